"""Predicates: checked evaluation, index sets, and the functions that ``allows`` may call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from ...index_set import AffineRows, Runs

__all__ = [
    "NO_TRUTH_VALUE",
    "Positions",
    "Predicate",
    "allowed",
    "apply",
    "evaluate",
    "listed",
    "member",
    "pair_count",
    "rank",
    "row_or_last",
]

_PAIRS_AT_ONCE = 1 << 20
_SELECTING = 8  # selecting one candidate pair costs as much as this many evaluations of the predicate

NO_TRUTH_VALUE = (
    "allows(): expected &, |, ~, np.minimum and np.maximum on arrays of positions, got 'and', 'or', 'not', 'if', "
    "min() or max(), which need the truth value of a whole array"
)
_NO_TRUTH = "truth value of an array"  # part of NumPy's error message
_NEAR = 1024  # rows of the gcd table; larger distances use np.gcd


class Predicate(Protocol):
    """Protocol of objects with a predicate."""

    def allows(self, q: Any, k: Any) -> Any: ...


def allowed(pattern: Predicate, q: Any, k: Any) -> Any:
    """Evaluate ``pattern.allows(q, k)`` and check the result. Call this instead of ``allows``.

    If the predicate does not support the planner's symbolic positions, it decides no tile. Other operands of a
    composition may still decide tiles.
    """
    leave_open = getattr(q, "leave_open", None)
    if leave_open is None:
        return _checked(pattern, q, k)
    try:
        return _checked(pattern, q, k)
    except (TypeError, AttributeError, IndexError) as error:  # an unsupported operator, method or array index
        return leave_open(pattern, k, error)


def _checked(pattern: Predicate, q: Any, k: Any) -> Any:
    """Evaluate the predicate; raise TypeError if the result is not boolean or has a wrong shape."""
    try:
        result = pattern.allows(*_of_tiles(q, k))
    except ValueError as error:
        if _NO_TRUTH in str(error):
            raise TypeError(NO_TRUTH_VALUE) from error
        raise
    if isinstance(result, (bool, np.bool_)) or getattr(result, "is_truth", False):
        return result
    if not isinstance(result, np.ndarray) or isinstance(result, np.ma.MaskedArray) or result.dtype != bool:
        got = f"{type(result).__name__} of {result.dtype}" if hasattr(result, "dtype") else type(result).__name__
        raise TypeError(f"allows(): expected a bool array from {pattern!r}, got {got}")
    shape = np.broadcast(q, k).shape
    axes = zip(reversed(result.shape), reversed(shape), strict=False)
    if result.ndim > len(shape) or any(n not in (1, length) for n, length in axes):
        raise TypeError(f"allows(): expected a bool array of shape {shape} from {pattern!r}, got shape {result.shape}")
    return result


def _of_tiles(q: Any, k: Any) -> tuple[Any, Any]:
    """View positions of tiles, (tiles, rows, 1) and (tiles, 1, columns), as :class:`Positions`."""
    if not all(isinstance(x, np.ndarray) and x.ndim == 3 for x in (q, k)):
        return q, k
    return q.view(Positions), k.view(Positions)


def apply(function: Callable[[np.ndarray], np.ndarray], positions: Any) -> Any:
    """Evaluate ``function(positions)`` for a function that is not a ufunc, such as a table lookup or a search.

    Parameters
    ----------
    function : callable
        Maps an int64 array of positions elementwise to an array of the same shape.
    positions : int or int array
        An argument of :meth:`Pattern.allows`, or a value computed from one of them.

    Returns
    -------
    array
        During planning, an object with the same operators.
    """
    each = getattr(positions, "map", None)
    return each(function) if each is not None else function(positions)


def member(table: np.ndarray, positions: Any) -> Any:
    """Return True where a position, or a difference of positions, is in the sorted integer array `table`.

    Parameters
    ----------
    table : (n,) int64 array
        Sorted, without repeats.
    positions : int or int array
        An argument of :meth:`Pattern.allows`, or the difference of both.

    Returns
    -------
    bool array
        During planning, an object with the same operators.
    """
    decide = getattr(positions, "member", None)
    return decide(table) if decide is not None else _is_in(np.asarray(positions), table)


def _is_in(positions: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Evaluate ``np.isin(positions, table)``; on tiles of differences, look up each diagonal once."""
    if positions.ndim != 3 or not positions.size or (positions[:, 1:, 1:] != positions[:, :-1, :-1]).any():
        return np.isin(positions, table)
    diagonals = np.concatenate([positions[:, 0, ::-1], positions[:, 1:, 0]], axis=1)
    of_rows = np.lib.stride_tricks.sliding_window_view(np.isin(diagonals, table), positions.shape[2], axis=1)
    return of_rows[:, :, ::-1]


