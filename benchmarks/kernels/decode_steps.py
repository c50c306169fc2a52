#!/usr/bin/env python3
"""Measure decode steps: calls whose KV length grows by one.

    python benchmarks/kernels/decode_steps.py              # seconds, on the CPU
    python benchmarks/kernels/decode_steps.py --cuda       # host time of calls on a GPU; needs torch
    python benchmarks/kernels/decode_steps.py --patterns   # host time of steps of 20 patterns, on the CPU
    python benchmarks/kernels/decode_steps.py --patterns --cuda   # on a GPU

100 000 keys, 32 query heads over 8 KV heads, head_dim 64 and 128, one new token. Patterns: a window of 1024 keys with
and without 4 sinks, left padding of two sequences, and on a GPU all keys. K and V are slices of a preallocated cache
(step_us) or new arrays in each step (step_elsewhere_us); repeated_us is a call at constant length. Medians of wall
times of single calls. Writes ``decode_steps_cpu`` or ``decode_steps_cuda``; exits with 1 if a step misses its target.

With ``--patterns``: 20 000 keys, 4 query heads over 1 KV head, head_dim 16, 1, 16 and 64 batch entries, one thread. The
cache grows (*growing*), has a fixed size and one position that moves (*fixed*), or a position for each entry
(*ragged*), or entries differ by ``PerBatch``, ``RowIntervals``, ``KeyPadding`` or ``KeyBlocks`` (*by entry*). host_us
is the process's CPU time of a step less that of the same call with its plan at hand, as medians; making the pattern
object counts. Calls with plans are prepared before: preparing one in between would empty the processor's caches.
Writes ``decode_patterns_cpu``. On a GPU, head_dim is 64, arrays are bfloat16, and times are wall times of the host
while the GPU is idle: until the call returns. Writes ``decode_patterns_cuda``.
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
import spattn.cpu
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
PATTERN_KEYS, CACHES = 20_000, ("growing", "fixed", "ragged")
MOST_HOST_US = {"cpu": {1: 300, 16: 300, 64: 1000}, "cuda": {1: 40, 16: 300, 64: 300}}  # by the number of entries
GIVEN = tuple(np.random.default_rng(1).choice(PATTERN_KEYS // 2, 40, replace=False).tolist())
STEPPED = {
    "causal": sp.Causal(),
    "window": sp.SlidingWindow(255, 0),
    "window and sinks": sp.Causal() & (sp.Sinks(4) | sp.SlidingWindow(255, 0)),
    "dilated window": sp.DilatedWindow(64, 0, 4),
    "two dilated windows": sp.DilatedWindow(64, 0, 2) | sp.DilatedWindow(64, 0, 16),
    "stride": sp.Stride(128) & sp.Causal(),
    "strided": sp.strided(64),
    "fixed": sp.fixed(64, 4),
    "local blocks": sp.BlockLocal(512) & sp.Causal(),
    "local blocks and sinks": (sp.BlockLocal(512) | sp.Sinks(4)) & sp.Causal(),
    "global tokens": sp.Causal() & (sp.GlobalTokens(GIVEN) | sp.SlidingWindow(255, 0)),
    "Longformer": sp.Causal() & sp.longformer(256, global_tokens=16),
    "BigBird": sp.Causal() & sp.BigBird(64, seed=1),
    "BigBird without random blocks": sp.BigBird(64, 3, 1, 0, causal=True),
    "window, strided": sp.SlidingWindow(255, 0) | sp.strided(256),
    "window, fixed, sinks": sp.SlidingWindow(255, 0) | sp.fixed(256, 1) | (sp.Sinks(4) & sp.Causal()),
    "all but a stride": sp.Causal() - sp.Stride(64),
    "all but a window": sp.Causal() - sp.SlidingWindow(1024, 0),
    "by head": sp.PerHead((sp.SlidingWindow(255, 0), sp.strided(64), sp.fixed(64, 4), sp.DilatedWindow(64, 0, 4))),
    "by head, and sinks": sp.PerHead((sp.strided(64), sp.SlidingWindow(255, 0))) | sp.Sinks(4) & sp.Causal(),
}
BY_ENTRY = [((name, name), "by entry") for name in ("PerBatch", "RowIntervals", "KeyPadding", "KeyBlocks")]
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


def of_entries(name: str, places: np.ndarray) -> sp.Pattern:
    """Return a pattern of batch entries at places of their own, (entries, 1)."""
    if name == "PerBatch":
        return sp.PerBatch(tuple(sp.QueriesAt(STEPPED["window and sinks"], place) for place in places[:, 0].tolist()))
    if name == "RowIntervals":
        return sp.RowIntervals(places[:, None] - 255, places[:, None] + 1)
    if name == "KeyPadding":
        return sp.KeyPadding.from_lengths(places[:, 0] + 1, PATTERN_KEYS)
    chosen = places[:, None, None] % 150 + np.arange(0, 160, 10)  # 16 blocks of 64 keys, as a selection lists them
    return sp.KeyBlocks(chosen, PATTERN_KEYS, 64)


def timed_us(arrays: tuple[Any, ...], pattern: Callable[[int], Any], step: int, cuda: bool) -> float:
    """µs of a call: the process's CPU time or, on a GPU that is idle, wall time until the call returns."""
    clock = time.process_time
    if cuda:
        import torch

        torch.cuda.synchronize()
        clock = time.perf_counter
    start = clock()
    spattn.attention(*arrays, pattern(step))
    return 1e6 * (clock() - start)


