#!/usr/bin/env python3
"""Fit the cost model's coefficients for Hopper GPUs and measure its errors.

    python benchmarks/costs/price_cuda.py                   # measure and fit: a minute; needs torch and SciPy
    python benchmarks/costs/price_cuda.py --measure FILE    # measure only
    python benchmarks/costs/price_cuda.py --fit FILE        # fit measured times; needs no GPU
    python benchmarks/costs/price_cuda.py --only window     # measure problems with such names, write nothing

Forward, bfloat16. Several plans per problem: other tiles, boxes of queries with their own keys where the pattern has
spans, other numbers of split-KV partials, contiguous views instead of the pattern's, permuted and gathered plans.
Before timing, the plans of a problem are compared with each other. A measurement is a replay of a CUDA graph of several
calls between two events, without host time, in turns; all calls read the same arrays, which L2 holds if they fit. Plans
that the kernels reject, or leave to the portable ones, are printed and listed as skipped.

Coefficients are nanoseconds per feature of ``spattn.choose.features_gpu.GpuCounts``, with a set of per-worker
coefficients for each kind of tile, fitted by non-negative least squares of relative errors. Each case is predicted by
coefficients fitted without its problem. Writes ``price_cuda``, and the backend's choices to ``price_cuda_choices``;
exits with 1 if a target is missed or plans disagree. The lines printed per kind are those of
``spattn/choose/machine_gpu.py``.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import ml_dtypes
import numpy as np
import record
from scipy.optimize import nnls

from spattn import patterns as sp
from spattn.choose import machine_gpu
from spattn.choose.chooser import Sizes
from spattn.choose.features_gpu import GpuCounts, count_on_gpu
from spattn.choose.machine_gpu import KINDS, cost_ms, kernel_of, kind_of, specialization_of
from spattn.planning import Plan
from spattn.request.call import Call
from spattn.schedule import compiler

ROUNDS, GRAPH_MS = 20, 2.0
TOLERANCE = 0.01  # between two plans, relative to the largest result: two to three bfloat16 roundings
WITHIN, WITHIN_SHARE, ORDER_SHARE = 0.25, 0.8, 0.9
SHARED = ("launches", "merging", "merged", "elements")  # features with one coefficient for all kinds of tiles

CHOICES = (
    "The backend's plan for each problem of price_cuda: chosen_ms, if it was measured; first_ms, the plan with tile() "
    "for two workers per SM; least_ms, the fastest measured plan."
)


class How(NamedTuple):
    """How a problem is planned.

    `pieces` scales the backend's number of split-KV partials. `listed` passes the pairs as a list, so that views are
    contiguous. `ordered` plans are permuted, `gathered` ones gather keys for each query tile.
    """

    tile: tuple[int, int] = (128, 64)
    box: tuple[int, ...] | None = None
    pieces: float = 1.0
    listed: bool = False
    ordered: bool = False
    gathered: bool = False


WIDE, HALF, WHOLE, LISTED = How(), How((64, 64)), How(pieces=0), How(listed=True)
HALF_WHOLE = How((64, 64), pieces=0)
WIDEST, WIDEST_WHOLE = How((192, 64)), How((192, 64), pieces=0)
LONG = WIDE, HALF, WHOLE, HALF_WHOLE, WIDEST, WIDEST_WHOLE
SMALL, SPLIT, VIEWS = (WIDE, HALF, How((32, 64))), (WIDE, HALF, WHOLE, HALF_WHOLE), (WIDE, HALF, LISTED)
SQUARES = WIDE, How((64, 64), (8, 8)), How((128, 64), (8, 16)), HALF, How((64, 64), (4, 16))
CUBES = WIDE, How((64, 64), (4, 4, 4)), How((128, 64), (4, 4, 8)), WHOLE, How((64, 64), (4, 4, 4), 0)
CLUSTERED, SCATTERED = (WIDE, HALF, How((64, 64), ordered=True)), (WIDE, HALF, How((64, 64), gathered=True))
SEVENS = WIDE, How((49, 64), (7, 7)), How((64, 64), (8, 8)), How((56, 64), (7, 8)), How((63, 64), (7, 9))


class Problem(NamedTuple):
    """A pattern, the sizes of the call, and the plans to compare."""

    name: str
    pattern: sp.Pattern
    tokens: int
    head_dim: int
    heads: int
    batch: int
    plans: tuple[How, ...]

    @property
    def sizes(self) -> Sizes:
        """Sizes of the call."""
        return Sizes(self.batch, self.heads, self.heads, self.head_dim, self.head_dim)


def at_random(tokens: int, share: float) -> sp.Pattern:
    """Random pairs."""
    return sp.interop.from_pairs(*(np.random.default_rng(0).random((tokens, tokens)) < share).nonzero(), tokens, tokens)


def keys_at_random(tokens: int, keys: int) -> sp.Pattern:
    """Up to `keys` random keys per query."""
    rows = np.repeat(np.arange(tokens), keys)
    return sp.interop.from_pairs(rows, np.random.default_rng(0).integers(0, tokens, len(rows)), tokens, tokens)


def clusters(tokens: int, number: int) -> sp.Pattern:
    """Random clusters, as a list of pairs."""
    own = np.random.default_rng(1).integers(0, number, tokens)
    return sp.interop.from_pairs(*(own[:, None] == own).nonzero(), tokens, tokens)


def problems() -> list[Problem]:
    """All problems."""
    lengths = tuple(np.random.default_rng(2).multinomial(8192 - 24 * 32, [1 / 24] * 24) + 32)
    listed = [
        ("full", sp.Full(), 2048, 128, 16, 1, SPLIT),
        ("full, half as wide", sp.Full(), 4096, 64, 8, 1, LONG),
        ("full, short", sp.Full(), 1024, 128, 4, 2, SMALL),
        ("full, one head", sp.Full(), 4096, 128, 1, 1, SPLIT),
        ("causal", sp.Causal(), 4096, 128, 16, 1, SPLIT),
        ("causal, long", sp.Causal(), 8192, 64, 4, 1, LONG),
        ("full, longest", sp.Full(), 16384, 64, 8, 1, LONG),
        ("causal, longest", sp.Causal(), 16384, 64, 16, 1, LONG),
        ("window 1023, half as wide", sp.SlidingWindow(1023, 0), 16384, 64, 16, 1, LONG),
        ("documents, long", sp.Documents((4096, 3000, 5000, 4288)) & sp.Causal(), 16384, 64, 16, 1, LONG),
        ("window 2048", sp.SlidingWindow(2048), 16384, 64, 8, 1, LONG),
        ("causal, short", sp.Causal(), 2048, 64, 16, 2, LONG),
        ("causal, shortest", sp.Causal(), 1024, 128, 8, 1, SMALL),
        ("causal, one head", sp.Causal(), 16384, 128, 1, 1, SPLIT),
        ("window 256", sp.SlidingWindow(256), 16384, 128, 8, 1, SMALL),
        ("window 64", sp.SlidingWindow(64), 16384, 64, 16, 1, SMALL),
        ("window 16", sp.SlidingWindow(16), 8192, 64, 16, 2, SMALL),
        ("window 127, causal", sp.SlidingWindow(127, 0), 16384, 128, 16, 1, SMALL),
        ("window 1023, causal", sp.SlidingWindow(1023, 0), 8192, 128, 8, 1, SPLIT),
        ("window 512, one head", sp.SlidingWindow(512), 8192, 64, 1, 2, LONG),
        ("dilated window", sp.DilatedWindow(128, dilation=4), 4096, 64, 16, 1, VIEWS),
        ("dilated window, wide", sp.DilatedWindow(64, dilation=16), 4096, 128, 16, 1, VIEWS),
        ("strided 64", sp.strided(64), 4096, 64, 16, 1, VIEWS),
        ("strided 128", sp.strided(128), 8192, 128, 8, 1, VIEWS),
        ("fixed 64, 8", sp.fixed(64, 8), 4096, 64, 16, 1, VIEWS),
        ("fixed 128, 8", sp.fixed(128, 8), 8192, 128, 8, 1, VIEWS),
        ("Longformer 512", sp.longformer(512, global_tokens=64), 8192, 128, 8, 1, SPLIT),
        ("Longformer 128", sp.longformer(128, global_tokens=16), 4096, 64, 16, 1, SPLIT),
        ("BigBird", sp.BigBird(64), 4096, 64, 16, 1, SPLIT),
        ("BigBird, long", sp.BigBird(64), 8192, 128, 4, 1, SPLIT),
        ("documents", sp.Documents(tuple(map(int, lengths))), 8192, 128, 8, 1, SMALL),
        ("documents of 100", sp.Documents((100,) * 80), 8000, 64, 16, 1, SMALL),
        ("axial", sp.axial((64, 64), 0), 4096, 64, 16, 1, VIEWS),
        ("axial, large", sp.axial((128, 128), 1), 16384, 128, 16, 1, SMALL),
        ("neighbourhood 7", sp.Neighborhood((56, 56), 7), 3136, 64, 16, 2, SQUARES),
        ("neighbourhood 13", sp.Neighborhood((128, 128), 13), 16384, 128, 8, 1, SQUARES),
        ("neighbourhood 33", sp.Neighborhood((64, 64), 33), 4096, 64, 16, 1, SQUARES),
        ("neighbourhood 5, cube", sp.Neighborhood((12, 12, 16), 5), 2304, 64, 16, 2, CUBES),
        ("neighbourhood 9, cube", sp.Neighborhood((12, 12, 16), 9), 2304, 128, 8, 2, CUBES),
        ("neighbourhood 129, line", sp.Neighborhood((8192,), 129), 8192, 64, 16, 2, SMALL),
        ("windows 7", sp.windowed((56, 56), 7), 3136, 64, 16, 2, SEVENS),
        ("windows 7, shifted", sp.windowed((112, 112), 7, 3), 12544, 64, 16, 1, SEVENS),
        ("windows 7, wide", sp.windowed((56, 56), 7), 3136, 128, 8, 8, SEVENS),
        ("windows 7, shifted, wide", sp.windowed((56, 56), 7, 3), 3136, 128, 8, 8, SEVENS),
        ("neighbourhood 7, wide", sp.Neighborhood((56, 56), 7), 3136, 128, 8, 8, SQUARES),
        ("neighbourhood 33, whole", sp.Neighborhood((64, 64), 33), 4096, 64, 16, 1, SPLIT),
        ("windows 8, shifted", sp.windowed((64, 64), 8, 4), 4096, 128, 16, 2, SQUARES),
        ("windows 16", sp.windowed((128, 128), 16), 16384, 64, 16, 1, SQUARES),
        ("1 % at random", at_random(4096, 0.01), 4096, 64, 8, 1, SCATTERED),
        ("1 % at random, wide", at_random(4096, 0.01), 4096, 128, 16, 1, SCATTERED),
        ("0.1 % at random", at_random(4096, 0.001), 4096, 128, 8, 1, SCATTERED),
        ("0.3 % at random", at_random(4096, 0.003), 4096, 128, 16, 1, SCATTERED),
        ("3 % at random", at_random(4096, 0.03), 4096, 64, 16, 1, SCATTERED),
        ("24 keys at random", keys_at_random(16384, 24), 16384, 64, 4, 1, SCATTERED),
        ("6 keys at random", keys_at_random(8192, 6), 8192, 128, 16, 1, SCATTERED),
        ("32 clusters", clusters(4096, 32), 4096, 64, 8, 1, CLUSTERED),
        ("8 clusters", clusters(4096, 8), 4096, 128, 16, 1, CLUSTERED),
        ("128 clusters", clusters(4096, 128), 4096, 64, 16, 1, CLUSTERED),
        ("512 clusters", clusters(8192, 512), 8192, 128, 16, 1, CLUSTERED),
    ]
    return [Problem(*one) for one in listed]


def plan_of(problem: Problem, how: How, sms: int) -> Plan:
    """The backend's plan for a device with this many SMs, modified by `how`."""
    pattern, tokens = problem.pattern, problem.tokens
    if how.listed:
        rows = np.arange(tokens)
        allowed = np.broadcast_to(pattern.bind(tokens, tokens).allows(rows[:, None], rows[None]), (tokens, tokens))
        pattern = sp.interop.from_pairs(*allowed.nonzero(), tokens, tokens)
    sizes = {"batch": problem.batch, "heads": problem.heads, "workers": workers_of(problem, how, sms)}
    look_up = {"ordered": how.ordered, "gathered": how.gathered}
    return compiler.plan(pattern, tokens, tile=how.tile, box=how.box, **look_up, **sizes)


