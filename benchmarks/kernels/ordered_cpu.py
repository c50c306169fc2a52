#!/usr/bin/env python3
"""Measure clusters on one CPU thread: permuted plans against alternatives.

    OMP_NUM_THREADS=1 python benchmarks/kernels/ordered_cpu.py            # two minutes
    OMP_NUM_THREADS=1 python benchmarks/kernels/ordered_cpu.py --quick    # 1024 tokens, writes nothing

8 heads, head_dim 64, float32; random labels; contenders in turns, medians of the process's CPU time. Contenders: the
permuted plan, tiles of consecutive tokens, pair by pair, dense, and *sorted by the caller*: copy the arrays cluster by
cluster, attend as packed documents, and scatter the output back. plan_ms is a new permuted plan. Writes
``ordered_cpu``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import numpy as np
import record
from timing import medians_in_turns

import spattn
from spattn import cpu
from spattn import patterns as sp
from spattn.schedule import compiler

HEADS, HEAD_DIM = 8, 64
NOTES = "One process, one thread, in turns; medians of CPU time."
MOST_TOKENS = 4096  # limit for the slow contenders: consecutive tokens, pair by pair, dense


def problems(quick: bool) -> list[tuple[str, int, int, bool, bool]]:
    """(name, tokens, clusters, causal, pairs given as a list)."""
    if quick:
        return [("16 clusters", 1024, 16, False, False)]
    return [
        ("32 clusters", 4096, 32, False, False),
        ("32 clusters, causal", 4096, 32, True, False),
        ("32 clusters, listed pairs", 4096, 32, False, True),
        ("128 clusters", 4096, 128, False, False),
        ("64 clusters", 16384, 64, False, False),
        ("64 clusters, causal", 16384, 64, True, False),
    ]


def sorted_by_the_caller(labels: np.ndarray, causal: bool, arrays: list[np.ndarray], scale: float) -> np.ndarray:
    """Output computed as packed documents."""
    order = np.argsort(labels, kind="stable")
    documents: sp.Pattern = sp.Documents(tuple(np.bincount(labels).tolist()))
    out = spattn.attention(
        *(x[:, :, order] for x in arrays), sp.Causal() & documents if causal else documents, scale=scale, backend="cpu"
    )
    back = np.empty_like(out)
    back[:, :, order] = out
    return back


def measure(name: str, tokens: int, clusters: int, causal: bool, listed: bool, rounds: int) -> dict[str, object]:
    """One row of the results."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, clusters, tokens)
    arrays = [rng.standard_normal((1, HEADS, tokens, HEAD_DIM), np.float32) for _ in range(3)]
    own: sp.Pattern = sp.Clusters(labels)
    if listed:
        own = sp.interop.from_pairs(*np.nonzero(labels[:, None] == labels), tokens, tokens)
    pattern, scale = sp.Causal() & own if causal else own, HEAD_DIM**-0.5
    spattn.clear_plan_cache()
    start = time.process_time()
    plan = spattn.plan_for(pattern, *arrays, backend="cpu")
    row = {"name": name, "tokens": tokens, "plan_ms": round(1e3 * (time.process_time() - start), 2)}
    assert plan.ordered, "expected a permuted plan"
    calls: dict[str, Callable[[], object]] = {
        "ordered_ms": partial(cpu.forward, *arrays, plan, scale),
        "sorted_ms": partial(sorted_by_the_caller, labels, causal, arrays, scale),
    }
    if tokens <= MOST_TOKENS:
        for column, tile in (("in_a_row_ms", cpu.TILE), ("pair_by_pair_ms", (1, 64))):
            calls[column] = partial(cpu.forward, *arrays, compiler.plan(pattern, tokens, heads=HEADS, tile=tile), scale)
        calls["dense_ms"] = partial(cpu.forward, *arrays, spattn.plan_for(sp.Full(), *arrays, backend="cpu"), scale)
    np.testing.assert_allclose(calls["ordered_ms"]()[0], calls["sorted_ms"](), rtol=1e-4, atol=1e-5)  # type: ignore[index]
    return row | {column: round(taken, 2) for column, taken in medians_in_turns(calls, rounds).items()}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1024 tokens, write nothing")
    args = parser.parse_args()
    compiler.plan(sp.Clusters(np.arange(100) % 3), 100, ordered=True)  # imports the planner
    rows = []
    for problem in problems(args.quick):
        rows.append(measure(*problem, rounds=3 if args.quick else 7))
        print(rows[-1], flush=True)
    if not args.quick:
        record.write("ordered_cpu", rows, notes=NOTES)


if __name__ == "__main__":
    main()
