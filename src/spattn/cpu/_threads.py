"""How many threads a call may use: the caller's setting or OpenMP's, bounded by the processors of this process."""

from __future__ import annotations

import contextvars
import os

from .._util import limits as _limits
from ..patterns.base.check import integer
from . import _core

__all__ = ["num_threads", "set_num_threads", "team_size", "threads"]

_IMPORTED_BY = os.getpid()
_OPENMP_AT_IMPORT = _core.openmp_threads()
_ALWAYS_ALLOWED = 64  # threads that a caller may ask for on any machine

_of_process: int | None = None
_of_context: contextvars.ContextVar[int | None] = contextvars.ContextVar("spattn.threads", default=None)


def num_threads() -> int:
    """Return the number of threads that a call made now uses at most.

    The innermost :func:`threads` block decides, else :func:`set_num_threads`, else OpenMP (``OMP_NUM_THREADS``); a
    limit of threadpoolctl holds in any case. Without any of them it is the number of processors in the affinity mask
    and in the cgroup's quota. A number that the caller or ``OMP_NUM_THREADS`` asks for is limited to four times the
    processors, or 64 where that is more, because each thread has a workspace.

    A call uses fewer while other processes occupy the cores: see the page on threads. The number is 1 in a build
    without OpenMP, inside another parallel region, and in a forked child of the process that imported spattn: OpenMP's
    threads do not survive a fork, and waiting for them would never end.

    Returns
    -------
    int

    Examples
    --------
    >>> import spattn.cpu
    >>> spattn.cpu.num_threads() >= 1
    True
    """
    if os.getpid() != _IMPORTED_BY:
        return 1
    openmp = _core.openmp_threads()
    asked = _of_context.get() or _of_process
    if asked is None and b"OMP_NUM_THREADS" not in _limits.environment:
        return min(openmp, _limits.processors())
    if asked is None:
        asked = openmp
    elif not _core.OPENMP or _core.in_parallel() or openmp < _OPENMP_AT_IMPORT:  # the last by threadpoolctl
        asked = min(asked, openmp)
    return asked if asked <= _ALWAYS_ALLOWED else min(asked, max(_ALWAYS_ALLOWED, 4 * _limits.processors()))


def team_size(useful: int) -> int:
    """Return the number of threads for a call that has work for `useful` threads: fewer where cores are occupied."""
    return _core.team_size(min(useful, num_threads())) if useful > 1 else 1


def set_num_threads(n: int | None) -> None:
    """Set the number of CPU threads that each call of this process uses at most.

    Parameters
    ----------
    n : int or None
        At least 1; None restores the default, which OpenMP and the processors of this process decide.

    Raises
    ------
    TypeError
        If `n` is not an integer.
    ValueError
        If `n` is less than 1.

    See Also
    --------
    spattn.threads : The same for a block of code.
    spattn.cpu.num_threads : The number in effect.

    Examples
    --------
    >>> import spattn
    >>> spattn.set_num_threads(1)
    >>> spattn.cpu.num_threads()
    1
    >>> spattn.set_num_threads(None)
    """
    global _of_process
    _of_process = None if n is None else integer("n", n, 1)


class threads:  # noqa: N801 - used as a function, like numpy.errstate
    """Limit the CPU threads of each call within a ``with`` block.

    The limit holds for the calls of this Python thread, or of this task of asyncio, and overrides
    :func:`set_num_threads`. As with ``decimal.localcontext``, the end of the block restores the number that was there
    at its start, so a generator that is suspended within the block limits its caller.

    Parameters
    ----------
    n : int
        At least 1.

    Raises
    ------
    TypeError
        If `n` is not an integer.
    ValueError
        If `n` is less than 1.

    Examples
    --------
    >>> import spattn
    >>> with spattn.threads(1):
    ...     spattn.cpu.num_threads()
    1
    """

    def __init__(self, n: int) -> None:
        self._n = integer("n", n, 1)
        self._before: list[int | None] = []

    def __enter__(self) -> None:
        self._before.append(_of_context.get())
        _of_context.set(self._n)

    def __exit__(self, *error: object) -> None:
        _of_context.set(self._before.pop())
