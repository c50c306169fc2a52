"""Allowed keys of a few rows, as bool arrays: what a step of generation needs instead of tiles."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..._util.ragged import ramp
from .predicate import allowed

if TYPE_CHECKING:
    from ...index_set import Runs
    from .pattern import Pattern

__all__ = ["AskedRows", "alike", "filled", "rows_of_bound"]

_FEW_RUNS = 512  # runs that are faster written one by one


class AskedRows(NamedTuple):
    """Rows whose allowed keys are asked for, in a call of `batch` entries and `heads` heads.

    `q` are their positions, (batch or 1, heads or 1, rows) int64, in a sequence that patterns bind to `q_len` and
    `kv_len`. If `within` is given, (batch or 1, heads or 1, rows, kv_len) bool, the result is arbitrary outside it.
    """

    q: np.ndarray
    q_len: int
    kv_len: int
    batch: int
    heads: int
    within: np.ndarray | None = None

    def entry(self, batch: int, head: int) -> AskedRows:
        """Return the rows of one batch entry and head."""
        at = tuple(min(n, size - 1) for n, size in zip((batch, head), self.q.shape, strict=False))
        return self._replace(q=self.q[at][None, None], batch=1, heads=1, within=None)


def alike(each: Iterable[np.ndarray]) -> list[np.ndarray]:
    """Repeat the heads of (batch or 1, heads, ...) arrays up to the largest number of heads."""
    found = list(each)
    heads = max(x.shape[1] for x in found)
    return [x if x.shape[1] in (1, heads) else np.repeat(x, heads // x.shape[1], axis=1) for x in found]


def rows_of_bound(pattern: Pattern, asked: AskedRows) -> np.ndarray:
    """Return the allowed keys of a pattern that is bound to lengths, and the same for all batch entries and heads."""
    q, kv_len = asked.q.reshape(-1), asked.kv_len
    shape = (*asked.q.shape, kv_len)
    if pattern._lists_pairs:
        found = np.zeros((len(q), kv_len), bool)
        found[pattern._pairs(q, kv_len)] = True
        return found.reshape(shape)
    runs = pattern.runs(q, kv_len)
    if runs is not None:
        return filled(runs, kv_len).reshape(shape)
    if asked.within is None:
        rows: np.ndarray = np.broadcast_to(allowed(pattern, q[:, None], np.arange(kv_len)), (len(q), kv_len))
        return rows.reshape(shape)
    shape = np.broadcast_shapes(asked.within.shape, shape)
    within = np.broadcast_to(asked.within, shape)
    some = np.flatnonzero(within)
    row, key = np.divmod(some, kv_len)
    found = np.zeros(within.size, bool)
    found[some] = allowed(pattern, np.broadcast_to(asked.q, shape[:3]).reshape(-1)[row], key)
    return found.reshape(shape)


def filled(runs: Runs, kv_len: int) -> np.ndarray:
    """Return True at the keys of the runs: (rows, kv_len)."""
    rows = len(runs.start)
    found = np.zeros(rows * kv_len, bool)
    (some,) = np.nonzero(runs.count.reshape(-1) > 0)
    first = runs.start + kv_len * np.arange(rows)[:, None]
    first, step, count = (x.reshape(-1)[some] for x in (first, runs.step, runs.count))
    if len(some) <= _FEW_RUNS:
        ends = first + step * (count - 1) + 1
        for start, end, by in zip(first.tolist(), ends.tolist(), step.tolist(), strict=True):
            found[start:end:by] = True
    else:
        found[np.repeat(first, count) + np.repeat(step, count) * ramp(count)] = True
    return found.reshape(rows, kv_len)
