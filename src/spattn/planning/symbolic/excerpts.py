"""Block-table lookups at indices that depend on query and key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .cells import Cells
from .symbols import OneSide, Pair, Symbolic, TilePairs, as_pair, boolean, combine

if TYPE_CHECKING:
    from ...patterns.hints.table import BlockTable

__all__ = ["looked_up"]


def looked_up(pairs: TilePairs, table: BlockTable, a: Any, b: Any) -> Symbolic:
    """Return whether key block `b` is set in row `a` of the table."""
    if isinstance(a, OneSide) and isinstance(b, OneSide) and a.box is b.box:
        return OneSide(pairs, a.box, Cells.listed(table.contains(a.cells.values, b.cells.values)))
    x, y = as_pair(pairs, a), as_pair(pairs, b)
    lo, hi = table.all_in(x.lo, x.hi, y.lo, y.hi), table.any_in(x.lo, x.hi, y.lo, y.hi)
    return boolean(pairs, lo, hi, _excerpt_key(table, a, b, x, y))


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
