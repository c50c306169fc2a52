#!/usr/bin/env python3
"""Compare spattn with PyTorch, NATTEN, NumPy and SciPy on one CPU thread.

    python benchmarks/peers/peers_cpu.py               # 20 minutes; needs torch, SciPy, a C compiler; NATTEN optional
    python benchmarks/peers/peers_cpu.py --quick       # small problems, results in a temporary folder

All contenders compute the same attention in one process, in turns. Every result is checked against float64 on sampled
rows (gradients on a whole head) before timing; exits with 1 if one exceeds its error bound. Figures are medians of the
process's CPU time, ratios are medians over medians of the same rounds; the machine's ceilings are sampled between the
contenders. Writes ``peers_cpu``, ``peers_cpu_roofline``, ``peers_cpu_targets``, ``peers_cpu_ceilings``,
``peers_cpu_memory`` and their figures, ``docs/images/peers_cpu-MACHINE.png`` and ``cpu_roofline-MACHINE.png``.
"""

from __future__ import annotations

import os

# Set before the import of NumPy, torch and MKL, which read it once.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import argparse
import gc
import json
import math
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import record
import timing
import torch
from ceilings import UNITS, Ceilings
from cpu_peers import contenders, figures, memory, problems, roofline, targets

NOTES = (
    "One process, one thread, contenders in turns; medians of the process's CPU time. GF/s count allowed pairs only, "
    "4·head_dim each forward and 10·head_dim backward. times_spattn: the contender's median over spattn's."
)


MEMORY_PROBLEMS = ("window", "window_long")


