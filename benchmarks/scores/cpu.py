#!/usr/bin/env python3
"""Measure what score functions add to a call on one CPU thread.

    OMP_NUM_THREADS=1 python benchmarks/scores/cpu.py            # two minutes
    OMP_NUM_THREADS=1 python benchmarks/scores/cpu.py --quick    # head_dim 64 and three rounds only, writes nothing

4096 tokens, 8 heads, float32, a window of 256 tokens on each side; contenders in turns, medians of the process's CPU
time. The backward includes the gradients of slopes and tables. Writes ``scores_cpu``.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import numpy as np
import record
from timing import medians_in_turns

import spattn
from spattn import cpu
from spattn.request.call import Call
from spattn.request.score import ScoreOperands, TableType
from spattn.score.program import program_of
from spattn.score.tracing import trace

TOKENS, HEADS, WINDOW = 4096, 8, 256
NOTES = (
    "One process, one thread, in turns; medians of CPU time. above_plain_pct: time above the same call without a "
    "function."
)


def functions() -> dict:
    """Score functions by name; None is a plain call."""
    rng = np.random.default_rng(0)
    slopes = (2.0 ** -np.arange(1, HEADS + 1)).astype(np.float32)
    table = rng.standard_normal((HEADS, 2 * WINDOW + 1)).astype(np.float32)
    return {
        "plain": None,
        "alibi": lambda score, b, h, q, k: score + slopes[h] * (k - q),
        "softcap": lambda score, b, h, q, k: 50.0 * np.tanh(score / 50.0),
        "relative_table": lambda score, b, h, q, k: score + table[h, k - q + WINDOW],
    }


def operands(function) -> ScoreOperands | None:
    """What a call passes to the backend."""
    if function is None:
        return None
    found = trace(function)
    types = tuple(TableType(str(x.dtype), x.shape, tuple(n // x.itemsize for n in x.strides)) for x in found.tables)
    return ScoreOperands(
        program_of(found.graph), found.parameters, found.tables, types, None, tuple(True for _ in types)
    )


def measure(head_dim: int, rounds: int) -> list[dict]:
    """One row per function and pass."""
    rng = np.random.default_rng(1)
    *arrays, dout = (rng.standard_normal((1, HEADS, TOKENS, head_dim), np.float32) for _ in range(4))
    call, scale = Call.of(*arrays), head_dim**-0.5
    pattern = spattn.patterns.SlidingWindow(WINDOW, WINDOW)
    forwards, backwards = {}, {}
    for name, function in functions().items():
        score = operands(function)
        own = replace(call, score=score)
        last = () if score is None else (score,)
        forward = cpu.prepare(own, cpu.plan_for(pattern, call))
        out, lse = forward(*arrays, scale, *last)
        forwards[name] = partial(forward, *arrays, scale, *last)
        backward = cpu.prepare_backward(own, cpu.plan_for(pattern, call, backward=True))
        backwards[name] = partial(backward, dout, *arrays, out, lse, None, scale, *last)
    rows = []
    for kind, calls in (("forward", forwards), ("backward", backwards)):
        found = medians_in_turns(calls, rounds)
        for name, ms in found.items():
            rows.append({"head_dim": head_dim, "pass": kind, "function": name, "ms": round(ms, 2)})
            rows[-1]["above_plain_pct"] = round(100 * (ms / found["plain"] - 1), 1)
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="head_dim 64, three rounds, write nothing")
    parser.add_argument("--rounds", type=int, default=21)
    args = parser.parse_args()
    rows = [row for d in ((64,) if args.quick else (64, 128)) for row in measure(d, 3 if args.quick else args.rounds)]
    if not args.quick:
        record.write("scores_cpu", rows, notes=NOTES, tokens=TOKENS, heads=HEADS, window=WINDOW)


if __name__ == "__main__":
    main()
