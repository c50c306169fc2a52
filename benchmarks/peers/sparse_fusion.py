#!/usr/bin/env python3
"""Compare the fused kernel with SDDMM, softmax and SpMM as separate kernels.

    python benchmarks/peers/sparse_fusion.py           # four minutes; torch, SciPy; MKL and sparse_dot_mkl optional
    python benchmarks/peers/sparse_fusion.py --quick   # small problems, results in a temporary folder

float32, 8 heads of 64, one thread, CPU time, contenders in turns. The unfused pipelines combine the SDDMM, softmax and
SpMM kernels of the installed libraries (NumPy and SciPy, torch.sparse on MKL, sparse_dot_mkl); the fastest combination
counts, even if no single library has all three. Inspection is the work per pattern: planning for the fused kernel, the
CSR index in the forms that the kernels need for the unfused ones. Writes ``sparse_fusion``, ``sparse_fusion_summary``
and ``docs/images/sparse_fusion.png``; exits with 1 if the target is missed.
"""

from __future__ import annotations

import os

# Set before the import of NumPy, torch and MKL, which read it once.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import argparse
import itertools
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import record
import timing
import torch
from ceilings import Ceilings
from cpu_peers import contenders, figures, problems, unfused

import spattn
from spattn import patterns as sp

TARGET = 8.0
NOTES = (
    "float32, batch 1, 8 heads of 64, one process, one thread, contenders in turns; medians of the process's CPU time. "
    "A pipeline is named after the libraries of its SDDMM, softmax and SpMM. times_fused: ratio of the pipeline's "
    "median to the fused kernel's. break_even_calls: calls that amortize planning."
)
# The pipelines of a single library (NumPy counts as SciPy).
NAMED = {unfused.SCIPY: "SciPy CSR: ", unfused.TORCH: "torch.sparse: "}


