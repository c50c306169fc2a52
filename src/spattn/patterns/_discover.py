"""The index set of a pattern without a closed form: its predicate, evaluated on as few pairs as possible."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..index_set import AffineRows
from ._predicate import allowed

if TYPE_CHECKING:
    from ._base import Pattern

__all__ = ["discover", "every_pair"]

_CELLS_AT_ONCE = 1 << 20  # pairs evaluated at once
_FEW_CELLS = 1 << 12  # up to so many pairs are sooner evaluated than sorted out by closed forms


def discover(pattern: Pattern, q: np.ndarray, kv_len: int) -> AffineRows:
    """Evaluates the predicate strip by strip, on the keys that closed forms leave over; bounded memory."""
    rows = max(1, _CELLS_AT_ONCE // max(kv_len, 1))
    counts, columns = [np.zeros(1, np.int64)], [np.zeros(0, np.int64)]
    for first in range(0, len(q), rows):
        strip = q[first : first + rows]
        few = len(strip) * kv_len <= _FEW_CELLS
        row, column = every_pair(len(strip), kv_len) if few else pattern._candidates(strip, kv_len)
        keep = np.broadcast_to(allowed(pattern, strip[row], column), row.shape)
        counts.append(np.bincount(row[keep], minlength=len(strip)))
        columns.append(column[keep])
    return AffineRows.from_csr(np.cumsum(np.concatenate(counts)), np.concatenate(columns), kv_len)


def every_pair(rows: int, kv_len: int) -> tuple[np.ndarray, np.ndarray]:
    """(row, key) of all pairs."""
    return np.repeat(np.arange(rows), kv_len), np.tile(np.arange(kv_len), rows)
