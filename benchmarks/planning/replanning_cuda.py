#!/usr/bin/env python3
"""Measure attention on a GPU when the mask changes in every call.

    python benchmarks/planning/replanning_cuda.py             # two minutes on an H200; needs torch
    python benchmarks/planning/replanning_cuda.py --quick     # 8,192 tokens, writes nothing

65,536 tokens, indices on the GPU. ``selected_ms`` is a CUDA graph replay of a call with a device-side block mask,
``planned_ms`` the same pairs with an existing plan, ``selecting_ms`` the difference. ``host_us`` is the host time of a
call with a device-side mask, which never synchronizes. ``copied_ms`` is the wall time of the alternative: copy the
indices to the host, make a pattern, plan, call, synchronize. Results of both are compared before timing. Writes
``replanning_cuda``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import numpy as np
import record
from gpu_timing import gpu_ms, host_us
from replanning import documents, lines

import spattn
from spattn import patterns as sp
from spattn.patterns import dynamic

TOKENS, QUICK_TOKENS = 65536, 8192
CHOSEN = 16  # key blocks per query block
COPIED = 7  # calls for copied_ms
NOTES = "bfloat16, head_dim 128. Medians of CUDA events around graph replays, and of host clock times."


class Case(NamedTuple):
    """Draws random indices with NumPy, and makes a device-side mask of their GPU copies."""

    draw: Callable[[np.random.Generator, int], tuple[np.ndarray, ...]]
    make: Callable[..., object]
    batch: int = 1
    heads: int = 8


def blocks(heads: int) -> Callable[[np.random.Generator, int], tuple[np.ndarray, ...]]:
    """CHOSEN causal key blocks of 64 per block of 64 queries and head."""

    def draw(rng: np.random.Generator, tokens: int) -> tuple[np.ndarray, ...]:
        rows = tokens // 64
        return (rng.integers(0, np.arange(1, rows + 1)[:, None], (1, heads, rows, CHOSEN)),)

    return draw


def cumulative(rng: np.random.Generator, tokens: int) -> tuple[np.ndarray, ...]:
    """Cumulative document lengths, 700 tokens on average."""
    return (np.cumsum((0, *documents(rng, tokens))),)


CASES = {
    "causal, key blocks 64/64": Case(blocks(1), lambda x: sp.Causal() & dynamic.DynamicKeyBlocks(x, 64, 64)),
    "causal, key blocks 64/64, of 8 heads": Case(
        blocks(8), lambda x: sp.Causal() & dynamic.DynamicKeyBlocks(x, 64, 64)
    ),
    "window ±512, documents": Case(cumulative, lambda x: sp.SlidingWindow(512) & dynamic.DynamicDocuments(x)),
    "causal, documents": Case(cumulative, lambda x: sp.Causal() & dynamic.DynamicDocuments(x)),
    "causal, padding of 8": Case(
        lambda rng, n: (rng.integers(n // 4, n, 8),), lambda x: sp.Causal() & dynamic.DynamicKeyPadding(x), 8, 1
    ),
    "vertical slash": Case(
        lambda rng, n: tuple(np.array(x)[None, None] for x in lines(rng, n)),
        lambda *x: sp.Causal() & dynamic.DynamicVerticalSlash(*x),
        1,
        1,
    ),
}


def replay(call: Callable[[], object]) -> Callable[[], object]:
    """Replay of a CUDA graph of the call; returns its result."""
    import torch

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()
    return lambda: (graph.replay(), kept)[0]


def measure(name: str, case: Case, tokens: int) -> dict[str, object]:
    """One row of the results."""
    import torch

    rng = np.random.default_rng(0)
    q, k, v = torch.randn(3, case.batch, case.heads, tokens, 128, device="cuda", dtype=torch.bfloat16)
    indices = [torch.from_numpy(x).cuda() for x in case.draw(rng, tokens)]
    chosen = case.make(*indices)
    pattern = chosen.to_host(tokens)
    results = [spattn.attention(q, k, v, how) for how in (chosen, pattern)]
    torch.testing.assert_close(*results, atol=8e-3, rtol=2e-2)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    spattn.attention(q, k, v, chosen)
    torch.cuda.synchronize()
    scratch = torch.cuda.max_memory_allocated() - before - q.nbytes
    selected, planned = (replay(lambda how=how: spattn.attention(q, k, v, how)) for how in (chosen, pattern))
    times: dict[str, list[float]] = {"selected": [], "planned": []}
    for _ in range(3):
        times["selected"].append(gpu_ms(selected, 5))
        times["planned"].append(gpu_ms(planned, 5))
    selected_ms, planned_ms = (statistics.median(own) for own in times.values())
    host = host_us(lambda: spattn.attention(q, k, v, chosen), 60)
    copied = []
    for _ in range(COPIED):
        for target, source in zip(indices, case.draw(rng, tokens), strict=True):
            if target.shape == source.shape:
                target.copy_(torch.from_numpy(source))
        torch.cuda.synchronize()
        start = time.perf_counter()
        spattn.attention(q, k, v, chosen.to_host(tokens))
        torch.cuda.synchronize()
        copied.append(1e3 * (time.perf_counter() - start))
    return {
        "name": name,
        "tokens": tokens,
        "batch": case.batch,
        "heads": case.heads,
        "selected_ms": round(selected_ms, 4),
        "planned_ms": round(planned_ms, 4),
        "selecting_ms": round(selected_ms - planned_ms, 4),
        "host_us": round(host, 1),
        "copied_ms": round(statistics.median(copied), 3),
        "scratch_mib": round(scratch / 2**20, 1),
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="8,192 tokens, write nothing")
    args = parser.parse_args()
    import torch

    rows = []
    for name, case in CASES.items():
        rows.append(measure(name, case, QUICK_TOKENS if args.quick else TOKENS))
        print(rows[-1], flush=True)
    if not args.quick:
        record.write("replanning_cuda", rows, notes=NOTES, gpu=torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
