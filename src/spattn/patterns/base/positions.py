"""Positions of whole tiles, as predicates are given them: an array of NumPy's whose ``gcd`` is looked up.

Euclid's algorithm in every cell costs twenty times what other operations cost. Consecutive queries and keys that are
near each other have few distances d, and gcd(q, k) = gcd(d, q mod d) is in a small table; along a row of the table q
goes on by one, so that a cell costs a sum and a look-up.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

__all__ = ["Positions"]

_NEAR = 1024  # distances that the table has


class Positions(np.ndarray[Any, Any]):
    """Positions on one side of some tiles, (tiles, rows, 1) or (tiles, 1, columns); all results are plain arrays."""

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        both = len(inputs) == 2 and all(isinstance(x, Positions) for x in inputs)
        plain = [x.view(np.ndarray) if isinstance(x, Positions) else x for x in inputs]
        if ufunc is np.gcd and method == "__call__" and both and not kwargs:
            return _gcd(*plain)
        return getattr(ufunc, method)(*plain, **kwargs)


def _gcd(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """``np.gcd(q, k)`` of tiles."""
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
    """The same of consecutive positions at distances below `_NEAR`."""
    rows, columns = q.shape[1], k.shape[2]
    table = _gcds(_NEAR, _NEAR + rows)
    distance = abs(q[:, :1, 0] - k[:, 0, :1] + np.arange(1 - columns, rows))  # on each diagonal of each tile
    place = distance * table.shape[1] + q[:, :1, 0] % np.maximum(distance, 1)
    of_cells = np.lib.stride_tricks.sliding_window_view(place, columns, axis=1)[:, :, ::-1]
    found = table.take(of_cells + np.arange(rows)[:, None]).astype(np.int64)
    meet = np.nonzero((distance == 0).any(axis=1))[0]
    found[meet] = np.where(q[meet] == k[meet], abs(q[meet]), found[meet])
    return found


@functools.lru_cache(maxsize=4)
def _gcds(rows: int, columns: int) -> np.ndarray:
    """The greatest common divisor of each row and column but (0, 0): the last number that divides both."""
    table = np.zeros((rows, columns), np.uint16)
    for divisor in range(1, columns):
        table[::divisor, ::divisor] = divisor
    return table
