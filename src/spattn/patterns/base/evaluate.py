"""Evaluate predicates into index sets, restricted to candidate runs where possible."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ...index_set import AffineRows, Runs
from .predicate import Predicate, allowed

__all__ = ["evaluate", "pair_count"]

_PAIRS_AT_ONCE = 1 << 20
_SELECTING = 8  # predicate evaluations that cost as much as selecting one candidate pair


class Bounded(Predicate, Protocol):
    """A predicate with candidate runs: a superset of the allowed pairs."""

    def _candidates(self, q: np.ndarray, kv_len: int) -> list[Runs] | None: ...


def evaluate(pattern: Bounded, q: np.ndarray, kv_len: int) -> AffineRows:
    """Evaluate the predicate strip by strip, on candidate pairs only if they are few."""
    rows = max(1, _PAIRS_AT_ONCE // max(kv_len, 1))
    counts, columns = [np.zeros(1, np.int64)], [np.zeros(0, np.int64)]
    for first in range(0, len(q), rows):
        strip = q[first : first + rows]
        row, column = _allowed_pairs(pattern, strip, kv_len)
        counts.append(np.bincount(row, minlength=len(strip)))
        columns.append(column)
    return AffineRows.from_csr(np.cumsum(np.concatenate(counts)), np.concatenate(columns), kv_len)


def pair_count(candidates: list[Runs]) -> int:
    """Count the pairs of several runs; overlaps count repeatedly."""
    return sum(int(runs.count.sum()) for runs in candidates)


def _allowed_pairs(pattern: Bounded, q: np.ndarray, kv_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (row, key) of the allowed pairs of queries `q`, sorted."""
    shape = len(q), kv_len
    candidates = pattern._candidates(q, kv_len)
    if candidates is None or _SELECTING * pair_count(candidates) >= len(q) * kv_len:
        row, column = np.nonzero(np.broadcast_to(allowed(pattern, q[:, None], np.arange(kv_len)), shape))
        return row, column
    selected = np.zeros(shape, dtype=bool)
    for runs in candidates:
        indptr, column = AffineRows.from_runs(runs, kv_len).to_csr()
        selected[np.repeat(np.arange(len(q)), np.diff(indptr)), column] = True
    row, column = np.nonzero(selected)
    keep = np.broadcast_to(allowed(pattern, q[row], column), row.shape)
    return row[keep], column[keep]
