#!/usr/bin/env python3
"""What it costs on a GPU that a model chooses another mask in every call, at 65,536 tokens.

    python benchmarks/planning/replanning_cuda.py             # two minutes on an H200; needs torch
    python benchmarks/planning/replanning_cuda.py --quick     # 8,192 tokens, nothing written

The indices are on the GPU. A selection is read there by each call: ``selected_ms`` is the time of a CUDA graph's replay
of the call, ``planned_ms`` that of the same pairs by a plan that was there before, and ``selecting_ms`` the difference.
``host_us`` is what a call with a selection takes the host, which waits for nothing. ``copied_ms`` is the wall time of
the other way: indices copied to the host, a new pattern, plan and call, until its result is there. Results of both are
compared before anything is timed. Writes ``benchmarks/results/replanning_cuda-h200.json``.
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
from spattn import selections

TOKENS, QUICK_TOKENS = 65536, 8192
CHOSEN = 16  # key blocks of each block of queries
COPIED = 7  # calls whose wall time is taken
NOTES = "bfloat16, head_dim 128. Medians of CUDA events around replays of graphs, and of the host's clock."


class Case(NamedTuple):
    """Indices drawn at random, as NumPy's, and what is made of those on the GPU."""

    draw: Callable[[np.random.Generator, int], tuple[np.ndarray, ...]]
    make: Callable[..., object]
    batch: int = 1
    heads: int = 8


def blocks(heads: int) -> Callable[[np.random.Generator, int], tuple[np.ndarray, ...]]:
    """CHOSEN of the key blocks of 64 up to each block of 64 queries, for each head."""

    def draw(rng: np.random.Generator, tokens: int) -> tuple[np.ndarray, ...]:
        rows = tokens // 64
        return (rng.integers(0, np.arange(1, rows + 1)[:, None], (1, heads, rows, CHOSEN)),)

    return draw


def cumulative(rng: np.random.Generator, tokens: int) -> tuple[np.ndarray, ...]:
    """Documents of 700 tokens on average."""
    return (np.cumsum((0, *documents(rng, tokens))),)


CASES = {
    "causal, key blocks 64/64": Case(blocks(1), lambda x: sp.Causal() & selections.KeyBlocks(x, 64, 64)),
    "causal, key blocks 64/64, of 8 heads": Case(blocks(8), lambda x: sp.Causal() & selections.KeyBlocks(x, 64, 64)),
    "window ±512, documents": Case(cumulative, lambda x: sp.SlidingWindow(512) & selections.Documents(x)),
    "causal, documents": Case(cumulative, lambda x: sp.Causal() & selections.Documents(x)),
    "causal, padding of 8": Case(
        lambda rng, n: (rng.integers(n // 4, n, 8),), lambda x: sp.Causal() & selections.KeyPadding(x), 8, 1
    ),
    "vertical slash": Case(
        lambda rng, n: tuple(np.array(x)[None, None] for x in lines(rng, n)),
        lambda *x: sp.Causal() & selections.VerticalSlash(*x),
        1,
        1,
    ),
}


def replay(call: Callable[[], object]) -> Callable[[], object]:
    """The call in a graph."""
    import torch

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()
    return lambda: (graph.replay(), kept)[0]


def measure(name: str, case: Case, tokens: int) -> dict[str, object]:
    """A row of the results."""
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
    parser.add_argument("--quick", action="store_true")
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