def workers_of(problem: Problem, how: How, sms: int) -> int:
    """Number of workers per head."""
    return max(1, math.ceil(how.pieces * 2 * sms / (problem.batch * problem.heads)))


# -- measuring -------------------------------------------------------------------------------------------------------


def measure(path: Path, names: str | None) -> dict[str, object]:
    """Times of all cases, written to `path` after every problem."""
    import torch

    from spattn import cuda
    from spattn.choose.specializations import TABLE

    found: dict[str, object] = {
        "device": torch.cuda.get_device_name(),
        "sms": cuda.sm_count(),
        "date": datetime.date.today().isoformat(),
        "commit": record.commit(),
        "versions": record.versions(),
        "builds": [row._asdict() for row in TABLE],
    }
    cases: list[dict[str, object]] = []
    skipped: list[dict[str, object]] = []
    found |= {"cases": cases, "skipped": skipped}
    began = time.perf_counter()
    for problem in problems():
        if names is None or names in problem.name:
            with torch.no_grad():
                timed, left = measured(problem, cuda.sm_count())
            for case in timed:
                print(*(f"{value!s:>{26 if key == 'problem' else 10}}" for key, value in case.items()), flush=True)
            for case in left:
                print("skipped:", *case.values(), flush=True)
            cases += timed
            skipped += left
            found["seconds"] = round(time.perf_counter() - began, 1)
            path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    print(f"{len(cases)} cases, {len(skipped)} skipped, in {found.get('seconds')} s: {path}")
    return found


