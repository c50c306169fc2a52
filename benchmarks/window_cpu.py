#!/usr/bin/env python3
"""Sliding window on one CPU thread against PyTorch's dense attention, in one process.

    python benchmarks/window_cpu.py                 # about half a minute; needs torch

float32, window ±256, 4096 tokens, 8 heads, head_dim 64. The contenders take turns, so that a machine that slows down
slows all of them; the figure is the median of the process's CPU time. Before anything is timed, the window's result is
checked against PyTorch's with a boolean mask. Writes ``benchmarks/results/window_cpu.json``.
"""

from __future__ import annotations

import os

# Before NumPy and torch are imported: both read it once.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import argparse
import statistics
import time

import numpy as np
import record
import torch

import spattn
from spattn import cpu
from spattn import patterns as sp

SHAPE = {"batch": 1, "heads": 8, "tokens": 4096, "head_dim": 64}
SIDE = 256
LEAST_RATIO = 4.0


def tensors() -> list[torch.Tensor]:
    """Random q, k, v."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(tuple(SHAPE.values()), generator=generator) for _ in range(3)]


def contenders(q, k, v) -> dict[str, tuple[object, int]]:
    """Name → (what to call, allowed pairs per head)."""
    tokens, sdpa = SHAPE["tokens"], torch.nn.functional.scaled_dot_product_attention
    at = torch.arange(tokens)
    mask = (at[:, None] - at[None, :]).abs() <= SIDE
    window = sp.SlidingWindow(SIDE)
    pairs = int(mask.sum())
    return {
        "spattn window": (lambda: spattn.attention(q, k, v, window, backend="cpu"), pairs),
        "spattn dense": (lambda: spattn.attention(q, k, v, sp.Full(), backend="cpu"), tokens**2),
        "torch SDPA dense": (lambda: sdpa(q, k, v), tokens**2),
        "torch SDPA, boolean window mask": (lambda: sdpa(q, k, v, attn_mask=mask), pairs),
    }


def check(calls) -> float:
    """Largest difference between the window's two results; AssertionError above 1e-5."""
    ours, theirs = (np.asarray(calls[name][0]()) for name in ("spattn window", "torch SDPA, boolean window mask"))
    difference = float(np.abs(ours - theirs).max())
    assert difference < 1e-5, f"the results differ by {difference}"
    return difference


def medians(calls, repeats: int) -> dict[str, float]:
    """Median milliseconds of CPU time of each, taken in turns after one warm-up each."""
    times = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, (call, _) in calls.items():
            start = time.process_time()
            call()
            if turn:
                times[name].append(1e3 * (time.process_time() - start))
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=21)
    args = parser.parse_args()
    torch.set_num_threads(1)
    calls = contenders(*tensors())
    difference = check(calls)
    median = medians(calls, args.repeats)
    dense = median["torch SDPA dense"]
    rows = []
    for name, (_, pairs) in calls.items():
        gflops = 4 * SHAPE["head_dim"] * SHAPE["heads"] * pairs / median[name] / 1e6
        rows.append(
            {
                "name": name,
                "median_ms": round(median[name], 2),
                "gflops_on_allowed_pairs": round(gflops, 1),
                "times_faster_than_dense_sdpa": round(dense / median[name], 2),
            }
        )
        print(f"{name:34} {median[name]:8.1f} ms  {gflops:6.1f} GF/s  {dense / median[name]:6.2f}×")
    notes = "Medians of CPU time on one thread, the contenders in turns. GF/s count allowed pairs, 4·head_dim each."
    record.write(
        "window_cpu",
        rows,
        notes=notes,
        shape=SHAPE,
        window=SIDE,
        dtype="float32",
        repeats=args.repeats,
        largest_difference=difference,
        core={k: str(v) for k, v in cpu.info().items()},
    )
    ratio = dense / median["spattn window"]
    print(f"the window is {ratio:.1f} times faster than dense SDPA (target {LEAST_RATIO})")
    return 0 if ratio >= LEAST_RATIO else 1


if __name__ == "__main__":
    raise SystemExit(main())
