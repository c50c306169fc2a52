"""Equality of a value of the query with a value of the key, such as documents, classes and block numbers.

Intervals decide it for sorted labels. Labels in any order are compared as sets.
"""

from __future__ import annotations

import itertools

import numpy as np

from .cells import Cells, unique_rows
from .symbols import OneSide, TilePairs, combine

__all__ = ["match_key", "may_meet"]

_WORDS = 4  # independent hashes of a set, each into 64 bits
_FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], np.uint64)
_MOST_CELLS = 512  # sets of larger boxes set most bits of their hashes
_MOST_LABELS = 4  # per box, of which pairs are compared one by one


def may_meet(pairs: TilePairs, a: OneSide, b: OneSide, open_: np.ndarray) -> np.ndarray:
    """Return False for pairs in `open_` whose boxes have no value in common, by hashes of their sets of values."""
    sides = [x.integers for x in (a, b)]
    if np.count_nonzero(open_) < sum(map(len, sides)) or max(x.table.shape[1] for x in sides) > _MOST_CELLS:
        return open_  # hashing the boxes would cost more than it saves
    at = np.nonzero(open_)[0]
    one, other = (_hashes(side)[x.box[at]] for side, x in zip(sides, (a, b), strict=True))
    found = np.zeros_like(open_)
    found[at] = ((one & other) != 0).all(axis=1)
    return found


def _hashes(cells: Cells) -> np.ndarray:
    """Return the hashes of the set of values of each box, (boxes, words)."""
    values = cells.values.astype(np.uint64)[:, :, None]
    bits = (values * _FACTORS) >> np.uint64(58)
    return np.bitwise_or.reduce(np.uint64(1) << bits, axis=1)


def match_key(pairs: TilePairs, a: OneSide, b: OneSide) -> np.ndarray | None:
    """Return the key of an equality: which cells of each box are equal, and which values of the boxes; or None."""
    if not pairs.with_keys:
        return None
    kinds, values = [], []
    for x in (a, b):
        boxes, at = np.unique(x.box, return_inverse=True)
        found = _labels(x.integers.take(boxes))
        if found is None:
            return None
        kinds.append(found[0][at])
        values.append(found[1][at])
    match = np.zeros(len(kinds[0]), np.int64)
    for one, other in itertools.product(*(own.T for own in values)):
        match = 2 * match + (one == other)
    return combine(combine(*kinds), match)


def _labels(cells: Cells) -> tuple[np.ndarray, np.ndarray] | None:
    """Return, for each box, the index of its partition into equal cells, and its distinct values in ascending order,
    the last one repeated; None if a box has many."""
    rows = np.sort(cells.table, axis=1)
    new = rows[:, 1:] != rows[:, :-1]
    if int(new.sum(axis=1).max(initial=0)) >= _MOST_LABELS:
        return None
    values = np.repeat(rows[:, -1:], _MOST_LABELS, axis=1)
    values[:, 0] = rows[:, 0]
    row, column = np.nonzero(new)
    values[row, np.cumsum(new, axis=1)[row, column]] = rows[row, column + 1]
    rank = (cells.table[:, :, None] > values[:, None, :]).sum(axis=2, dtype=np.int8)
    return unique_rows(rank)[1][cells.kind], values[cells.kind] + cells.base[:, None]