def measured(problem: Problem, sms: int) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """Timed and skipped cases of a problem."""
    import torch

    from spattn import cuda
    from spattn.cuda.host.repeat import Repeated

    torch.manual_seed(0)
    shape = problem.batch, problem.heads, problem.tokens, problem.head_dim
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    call = Call.of(q, k, v)
    calls, reference, skipped, differences = {}, None, [], {}
    for number, how in enumerate(problem.plans):
        try:
            run = cuda.prepare(call, plan_of(problem, how, sms))
        except ValueError as error:
            skipped.append(named(problem, number) | {"reason": str(error)})
            continue
        if not isinstance(run, Repeated):
            skipped.append(named(problem, number) | {"reason": "left to the portable kernels"})
            continue
        out = run(q, k, v, call.scale)[0].float()
        reference = out if reference is None else reference
        differences[number] = float((out - reference).abs().max())
        if not differences[number] <= TOLERANCE * max(1.0, float(reference.abs().max())):
            reason = f"differs by {differences[number]:.3g} from the first plan"
            skipped.append(named(problem, number) | {"reason": reason, "wrong": True})
            continue
        calls[number] = lambda run=run: run(q, k, v, call.scale)
    times = in_turns(calls)
    cases = [
        named(problem, number) | {"ms": round(ms, 6), "difference": float(f"{differences[number]:.2g}")}
        for number, ms in times.items()
    ]
    return cases, skipped