class Comparison:
    """Runs problems and collects rows of the results."""

    def __init__(self, rounds: int):
        self.rounds = rounds
        self.ceilings = Ceilings()
        self.results: list[dict] = []
        self.roofline: list[dict] = []
        self.skipped: list[dict] = []
        self.ceilings.sample(*(name for name in UNITS for _ in range(5)))

    def run(self, problem: problems.Problem, dtype: str, both: bool) -> None:
        """Build, check and time the contenders of one problem."""
        names = problem.both if both else problem.forward
        if not names:
            return
        given = problems.inputs(problem, dtype)
        facts = {
            "name": problem.name,
            "problem": f"{problem.title}, N = {problem.tokens}",
            "dtype": dtype,
            "pass": "forward + backward" if both else "forward",
        }
        facts["table"] = f"{dtype}, {facts['pass']}"  # selects rows in the documentation's tables
        print(f"\n{facts['problem']}, {dtype}, {facts['pass']}", flush=True)
        built, checks = self._build(problem, given, names, both, facts)
        reference = self.ceilings.reference(dtype)
        before = len(self.ceilings.samples[reference])
        calls = {name: contender.call for name, contender in built.items()}
        times = timing.interleave(calls, self.rounds, lambda: self.ceilings.sample(reference, "exp_fp32"))
        ceiling = self.ceilings.median(reference, len(self.ceilings.samples[reference]) - before)
        for name, contender in built.items():
            row = facts | {"contender": name} | timing.summary(times[name]) | checks[name]
            pairs = problems.HEADS * self._pairs(problem, contender.allowed)
            gflops = roofline.flops_per_pair(both) * pairs / row["median_ms"] / 1e6
            row |= {
                "times_spattn": None,
                "gflops_on_allowed_pairs": round(gflops, 1),
                "share_of_ceiling_pct": round(100 * gflops / ceiling, 2),
                "ceiling": reference,
                "ceiling_gflops": round(ceiling, 1),
                "prepare_ms": round(contender.prepare_ms, 2),
                "compile_ms": contender.compile_ms and round(contender.compile_ms),
            }
            self.results.append(row)
        self._compare(len(built))
        if "spattn" in built:
            own = next(r for r in self.results[-len(built) :] if r["contender"] == "spattn")
            self.roofline.append(roofline.row(problem, given, dtype, both, own["median_ms"], self.ceilings))

    def _build(self, problem, given, names, both, facts):
        reference = problems.Reference(problem, given)
        built, checks = {}, {}
        for name in names:
            gc.collect()
            try:
                contender = contenders.build(name, problem, given, both)
            except contenders.Unavailable as reason:
                self.skipped.append(facts | {"contender": name, "reason": str(reason)})
                print(f"  {name:22} skipped: {reason}", flush=True)
                continue
            checks[name] = reference.check(contender.call(), contender.allowed)
            built[name] = contender
        return built, checks

    @staticmethod
    def _pairs(problem, allowed: str) -> int:
        n = problem.tokens
        full = {"dense": n * n, "causal": n * (n + 1) // 2}
        return full.get(allowed) or problem.pairs

    def _compare(self, count: int) -> None:
        rows = self.results[-count:] if count else []
        own = next((r["median_ms"] for r in rows if r["contender"] == "spattn"), None)
        for row in rows:
            row["times_spattn"] = own and round(row["median_ms"] / own, 3)
            spread = f"[{row['least_ms']:.2f} … {row['most_ms']:.2f}]"
            share = f"{row['gflops_on_allowed_pairs']:7.1f} GF/s {row['share_of_ceiling_pct']:6.1f} %"
            ratio = f"{row['times_spattn'] or float('nan'):7.2f}× spattn, error {row['error']:.1e}"
            ratio += "" if row["within_bound"] else f" EXCEEDS the bound {row['error_bound']:.1e}"
            print(f"  {row['contender']:22} {row['median_ms']:9.2f} ms {spread} {share} {ratio}", flush=True)


def measure_memory(chosen, dtype: str, quick: bool) -> list[dict]:
    """Peak memory of the contenders of :data:`MEMORY_PROBLEMS`, for both passes."""
    rows = []
    for problem in (p for p in chosen if p.name in MEMORY_PROBLEMS):
        for both in (False, True):
            for name in problem.both if both else problem.forward:
                found = memory.in_a_process(__file__, problem.name, name, dtype, both, quick)
                row = {
                    "problem": f"{problem.title}, N = {problem.tokens}",
                    "dtype": dtype,
                    "contender": name,
                    "pass": "forward + backward" if both else "forward",
                    **found,
                }
                print(f"  {row['problem']}, {row['pass']}, {dtype}, {name}: {found}", flush=True)
                if "call_mib" in found:
                    rows.append(row)
    return rows


def arguments() -> argparse.Namespace:
    """Parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="small problems, three rounds, results into a temporary folder"
    )
    parser.add_argument("--rounds", type=int, help="runs of each contender (default: 15)")
    parser.add_argument("--only", nargs="+", metavar="PROBLEM", help="problem names, such as window dense strided")
    parser.add_argument("--dtype", choices=list(problems.DTYPES), help="default: both")
    parser.add_argument("--pass", dest="which", choices=("forward", "both"), help="default: both, one after the other")
    parser.add_argument("--leave-out", choices=("memory", "times"), help="skip these measurements")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no problem after this time")
    parser.add_argument("--keep", action="store_true", help="write the results of --only, --dtype or --pass, too")
    parser.add_argument(
        "--memory-of", nargs=4, metavar=("PROBLEM", "CONTENDER", "DTYPE", "PASS"), help=argparse.SUPPRESS
    )
    return parser.parse_args()


def memory_of(problem: str, contender: str, dtype: str, which: str, quick: bool) -> None:
    """Child process of the memory measurement: print one JSON line."""
    chosen = next(p for p in problems.problems(quick) if p.name == problem)
    print(json.dumps(memory.measure(chosen, contender, dtype, which == "both")))


def write(tables: dict[str, list[dict]], partial: bool, **facts) -> None:
    """Write results and figures; those of a partial run into a temporary folder."""
    images = record.IMAGES
    if partial:
        images = Path(tempfile.mkdtemp(prefix="peers-cpu-"))
        for name, rows in tables.items():
            (images / f"{name}.json").write_text(json.dumps({"results": rows, **facts}, indent=1))
        print(f"partial run: results are in {images}")
    else:
        for name, rows in tables.items():
            record.write(name, rows, notes=NOTES, **facts)
    if any(row["times_spattn"] for row in tables.get("peers_cpu", [])):
        figures.peers(tables["peers_cpu"], images / f"peers_cpu-{record.slug()}.png")
        figures.roofline(tables["peers_cpu_roofline"], images / f"cpu_roofline-{record.slug()}.png")


def main() -> int:
    """Measure, print, write; return 1 if a result exceeds its error bound."""
    options = arguments()
    torch.set_num_threads(1)
    if options.memory_of:
        memory_of(*options.memory_of, options.quick)
        return 0
    chosen = [p for p in problems.problems(options.quick) if not options.only or p.name in options.only]
    dtypes = [options.dtype] if options.dtype else list(problems.DTYPES)
    passes = {"forward": [False], "both": [True], None: [False, True]}[options.which]
    comparison = Comparison(options.rounds or (3 if options.quick else 15))
    load = os.getloadavg()
    started = time.monotonic()
    for problem in chosen if options.leave_out != "times" else ():
        if time.monotonic() - started > 60 * options.minutes:
            comparison.skipped.append({"name": problem.name, "reason": f"not started within {options.minutes} minutes"})
            continue
        for dtype in dtypes:
            for both in passes:
                comparison.run(problem, dtype, both)
    aims = targets.rows(comparison.results)
    tables = {
        "peers_cpu": comparison.results,
        "peers_cpu_roofline": comparison.roofline,
        "peers_cpu_targets": aims,
        "peers_cpu_ceilings": comparison.ceilings.rows(),
    }
    part = options.only or options.dtype or options.which
    partial = bool(options.quick or (part and not options.keep))
    facts = {
        "shape": {"batch": 1, "heads": problems.HEADS, "head_dim": problems.HEAD_DIM},
        "threads": 1,
        "rounds": comparison.rounds,
        "vector_bits": comparison.ceilings.vector_bits,
        "skipped": comparison.skipped,
        "load_before": load,
        "load_after": os.getloadavg(),
        "peers": contenders.versions(),
    }
    if comparison.results:
        write(tables, partial, **facts)
    for row in aims:
        print(f"{row['what']}, {row['dtype']}: {row['reached']} (target {row['target']}): {row['met']}", flush=True)
    if options.leave_out != "memory":
        rows = measure_memory(chosen, dtypes[0], options.quick)
        write({"peers_cpu_memory": rows}, partial, **facts)
    return 0 if all(row["within_bound"] for row in comparison.results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
