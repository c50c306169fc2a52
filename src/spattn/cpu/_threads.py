"""Thread count of a call: the caller's or OpenMP's setting, limited by the processors of this process."""

from __future__ import annotations

import contextvars
import os

from .._util import limits as _limits
from ..patterns.base.check import integer
from . import _core

__all__ = ["IMPORTED_BY", "num_threads", "requested", "set_num_threads", "team_size", "threads"]

IMPORTED_BY = os.getpid()
_OPENMP_AT_IMPORT = _core.openmp_threads()
_ALWAYS_ALLOWED = 64  # a caller may request this many threads on any machine

_of_process: int | None = None
_of_context: contextvars.ContextVar[int | None] = contextvars.ContextVar("spattn.threads", default=None)


def num_threads() -> int:
    """Return the maximum number of threads of a call made now.

    The innermost :func:`threads` block sets the number, else :func:`set_num_threads`, else ``OMP_NUM_THREADS``, else
    the number of processors that the affinity mask and the cgroup quota allow. Limits of threadpoolctl always apply.
    Because each thread allocates a workspace, the number is capped at four times the processors or 64, whichever is
    larger.

    A call uses fewer threads while other processes occupy the cores: see the page on threads. It uses one thread in a
    build without OpenMP, inside another parallel region, and in a forked child of the process that imported spattn:
    OpenMP threads do not survive a fork, and waiting for them would hang.

    Returns
    -------
    int

    Examples
    --------
    >>> import spattn.cpu
    >>> spattn.cpu.num_threads() >= 1
    True
    """
    if os.getpid() != IMPORTED_BY:
        return 1
    openmp = _core.openmp_threads()
    asked = _of_context.get() or _of_process
    if asked is None and b"OMP_NUM_THREADS" not in _limits.environment:
        return min(openmp, _limits.processors())
    if asked is None:
        asked = openmp
    elif not _core.OPENMP or _core.in_parallel() or openmp < _OPENMP_AT_IMPORT:  # lower only if threadpoolctl set it
        asked = min(asked, openmp)
    return asked if asked <= _ALWAYS_ALLOWED else min(asked, max(_ALWAYS_ALLOWED, 4 * _limits.processors()))


def requested() -> str | None:
    """Return the call that set the thread count, or None for the default."""
    return "spattn.threads" if _of_context.get() else "spattn.set_num_threads" if _of_process else None


def team_size(useful: int) -> int:
    """Return the thread count of a call with enough work for `useful` threads; fewer while cores are occupied."""
    return _core.team_size(min(useful, num_threads())) if useful > 1 else 1


def set_num_threads(n: int | None) -> None:
    """Set the maximum number of CPU threads of each call in this process.

    Parameters
    ----------
    n : int or None
        At least 1; None restores the default: see :func:`spattn.cpu.num_threads`.

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

    The limit applies to this Python thread or asyncio task and overrides :func:`set_num_threads`. Leaving the block
    restores the previous number. As with ``decimal.localcontext``, a generator suspended within the block limits its
    caller.

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
