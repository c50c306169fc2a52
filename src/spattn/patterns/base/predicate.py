"""Predicates: how everybody calls ``allows``, and what it may use beside operators and ufuncs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from ..._util.imports import whole_imports

__all__ = ["NO_TRUTH_VALUE", "Predicate", "allowed", "apply", "member", "rank"]

NO_TRUTH_VALUE = (
    "allows(): expected &, | and ~, np.minimum and np.maximum of arrays of positions, got 'and', 'or', 'not', 'if', "
    "min() or max(), which ask an array for a single truth value"
)
_NO_TRUTH = "truth value of an array"  # how NumPy begins to say so


class Predicate(Protocol):
    """What evaluation needs of a pattern."""

    def allows(self, q: Any, k: Any) -> Any: ...


def allowed(pattern: Predicate, q: Any, k: Any) -> Any:
    """``pattern.allows(q, k)``, TypeError unless it returns what it promises: every caller comes through here.

    A predicate that can do nothing with the planner's symbols is undecided on all tiles, also as an operand of another.

    Parameters
    ----------
    pattern : Pattern
    q, k : int, int array or the planner's symbolic positions

    Returns
    -------
    bool, bool array that broadcasts to the shape of `q` and `k`, or the planner's symbolic truth value
    """
    leave_open = getattr(q, "leave_open", None)
    if leave_open is None:
        return _checked(pattern, q, k)
    try:
        return _checked(pattern, q, k)
    except (TypeError, AttributeError, IndexError) as error:  # of an operator, a method, an array that is looked up in
        return leave_open(pattern, k, error)


def _checked(pattern: Predicate, q: Any, k: Any) -> Any:
    """The predicate's result; TypeError where it is none."""
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
    """The positions of tiles, (tiles, rows, 1) and (tiles, 1, columns), as :class:`Positions`; others as they are."""
    if not all(isinstance(x, np.ndarray) and x.ndim == 3 for x in (q, k)):
        return q, k
    with whole_imports:  # which planning alone needs
        from .positions import Positions

    return q.view(Positions), k.view(Positions)


def apply(function: Callable[[np.ndarray], np.ndarray], positions: Any) -> Any:
    """``function(positions)`` for a function that NumPy has no operator for (a table look-up, a search).

    `function` maps an integer array of positions elementwise to an array of the same shape.

    Parameters
    ----------
    function : callable
        Maps an int64 array of positions to an array of the same shape, elementwise.
    positions : int or int array
        What :meth:`Pattern.allows` was given, or computed from one side of it.

    Returns
    -------
    array
        While planning, an object with the same operators.
    """
    each = getattr(positions, "map", None)
    return each(function) if each is not None else function(positions)


def member(table: np.ndarray, positions: Any) -> Any:
    """Whether each position, or difference of positions, is in the sorted integer array `table`.

    Parameters
    ----------
    table : (n,) int64 array
        Sorted, without repeats.
    positions : int or int array
        What :meth:`Pattern.allows` was given, or a difference of both.

    Returns
    -------
    bool array
        While planning, an object with the same operators.
    """
    decide = getattr(positions, "member", None)
    return decide(table) if decide is not None else _is_in(np.asarray(positions), table)


def _is_in(positions: np.ndarray, table: np.ndarray) -> np.ndarray:
    """``np.isin(positions, table)``; of tiles in which each diagonal is one number, as differences have it, the
    diagonals alone are looked up."""
    if positions.ndim != 3 or not positions.size or (positions[:, 1:, 1:] != positions[:, :-1, :-1]).any():
        return np.isin(positions, table)
    diagonals = np.concatenate([positions[:, 0, ::-1], positions[:, 1:, 0]], axis=1)
    of_rows = np.lib.stride_tricks.sliding_window_view(np.isin(diagonals, table), positions.shape[2], axis=1)
    return of_rows[:, :, ::-1]


def rank(table: np.ndarray, positions: Any) -> Any:
    """How many numbers of the sorted integer array `table` each position, or difference of positions, has reached.

    Parameters
    ----------
    table : (n,) int64 array
        Sorted.
    positions : int or int array
        As for :func:`member`.

    Returns
    -------
    int array
        While planning, an object with the same operators.
    """
    count = getattr(positions, "rank", None)
    return count(table) if count is not None else np.searchsorted(table, positions, side="right")