def host_us(pattern: sp.Pattern | str, cache: str, entries: int, cuda: bool, steps: int = 32) -> dict[str, float]:
    """Median µs of a step, and of the step less those of the same call with its plan at hand."""
    rng = np.random.default_rng(0)
    if cuda:
        import torch

        shapes = (4, 1, 64), (1, PATTERN_KEYS + steps, 64)
        q, k = (torch.randn(entries, *shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    else:
        q = rng.standard_normal((entries, 4, 1, 16), np.float32)
        k = rng.standard_normal((entries, 1, PATTERN_KEYS + steps, 16), np.float32)
    places = rng.integers(300, PATTERN_KEYS - steps, (entries, 1))

    def own(step: int) -> sp.Pattern:
        if isinstance(pattern, str):
            return of_entries(pattern, places + step)
        at = PATTERN_KEYS - steps + step if cache == "fixed" else places + step
        return pattern if cache == "growing" else sp.QueriesAt(pattern, at)

    keys = [k[:, :, : PATTERN_KEYS + (step if cache == "growing" else 0)] for step in range(steps)]
    plans = [spattn.plan_for(own(step), q, keys[step], keys[step]) for step in range(steps)]
    spattn.clear_plan_cache()
    for own_keys, plan in zip(keys, plans, strict=True):
        spattn.attention(q, own_keys, own_keys, plan)  # prepared: no timed step follows the preparation of another call
    taken = []
    for step in range(steps):
        arrays = q, keys[step], keys[step]
        spattn.attention(*arrays, plans[step])  # the timed calls find the keys in the same caches
        first = timed_us(arrays, own, step, cuda)
        taken.append((first, timed_us(arrays, plans.__getitem__, step, cuda)))
    host = statistics.median(first - again for first, again in taken[2:])
    return {"step_us": round(statistics.median(first for first, _ in taken[2:]), 1), "host_us": round(host, 1)}


def measure_patterns(cuda: bool, quick: bool) -> int:
    """Measure, print and write the host time of steps; return 1 if one misses its target."""
    spattn.cpu.set_num_threads(1)
    rows, device = [], "cuda" if cuda else "cpu"
    for (name, pattern), cache in (*itertools.product(STEPPED.items(), CACHES), *BY_ENTRY):
        for entries, most in MOST_HOST_US[device].items():
            row = host_us(pattern, cache, entries, cuda)
            met = "yes" if row["host_us"] <= most else "no"
            rows.append({"pattern": name, "cache": cache, "entries": entries, **row, "met": met})
            print(", ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    if not quick:
        notes = "Medians of host times." if cuda else "Medians of CPU times on one thread."
        gpu = gpu_name() if cuda else None
        record.write(f"decode_patterns_{device}", rows, notes=notes, gpu=gpu, keys=PATTERN_KEYS)
    return 0 if all(row["met"] == "yes" for row in rows) else 1


def gpu_name() -> str:
    """Name of the GPU."""
    import torch

    return torch.cuda.get_device_name()


def main() -> int:
    """Measure, print, write; return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda", action="store_true", help="use tensors on a GPU")
    parser.add_argument("--patterns", action="store_true", help="measure the host time of many patterns")
    parser.add_argument("--quick", action="store_true", help="write nothing")
    options = parser.parse_args()
    if options.patterns:
        return measure_patterns(options.cuda, options.quick)
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
