"""Compare builds of spattn: their processes, or single calls, alternate."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from child import child

__all__ = ["Build", "calls_in_turns", "compare_builds", "rounds"]


def rounds(builds: dict[str, Path | str], count: int, *arguments: str) -> Iterator[dict[str, dict[str, float]]]:
    """One process of each build per round: the times that each prints, by build.

    Parameters
    ----------
    builds : dict of str to path
        Folders that hold the package, by name. Every other round runs them in this order, the rest in reverse.
    count : int
        Number of rounds.
    *arguments : str
        Command line that makes the current script print its times as JSON, ``{problem: milliseconds}``.
    """
    for turn in range(count):
        order = list(builds) if turn % 2 else reversed(builds)
        yield {name: child(*arguments, package=builds[name]) for name in order}


def compare_builds(
    name: str, description: str, notes: str, times: Callable[[], dict[str, float]], gpu: bool = False
) -> None:
    """Main program of a benchmark that compares builds and writes its results under `name`.

    Parameters
    ----------
    name, description, notes : str
    times : callable
        Measures in this process: milliseconds of each problem.
    gpu : bool, optional
        Whether the results are from a GPU.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", action="append", default=[], metavar="NAME=FOLDER", help="a folder with spattn")
    parser.add_argument("--rounds", type=int, default=5, help="processes per build")
    parser.add_argument("--times", action="store_true", help="print this process's times as JSON")
    args = parser.parse_args()
    if args.times:
        print(json.dumps(times()))
        return
    import record

    builds: dict[str, Path | str] = dict(build.split("=", 1) for build in args.build)
    if not builds:
        parser.error("expected at least one --build NAME=FOLDER")
    measured, last, rows = list(rounds(builds, args.rounds, "--times")), list(builds)[-1], []
    for problem in measured[0][last]:
        own = {build: statistics.median(each[build][problem] for each in measured) for build in builds}
        ratios = {f"{build}_ratio": round(own[build] / own[last], 3) for build in builds if build != last}
        rows.append({"problem": problem, **{f"{build}_ms": round(ms, 4) for build, ms in own.items()}, **ratios})
        print(rows[-1], flush=True)
    device = None
    if gpu:
        import torch

        device = torch.cuda.get_device_name()
    record.write(name, rows, notes=notes, rounds=args.rounds, gpu=device)


class Build:
    """A build of spattn, imported beside others in one process.

    ``import spattn`` inside ``with build:`` gets this build.

    Parameters
    ----------
    folder : path
        Holds the package.
    """

    def __init__(self, folder: Path | str):
        self._modules: dict[str, ModuleType] = {}
        with self:
            sys.path.insert(0, str(Path(folder).resolve()))
            try:
                import spattn
            finally:
                del sys.path[0]
            if not Path(spattn.__file__).is_relative_to(Path(folder).resolve()):
                raise ImportError(f"{folder}: expected a folder that holds the package spattn")

    def __enter__(self) -> Build:
        self._others = _pop_modules()
        sys.modules.update(self._modules)
        return self

    def __exit__(self, *raised: object) -> None:
        self._modules = _pop_modules()  # includes modules imported since __enter__
        sys.modules.update(self._others)


def _pop_modules() -> dict[str, ModuleType]:
    """Remove spattn's modules from ``sys.modules`` and return them."""
    names = [name for name in sys.modules if name.partition(".")[0] == "spattn"]
    return {name: sys.modules.pop(name) for name in names}


def calls_in_turns(
    builds: dict[str, Build], calls: dict[str, Callable[[], object]], repeats: int
) -> dict[str, list[float]]:
    """Milliseconds of CPU time of alternating single calls, each after an untimed one, by build."""
    taken: dict[str, list[float]] = {name: [] for name in builds}
    for turn in range(repeats):
        for name in sorted(builds, reverse=bool(turn % 2)):
            with builds[name]:
                calls[name]()
                start = time.process_time()
                calls[name]()
                taken[name].append(1e3 * (time.process_time() - start))
    return taken
