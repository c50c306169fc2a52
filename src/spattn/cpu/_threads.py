"""How many threads a call may use: OpenMP's own setting, bounded by the processors that this process may have."""

from __future__ import annotations

import os

from .. import _limits
from . import _core

_IMPORTED_BY = os.getpid()
_ALWAYS_ALLOWED = 64  # threads that OMP_NUM_THREADS may ask for on any machine


def num_threads() -> int:
    """Threads that a call made now would use at most.

    ``OMP_NUM_THREADS`` and threadpoolctl decide; without the former, never more than the processors of the affinity
    mask and of the cgroup's quota. With it, at most four times as many, or 64 where that is more: every thread has a
    workspace of its own, whether there is a processor for it or not. 1 in a build without OpenMP, inside another
    parallel region, and in a forked child of the process that imported spattn: OpenMP's threads do not survive a fork,
    and waiting for them would never end.

    Examples
    --------
    >>> import spattn.cpu
    >>> spattn.cpu.num_threads() >= 1
    True
    """
    if os.getpid() != _IMPORTED_BY:
        return 1
    threads = _core.openmp_threads()
    if b"OMP_NUM_THREADS" not in _limits.environment:
        return min(threads, _limits.processors())
    return threads if threads <= _ALWAYS_ALLOWED else min(threads, max(_ALWAYS_ALLOWED, 4 * _limits.processors()))
