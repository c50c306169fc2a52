"""Limits of the process: processors, memory, environment variables."""

from __future__ import annotations

import functools
import math
import os
import resource
from collections.abc import Callable

__all__ = ["environment", "memory", "processors"]

_CGROUPS = "/sys/fs/cgroup"


# The dict behind os.environ: a lookup in os.environ spends 2 µs on encoding the name.
environment: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]


def processors() -> int:
    """Return the number of processors in the affinity mask, at most the cgroup's quota (rounded up)."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return int(max(1, min(own, _quota())))


def memory() -> int:
    """Return the memory of the machine or cgroup in bytes, at most the unused part of RLIMIT_AS."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return _installed()
    used = int(_read("/proc/self/statm").split()[0]) * os.sysconf("SC_PAGE_SIZE")
    return min(_installed(), max(0, limit - used))


@functools.cache
def _quota() -> float:
    """Return the cgroup's CPU quota, rounded up; inf without a limit."""
    return _least("cpu", _processors_v2, _processors_v1)


@functools.cache
def _installed() -> int:
    """Return the physical memory in bytes, at most the cgroup's limit."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(min(installed, _least("memory", _memory_v2, _memory_v1)))


def _least(controller: str, *limits: Callable[[str], float]) -> float:
    """Return the smallest limit of a controller, in cgroups v1 and v2."""
    return min(limit(folder) for folder in _folders(controller) for limit in limits)


def _folders(controller: str) -> set[str]:
    """Return the visible folders of the process's cgroup and of its ancestors."""
    folders = {_CGROUPS, f"{_CGROUPS}/{controller}"}
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        root = f"{_CGROUPS}/{controller}" if controller in controllers.split(",") else _CGROUPS
        if not controllers or root != _CGROUPS:
            names = path.strip("/").split("/")
            folders.update("/".join([root, *names[:depth]]) for depth in range(1, len(names) + 1))
    return folders


def _read(file: str) -> str:
    """Return the contents of a file, or '' if it does not exist."""
    if not os.path.isfile(file):
        return ""
    with open(file) as opened:
        return opened.read()


def _processors_v2(folder: str) -> float:
    quota, period = _read(f"{folder}/cpu.max").split() or ("max", "1")
    return math.inf if quota == "max" else math.ceil(int(quota) / int(period))


def _processors_v1(folder: str) -> float:
    quota, period = (_read(f"{folder}/cpu.cfs_{name}_us") for name in ("quota", "period"))
    return math.ceil(int(quota) / int(period)) if quota and period and int(quota) > 0 else math.inf


def _memory_v2(folder: str) -> float:
    most = _read(f"{folder}/memory.max").strip() or "max"
    return math.inf if most == "max" else int(most)


def _memory_v1(folder: str) -> float:
    most = _read(f"{folder}/memory.limit_in_bytes")
    return int(most) if most else math.inf
