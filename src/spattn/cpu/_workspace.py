"""Workspace cache for calls of equal size.

Without it, page faults take 10 % of a call with many split-KV partials, and more when memory is fragmented.
"""

from __future__ import annotations

import numpy as np

__all__ = ["free_workspaces", "give_back", "take"]

_MOST_KEPT = 64 << 20  # bytes
_LEAST_KEPT = 1 << 18  # bytes; smaller buffers are cheap to allocate and come in too many sizes

_kept: dict[int, list[np.ndarray]] = {}  # by size; has no lock, so each access must be one atomic operation


def take(size: int) -> np.ndarray:
    """Return `size` uninitialized bytes; raise MemoryError if the allocation fails."""
    same = _kept.get(size)
    try:
        return same.pop() if same else np.empty(size, np.uint8)
    except IndexError:  # another thread took it
        return np.empty(size, np.uint8)


def give_back(memories: list[np.ndarray]) -> None:
    """Cache buffers for later calls; above the limit, evict whole sizes, oldest first."""
    for memory in memories:
        if _LEAST_KEPT <= len(memory) <= _MOST_KEPT:
            same = _kept.setdefault(len(memory), [])
            same.append(memory)
            if len(same) > 1 or len(_kept) > 1:  # a single buffer is below the limit
                _forget()


def _forget() -> None:
    while sum([size * len(same) for size, same in _kept.copy().items()]) > _MOST_KEPT:
        _kept.pop(next(iter(_kept.copy()), 0), None)


def free_workspaces() -> None:
    """Free the cached workspaces, at most 64 MiB.

    Examples
    --------
    >>> import spattn.cpu
    >>> spattn.cpu.free_workspaces()
    """
    _kept.clear()
