#!/usr/bin/env python3
"""Fit the CPU cost model's coefficients and measure its errors.

    python benchmarks/costs/price_cpu.py                  # the best instruction set, two minutes; needs SciPy
    python benchmarks/costs/price_cpu.py --isa avx2       # another one, writes nothing
    python benchmarks/costs/price_cpu.py --dtype float32  # prints every case of one dtype, writes nothing

One thread, 21 problems with three plans each: other tiles, and boxes of queries with their own keys where the pattern
has spans; all timed in turns. Coefficients are nanoseconds per feature of ``choose.features_cpu.Counts``, fitted by
non-negative least squares of relative errors. Each case is predicted by coefficients fitted without its problem. The
coefficients of boxes of few queries, ``choose.features_cpu.RowCounts``, are fitted to neighbourhoods and windows;
those of tiles with one query, to random pairs. Writes ``price_cpu``; exits with 1 if a dtype misses a target. The last
lines printed are the table rows of ``spattn.choose.machine_cpu``: Counts first, then RowCounts for tiles with one query
and with a few.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # set before spattn's core reads it

import argparse
import itertools
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import ml_dtypes
import numpy as np
import record
from scipy.optimize import nnls

import spattn
from spattn import cpu
from spattn import patterns as sp
from spattn.choose.chooser import Sizes, predicted_ms
from spattn.choose.features_cpu import Counts, Kernels, RowCounts, count, count_pairs, count_rows
from spattn.choose.machine_cpu import few_of, kernels_of
from spattn.request.call import Call
from spattn.schedule import compiler

HEADS, ROUNDS = 2, 6
DTYPES = {"float32": np.float32, "float64": np.float64, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
WITHIN, WITHIN_SHARE, ORDER_SHARE = 0.25, 0.8, 0.9
PLAIN = (((48, 64), None), ((24, 64), None), ((128, 128), None))
SQUARES = (((48, 64), None), ((48, 64), (6, 8)), ((64, 64), (8, 8)))

# (name, pattern, tokens, head_dim, plans as (tile, box))
PROBLEMS = (
    ("full", sp.Full(), 768, 64, PLAIN),
    ("causal", sp.Causal(), 1024, 64, PLAIN),
    ("causal, narrow", sp.Causal(), 1024, 32, PLAIN),
    ("window 256", sp.SlidingWindow(256), 2048, 64, PLAIN),
    ("window 64", sp.SlidingWindow(64), 4096, 64, PLAIN),
    ("window 16", sp.SlidingWindow(16), 4096, 32, PLAIN),
    ("window 127, causal, wide", sp.SlidingWindow(127, 0), 2048, 128, PLAIN),
    ("dilated window", sp.DilatedWindow(32, dilation=4), 4096, 64, PLAIN),
    ("strided", sp.strided(64), 2048, 64, PLAIN),
    ("strided, narrow", sp.strided(32), 2048, 32, PLAIN),
    ("fixed", sp.fixed(64, 8), 2048, 64, PLAIN),
    ("Longformer", sp.longformer(128, global_tokens=16), 2048, 64, PLAIN),
    ("BigBird", sp.BigBird(64), 2048, 64, PLAIN),
    ("documents", sp.Documents((100,) * 20), 2000, 64, PLAIN),
    ("axial", sp.axial((48, 48), 0), 2304, 64, PLAIN),
    ("neighbourhood 7", sp.Neighborhood((56, 56), 7), 3136, 32, SQUARES),
    ("neighbourhood 13", sp.Neighborhood((64, 64), 13), 4096, 64, SQUARES),
    (
        "neighbourhood 5, cube",
        sp.Neighborhood((12, 12, 12), 5),
        1728,
        64,
        (((48, 64), None), ((64, 64), (4, 4, 4)), ((48, 64), (3, 4, 4))),
    ),
    ("windows 7", sp.windowed((56, 56), 7), 3136, 32, (((48, 64), None), ((49, 64), (7, 7)), ((48, 64), (6, 8)))),
    ("windows 8, shifted", sp.windowed((64, 64), 8, 4), 4096, 64, SQUARES),
    ("windows 12", sp.windowed((48, 48), 12), 2304, 64, (((48, 64), None), ((48, 64), (4, 12)), ((72, 64), (6, 12)))),
)

# Tiles and boxes of few queries; used if the instruction set computes that many row by row.
FEW = ({"tile": (4, 64), "box": (2, 2)}, {"tile": (16, 64), "box": (4, 4)})

# (pattern, tokens, head_dim) planned in these tiles
ROWS = tuple(
    (pattern, 3136, dim)
    for pattern in (
        *(sp.Neighborhood((56, 56), kernel) for kernel in (3, 5, 7, 13)),
        *(sp.windowed((56, 56), side) for side in (2, 4)),
    )
    for dim in (32, 64, 128)
)

# (share of the pairs, head_dim) of plans with one query per tile
PAIRS = tuple(itertools.product((0.001, 0.003, 0.01, 0.03), (64, 128)))
PAIRS_TOKENS = 4096


def pairs_of(plan: spattn.Plan, sizes: Sizes, kernels: Kernels) -> RowCounts:
    """Features of tiles of one query."""
    return count_pairs(plan, sizes)


def rows_of(plan: spattn.Plan, sizes: Sizes, kernels: Kernels) -> RowCounts:
    """Features of tiles of a few queries."""
    return count_rows(plan, sizes, kernels.lanes)


def cases() -> list[tuple[str, sp.Pattern, int, int, tuple]]:
    """(problem, pattern, tokens, head_dim, (tile, box)) of every plan."""
    return [(name, pattern, n, dim, how) for name, pattern, n, dim, plans in PROBLEMS for how in plans]


def scattered() -> list[tuple[sp.Pattern, int, int]]:
    """(pattern, tokens, head_dim) of random pairs."""
    rng = np.random.default_rng(0)
    shape = PAIRS_TOKENS, PAIRS_TOKENS
    return [
        (sp.interop.from_pairs(*(rng.random(shape) < share).nonzero(), *shape), PAIRS_TOKENS, dim)
        for share, dim in PAIRS
    ]


def ready(tokens: int, dim: int, isa: str, dtype: str, plan_of, counted):
    """(call, operands, counts, efficiency) of a plan."""
    q, k, v = (x.astype(DTYPES[dtype]) for x in np.random.default_rng(0).standard_normal((3, 1, HEADS, tokens, dim)))
    call = Call.of(q, k, v)
    plan = plan_of(call)
    counts = counted(plan, Sizes(1, HEADS, HEADS, dim, dim), kernels_of(isa, dtype))
    return cpu.prepare(call, plan, isa=isa), (q, k, v, call.scale), counts, plan.efficiency


def prepare(case, isa: str, dtype: str):
    """(call, operands, counts, efficiency) of a case."""
    _, pattern, tokens, dim, (tile, box) = case

    def plan_of(call: Call) -> spattn.Plan:
        return compiler.plan(pattern, tokens, tile=tile, box=box, workers=cpu.workers_for(call))

    return ready(tokens, dim, isa, dtype, plan_of, count)


def fitted_to(problems, isa: str, dtype: str, counted, hows) -> tuple[float, ...]:
    """Coefficients in nanoseconds, fitted to these problems, each planned in every way of `hows`."""

    def prepare(pattern: sp.Pattern, tokens: int, dim: int, how: dict):
        return ready(tokens, dim, isa, dtype, lambda _: compiler.plan(pattern, tokens, **how), counted)

    prepared = [prepare(*problem, how) for problem in problems for how in hows]
    return fitted([counts for _, _, counts, _ in prepared], measured(prepared))


def measured(prepared) -> np.ndarray:
    """Milliseconds of CPU time of each call, the minimum over all rounds, in turns."""
    least = np.full(len(prepared), np.inf)
    for _ in range(ROUNDS):
        for number, (run, operands, *_) in enumerate(prepared):
            for _ in range(2):
                start = time.process_time_ns()
                run(*operands)
                least[number] = min(least[number], 1e-6 * (time.process_time_ns() - start))
    return least


def fitted(counts: list[Counts] | list[RowCounts], times: np.ndarray) -> tuple[float, ...]:
    """Coefficients in nanoseconds."""
    shares = 1e-6 * np.array(counts) / times[:, None]
    size = np.maximum(shares.max(axis=0), 1e-30)
    return tuple(nnls(shares / size, np.ones(len(times)))[0] / size)


def judged(isa: str, dtype: str) -> tuple[list[dict[str, object]], tuple[float, ...], dict[str, float]]:
    """Rows of the results, coefficients and prediction quality of a dtype."""
    names = [case[0] for case in cases()]
    prepared = [prepare(case, isa, dtype) for case in cases()]
    times, counts = measured(prepared), [one[2] for one in prepared]
    predicted = np.zeros(len(times))
    for problem in set(names):
        others = [n for n, name in enumerate(names) if name != problem]
        own = fitted([counts[n] for n in others], times[others])
        for n in set(range(len(names))) - set(others):
            predicted[n] = predicted_ms(counts[n], own)
    rows = []
    for n, (name, _, tokens, dim, (tile, box)) in enumerate(cases()):
        rows.append(
            {
                "isa": isa,
                "dtype": dtype,
                "problem": name,
                "tokens": tokens,
                "head_dim": dim,
                "tile": tile,
                "box": box,
                "efficiency": round(prepared[n][3], 4),
                "measured_ms": round(times[n], 4),
                "predicted_ms": round(predicted[n], 4),
                "error": round(predicted[n] / times[n] - 1, 3),
            }
        )
    pairs = [(a, b) for a, b in itertools.combinations(range(len(names)), 2) if names[a] == names[b]]
    right = [(times[a] < times[b]) == (predicted[a] < predicted[b]) for a, b in pairs]
    apart = [max(times[a], times[b]) > 1.05 * min(times[a], times[b]) for a, b in pairs]
    quality = {
        "within_25_percent": float(np.mean(np.abs(predicted / times - 1) <= WITHIN)),
        "order": float(np.mean(right)),
        "order_where_apart": float(np.mean([r for r, far in zip(right, apart, strict=True) if far])),
        "pairs_apart": int(sum(apart)),
    }
    return rows, fitted(counts, times), quality


def line(numbers: tuple[float, ...]) -> str:
    """A tuple in Python syntax with three digits per number."""
    return f"({', '.join(f'{x:.3g}' for x in numbers)})"


def main() -> int:
    """Measure, fit, print, write; return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", choices=cpu.instruction_sets(), action="append", help="default: the best")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="default: all")
    args = parser.parse_args()
    kernels = list(itertools.product(args.isa or cpu.instruction_sets()[:1], args.dtype or DTYPES))
    rows, coefficients, quality = [], {}, {}
    for isa, dtype in kernels:
        found, coefficients[isa, dtype], quality[isa, dtype] = judged(isa, dtype)
        rows += found
        for row in found if len(kernels) == 1 else ():
            print(*(f"{value!s:>{25 if key == 'problem' else 10}}" for key, value in row.items()))
        print(isa, dtype, quality[isa, dtype], flush=True)
    for names, each in coefficients.items():
        print(f"    {names}: {line(each)},".replace("'", '"'))
    for names in kernels:
        one = fitted_to(scattered(), *names, pairs_of, [{"tile": (1, 64)}])
        few = [how for how in FEW if how["tile"][0] <= few_of(*names)]
        together = fitted_to(ROWS, *names, rows_of, few)
        print(f"    {names}: ({line(one)}, {line(together)}),".replace("'", '"'))
    if args.isa is None and args.dtype is None:
        notes = (
            "One thread; CPU time, the minimum of 12 runs in turns. A case is predicted by coefficients fitted without "
            "its problem. 'order': share of pairs of plans of a problem whose order is predicted; 'order_where_apart': "
            "of those whose times differ by more than 5 %. Coefficients: nanoseconds per feature."
        )
        fits = [
            {"isa": isa, "dtype": dtype, **quality[isa, dtype], **dict(zip(Counts._fields, each, strict=True))}
            for (isa, dtype), each in coefficients.items()
        ]
        record.write("price_cpu", rows, notes=notes, fits=fits)
    missed = (q["within_25_percent"] < WITHIN_SHARE or q["order_where_apart"] < ORDER_SHARE for q in quality.values())
    return int(any(missed))


if __name__ == "__main__":
    raise SystemExit(main())
