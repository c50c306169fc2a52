#!/usr/bin/env python3
"""Measure scattered pairs on one CPU thread: dense, tiled and pair by pair.

    OMP_NUM_THREADS=1 python benchmarks/kernels/pairwise_cpu.py            # five minutes; needs a C compiler
    OMP_NUM_THREADS=1 python benchmarks/kernels/pairwise_cpu.py --quick    # 1 % of the pairs only, writes nothing

4096 tokens, 8 heads, head_dim 64, float32; contenders in turns, medians of the process's CPU time. Two floors: the
pairs' multiply-adds at the rate of dense attention, and the bytes of their rows of K and V (in the backward also dK and
dV) at the L2 read rate that ``ceilings`` measures. Writes ``pairwise_cpu``.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import numpy as np
import record
from ceilings import Ceilings
from timing import medians_in_turns

import spattn
from spattn import cpu

TOKENS, HEADS, HEAD_DIM = 4096, 8, 64
SHARES = (0.001, 0.003, 0.01, 0.03, 0.1)
NOTES = "One process, one thread, in turns; medians of CPU time. chosen: the plan that spattn.attention() selects."


def calls_of(plan, arrays, dout) -> tuple:
    """(forward call, backward call) with a plan."""
    scale = HEAD_DIM**-0.5
    out, lse = cpu.forward(*arrays, plan, scale)
    return partial(cpu.forward, *arrays, plan, scale), partial(cpu.backward, dout, *arrays, out, lse, plan, scale)


def measure(share: float, rounds: int, bytes_per_ms: float) -> list[dict]:
    """One row per pass."""
    rng = np.random.default_rng(0)
    shape = (1, HEADS, TOKENS, HEAD_DIM)
    *arrays, dout = (rng.standard_normal(shape, np.float32) for _ in range(4))
    pairs = spattn.patterns.interop.from_pairs(*(rng.random((TOKENS, TOKENS)) < share).nonzero(), TOKENS, TOKENS)
    chosen = spattn.plan_for(pairs, *arrays, backend="cpu")
    plans = {
        "dense": spattn.plan_for(spattn.patterns.Full(), *arrays, backend="cpu"),
        "tiles": spattn.plan(pairs, TOKENS, tiling=spattn.Tiling(tile=cpu.TILE, workers=2), heads=HEADS),
        "pairs": spattn.plan(pairs, TOKENS, tiling=spattn.Tiling(tile=(1, 64), workers=2), heads=HEADS),
    }
    made = {name: calls_of(plan, arrays, dout) for name, plan in plans.items()}
    rows = []
    for number, (name, products, passes) in enumerate((("forward", 2, 2), ("backward", 5, 7))):
        found = medians_in_turns({contender: calls[number] for contender, calls in made.items()}, rounds)
        row_bytes = HEADS * plans["pairs"].nnz * HEAD_DIM * 4
        rows.append(
            {
                "share_pct": 100 * share,
                "pass": name,
                **{f"{contender}_ms": round(ms, 2) for contender, ms in found.items()},
                "dense_to_pairs": round(found["dense"] / found["pairs"], 2),
                "tiles_to_pairs": round(found["tiles"] / found["pairs"], 2),
                "floor_flops_ms": round(found["dense"] * plans["pairs"].density, 2),
                "floor_bytes_ms": round(passes * row_bytes / bytes_per_ms, 2),
                "gflop": round(2e-9 * products * HEADS * plans["pairs"].nnz * HEAD_DIM, 2),
                "chosen": "pairs" if chosen.block_q == 1 else "tiles",
            }
        )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1 %% of the pairs only, three rounds, write nothing")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    shares, rounds, ceilings = (0.01,) if args.quick else SHARES, 3 if args.quick else args.rounds, Ceilings()
    for _ in range(rounds):
        ceilings.sample("read_l2")
    rate = 1e6 * ceilings.median("read_l2", rounds)
    rows = [row for share in shares for row in measure(share, rounds, rate)]
    if not args.quick:
        record.write("pairwise_cpu", rows, notes=NOTES, tokens=TOKENS, heads=HEADS, head_dim=HEAD_DIM)


if __name__ == "__main__":
    main()
