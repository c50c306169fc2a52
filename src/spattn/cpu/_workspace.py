"""Memory that calls work in, kept from one call to the next of equal needs: getting it anew from the operating system,
page by page, takes a tenth of the time of a call with many partial results, and more where memory is fragmented."""

from __future__ import annotations

import numpy as np

__all__ = ["free_workspaces", "give_back", "take"]

_MOST_KEPT = 64 << 20  # bytes
_LEAST_KEPT = 1 << 18  # of one workspace; smaller ones are cheap to get, and there are as many sizes as shapes
_LINE = 64  # of a cache, where workspaces start

_kept: dict[int, list[np.ndarray]] = {}  # by size; threads may call at the same time, so single operations only


def take(size: int) -> np.ndarray:
    """`size` bytes that hold anything. MemoryError when there is no room."""
    try:
        return _kept[size].pop()
    except (KeyError, IndexError):
        memory = np.empty(size + _LINE, np.uint8)
        return memory[-memory.ctypes.data % _LINE :][:size]


def give_back(memories: list[np.ndarray]) -> None:
    """Keeps them for later calls, and forgets other sizes, oldest first, while there is more than the limit."""
    for memory in memories:
        if _LEAST_KEPT <= len(memory) <= _MOST_KEPT:
            _kept.setdefault(len(memory), []).append(memory)
    for size in list(_kept):
        if sum(size * len(same) for size, same in _kept.copy().items()) <= _MOST_KEPT:
            break
        _kept.pop(size, None)


def free_workspaces() -> None:
    """Forget the memory that calls have worked in, at most 64 MiB, which is kept for calls to come.

    Examples
    --------
    >>> import spattn.cpu
    >>> spattn.cpu.free_workspaces()
    """
    _kept.clear()
