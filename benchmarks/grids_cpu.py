#!/usr/bin/env python3
"""Attention on a 56 × 56 image by several builds of spattn in turns, on one CPU thread.

    python benchmarks/grids_cpu.py --build before=FOLDER --build now=FOLDER      # a minute for each build

A folder holds the package spattn; ``benchmarks/builds.py`` says how one is made of another commit. Processes of the
builds take turns; each times every problem after a warm call, by the processor time of the process. A build's figure is
the median over its processes. Writes ``benchmarks/results/grids_cpu.json``; exits with 1 when the last build is slower
than any other by more than ``--most``.
"""

from __future__ import annotations

import argparse
import json
from functools import partial

from child import builds_in_turns

SIDE = 56
NOTES = "float32, one thread, processor time; medians over processes of the builds that took turns."


def problems() -> dict[str, object]:
    """Patterns by name."""
    from spattn import patterns as sp

    grid = SIDE, SIDE
    return {
        "neighbourhood 7×7": sp.Neighborhood(grid, 7),
        "windows 7×7": sp.Windowed(grid, 7),
        "windows 7×7, shifted": sp.Windowed(grid, 7, 3),
    }


def times() -> dict[str, float]:
    """Milliseconds of each problem in this process."""
    import numpy as np
    from builds import cpu_time

    import spattn

    found = {}
    for heads, head_dim in ((8, 32), (8, 64), (16, 32)):
        q, k, v = np.random.default_rng(0).standard_normal((3, 1, heads, SIDE**2, head_dim), np.float32)
        for name, pattern in problems().items():
            spattn.attention(q, k, v, pattern)
            found[f"{name}, {heads} heads, head_dim {head_dim}"] = cpu_time(partial(spattn.attention, q, k, v, pattern))
    return found


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--most", type=float, default=1.1, help="the largest ratio that is taken for noise")
    parser.add_argument("--times", action="store_true", help="print this process's times, as JSON")
    args = parser.parse_args()
    if args.times:
        print(json.dumps(times()))
        return 0
    import record

    builds = dict(build.split("=", 1) for build in args.build)
    rows = builds_in_turns(builds, args.rounds)
    ratios = [ratio for row in rows for key, ratio in row.items() if key.endswith("_ratio")]
    record.write("grids_cpu", rows, notes=NOTES, rounds=args.rounds)
    return int(max((1 / ratio for ratio in ratios), default=0.0) > args.most)


if __name__ == "__main__":
    raise SystemExit(main())
