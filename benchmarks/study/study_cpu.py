#!/usr/bin/env python3
"""Study sparse attention on a CPU: speed-ups over naive attention, layers, bounds.

    python benchmarks/study/study_cpu.py             # ten minutes; torch, transformers; an idle machine
    python benchmarks/study/study_cpu.py --quick     # seconds, writes nothing
    python benchmarks/study/study_cpu.py --only layers

float32. *Speed-up*: one head of 64, 128 to 65,536 tokens, on one thread by CPU time and on two by wall time; naive
attention in PyTorch, in blocks of queries. A time that would exceed 20 s is extrapolated from the longest measured
length with the square of the length, and marked. *Layers*: parts of a BERT encoder of MiniLM's sizes with random
weights. *Bounds*: floors of the allowed pairs at the measured ceilings of one core (docs/cpu-roofline.md). Each part
runs in a process of its own; that on two threads is left out if other programs take more than a tenth of the CPU.
Writes ``study_speedup_cpu``, ``study_layers_cpu`` and ``study_bounds_cpu``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "peers"))

import record
import study_problems as study
import timing
import torch
from child import child

from spattn import cpu

sys.path.append(str(record.ROOT / "examples"))
from sentence_encoder.others import Others  # noqa: E402

ROWS = 256  # queries of a block of naive attention: the fastest of 64 to 1024 at 4096 and 16,384 tokens
ROUNDS, SHORT_SECONDS, SLOW_SECONDS, LONGEST_SECONDS = 5, 0.02, 1.0, 20.0
WALL, BUSY = "speedup2", 0.1  # the part by wall time needs an idle machine
TOLERANCE = 1e-5  # relative error in float32
MINILM = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
NOTES = {
    "speedup": "float32, 1 head of 64; medians of CPU time on one thread and of wall time on two, contenders in turns; "
    "calls under 20 ms were repeated in each turn, calls over 1 s ran once. Plans are made before timing. Naive: "
    "PyTorch's eager mode in blocks of 256 queries. ≈ and extrapolated: a time grown with the square of the length "
    "from the longest measured one.",
    "layers": "float32, BERT encoder of MiniLM's sizes with random weights, 4096 tokens, one thread; medians of CPU "
    "time, contenders in turns.",
    "bounds": "float32, 8 heads of 64, 4096 tokens, one thread; medians of CPU time. Floors count the "
    "allowed pairs only, at ceilings measured in the same process; floor_percent is the share of the time that the "
    "larger floor takes.",
}


def speedup(lengths: tuple[int, ...], threads: int) -> list[dict]:
    """Rows of one number of threads."""
    clock = time.process_time if threads == 1 else time.perf_counter
    if {torch.get_num_threads(), cpu.num_threads()} != {threads}:
        raise SystemExit(f"study_cpu: expected {threads} processors for {threads} threads")
    rows: list[dict] = []
    for which in study.PASSES:
        last: dict[str, dict] = {}
        for tokens in lengths:
            grown = {name: own["median_ms"] * (tokens / own["tokens"]) ** 2 for name, own in last.items()}
            skipped = {name for name, ms in grown.items() if ms > 1e3 * LONGEST_SECONDS}
            names = {study.NAIVE, *study.PATTERNS} - skipped
            given = study.inputs(1, tokens, torch.float32, "cpu")
            errors = study.check(given, ROWS, TOLERANCE, names) if which == study.PASSES[0] else {}
            made = study.calls([given], which, ROWS, names)
            timed = {name: (lambda call=call: call(0)) for name, call in made.items()}
            found = timing.medians_in_turns(timed, ROUNDS, clock, SLOW_SECONDS, SHORT_SECONDS)
            last |= {name: {"median_ms": ms, "tokens": tokens} for name, ms in found.items()}
            ms = {
                name: {
                    "median_ms": round(found.get(name, grown.get(name, 0.0)), 4),
                    "extrapolated": name in skipped,
                }
                for name in (study.NAIVE, *study.PATTERNS)
            }
            rows += study.rows_of(ms, which, tokens, errors, threads=threads)
            study.show(rows[-len(ms) :])
    return rows


def bounds(quick: bool) -> list[dict]:
    """Floors of every pattern and pass, beside spattn's time."""
    from ceilings import Ceilings
    from cpu_peers import contenders, problems

    ceilings, rows = Ceilings(), []
    for name, pattern in study.PATTERNS.items():
        problem = problems.Problem(name, name, 512 if quick else 4096, pattern, lambda b, h, q, k: q >= 0, ())
        given = problems.inputs(problem, "float32")
        checked = problems.Reference(problem, given, mask_mod=False)
        calls = {
            which: contenders.build("spattn", problem, given, which != study.PASSES[0]).call for which in study.PASSES
        }
        for call in calls.values():
            if not checked.check(call())["within_bound"]:
                raise AssertionError(f"{name}: the error exceeds its bound")
        times = timing.interleave(
            calls, 1 if quick else 7, lambda: ceilings.sample("fma_fp32", "exp_fp32", "read_dram")
        )
        for which, own in times.items():
            rows.append(
                bound(name, which, problem, contenders.plan_of(problem, given), statistics.median(own), ceilings)
            )
            print(rows[-1], flush=True)
    return rows


