#!/usr/bin/env python3
"""Compare a grouped call with separate calls and hand tuning on one GPU.

    python benchmarks/kernels/grouped_cuda.py          # two minutes on an H200; needs torch
    python benchmarks/kernels/grouped_cuda.py --quick  # few rounds, writes nothing

bfloat16 problems of different lengths, patterns and heads. Contenders: the problems one after another, each on its own
stream, and in one grouped call (twice, as a measure of noise). Tuned by hand: the grouped call with every problem
planned for the whole GPU, without split-KV, or with equal shares; and every problem with its fastest number of workers,
one after another and grouped. Groups: sixteen problems, image grids of a vision transformer, and one long sequence with
short ones. Results are checked against float64 on sampled rows before timing. GPU times are medians of CUDA events
around CUDA graph replays, contenders in turns; wall times are many ordinary calls and one synchronization. Writes
``grouped_cuda``.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import record
from gpu_timing import TOLERANCE, worst_error

ROUNDS, TARGET_MS, WALL_CALLS = 15, 10.0, 60
WORKERS = (1, 2, 4, 8, 16, 32, 64)  # tried for each problem by itself
GROUPED, AGAIN = "grouped", "grouped, once more"
ONE_BY_ONE, STREAMS = "one after another", "a stream for each"
BY_HAND = ("grouped, each planned for the whole machine", "grouped, no splits", "grouped, equal shares")
TUNED = ("one after another, each tuned by itself", "grouped, each tuned by itself")
NOTES = (
    "Forward, bfloat16. gpu_ms: a CUDA graph replay, medians of CUDA events, contenders in turns. wall_ms: many "
    "ordinary calls and one synchronization, host clock. times_grouped: ratio to the grouped call."
)


def groups() -> dict[str, tuple[tuple[int, ...], list[tuple]]]:
    """By name: head dimensions, and (name, pattern, batch, heads, tokens) of each problem."""
    from spattn import patterns

    image, half = (56, 56), (28, 28)
    images = [
        ("neighbourhood 56×56, 7×7", patterns.Neighborhood(image, 7), 16, 4, 3136),
        ("windows 56×56, 7×7", patterns.windowed(image, 7), 16, 4, 3136),
        ("shifted windows 56×56, 7×7", patterns.windowed(image, 7, 3), 16, 4, 3136),
        ("neighbourhood 28×28, 7×7", patterns.Neighborhood(half, 7), 16, 8, 784),
    ]
    long = [
        ("causal", patterns.Causal(), 1, 1, 16384),
        ("window ±64", patterns.SlidingWindow(64), 1, 4, 2048),
        ("causal", patterns.Causal(), 1, 4, 1000),
    ]
    return {"sixteen": ((128, 64), sixteen()), "images": ((32,), images), "one long": ((128,), long)}


def sixteen() -> list[tuple]:
    """(name, pattern, batch, heads, tokens) of sixteen problems."""
    from spattn import patterns

    documents = patterns.Documents((100, 700, 300, 48, 500, 400))
    few = patterns.Documents((64, 200, 30, 218))
    return [
        ("causal", patterns.Causal(), 1, 8, 1024),
        ("causal", patterns.Causal(), 1, 4, 4096),
        ("window ±128", patterns.SlidingWindow(128), 1, 4, 8192),
        ("window ±64", patterns.SlidingWindow(64), 1, 16, 512),
        ("Longformer ±128 + 16", patterns.longformer(256, global_tokens=16), 1, 8, 4096),
        ("Longformer ±256 + 64", patterns.longformer(512, global_tokens=64), 1, 4, 2048),
        ("BigBird", patterns.BigBird(64, 3, 2, 2), 1, 8, 4096),
        ("BigBird", patterns.BigBird(64, 3, 2, 2), 1, 4, 1024),
        ("strided 64", patterns.strided(64), 1, 4, 4096),
        ("strided 32", patterns.strided(32), 1, 8, 1024),
        ("documents", documents, 1, 8, 2048),
        ("documents", few, 1, 4, 512),
        ("dilated ±64, d=4", patterns.DilatedWindow(64, 64, 4), 1, 16, 2048),
        ("neighbourhood 64×64, 13×13", patterns.Neighborhood((64, 64), 13), 1, 4, 4096),
        ("neighbourhood 32×32, 7×7", patterns.Neighborhood((32, 32), 7), 1, 16, 1024),
        ("full", patterns.Full(), 1, 16, 256),
    ]


def one_by_one(given: list[tuple]) -> list:
    """Outputs of separate calls."""
    import spattn

    return [spattn.attention(*problem) for problem in given]


def on_streams(given: list[tuple], streams: list) -> list:
    """Outputs of separate calls, each on its own stream, forked from and joined to the current one."""
    import torch

    import spattn

    current, outs = torch.cuda.current_stream(), []
    for problem, stream in zip(given, streams, strict=True):
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            outs.append(spattn.attention(*problem))
    for stream in streams:
        current.wait_stream(stream)
    return outs


def with_workers(given: list[tuple], workers: list[int]) -> list[tuple]:
    """The problems with plans for the given numbers of workers per head."""
    import spattn
    from spattn import cuda

    made = []
    for (q, k, v, pattern), each in zip(given, workers, strict=True):
        tile = cuda.tile("bfloat16", q.shape[3])
        plan = spattn.plan(
            pattern, q.shape[2], tiling=spattn.Tiling(tile=tile, workers=each), batch=q.shape[0], heads=q.shape[1]
        )
        made.append((q, k, v, plan))
    return made


def tune(given: list[tuple]) -> list[int]:
    """The fastest number of workers of each problem by itself."""
    best = []
    for problem in given:
        calls = {}
        for workers in WORKERS:
            (planned,) = with_workers([problem], [workers])
            calls[workers] = graph_of(lambda planned=planned: one_by_one([planned]))
        times = measure(calls, 5, 1.0)
        best.append(min(WORKERS, key=lambda workers: statistics.median(times[workers])))  # noqa: B023
    return best


def contenders(given: list[tuple]) -> tuple[dict[str, Callable[[], list]], list[int]]:
    """Calls that compute all problems, by name, and the tuned numbers of workers."""
    import torch

    import spattn
    from spattn import cuda
    from spattn.schedule.group import workers

    blocks, heads = 2 * cuda.sm_count(), [q.shape[0] * q.shape[1] for q, *_ in given]
    by_hand = [
        with_workers(given, [workers(blocks, n) for n in heads]),
        with_workers(given, [1] * len(given)),
        with_workers(given, [workers(blocks // len(given), n) for n in heads]),
    ]
    best = tune(given)
    tuned, streams = with_workers(given, best), [torch.cuda.Stream() for _ in given]
    calls = {
        GROUPED: lambda: spattn.grouped_attention(given),
        AGAIN: lambda: spattn.grouped_attention(given),
        ONE_BY_ONE: lambda: one_by_one(given),
        STREAMS: lambda: on_streams(given, streams),
        TUNED[0]: lambda: one_by_one(tuned),
        TUNED[1]: lambda: spattn.grouped_attention(tuned),
    }
    for name, planned in zip(BY_HAND, by_hand, strict=True):
        calls[name] = lambda planned=planned: spattn.grouped_attention(planned)
    return calls, best


def graph_of(call: Callable[[], object]) -> Callable[[], None]:
    """A function that replays a CUDA graph of the call."""
    import torch

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()

    def replay() -> None:
        graph.replay()

    replay.kept = kept  # keeps the graph's outputs alive
    return replay


def measure(calls: dict, rounds: int, target_ms: float) -> dict[object, list[float]]:
    """Milliseconds of a call, once per round and contender; one measurement takes about `target_ms`."""
    import torch

    def once(call: Callable[[], object], repeats: int) -> float:
        start, stop = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        for _ in range(repeats):
            call()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / repeats

    repeats = {name: max(2, math.ceil(target_ms / once(call, 3))) for name, call in calls.items()}
    times = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(once(call, repeats[name]))
    return times


def wall(calls: dict, rounds: int) -> dict[str, list[float]]:
    """Wall milliseconds per call, including the final synchronization."""
    import torch

    times = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(WALL_CALLS):
                call()
            torch.cuda.synchronize()
            times[name].append(1e3 * (time.perf_counter() - start) / WALL_CALLS)
    return times


def run(group: str, problems: list[tuple], head_dim: int, rounds: int) -> tuple[list[dict], dict]:
    """Rows of the results for one group and head dimension, and their summary."""
    import torch

    import spattn

    torch.manual_seed(0)
    given, pairs = [], 0
    for _, pattern, batch, heads, tokens in problems:
        shape = batch, heads, tokens, head_dim
        arrays = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        given.append((*arrays, pattern))
        plan = spattn.plan_for(pattern, *arrays, backend="cuda")
        pairs += batch * heads * plan.nnz // plan.variants
    calls, best = contenders(given)
    for name, call in calls.items():
        errors = [worst_error(p[3], *p[:3], out) for p, out in zip(given, call(), strict=True)]
        if not max(errors) < TOLERANCE:
            raise AssertionError(f"{name}: relative errors {errors} against float64")
    gpu = measure({name: graph_of(call) for name, call in calls.items()}, rounds, TARGET_MS)
    host = wall(calls, rounds)
    gpu_ms, wall_ms = ({name: statistics.median(values) for name, values in times.items()} for times in (gpu, host))
    rows = []
    for name in calls:
        row = {
            "group": group,
            "head_dim": head_dim,
            "contender": name,
            "gpu_ms": round(gpu_ms[name], 4),
            "gpu_times_grouped": round(gpu_ms[name] / gpu_ms[GROUPED], 3),
            "wall_ms": round(wall_ms[name], 4),
            "wall_times_grouped": round(wall_ms[name] / wall_ms[GROUPED], 3),
            "tflops": round(4e-9 * head_dim * pairs / gpu_ms[name], 1),
        }
        rows.append(row)
        print(row, flush=True)
    return rows, {
        "group": group,
        "head_dim": head_dim,
        "gpu_times_one_after_another": round(gpu_ms[ONE_BY_ONE] / gpu_ms[GROUPED], 3),
        "wall_times_one_after_another": round(wall_ms[ONE_BY_ONE] / wall_ms[GROUPED], 3),
        "gpu_times_best_by_hand": round(min(gpu_ms[name] for name in BY_HAND) / gpu_ms[GROUPED], 3),
        "gpu_times_once_more": round(gpu_ms[AGAIN] / gpu_ms[GROUPED], 3),
        "gpu_times_tuned_one_by_one": round(gpu_ms[TUNED[0]] / gpu_ms[GROUPED], 3),
        "tuned_workers": best,
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds, write nothing")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="timings per contender (default: %(default)s)")
    args = parser.parse_args()
    import torch

    rows, shows = [], []
    with torch.no_grad():
        for group, (head_dims, problems) in groups().items():
            for head_dim in head_dims:
                own, shown = run(group, problems, head_dim, 3 if args.quick else args.rounds)
                rows += own
                shows.append(shown)
    for shown in shows:
        print(shown)
    if args.quick:
        return
    record.write(
        "grouped_cuda",
        rows,
        notes=NOTES,
        gpu=torch.cuda.get_device_name(),
        problems=[
            {"group": group, "pattern": name, "batch": batch, "heads": heads, "tokens": tokens}
            for group, (_, problems) in groups().items()
            for name, _, batch, heads, tokens in problems
        ],
        shows=shows,
    )


if __name__ == "__main__":
    main()
