#!/usr/bin/env python3
"""Compare builds on 2D neighbourhood and window attention on one CPU thread.

    python benchmarks/regressions/grids_cpu.py --build before=FOLDER --build now=FOLDER     # a minute per build

A folder holds the package spattn; ``tools/package_of.sh`` makes one from a commit. Images of 56 × 56 tokens and smaller
ones. Single calls of the builds alternate in one process, because the speed of a shared machine changes within seconds;
there are several processes. A figure is the median CPU time of a build's calls; a ratio is the median of the ratios of
neighbouring calls. Writes ``grids_cpu``; exits with 1 if the last build is slower than another by more than ``--most``.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

from child import child
from turns import Build, calls_in_turns

SIDE = 56
NOTES = "float32, one thread, CPU time; medians over calls of the builds in turns, and over their ratios."
REPEATS = 20  # per process


def problems() -> dict[str, object]:
    """Patterns by name."""
    from spattn import patterns as sp

    grid = SIDE, SIDE
    return {
        "neighbourhood 7×7": sp.Neighborhood(grid, 7),
        "windows 7×7": sp.windowed(grid, 7),
        "windows 7×7, shifted": sp.windowed(grid, 7, 3),
    }


def cases() -> Iterator[tuple[str, object, int, int, int]]:
    """(problem, pattern, image side, heads, head_dim)"""
    from spattn import patterns as sp

    for heads, head_dim in ((8, 32), (8, 64), (16, 32), (4, 128)):
        for name, pattern in problems().items():
            yield f"{name}, {heads} heads, head_dim {head_dim}", pattern, SIDE, heads, head_dim
    for side, kernel, heads in ((SIDE, 3, 8), (24, 7, 40), (16, 7, 96)):
        for head_dim in (32, 64):
            name = f"neighbourhood {kernel}×{kernel} of {side}×{side}, {heads} heads, head_dim {head_dim}"
            yield name, sp.Neighborhood((side, side), kernel), side, heads, head_dim


def times(folders: dict[str, str]) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of each call in this process, by problem and build."""
    import numpy as np

    @functools.cache
    def arrays(*shape: int) -> np.ndarray:
        return np.random.default_rng(0).standard_normal(shape, np.float32)

    builds, calls = {name: Build(folder) for name, folder in folders.items()}, {}
    for name, build in builds.items():
        with build:
            import spattn

            for problem, pattern, side, heads, head_dim in cases():
                own = partial(spattn.attention, *arrays(3, 1, heads, side**2, head_dim), pattern)
                calls.setdefault(problem, {})[name] = own
    return {problem: calls_in_turns(builds, own, REPEATS) for problem, own in calls.items()}


def row(problem: str, taken: dict[str, list[float]]) -> dict[str, Any]:
    """Row of the results: time of each build, and its ratio to the last build."""
    last = list(taken)[-1]
    ratios = {
        f"{name}_ratio": round(statistics.median(a / b for a, b in zip(own, taken[last], strict=True)), 3)
        for name, own in taken.items()
        if name != last
    }
    medians = {f"{name}_ms": round(statistics.median(own), 4) for name, own in taken.items()}
    return {"problem": problem, **medians, **ratios}


def main() -> int:
    """Measure, print, write; return 1 if the last build is slower."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--rounds", type=int, default=5, help="number of processes")
    parser.add_argument("--most", type=float, default=1.1, help="largest ratio that counts as noise (default: 1.1)")
    parser.add_argument("--times", action="store_true", help="print this process's times as JSON")
    args = parser.parse_args()
    builds = dict(build.split("=", 1) for build in args.build)
    if args.times:
        print(json.dumps(times(builds)))
        return 0
    import record

    named = [f"--build={build}" for build in args.build]
    processes = [child("--times", *named) for _ in range(args.rounds)]
    rows = []
    for problem in processes[0]:
        rows.append(row(problem, {name: sum((each[problem][name] for each in processes), []) for name in builds}))
        print(rows[-1], flush=True)
    ratios = [ratio for row in rows for key, ratio in row.items() if key.endswith("_ratio")]
    record.write("grids_cpu", rows, notes=NOTES, rounds=args.rounds)
    return int(max((1 / ratio for ratio in ratios), default=0.0) > args.most)


if __name__ == "__main__":
    raise SystemExit(main())
