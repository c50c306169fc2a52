"""The running benchmark in a process of its own: with another build of the package, or with memory and caches of its
own."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["builds_in_turns", "builds_on_a_gpu", "child"]


def child(*arguments: str, package: Path | str | None = None, **settings: str) -> Any:
    """What this script prints last, as JSON, when it is called with `arguments`.

    Parameters
    ----------
    *arguments : str
        Of its command line.
    package : path, optional
        Folder from which it imports spattn.
    **settings
        Environment variables. OMP_NUM_THREADS and OPENBLAS_NUM_THREADS are 1 unless given.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"} | settings
    if package is not None:
        path = os.pathsep.join([str(Path(package).resolve()), environment.get("PYTHONPATH", "")])
        environment |= {"PYTHONPATH": path}
    command = [sys.executable, sys.argv[0], *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def builds_in_turns(builds: dict[str, str], rounds: int) -> list[dict[str, Any]]:
    """A row for each problem that this script times when it is called with ``--times``, with several builds of spattn.

    Parameters
    ----------
    builds : dict of str to str
        Folders by name. Their processes take turns, and a figure is the median over those of a build.
    rounds : int
        Processes of each build.
    """
    found: dict[str, list[dict[str, float]]] = {name: [] for name in builds}
    for turn in range(rounds):
        for name in sorted(builds, reverse=bool(turn % 2)):
            found[name].append(child("--times", package=builds[name]))
    rows, last = [], list(builds)[-1]
    for problem in found[last][0]:
        own = {name: statistics.median(each[problem] for each in found[name]) for name in builds}
        ratios = {f"{name}_ratio": round(own[name] / own[last], 3) for name in builds if name != last}
        rows.append({"problem": problem, **{f"{name}_ms": round(ms, 4) for name, ms in own.items()}, **ratios})
        print(rows[-1], flush=True)
    return rows


def builds_on_a_gpu(name: str, description: str, notes: str, times: Callable[[], dict[str, float]]) -> None:
    """The main program of a benchmark that compares builds on a GPU and writes its results under `name`.

    Parameters
    ----------
    name, description, notes : str
    times : callable
        Milliseconds of each problem in this process.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--build", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--times", action="store_true", help="print this process's times, as JSON")
    args = parser.parse_args()
    if args.times:
        print(json.dumps(times()))
        return
    import record
    import torch

    rows = builds_in_turns(dict(build.split("=", 1) for build in args.build), args.rounds)
    record.write(name, rows, notes=notes, rounds=args.rounds, gpu=torch.cuda.get_device_name())
