#!/usr/bin/env python3
"""Measure the speed-up of several CPU threads over one.

    python benchmarks/kernels/threads_cpu.py                # three minutes, two threads; needs threadpoolctl
    python benchmarks/kernels/threads_cpu.py --quick        # one round, writes nothing

4096 tokens, 8 heads and 1 head, head_dim 64, float32 and bfloat16, forward and backward; decoding is one query against
4096 and 102400 keys. One thread and several alternate in one process; figures are median wall times, so the machine
must be idle: results are discarded if other programs took more than a tenth of the processors. Before timing, results
are compared bit by bit. Writes ``threads_cpu``; exits with 1 if a target is missed or the machine was busy.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import numpy as np
import record
from threadpoolctl import ThreadpoolController

import spattn
from spattn import cpu
from spattn import patterns as sp
from spattn.testing import inputs, random

sys.path.append(str(record.ROOT / "examples"))
from sentence_encoder.others import Others  # noqa: E402

TOKENS, HEAD_DIM, SIDE = 4096, 64, 256
LEAST_SPEEDUP = 1.8  # target for two threads
BUSY = 0.1
SAMPLE_SECONDS = 0.02  # shorter calls are repeated
PATTERNS = {
    f"Longformer ±{SIDE} + 16": sp.longformer(2 * SIDE, global_tokens=16),
    f"Longformer ±{SIDE} + 64": sp.longformer(2 * SIDE, global_tokens=64),
    "BigBird, blocks of 64": sp.BigBird(64),
    f"window ±{SIDE}": sp.SlidingWindow(SIDE),
    "dense": sp.Full(),
}
PROBLEMS = [(name, pattern, TOKENS, TOKENS) for name, pattern in PATTERNS.items()]
PROBLEMS += [(f"decoding, {keys} keys", sp.Full(), 1, keys) for keys in (TOKENS, 25 * TOKENS)]


def calls(name, pattern, q_len, kv_len, heads, dtype) -> Iterator[tuple[dict, Callable]]:
    """(facts, call) of the forward and, except for decoding, of the backward."""
    q, k, v = inputs(1, heads, heads, q_len, kv_len, HEAD_DIM, dtype=dtype)
    plan = spattn.plan_for(pattern, q, k, v, backend="cpu")
    facts = {"problem": name, "heads": heads, "dtype": dtype, "threads_taken": cpu._threads_for(q, v, plan)}
    forward = partial(spattn.attention, q, k, v, pattern, return_lse=True, backend="cpu")
    yield facts | {"pass": "forward"}, forward
    if q_len > 1:
        dout = random(q.shape, dtype, seed=9)
        yield (
            facts | {"pass": "backward"},
            partial(spattn.attention_backward, dout, q, k, v, *forward(), pattern, backend="cpu"),
        )


def milliseconds(call, repeats: int) -> float:
    """Mean wall time of several calls, after an untimed one that wakes the threads."""
    call()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return 1e3 * (time.perf_counter() - start) / repeats


def medians(call, limits: dict[int, Callable], rounds: int) -> dict[int, float]:
    """Median milliseconds by number of threads, in turns; checks that results are bitwise equal."""
    results, slowest = [], 0.0
    for limit in limits.values():
        with limit():
            results.append(call())
            slowest = max(slowest, milliseconds(call, 1) / 1e3)
    for result in results[1:]:
        for x, y in zip(result, results[0], strict=True):
            assert np.array_equal(x, y), "the results depend on the number of threads"
    repeats, times = math.ceil(SAMPLE_SECONDS / slowest), {threads: [] for threads in limits}
    for turn in range(rounds):
        for threads in sorted(limits, reverse=bool(turn % 2)):
            with limits[threads]():
                times[threads].append(milliseconds(call, repeats))
    return {threads: statistics.median(each) for threads, each in times.items()}


def measure(threads: int, rounds: int) -> list[dict]:
    """One row per problem, number of heads, dtype and pass."""
    pool = ThreadpoolController()
    limits = {n: partial(pool.limit, limits=n, user_api="openmp") for n in (1, threads)}
    with limits[threads]():
        if cpu.num_threads() != threads:
            sys.exit(f"threads_cpu: {threads} threads need {threads} processors, got {cpu.num_threads()}")
    rows = []
    for problem in PROBLEMS:
        for heads, dtype in ((h, d) for h in (8, 1) for d in ("float32", "bfloat16")):
            with limits[threads]():
                cases = list(calls(*problem, heads, dtype))
            for facts, call in cases:
                median = medians(call, limits, rounds)
                one, several = median[1], median[threads]
                rows.append(
                    facts
                    | {
                        "one_thread_ms": round(one, 3),
                        "threads_ms": round(several, 3),
                        "times_faster": round(one / several, 2),
                        "met": verdict(facts, one / several),
                    }
                )
                print(
                    f"{facts['problem']:24} {facts['pass']:8} {dtype:8} {heads} heads {one:9.3f} ms "
                    f"{several:9.3f} ms {one / several:6.2f}×  {rows[-1]['met']}",
                    flush=True,
                )
    return rows


def verdict(facts: dict, speedup: float) -> str:
    """``yes`` or ``no``; a call that uses one thread has no target."""
    if facts["threads_taken"] == 1:
        return "uses one thread"
    return "yes" if speedup >= LEAST_SPEEDUP else "no"


def main() -> int:
    """Measure, print, write; return 1 if a target is missed or the machine was busy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="number of threads to compare with one (default: 2)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="one round, write nothing")
    args = parser.parse_args()
    if args.threads < 2:
        parser.error(f"--threads must be at least 2, got {args.threads}")
    others = Others()
    rows = measure(args.threads, 1 if args.quick else args.rounds)
    missed = sum(row["met"] == "no" for row in rows)
    print(f"{args.threads} threads: {missed} of {len(rows)} cases are below a speed-up of {LEAST_SPEEDUP}")
    if args.quick:
        return 0
    taken = others.share()
    if taken > BUSY:
        print(
            f"threads_cpu: other programs took {100 * taken:.0f} % of the CPU; results discarded",
            file=sys.stderr,
        )
        return 1
    record.write(
        "threads_cpu",
        rows,
        notes="Medians of wall time; one thread and several in turns in one process.",
        tokens=TOKENS,
        head_dim=HEAD_DIM,
        threads=args.threads,
        least_times_faster=LEAST_SPEEDUP,
        rounds=args.rounds,
        taken_by_other_programs=round(taken, 3),
        core={k: str(v) for k, v in cpu.info().items()},
    )
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
