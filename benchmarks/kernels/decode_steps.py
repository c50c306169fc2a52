#!/usr/bin/env python3
"""Measure decode steps: calls whose KV length grows by one.

    python benchmarks/kernels/decode_steps.py              # seconds, on the CPU
    python benchmarks/kernels/decode_steps.py --cuda       # host time of calls on a GPU; needs torch

100 000 keys, 32 query heads over 8 KV heads, head_dim 64 and 128, one new token. Patterns: a window of 1024 keys with
and without 4 sinks, left padding of two sequences, and on a GPU all keys. K and V are slices of a preallocated cache
(step_us) or new arrays in each step (step_elsewhere_us); repeated_us is a call at constant length. Medians of wall
times of single calls. Writes ``decode_steps_cpu`` or ``decode_steps_cuda``; exits with 1 if a step misses its target.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import numpy as np
import record

import spattn
from spattn import patterns as sp

KEYS, STEPS, HEADS_Q, HEADS_KV, HEAD_DIMS = 100_000, 400, 32, 8, (64, 128)
MOST_US = {"cpu": 200, "cuda": 40}
STREAMING = (sp.Sinks(4) | sp.SlidingWindow(1023, 0)) & sp.Causal()
PROBLEMS = {
    "window": (sp.SlidingWindow(1023, 0), 1),
    "window and sinks": (STREAMING, 1),
    "left padding": (sp.PerBatch((STREAMING, STREAMING - sp.Sinks(100))), 2),
}
ALL_KEYS = {  # on a CPU the kernel would take all of the time
    "causal": (sp.Causal(), 1),
    "causal, left padding": (sp.PerBatch((sp.Causal(), sp.Causal() - sp.Sinks(100))), 2),
}
NOTES = "Medians of single calls. On a GPU host time, synchronized now and then so that the queue never fills."


def median_us(calls: Iterable[Callable[[], object]], wait: Callable[[], object]) -> float:
    """Median µs of these calls."""
    taken = []
    for number, call in enumerate(calls):
        if number % 50 == 0:
            wait()
        start = time.perf_counter()
        call()
        taken.append(1e6 * (time.perf_counter() - start))
    return statistics.median(taken[len(taken) // 8 :])


def measure(q: Any, k: Any, v: Any, pattern: sp.Pattern, own: Callable[[Any], Any], wait: Callable[[], object]) -> dict:
    """Median µs of a call: at constant length, at growing lengths, and with new K and V arrays in each step."""

    def call(kv_len: int, place: Callable[[Any], Any] = lambda x: x) -> Callable[[], object]:
        keys, values = place(k[:, :, :kv_len]), place(v[:, :, :kv_len])
        return lambda: spattn.attention(q, keys, values, pattern)

    growing = range(KEYS, KEYS + STEPS)
    short = range(2000, 2000 + STEPS // 2)  # copying 100 000 keys would take all of the time
    return {
        "repeated_us": round(median_us((call(KEYS) for _ in growing), wait), 1),
        "step_us": round(median_us(map(call, growing), wait), 1),
        "step_elsewhere_us": round(median_us((call(kv_len, own) for kv_len in short), wait), 1),
    }


def planning_us(pattern: sp.Pattern, batch: int) -> float:
    """Median µs of spattn.plan for one step."""
    lengths = range(KEYS, KEYS + STEPS)
    plans = (lambda n=n: spattn.plan(pattern, 1, n, batch=batch, heads=HEADS_Q) for n in lengths)
    return round(median_us(plans, lambda: None), 1)


def arrays(cuda: bool, batch: int, head_dim: int) -> tuple[Any, ...]:
    """q, k, v, a function that copies an array, and one that waits for the device."""
    shapes = (HEADS_Q, 1), (HEADS_KV, KEYS + STEPS), (HEADS_KV, KEYS + STEPS)
    if cuda:
        import torch

        made = (torch.randn(batch, *shape, head_dim, device="cuda", dtype=torch.bfloat16) for shape in shapes)
        return *made, lambda x: x.contiguous(), torch.cuda.synchronize
    rng = np.random.default_rng(0)
    made = (rng.standard_normal((batch, *shape, head_dim), np.float32) for shape in shapes)
    return *made, np.ascontiguousarray, lambda: None


def gpu_name() -> str:
    """Name of the GPU."""
    import torch

    return torch.cuda.get_device_name()


def main() -> int:
    """Measure, print, write; return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda", action="store_true", help="use tensors on a GPU")
    parser.add_argument("--quick", action="store_true", help="write nothing")
    options = parser.parse_args()
    device, rows = "cuda" if options.cuda else "cpu", []
    problems = PROBLEMS | (ALL_KEYS if options.cuda else {})
    for head_dim, (name, (pattern, batch)) in itertools.product(HEAD_DIMS, problems.items()):
        *operands, own, wait = arrays(options.cuda, batch, head_dim)
        row = measure(*operands, pattern, own, wait) | {"plan_us": planning_us(pattern, batch)}
        met = "yes" if row["step_us"] <= MOST_US[device] else "no"
        rows.append({"problem": name, "head_dim": head_dim, "batch": batch, **row, "met": met})
        print(", ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    if not options.quick:
        shape = {"keys": KEYS, "heads_q": HEADS_Q, "heads_kv": HEADS_KV}
        facts = {"shape": shape, "steps": STEPS, "most_us": MOST_US[device]}
        record.write(f"decode_steps_{device}", rows, notes=NOTES, gpu=gpu_name() if options.cuda else None, **facts)
    return 0 if all(row["met"] == "yes" for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
