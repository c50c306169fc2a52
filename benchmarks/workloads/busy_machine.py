#!/usr/bin/env python3
"""Time a decode step while other processes occupy the cores.

    python benchmarks/workloads/busy_machine.py [--others 8] [--cores 2] [--build NAME=FOLDER ...] [--rounds 3]

One query of 32 heads over the keys of 8 heads, head_dim 128, float32. The installed build and those in FOLDERs
alternate. For each, the step runs alone on `cores` cores, with the default number of threads and with one; then while
`others` processes compute on the same cores. With a fair share of the cores a step takes ``(others + 1) / cores`` times
as long as on one thread alone. Targets: median within 3 times the quiet median, mean within 1.5 times that share.
Writes ``busy_machine``. Needs threadpoolctl.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import record

MOST_MEDIAN, MOST_MEAN = 3.0, 1.5
STEP = """
import json, sys, time
sys.path[:0] = sys.argv[3:]
import numpy as np, spattn
from threadpoolctl import threadpool_limits
tokens, seconds = int(sys.argv[1]), float(sys.argv[2])
rng = np.random.default_rng(14)
q, k, v = (rng.standard_normal(s).astype("f4") for s in ((1, 32, 1, 128), (1, 8, tokens, 128), (1, 8, tokens, 128)))
pattern = spattn.patterns.Sinks(4) | spattn.patterns.SlidingWindow(8191, 0)

def times(seconds):
    found, end = [], time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        spattn.attention(q, k, v, pattern)
        found.append(1e3 * (time.perf_counter() - start))
    return found

times(0.5)
found = times(seconds)
with threadpool_limits(1, user_api="openmp"):
    one = times(min(seconds, 1))
print(json.dumps([found, one]))
"""
OTHER = "while True: pass"


def steps(tokens: int, seconds: float, folder: str | None) -> tuple[list[float], list[float]]:
    """Milliseconds of steps with the default number of threads, and on one thread."""
    command = [sys.executable, "-c", STEP, str(tokens), str(seconds), *([folder] if folder else [])]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--others", type=int, default=8)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--build", action="append", default=[], metavar="NAME=FOLDER")
    args = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
    builds: dict[str, str | None] = {"installed": None, **dict(build.split("=", 1) for build in args.build)}
    share = (args.others + 1) / args.cores
    rows = []
    for tokens in (1024, 2048, 8192):
        quiet = {name: ([], []) for name in builds}
        busy = {name: [] for name in builds}
        for _ in range(args.rounds):
            for name, folder in builds.items():
                for all_times, times in zip(quiet[name], steps(tokens, args.seconds / 3, folder), strict=True):
                    all_times += times
        others = [subprocess.Popen([sys.executable, "-c", OTHER]) for _ in range(args.others)]
        try:
            time.sleep(1)
            for _ in range(args.rounds):
                for name, folder in builds.items():
                    busy[name] += steps(tokens, args.seconds, folder)[0]
        finally:
            for other in others:
                other.kill()
                other.wait()
        for name in builds:
            alone, one = (statistics.median(times) for times in quiet[name])
            median, mean = statistics.median(busy[name]), statistics.mean(busy[name])
            row = {
                "tokens": tokens,
                "build": name,
                "quiet_ms": round(alone, 3),
                "quiet_one_thread_ms": round(one, 3),
                "busy_median_ms": round(median, 3),
                "busy_mean_ms": round(mean, 3),
                "busy_most_ms": round(max(busy[name]), 1),
                "median_over_quiet": round(median / alone, 2),
                "mean_over_share": round(mean / (share * one), 2),
                "holds": median <= MOST_MEDIAN * alone and mean <= MOST_MEAN * share * one,
            }
            rows.append(row)
            print(row, flush=True)
    record.write(
        "busy_machine",
        rows,
        notes=f"{args.others} other processes on {args.cores} cores; wall times of steps, builds in turns.",
        others=args.others,
        cores=args.cores,
    )


if __name__ == "__main__":
    main()
