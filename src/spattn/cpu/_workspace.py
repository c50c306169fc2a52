"""Memory that calls work in, kept from one call to the next of equal needs: getting it anew from the operating system,
page by page, takes a tenth of the time of a call with many partial results, and more where memory is fragmented."""

from __future__ import annotations

import numpy as np

__all__ = ["free_workspaces", "give_back", "take"]

_MOST_KEPT = 64 << 20  # bytes
_LEAST_KEPT = 1 << 18  # of one workspace; smaller ones are cheap to get, and there are as many sizes as shapes

_kept: dict[int, list[np.ndarray]] = {}  # by size; threads may call at the same time, so single operations only


def take(size: int) -> np.ndarray:
    """`size` bytes that hold anything. MemoryError when there is no room."""
    same = _kept.get(size)
    try:
        return same.pop() if same else np.empty(size, np.uint8)
    except IndexError:  # another thread was faster
        return np.empty(size, np.uint8)


def give_back(memories: list[np.ndarray]) -> None:
    """Keeps them for later calls, and forgets other sizes, oldest first, while there is more than the limit."""
    for memory in memories:
        if _LEAST_KEPT <= len(memory) <= _MOST_KEPT:
            same = _kept.setdefault(len(memory), [])
            same.append(memory)
            if len(same) > 1 or len(_kept) > 1:  # else it is all that there is
                _forget()


def _forget() -> None:
    while sum([size * len(same) for size, same in _kept.copy().items()]) > _MOST_KEPT:
        _kept.pop(next(iter(_kept.copy()), 0), None)


def free_workspaces() -> None:
    """Forget the memory that calls have worked in, at most 64 MiB, which is kept for calls to come.

    Examples
    --------
    >>> import spattn.cpu
    >>> spattn.cpu.free_workspaces()
    """
    _kept.clear()
