"""Several builds of spattn in one process, so that single calls of them can take turns: the speed of a machine that is
shared may change from one second to the next."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

__all__ = ["Build", "in_turns"]


class Build:
    """A build of spattn. Within ``with build:`` it is the one that is imported.

    Parameters
    ----------
    folder : path
        That holds the package.
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
        self._others = _taken_out()
        sys.modules.update(self._modules)
        return self

    def __exit__(self, *raised: object) -> None:
        self._modules = _taken_out()  # with those that were imported meanwhile
        sys.modules.update(self._others)


def _taken_out() -> dict[str, ModuleType]:
    """The modules of spattn that are imported, which are not any more."""
    names = [name for name in sys.modules if name.partition(".")[0] == "spattn"]
    return {name: sys.modules.pop(name) for name in names}


def in_turns(builds: dict[str, Build], calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of processor time of each call of each build, after one that is not timed."""
    taken: dict[str, list[float]] = {name: [] for name in builds}
    for turn in range(repeats):
        for name in sorted(builds, reverse=bool(turn % 2)):
            with builds[name]:
                calls[name]()
                start = time.process_time()
                calls[name]()
                taken[name].append(1e3 * (time.process_time() - start))
    return taken