def rank(table: np.ndarray, positions: Any) -> Any:
    """Evaluate ``np.searchsorted(table, positions, side="right")``, also for the planner's symbolic positions."""
    count = getattr(positions, "rank", None)
    return count(table) if count is not None else np.searchsorted(table, positions, side="right")


def row_or_last(row: np.ndarray, rows: int) -> np.ndarray:
    """Replace row indices out of range by `rows`, the index of an empty row that the caller appends to its table."""
    return np.where((row < 0) | (row >= rows), rows, row)


class Bounded(Predicate, Protocol):
    """Protocol of predicates with candidate runs, a superset of the allowed pairs."""

    def _candidates(self, q: np.ndarray, kv_len: int) -> list[Runs] | None: ...


def evaluate(pattern: Bounded, q: np.ndarray, kv_len: int) -> AffineRows:
    """Build the index set from the predicate, in strips of rows; evaluate only candidate pairs if they are few."""
    return AffineRows.from_csr(*listed(pattern, q, kv_len), kv_len)


def listed(pattern: Bounded, q: np.ndarray, kv_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (indptr, keys) of the pairs that :func:`evaluate` finds."""
    rows = max(1, _PAIRS_AT_ONCE // max(kv_len, 1))
    counts, columns = [np.zeros(1, np.int64)], [np.zeros(0, np.int64)]
    for first in range(0, len(q), rows):
        strip = q[first : first + rows]
        row, column = _allowed_pairs(pattern, strip, kv_len)
        counts.append(np.bincount(row, minlength=len(strip)))
        columns.append(column)
    return np.cumsum(np.concatenate(counts)), np.concatenate(columns)


def pair_count(candidates: list[Runs]) -> int:
    """Count the pairs of several runs; overlaps count more than once."""
    return sum(int(runs.count.sum()) for runs in candidates)


def _allowed_pairs(pattern: Bounded, q: np.ndarray, kv_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (row, key) of the allowed pairs of query positions `q`, sorted."""
    shape = len(q), kv_len
    candidates = pattern._candidates(q, kv_len)
    if candidates is None or _SELECTING * pair_count(candidates) >= len(q) * kv_len:
        found = np.broadcast_to(allowed(pattern, q[:, None], np.arange(kv_len)), shape)
        row, column = np.divmod(np.flatnonzero(found), max(kv_len, 1))  # NumPy's nonzero takes longer with two axes
        return row, column
    selected = np.zeros(shape, dtype=bool)
    for runs in candidates:
        indptr, column = AffineRows.from_runs(runs, kv_len).to_csr()
        selected[np.repeat(np.arange(len(q)), np.diff(indptr)), column] = True
    row, column = np.nonzero(selected)
    keep = np.broadcast_to(allowed(pattern, q[row], column), row.shape)
    return row[keep], column[keep]


class Positions(np.ndarray[Any, Any]):
    """Query or key positions of tiles, (tiles, rows, 1) or (tiles, 1, columns), with a fast ``np.gcd``.

    All operations return plain arrays. NumPy's gcd takes twenty times as long per cell as any other operation.
    Consecutive queries and keys have few distances d, so a small table holds gcd(q, k) = gcd(d, q mod d). Along a
    diagonal, q and the table column advance together, so a cell costs one addition and one lookup.
    """

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
    farthest = np.maximum(abs(q[:, 0, 0] - k[:, 0, -1]), abs(q[:, -1, 0] - k[:, 0, 0]))
    near = (farthest < _NEAR) & (np.diff(q[:, :, 0]) == 1).all(axis=1) & (np.diff(k[:, 0]) == 1).all(axis=1)
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
    entry = distance * table.shape[1] + q[:, :1, 0] % np.maximum(distance, 1)
    of_cells = np.lib.stride_tricks.sliding_window_view(entry, columns, axis=1)[:, :, ::-1]
    found = table.take(of_cells + np.arange(rows)[:, None]).astype(np.int64)
    equal = np.nonzero((distance == 0).any(axis=1))[0]
    found[equal] = np.where(q[equal] == k[equal], abs(q[equal]), found[equal])
    return found


@functools.lru_cache(maxsize=4)
def _gcds(rows: int, columns: int) -> np.ndarray:
    """Tabulate gcd(row, column), except at (0, 0): divisors are written in ascending order, so the largest remains."""
    table = np.zeros((rows, columns), np.uint16)
    for divisor in range(1, columns):
        table[::divisor, ::divisor] = divisor
    return table