def named(problem: Problem, number: int) -> dict[str, object]:
    """Fields that identify a case."""
    return {"problem": problem.name, "plan": number, **problem.plans[number]._asdict()}


def in_turns(calls) -> dict[int, float]:
    """Median milliseconds of each call, over replays in turns."""
    import torch

    start, stop = torch.cuda.Event(True), torch.cuda.Event(True)

    def replayed(graph) -> float:
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop)

    graphs = {}
    for number, run in calls.items():
        once = captured(run, 2)
        replayed(once)
        repeats = min(100, max(5, math.ceil(GRAPH_MS / (replayed(once) / 2))))
        graphs[number] = captured(run, repeats), repeats
    times = {number: [] for number in calls}
    for _ in range(ROUNDS):
        for number, (graph, repeats) in graphs.items():
            times[number].append(replayed(graph) / repeats)
    return {number: statistics.median(each) for number, each in times.items()}


def captured(run, repeats: int):
    """A CUDA graph of several calls."""
    import torch

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            run()
    return graph


# -- fitting ---------------------------------------------------------------------------------------------------------


def features(counts: GpuCounts, kind: str) -> np.ndarray:
    """Row of the design matrix: shared features, then the others once per kind of tile."""
    shared, own = [], []
    for name, value in counts._asdict().items():
        (shared if name in SHARED else own).append(value)
    return np.concatenate([shared, *(np.array(own) * (one == kind) for one in KINDS)])