def bound(name: str, which: str, problem, plan, median_ms: float, ceilings) -> dict:
    """One row: floors of any kernel that computes only the allowed pairs, and the measured time over the largest.

    Products and exponentials use the same vector units, so they add up; reads overlap with them. A forward reads q, k,
    v and writes out; a backward reads these, lse and dout and writes three gradients.
    """
    from cpu_peers import problems, roofline

    both = which != study.PASSES[0]
    pairs = plan.nnz * problems.HEADS
    arithmetic = pairs * roofline.flops_per_pair(both) / ceilings.median("fma_fp32") / 1e6
    exponentials = pairs * (1 + both) / ceilings.median("exp_fp32") / 1e6
    array = 4 * problems.HEADS * problem.tokens * problems.HEAD_DIM
    dram = array * (12 if both else 4) / ceilings.median("read_dram") / 1e6
    floor = max(arithmetic + exponentials, dram)
    return {
        "problem": name,
        "pass": which,
        "median_ms": round(median_ms, 3),
        "products_ms": round(arithmetic, 3),
        "exponentials_ms": round(exponentials, 3),
        "dram_ms": round(dram, 3),
        "bound": "DRAM" if floor == dram else "products and exponentials",
        "floor_percent": round(100 * floor / median_ms, 1),
        "efficiency_percent": round(100 * plan.efficiency, 1),
    }


def part(name: str, quick: bool) -> dict:
    """Rows of a part, and the load by other programs meanwhile."""
    others, load = Others(), os.getloadavg()
    if name.startswith("speedup"):
        rows = speedup(study.LENGTHS[:2] if quick else study.LENGTHS, int(name[-1]))
    elif name == "layers":
        sizes, tokens = (MINILM | {"num_hidden_layers": 1}, 512) if quick else (MINILM, 4096)
        rows = study.layer_rows("cpu", sizes, tokens, torch.float32, 1 if quick else 3)
    else:
        rows = bounds(quick)
    return {"rows": rows, "load_before": load, "taken_by_other_programs": round(others.share(), 3)}


def taken() -> float:
    """Share of the processors that other programs take in the next two seconds."""
    others = Others()
    time.sleep(2)
    return others.share()


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short problems, write nothing")
    parser.add_argument("--only", choices=NOTES, help="one part")
    parser.add_argument("--part", metavar="PART", help="print a part's rows as JSON")
    args = parser.parse_args()
    if args.part:
        with contextlib.redirect_stdout(sys.stderr):
            found = part(args.part, args.quick)
        print(json.dumps(found))
        return 0
    threads = {"speedup1": 1, "speedup2": 2, "layers": 1, "bounds": 1}
    for name in [args.only] if args.only else NOTES:
        rows, conditions = [], {}
        for which in (which for which in threads if which.startswith(name)):
            if which == WALL and not args.quick and (share := taken()) > BUSY:
                conditions[which] = f"not measured: other programs took {100 * share:.0f} % of the processors"
                continue
            found = child("--part", which, *["--quick"] * args.quick, OMP_NUM_THREADS=str(threads[which]))
            if which == WALL and found["taken_by_other_programs"] > BUSY:
                conditions[which] = "left out: other programs took more than a tenth of the processors"
            else:
                rows += found.pop("rows")
                conditions[which] = found
        print(name, json.dumps(conditions), flush=True)
        if not args.quick:
            record.write(f"study_{name}_cpu", rows, notes=NOTES[name], conditions=conditions)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
