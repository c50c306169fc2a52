"""Position arrays of whole tiles with a fast ``np.gcd``.

Euclid's algorithm per cell costs twenty times any other operation. Consecutive queries and keys within a tile have few
distances d, and gcd(q, k) = gcd(d, q mod d) comes from a small table; q advances by one along a table row, so a cell
costs one addition and one lookup.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

__all__ = ["Positions"]

_NEAR = 1024  # rows of the table: distances below this


class Positions(np.ndarray[Any, Any]):
    """Positions of one side of some tiles, (tiles, rows, 1) or (tiles, 1, columns); results are plain arrays."""

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        both = len(inputs) == 2 and all(isinstance(x, Positions) for x in inputs)
        plain = [x.view(np.ndarray) if isinstance(x, Positions) else x for x in inputs]
        if ufunc is np.gcd and method == "__call__" and both and not kwargs:
            return _gcd(*plain)
        return getattr(ufunc, method)(*plain, **kwargs)


def _gcd(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Compute ``np.gcd(q, k)`` on tiles."""
    if k.shape[2] == 1:
        return _gcd(k, q) if q.shape[1] == 1 else np.gcd(q, k)
    apart = np.maximum(abs(q[:, 0, 0] - k[:, 0, -1]), abs(q[:, -1, 0] - k[:, 0, 0]))
    near = (apart < _NEAR) & (np.diff(q[:, :, 0]) == 1).all(axis=1) & (np.diff(k[:, 0]) == 1).all(axis=1)
    if near.all():
        return _gcd_of_near(q, k)
    found = np.empty((len(q), q.shape[1], k.shape[2]), np.int64)
    found[near], found[~near] = _gcd_of_near(q[near], k[near]), np.gcd(q[~near], k[~near])
    return found


def _gcd_of_near(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Compute the gcd of consecutive positions at distances below `_NEAR`."""
    rows, columns = q.shape[1], k.shape[2]
    table = _gcds(_NEAR, _NEAR + rows)
    distance = abs(q[:, :1, 0] - k[:, 0, :1] + np.arange(1 - columns, rows))  # per diagonal of each tile
    place = distance * table.shape[1] + q[:, :1, 0] % np.maximum(distance, 1)
    of_cells = np.lib.stride_tricks.sliding_window_view(place, columns, axis=1)[:, :, ::-1]
    found = table.take(of_cells + np.arange(rows)[:, None]).astype(np.int64)
    meet = np.nonzero((distance == 0).any(axis=1))[0]
    found[meet] = np.where(q[meet] == k[meet], abs(q[meet]), found[meet])
    return found


@functools.lru_cache(maxsize=4)
def _gcds(rows: int, columns: int) -> np.ndarray:
    """Tabulate the gcd of row and column except at (0, 0): the last common divisor written remains."""
    table = np.zeros((rows, columns), np.uint16)
    for divisor in range(1, columns):
        table[::divisor, ::divisor] = divisor
    return table