def cases(quick: bool) -> list[problems.Problem]:
    """Windows of several lengths and widths, and patterns with non-contiguous rows."""
    cut = 8 if quick else 1
    made = [
        (f"window_{n}", f"window ±{256 // cut}", n // cut, sp.SlidingWindow(256 // cut)) for n in (1024, 4096, 16384)
    ]
    made.append(("narrow", f"window ±{64 // cut}", 4096 // cut, sp.SlidingWindow(64 // cut)))
    made.append(
        ("longformer", f"Longformer ±{256 // cut} + 16", 4096 // cut, sp.longformer(512 // cut, global_tokens=16))
    )
    made.append(("dilated", f"dilated ±{256 // cut}, every 4th", 4096 // cut, sp.DilatedWindow(256 // cut, dilation=4)))
    if not quick:
        made.append(("neighborhood", "neighbourhood 64×64, 13×13", 4096, sp.Neighborhood((64, 64), 13)))
    return [problems.Problem(*fields, mask_mod=lambda b, h, q, k: q >= 0, forward=()) for fields in made]


def pipelines(index: unfused.CsrIndex) -> dict[str, unfused.Pipeline]:
    """SciPy's pipeline, and torch's SDDMM (NumPy's is six times slower) with every installed softmax and SpMM."""
    spmm = [name for name in unfused.SPMM if name != "sparse_dot_mkl" or unfused.why_no_sparse_dot_mkl() is None]
    combinations = [unfused.SCIPY, *itertools.product(["torch"], unfused.SOFTMAX, spmm)]
    return {NAMED.get(names, "") + " · ".join(names): unfused.Pipeline(index, *names) for names in combinations}


def inspect_unfused(pattern: sp.Pattern, tokens: int, names: tuple[str, ...], repeats: int) -> float:
    """CPU milliseconds to build the CSR index in the forms that the pipeline's kernels need."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        index = unfused.CsrIndex.of_pattern(pattern, tokens)
        unfused.prepare(index, names)
        times.append(1e3 * (time.process_time() - start))
    return statistics.median(times)


def inspect_fused(pattern: sp.Pattern, tokens: int, tile: tuple[int, int], repeats: int) -> float:
    """CPU milliseconds of planning; each batch size misses the plan cache."""
    times = []
    for batch in range(2, 2 + repeats):
        start = time.process_time()
        spattn.plan(pattern, tokens, tiling=spattn.Tiling(tile=tile), batch=batch, heads=problems.HEADS)
        times.append(1e3 * (time.process_time() - start))
    return statistics.median(times)


def measure(problem: problems.Problem, rounds: int, ceilings: Ceilings) -> list[dict]:
    """Rows of one pattern: the fused kernel, then the pipelines, fastest first."""
    given = problems.inputs(problem, "float32")
    reference = problems.Reference(problem, given, mask_mod=False)
    fused = contenders.build("spattn", problem, given, both=False)
    dense = contenders.build("SDPA dense", problem, given, both=False)
    made = pipelines(unfused.CsrIndex.of_pattern(problem.pattern, problem.tokens))
    calls = {"spattn, fused": fused.call, "SDPA dense (no index)": dense.call}
    calls |= {name: (lambda p=pipeline: (p(given.q, given.k, given.v),)) for name, pipeline in made.items()}
    allowed = {"SDPA dense (no index)": "dense"}
    checks = {name: reference.check(call(), allowed.get(name, "pattern")) for name, call in calls.items()}
    for pipeline in made.values():
        pipeline.forget()
    times = timing.interleave(calls, rounds, lambda: ceilings.sample("fma_fp32", "exp_fp32", "read_l2", "read_dram"))
    inspected = {
        "spattn, fused": inspect_fused(problem.pattern, problem.tokens, contenders.plan_of(problem, given).tile, 9)
    }
    facts = {"name": problem.name, "problem": f"{problem.title}, N = {problem.tokens}", "nnz": problem.pairs}
    rows = []
    for name in calls:
        stages = made[name].medians() if name in made else {}
        if name in made:
            inspected[name] = inspect_unfused(problem.pattern, problem.tokens, made[name].names, 3)
        rows.append(
            facts
            | {
                "pipeline": name,
                **timing.summary(times[name]),
                **checks[name],
                **stages,
                "inspect_ms": round(inspected.get(name, 0.0), 3),
            }
        )
    return _compared(rows)


def _compared(rows: list[dict]) -> list[dict]:
    fused, rest = rows[0], sorted(rows[1:], key=lambda r: r["median_ms"])
    for row in [fused, *rest]:
        row["times_fused"] = round(row["median_ms"] / fused["median_ms"], 2)
        gain, paid = row["median_ms"] - fused["median_ms"], fused["inspect_ms"] - row["inspect_ms"]
        row["break_even_calls"] = None if row is fused or gain <= 0 else max(1, math.ceil(paid / gain))
    return [fused, *rest]


def summary(rows: list[dict]) -> list[dict]:
    """One row per pattern: the fused kernel, the best unfused pipeline and the best of a single library."""
    found = []
    for name in dict.fromkeys(r["name"] for r in rows):
        own = [r for r in rows if r["name"] == name]
        fused, unfused_rows = own[0], [r for r in own if "SDDMM_ms" in r]
        best = unfused_rows[0]
        found.append(
            {
                "problem": fused["problem"],
                "fused_ms": fused["median_ms"],
                "plan_ms": fused["inspect_ms"],
                "best_unfused": best["pipeline"],
                "best_unfused_ms": best["median_ms"],
                "times_best": best["times_fused"],
                "csr_ms": best["inspect_ms"],
                "break_even_calls": best["break_even_calls"],
                "times_scipy": _times(unfused_rows, "SciPy CSR"),
                "times_torch": _times(unfused_rows, "torch.sparse"),
                "times_dense": next(r["times_fused"] for r in own if r["pipeline"].startswith("SDPA dense")),
                "plan_in_fused_calls": round(fused["inspect_ms"] / fused["median_ms"], 2),
            }
        )
    return found


def _times(rows: list[dict], title: str) -> float:
    return next(r["times_fused"] for r in rows if r["pipeline"].startswith(title + ": "))


def main() -> int:
    """Measure, print, write; return 1 if the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="small problems, three rounds, results into a temporary folder"
    )
    parser.add_argument("--rounds", type=int, help="runs of each pipeline (default: 11)")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="case names, such as window_4096")
    options = parser.parse_args()
    torch.set_num_threads(1)
    unfused.quiet_torch_sparse()
    ceilings, rows, load = Ceilings(), [], os.getloadavg()
    for problem in cases(options.quick):
        if options.only and problem.name not in options.only:
            continue
        rows += measure(problem, options.rounds or (3 if options.quick else 11), ceilings)
        for row in (r for r in rows if r["name"] == problem.name):
            measured = f"{row['median_ms']:9.2f} ms {row['times_fused']:6.2f}× inspection {row['inspect_ms']:8.2f} ms"
            print(f"{row['problem']:34} {measured}  {row['pipeline']}", flush=True)
    facts = {
        "shape": {"batch": 1, "heads": problems.HEADS, "head_dim": problems.HEAD_DIM},
        "threads": 1,
        "ceilings": ceilings.rows(),
        "peers": contenders.versions(),
        "load_before": load,
        "load_after": os.getloadavg(),
        "sparse_dot_mkl": unfused.why_no_sparse_dot_mkl() or "available",
    }
    return finish(rows, facts, bool(options.quick or options.only))


def finish(rows: list[dict], facts: dict, partial: bool) -> int:
    """Write results and figure; return 1 if the target was measured and missed."""
    short = summary(rows)
    images = Path(tempfile.mkdtemp(prefix="sparse-fusion-")) if partial else record.IMAGES
    if not partial:
        record.write("sparse_fusion", rows, notes=NOTES, **facts)
        record.write("sparse_fusion_summary", short, notes=NOTES, **facts)
    shown = [r for r in rows if r["name"] == "window_4096"] or rows
    kernels = [r for r in shown if "SDDMM_ms" in r]
    figures.fusion(
        kernels, shown[0], f"{shown[0]['problem']}, float32, 8 heads of 64, one thread", images / "sparse_fusion.png"
    )
    reached = kernels[0]["times_fused"]
    print(f"fused over the best unfused pipeline: {reached:.2f}× (target {TARGET}×)")
    return 0 if reached >= TARGET or partial else 1


if __name__ == "__main__":
    raise SystemExit(main())
