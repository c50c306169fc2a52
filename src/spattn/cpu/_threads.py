"""How many threads a call may use: OpenMP's own setting, bounded by the processors that this process may have."""

from __future__ import annotations

import functools
import math
import os
from pathlib import Path

from . import _core

_IMPORTED_BY = os.getpid()
_CGROUPS = Path("/sys/fs/cgroup")


def num_threads() -> int:
    """Threads that a call made now would use at most.

    ``OMP_NUM_THREADS`` and threadpoolctl decide; without the former, never more than the processors of the affinity
    mask and of the cgroup's quota. 1 in a build without OpenMP, inside another parallel region, and in a forked child
    of the process that imported spattn: OpenMP's threads do not survive a fork, and waiting for them would never end.

    Examples
    --------
    >>> import spattn.cpu
    >>> spattn.cpu.num_threads() >= 1
    True
    """
    if os.getpid() != _IMPORTED_BY:
        return 1
    threads = _core.openmp_threads()
    if "OMP_NUM_THREADS" in os.environ:
        return threads
    return max(1, min(threads, _affinity(), _quota()))


def _affinity() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def _quota() -> float:
    """Processors that the cgroup grants this process, rounded up; inf without a limit."""
    smallest = math.inf
    for folder in _cgroup_folders():
        for quota, period in (_read_v2(folder), _read_v1(folder)):
            if quota > 0 and period > 0:
                smallest = min(smallest, math.ceil(quota / period))
    return smallest


def _cgroup_folders() -> set[Path]:
    """The process's own cgroup folders and all above them, as far as they are visible here."""
    own = Path("/proc/self/cgroup")
    folders = {_CGROUPS, _CGROUPS / "cpu"}
    for line in own.read_text().splitlines() if own.exists() else []:
        _, controllers, path = line.split(":", 2)
        root = _CGROUPS / "cpu" if "cpu" in controllers.split(",") else _CGROUPS
        if not controllers or root != _CGROUPS:
            leaf = root / path.lstrip("/")
            folders.update((leaf, *(p for p in leaf.parents if root in p.parents)))
    return folders


def _read_v2(folder: Path) -> tuple[int, int]:
    file = folder / "cpu.max"
    quota, period = file.read_text().split() if file.is_file() else ("max", "0")
    return (0 if quota == "max" else int(quota)), int(period)


def _read_v1(folder: Path) -> tuple[int, int]:
    files = folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us"
    quota, period = (int(file.read_text()) if file.is_file() else 0 for file in files)
    return quota, period
