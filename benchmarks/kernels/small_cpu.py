#!/usr/bin/env python3
"""Measure call overhead on a short sequence on one CPU thread.

    python benchmarks/kernels/small_cpu.py                 # seconds

Batch 1, 8 heads, 128 tokens, head_dim 64, NumPy arrays, plan in the cache. Kernel time is the cost of a further batch
entry: the time of 4 entries minus that of one, divided by 3. Calls with 1 and 4 entries alternate; medians of the
process's CPU time over several calls. Writes ``small_cpu``; exits with 1 if a call takes more than 3 times its kernel.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # set before NumPy is imported

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import ml_dtypes
import numpy as np
import record

import spattn
from spattn import cpu
from spattn import patterns as sp

MANY, ROUNDS, CALLS = 4, 41, {1: 32, 4: 8}  # batch → calls per measurement
MOST = 3.0  # times the kernel
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
PATTERNS = {"dense": sp.Full(), "causal": sp.Causal(), "window ±32": sp.SlidingWindow(32)}


def measure(pattern: sp.Pattern, dtype: type) -> dict[int, float]:
    """Median µs of a call by batch size."""
    rng = np.random.default_rng(0)
    inputs = {n: [rng.standard_normal((n, 8, 128, 64)).astype(dtype) for _ in range(3)] for n in CALLS}
    times = {n: [] for n in CALLS}
    for turn in range(ROUNDS + 1):
        for n, calls in CALLS.items():
            start = time.process_time()
            for _ in range(calls):
                spattn.attention(*inputs[n], pattern)
            if turn:
                times[n].append(1e6 * (time.process_time() - start) / calls)
    return {n: statistics.median(each) for n, each in times.items()}


def main() -> int:
    """Measure, print, write; return 1 if a target is missed."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows = []
    for name, pattern in PATTERNS.items():
        for dtype, kind in DTYPES.items():
            took = measure(pattern, kind)
            own = (took[MANY] - took[1]) / (MANY - 1)
            times = took[1] / own
            rows.append(
                {
                    "problem": name,
                    "dtype": dtype,
                    "call_us": round(took[1], 1),
                    "kernel_us": round(own, 1),
                    "times_kernel": round(times, 2),
                    "met": "yes" if times <= MOST else "no",
                }
            )
            print(f"{name:11} {dtype:8} call {took[1]:6.1f} µs, kernel {own:6.1f} µs: {times:.2f} times")
    record.write(
        "small_cpu",
        rows,
        notes="Medians of CPU time on one thread; kernel time by difference.",
        shape={"batch": 1, "heads": 8, "tokens": 128, "head_dim": 64},
        rounds=ROUNDS,
        core={k: str(v) for k, v in cpu.info().items()},
    )
    return 0 if all(row["met"] == "yes" for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
