"""Lookups in tables at indices that depend on query and key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .cells import MOST, Cells
from .fractions import between
from .symbols import OneSide, Pair, Symbolic, TilePairs, as_pair, boolean, combine

if TYPE_CHECKING:
    from ...patterns.hints.table import BlockTable, NumberTable

__all__ = ["looked_up", "read"]


def looked_up(pairs: TilePairs, table: BlockTable, a: Any, b: Any) -> Symbolic:
    """Return whether key block `b` is set in row `a` of the table."""
    if isinstance(a, OneSide) and isinstance(b, OneSide) and a.box is b.box:
        return OneSide(pairs, a.box, Cells.listed(table.contains(a.cells.values, b.cells.values)))
    return _lookup(pairs, table, a, b, as_pair(pairs, a), as_pair(pairs, b))


def _lookup(pairs: TilePairs, table: Any, a: Any, b: Any, x: Pair, y: Pair) -> Pair:
    lo, hi = table.all_in(x.lo, x.hi, y.lo, y.hi), table.any_in(x.lo, x.hi, y.lo, y.hi)
    return boolean(pairs, lo, hi, _excerpt_key(table, a, b, x, y))


def read(pairs: TilePairs, table: BlockTable | NumberTable, indices: Sequence[Any]) -> Symbolic:
    """Return elements of a table, unknown where an index may be out of range."""
    sides = [as_pair(pairs, x) for x in indices]
    shape, inside = table.shape, np.ones(len(pairs.query_box), bool)
    for side, length in zip(sides, shape, strict=True):
        inside &= (side.lo >= 0) & (side.hi < length)
    bounds = getattr(table, "bounds", None)
    if bounds is None:
        found = _lookup(pairs, table, *indices, *sides)
        place: Any = combine(*(side.key for side in sides))  # None without keys
        key = None if place is None else combine(found.key, np.where(inside, -1, place - place.min(initial=0)))
        return boolean(pairs, found.lo & inside, found.hi | ~inside, key)
    lows, highs = (
        [np.clip(end, 0, length - 1) for end, length in zip(ends, shape, strict=True)]
        for ends in zip(*((side.lo, side.hi) for side in sides), strict=True)
    )
    lo, hi = bounds(lows, highs)
    if lo.dtype.kind in "iu":
        lo, hi = np.where(inside, lo, -MOST), np.where(inside, hi, MOST)
    return between(pairs, lo, hi, inside & np.isfinite(lo) & np.isfinite(hi), tuple(indices))


def _excerpt_key(table: BlockTable, a: Any, b: Any, x: Pair, y: Pair) -> np.ndarray | None:
    """Return the key of a lookup: tiles that read equal excerpts of the table with indices of equal shape share a key.

    An excerpt of more than 62 cells does not fit an int64 and is identified by its location instead.
    """
    if not x.pairs.with_keys:
        return None
    height, width = (int((side.hi - side.lo).max(initial=0)) + 1 for side in (x, y))
    if height * width > 62 or not (isinstance(a, OneSide) and isinstance(b, OneSide)):
        return combine(x.key, y.key)
    excerpt = table.excerpts(x.lo, y.lo, height, width)
    shapes = combine(a.integers.shape_and_base[0][a.box], b.integers.shape_and_base[0][b.box])
    return combine(shapes, np.unique(excerpt, return_inverse=True)[1].reshape(-1))