def fitted(rows: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Coefficients in nanoseconds."""
    shares = 1e-6 * rows / times[:, None]
    size = np.maximum(shares.max(axis=0), 1e-30)
    return nnls(shares / size, np.ones(len(times)))[0] / size


def judge(found: dict[str, object]) -> tuple[list[dict[str, object]], dict[str, float], np.ndarray]:
    """Rows of the results, prediction quality and coefficients."""
    by_name = {problem.name: problem for problem in problems()}
    cases, sms = found["cases"], found["sms"]
    rows, counts = [], []
    for case in cases:
        problem = by_name[case["problem"]]
        how = problem.plans[case["plan"]]
        made = plan_of(problem, how, sms)
        build = specialization_of(made, (problem.head_dim,) * 2)
        counted = count_on_gpu(made, problem.sizes, kernel_of(build, sms))
        counts.append(features(counted, kind_of(build, made.ordered)))
        rows.append(
            {
                "problem": problem.name,
                "tokens": problem.tokens,
                "head_dim": problem.head_dim,
                "heads": problem.heads,
                "batch": problem.batch,
                **how._asdict(),
                "efficiency": round(made.efficiency, 4),
                "measured_ms": round(case["ms"], 5),
            }
        )
    names, times, matrix = (
        [case["problem"] for case in cases],
        np.array([case["ms"] for case in cases]),
        np.stack(counts),
    )
    predicted = np.zeros(len(times))
    for name in set(names):
        own = np.array([other == name for other in names])
        predicted[own] = 1e-6 * matrix[own] @ fitted(matrix[~own], times[~own])
    for row, ms, prediction in zip(rows, times, predicted, strict=True):
        row |= {"predicted_ms": round(prediction, 5), "error": round(prediction / ms - 1, 3)}
    pairs = [(a, b) for a, b in itertools.combinations(range(len(names)), 2) if names[a] == names[b]]
    right = [(times[a] < times[b]) == (predicted[a] < predicted[b]) for a, b in pairs]
    apart = [max(times[a], times[b]) > 1.05 * min(times[a], times[b]) for a, b in pairs]
    quality = {
        "cases": len(names),
        "within_25_percent": float(np.mean(np.abs(predicted / times - 1) <= WITHIN)),
        "order": float(np.mean(right)),
        "order_where_apart": float(np.mean([r for r, far in zip(right, apart, strict=True) if far])),
        "pairs": len(pairs),
        "pairs_apart": int(sum(apart)),
    }
    return rows, quality, fitted(matrix, times)


def choices(found: dict[str, object]) -> list[dict[str, object]]:
    """The backend's plan for each problem: its time, if measured, and that of the fastest plan."""
    chosen = []
    for problem in problems():
        times = {case["plan"]: case["ms"] for case in found["cases"] if case["problem"] == problem.name}
        if times:
            shape = problem.batch, problem.heads, problem.tokens, problem.head_dim
            call = Call.of(*[np.broadcast_to(np.zeros((), ml_dtypes.bfloat16), shape)] * 3)
            sms = found["sms"]
            made = machine_gpu.chosen(problem.pattern, call, workers_of(problem, WIDE, sms), None, sms)
            plans = ((number, plan_of(problem, how, sms)) for number, how in enumerate(problem.plans))
            same = next((number for number, plan in plans if number in times and alike(plan, made)), None)
            box = np.trim_zeros(made.views["box"][made.components["query_view"][0]] - 1, "f") + 1
            chosen.append(
                {
                    "problem": problem.name,
                    "tile": made.tile,
                    "box": box.tolist(),
                    "items": len(made.work),
                    "efficiency": round(made.efficiency, 4),
                    "predicted_ms": round(cost_ms(made, problem.sizes, sms), 5),
                    "first_ms": times[0],
                    "chosen_ms": times.get(same),
                    "least_ms": min(times.values()),
                }
            )
    return chosen


def alike(one: Plan, other: Plan) -> bool:
    """Whether kernels execute both plans alike."""
    arrays = (one.work, other.work), (one.views, other.views)
    return one.tile == other.tile and all(np.array_equal(*each) for each in arrays)


def of_tiles(coefficients: np.ndarray) -> dict[str, dict[str, float]]:
    """Coefficients by kind of tile and feature."""
    own = [name for name in GpuCounts._fields if name not in SHARED]
    shared = dict(zip(SHARED, coefficients, strict=False))
    parts = coefficients[len(SHARED) :].reshape(len(KINDS), -1)
    each = {tile: shared | dict(zip(own, part, strict=True)) for tile, part in zip(KINDS, parts, strict=True)}
    return {tile: {name: float(part[name]) for name in GpuCounts._fields} for tile, part in each.items()}


def report(found: dict[str, object], write: bool) -> int:
    """Fit, print, write; return 1 if a target is missed."""
    rows, quality, coefficients = judge(found)
    for row in rows:
        print(*(f"{value!s:>{26 if key == 'problem' else 10}}" for key, value in row.items()))
    print(found["device"], quality)
    tables = of_tiles(coefficients)
    for tile, table in tables.items():
        print(f'    "{tile}": GpuCounts({", ".join(f"{x:.3g}" for x in table.values())}),')
    chosen = choices(found)
    for row in chosen:
        print(*(f"{value!s:>{26 if key == 'problem' else 12}}" for key, value in row.items()))
    if write:
        notes = (
            "Forward, bfloat16; medians of CUDA graph replays, in turns, without host time; all calls read the same "
            "arrays. A case is predicted by coefficients fitted without its problem. 'order': share of pairs of plans "
            "of a problem whose order is predicted; 'order_where_apart': of those whose times differ by more than 5 %. "
            "Coefficients: nanoseconds per feature."
        )
        fits = [{"tile": tile, **table} for tile, table in tables.items()]
        facts = {name: found[name] for name in ("sms", "seconds", "skipped")} | {"gpu": found["device"]}
        measured_at = {"date": found["date"], "commit": found["commit"]}
        record.write("price_cuda", rows, notes=notes, **facts, measured=measured_at, quality=quality, fits=fits)
        record.write("price_cuda_choices", chosen, notes=CHOICES, gpu=found["device"], measured=measured_at)
    wrong = any(case.get("wrong") for case in found["skipped"])
    return int(wrong or quality["within_25_percent"] < WITHIN_SHARE or quality["order_where_apart"] < ORDER_SHARE)


def main() -> int:
    """Measure, fit, print, write; return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=Path, metavar="FILE", help="write raw times there, do not fit")
    parser.add_argument("--fit", type=Path, metavar="FILE", help="fit the raw times there, do not measure")
    parser.add_argument("--only", metavar="NAME", help="measure problems whose names contain this")
    args = parser.parse_args()
    if args.fit is not None:
        return report(json.loads(args.fit.read_text()), True)
    if args.measure is not None:
        found = measure(args.measure, args.only)
        return int(any(case.get("wrong") for case in found["skipped"]))
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder) / "price_cuda-h200.json", args.only)
    return report(found, True) if args.only is None else 0


if __name__ == "__main__":
    raise SystemExit(main())
