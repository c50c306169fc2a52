"""What the operating system grants this process: processors and memory."""

from __future__ import annotations

import functools
import math
import os
import resource
from collections.abc import Callable
from pathlib import Path

__all__ = ["memory", "processors"]

_CGROUPS = Path("/sys/fs/cgroup")


def processors() -> int:
    """Processors of the affinity mask, and no more than the cgroup's quota of them, rounded up."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(own, _quota()))


def memory() -> int:
    """Bytes: of the machine or of the cgroup, and no more than the limit of the address space still has room for."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return _installed()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    return min(_installed(), max(0, limit - used))


@functools.cache
def _quota() -> float:
    """Processors that the cgroup grants this process, rounded up; inf without a limit."""
    return _least("cpu", _processors_v2, _processors_v1)


@functools.cache
def _installed() -> int:
    """Bytes of the machine's memory, or of the cgroup's share of it."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(min(installed, _least("memory", _memory_v2, _memory_v1)))


def _least(controller: str, *limits: Callable[[Path], float]) -> float:
    """The least of a controller's limits, in either version of cgroups."""
    return min(limit(folder) for folder in _folders(controller) for limit in limits)


def _folders(controller: str) -> set[Path]:
    """The process's own folders of a controller and all above them, as far as they are visible here."""
    own = Path("/proc/self/cgroup")
    folders = {_CGROUPS, _CGROUPS / controller}
    for line in own.read_text().splitlines() if own.exists() else []:
        _, controllers, path = line.split(":", 2)
        root = _CGROUPS / controller if controller in controllers.split(",") else _CGROUPS
        if not controllers or root != _CGROUPS:
            leaf = root / path.lstrip("/")
            folders.update((leaf, *(p for p in leaf.parents if root in p.parents)))
    return folders


def _words(file: Path) -> list[str]:
    return file.read_text().split() if file.is_file() else []


def _processors_v2(folder: Path) -> float:
    quota, period = _words(folder / "cpu.max") or ("max", "1")
    return math.inf if quota == "max" else math.ceil(int(quota) / int(period))


def _processors_v1(folder: Path) -> float:
    quota, period = (_words(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    return math.ceil(int(quota[0]) / int(period[0])) if quota and period and int(quota[0]) > 0 else math.inf


def _memory_v2(folder: Path) -> float:
    most = _words(folder / "memory.max") or ["max"]
    return math.inf if most == ["max"] else int(most[0])


def _memory_v1(folder: Path) -> float:
    most = _words(folder / "memory.limit_in_bytes")
    return int(most[0]) if most else math.inf
