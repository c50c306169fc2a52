"""Symbolic evaluation of a predicate on tiles.

The planner calls ``pattern.allows(q, k)`` with symbolic positions. Values that depend on queries or keys alone are
exact in every cell and deduplicated (``cells.py``). A value that depends on both has, for each tile pair,

- an interval ``[lo, hi]`` with a step (every value is congruent to ``lo`` modulo ``step``), which may show that a
  comparison is *always* or *never* true on the tile, and
- a key: tile pairs with equal keys have equal values in every cell. A translation-invariant predicate has a handful of
  keys at any length. One tile pair of each key is evaluated cell by cell.

The result of an operation without an interval rule has only a key, and comparisons with it are undecided. A predicate
that cannot be called with symbols is undecided everywhere. Other conjuncts, such as a window, still limit the tiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from ..._util.cached import cached_property
from ...patterns.base.predicate import NO_TRUTH_VALUE, allowed
from .cells import MOST, Cells, distinct, evaluate

if TYPE_CHECKING:
    from ...patterns import Pattern
    from ...patterns.hints.table import BlockTable

_INT64, _BOOL = np.dtype(np.int64), np.dtype(bool)
_TRIED = 64  # number of queries and of keys on which a failing predicate is retried


class NoRule(TypeError):
    """An operation without an interval rule."""


class Rules(NamedTuple):
    """NumPy dispatch for symbols, passed in :class:`TilePairs` because the modules of the rules import this one."""

    of_ufunc: Callable[[np.ufunc, tuple[Any, ...]], Callable[..., Any]]
    of_function: Mapping[Callable[..., Any], Callable[..., Any]]
    converted: Callable[..., Any]
    looked_up: Callable[..., Any]
    read: Callable[..., Any]
    summed: Callable[..., Any]


@dataclass(frozen=True, eq=False)
class TilePairs:
    """A batch of tile pairs: pair n is query box ``query_box[n]`` and key box ``key_box[n]``."""

    query: Cells
    key: Cells
    query_box: np.ndarray
    key_box: np.ndarray
    with_keys: bool
    rules: Rules
    unfollowed: list[str] = field(default_factory=list)
    """Messages about operations without a rule that the predicate used."""
    source: list[str] = field(default_factory=list)
    """The line of the predicate that is being evaluated, for these messages, if known."""

    def evaluate(self, pattern: Pattern) -> Pair:
        """Evaluate the predicate on these pairs; raise TypeError if it does not return booleans."""
        q = OneSide(self, self.query_box, self.query)
        k = OneSide(self, self.key_box, self.key)
        return truth(self, allowed(pattern, q, k))


class Symbolic(NDArrayOperatorsMixin):
    """Base class of symbols, which dispatches NumPy operators and functions to the rules."""

    pairs: TilePairs
    dtype: np.dtype
    """Dtype that NumPy gives the value."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self.pairs.query_box)} tiles>"

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        symbols = [x for x in inputs if isinstance(x, Symbolic)]
        if method != "__call__" or kwargs or not all(isinstance(x, Symbolic) or np.ndim(x) == 0 for x in inputs):
            return NotImplemented
        first = symbols[0]
        if ufunc.nout != 1:
            return NotImplemented
        if isinstance(first, OneSide) and all(isinstance(x, OneSide) and x.box is first.box for x in symbols):
            operands = tuple(x.cells if isinstance(x, OneSide) else x for x in inputs)
            return OneSide(first.pairs, first.box, evaluate(ufunc, operands))
        try:
            return first.pairs.rules.of_ufunc(ufunc, inputs)(first.pairs, *inputs)
        except NoRule as reason:
            return _unfollowed(first.pairs, ufunc, inputs, reason)

    def __array_function__(self, function: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = (x for x in (*args, *kwargs.values()) if isinstance(x, Symbolic))
        followed = next((x.pairs.rules.of_function.get(function) for x in given), None)
        return NotImplemented if followed is None else followed(*args, **kwargs)

    def astype(self, dtype: Any) -> Symbolic:
        """See ``numpy.ndarray.astype``."""
        found: Symbolic = self.pairs.rules.converted(self, dtype)
        return found

    def leave_open(self, pattern: Pattern, k: Any, error: Exception) -> Pair:
        """Treat `pattern`, whose predicate raised `error` for the symbols `self` and `k`, as undecided on every tile.

        First evaluate the predicate at a few concrete positions, so that its own errors propagate.
        """
        if not isinstance(self, OneSide) or not isinstance(k, OneSide):
            raise error
        tried = (side.cells.take(np.arange(1)).values[:, :_TRIED] for side in (self, k))
        allowed(pattern, *(x.reshape(shape) for x, shape in zip(tried, ((1, -1, 1), (1, 1, -1)), strict=True)))
        self.pairs.unfollowed.append(str(error))
        return undecided(self.pairs, np.arange(len(self.pairs.query_box)) if self.pairs.with_keys else None)

    def clip(self, min: Any = None, max: Any = None, out: None = None) -> Any:
        """See ``numpy.ndarray.clip``; np.clip calls it too."""
        at_least: Any = self  # not in NumPy's type stubs
        at_least = at_least if min is None else np.maximum(at_least, min)
        return at_least if max is None else np.minimum(at_least, max)

    def contains(self, table: BlockTable, a: Any, b: Any) -> Symbolic:
        """Look up a BlockTable at indices that depend on query and key."""
        found: Symbolic = self.pairs.rules.looked_up(self.pairs, table, a, b)
        return found

    def read(self, table: Any, indices: Sequence[Any]) -> Symbolic:
        """Look up a BlockTable or NumberTable at `indices`; elements out of range are unknown."""
        found: Symbolic = self.pairs.rules.read(self.pairs, table, indices)
        return found

    def summed(self, terms: Sequence[Any]) -> Symbolic:
        """Return the sum of floats in any order."""
        found: Symbolic = self.pairs.rules.summed(self.pairs, terms)
        return found

    def unknown(self, operands: Sequence[Any], dtype: np.dtype, reason: str) -> Pair | Unfollowed:
        """Return a value of which only the operands are known."""
        return _unknown(self.pairs, operands, dtype, reason)

    @property
    def is_truth(self) -> bool:
        """Whether the value is a boolean; the ends of its intervals are then 0 or 1."""
        return self.dtype == _BOOL

    def __bool__(self) -> bool:
        raise TypeError(NO_TRUTH_VALUE)


@dataclass(frozen=True, eq=False, repr=False)
class OneSide(Symbolic):
    """A value that depends on the query or on the key alone, known exactly in every cell."""

    pairs: TilePairs
    box: np.ndarray
    cells: Cells

    @property
    def dtype(self) -> np.dtype:  # type: ignore[override]
        return self.cells.dtype

    def map(self, function: Callable[[np.ndarray], np.ndarray]) -> OneSide:
        """Apply `function` to every cell."""
        return OneSide(self.pairs, self.box, self.cells.map(function))

    def member(self, table: np.ndarray) -> OneSide:
        """Return ``np.isin(self, table)`` for a sorted `table`."""
        if np.can_cast(self.dtype, np.int64):
            return OneSide(self.pairs, self.box, self.cells.member(table))
        return self.map(lambda x: np.isin(x, table))

    def rank(self, table: np.ndarray) -> OneSide | Pair:
        """Return ``np.searchsorted(table, self, side="right")``; without `with_keys`, only for the intervals' ends."""
        if self.pairs.with_keys:
            return OneSide(self.pairs, self.box, self.integers.rank(table))
        return as_pair(self.pairs, self).rank(table)

    @cached_property
    def integers(self) -> Cells:
        """The values as int64; raises NoRule for floats and uint64, which have no exact steps and shapes."""
        cells = self.cells
        if not np.can_cast(cells.dtype, np.int64):
            raise NoRule(f"{cells.dtype} values in an expression of query and key")
        return Cells(cells.table.astype(np.int64, copy=False), cells.kind, cells.base)

    @cached_property
    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Minimum and maximum of each box."""
        return within_range(*self.integers.bounds)


@dataclass(frozen=True, eq=False, repr=False)
class Pair(Symbolic):
    """A value that depends on query and key, with an interval and a key for each tile pair."""

    pairs: TilePairs
    lo: np.ndarray  # int8 for booleans, int64 for integers, float64 for floats (non-finite if unknown)
    hi: np.ndarray
    step: int
    key: np.ndarray | None
    dtype: np.dtype = _INT64
    made_of: tuple[np.ufunc, tuple[Any, ...]] | None = None
    """The operation and its operands, for rules that use remainders."""

    def map(self, function: Callable[[np.ndarray], np.ndarray]) -> NoReturn:
        raise TypeError("apply(): expected values of the query or of the key alone, got a value that depends on both")

    def member(self, table: np.ndarray) -> Pair:
        """Return ``np.isin(self, table)`` for a sorted `table`, decided by the number of members in the interval."""
        inside = np.searchsorted(table, self.hi, side="right") - np.searchsorted(table, self.lo, side="left")
        if self.dtype.kind == "f":  # a float may lie between any two members
            return boolean(self.pairs, np.zeros(len(inside)), inside > 0, self.key)
        return boolean(self.pairs, inside == self.hi - self.lo + 1, inside > 0, self.key)

    def rank(self, table: np.ndarray) -> Pair:
        """Return ``np.searchsorted(table, self, side="right")``."""
        lo, hi = (np.searchsorted(table, bound, side="right") for bound in (self.lo, self.hi))
        return Pair(self.pairs, lo, hi, 1, self.key)


@dataclass(frozen=True, eq=False, repr=False)
class Unfollowed(Symbolic):
    """A value that depends on query and key and has no known interval, only a key for each tile pair."""

    pairs: TilePairs
    key: np.ndarray | None
    dtype: np.dtype

    map = Pair.map

    def member(self, table: np.ndarray) -> Pair:
        """Return ``np.isin(self, table)`` as undecided."""
        return undecided(self.pairs, self.key)


def within_range(lo: np.ndarray, hi: np.ndarray, dtype: np.dtype = _INT64) -> tuple[np.ndarray, np.ndarray]:
    """Return both bounds; raise NoRule if later sums could overflow, or if NumPy's result overflows `dtype`."""
    least, most = -MOST, MOST
    if dtype.kind in "biu":
        own = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        least, most = max(least, own[0]), min(most, own[1])
    if lo.min(initial=0) < least or hi.max(initial=0) > most:
        raise NoRule(f"values outside [{least}, {most}] in an expression of query and key")
    return lo, hi


def combine(a: np.ndarray | None, b: np.ndarray | None) -> np.ndarray | None:
    """Return a key that is equal for two tile pairs only if `a` and `b` are both equal."""
    if a is None or b is None:
        return None
    if _width(a) * _width(b) > MOST:  # ranks are smaller and avoid overflow
        a, b = distinct(a)[1], distinct(b)[1]
    return (a - a.min(initial=0)) * _width(b) + (b - b.min(initial=0))


def _width(key: np.ndarray) -> int:
    """Return the width of the range of 0 and a key's values, as a Python int, which cannot overflow."""
    return int(key.max(initial=0)) - int(key.min(initial=0)) + 1


def as_pair(pairs: TilePairs, x: Any) -> Pair:
    """Convert an operand to a Pair of int64; raise NoRule if its values are not integers."""
    value = _operand(pairs, x)
    return value if value.lo.dtype == _INT64 else replace(value, lo=value.lo.astype(_INT64), hi=value.hi.astype(_INT64))


def _operand(pairs: TilePairs, x: Any) -> Pair:
    """Convert an operand to a Pair of int64, or int8 for booleans; raise NoRule if its values are not integers."""
    if isinstance(x, Pair):
        if x.dtype.kind == "f":
            raise NoRule(f"{x.dtype} values in an expression of query and key")
        return x
    if isinstance(x, Unfollowed):
        raise NoRule(pairs.unfollowed[-1])
    count = len(pairs.query_box)
    if not isinstance(x, OneSide):
        if not abs(x) <= MOST or int(x) != x:
            raise NoRule(f"the number {x} in an expression of query and key")
        value = np.full(count, int(x), dtype=np.int64)
        return Pair(pairs, value, value, 0, np.zeros(count, dtype=np.int64) if pairs.with_keys else None)
    own = np.int8 if x.is_truth else np.int64
    lo, hi = (bound.astype(own, copy=False)[x.box] for bound in x.bounds)
    key = None
    if pairs.with_keys:
        shape, base = x.integers.shape_and_base
        key = combine(shape[x.box], base[x.box])
    return Pair(pairs, lo, hi, x.integers.step, key, x.dtype)


def boolean(pairs: TilePairs, always: np.ndarray, never_not: np.ndarray, key: np.ndarray | None) -> Pair:
    """Return a boolean with the interval [`always`, `never_not`]; on tiles that decide it, its key is 0 or 1."""
    lo, hi = always.astype(np.int8, copy=False), never_not.astype(np.int8, copy=False)
    if key is not None:
        key = np.where(lo == hi, lo, key + 2)
    return Pair(pairs, lo, hi, 1, key, _BOOL)


def undecided(pairs: TilePairs, key: np.ndarray | None) -> Pair:
    """Return a boolean that is undecided on every tile."""
    count = len(pairs.query_box)
    return boolean(pairs, np.zeros(count), np.ones(count), key)


def _unfollowed(pairs: TilePairs, ufunc: np.ufunc, operands: tuple[Any, ...], reason: NoRule) -> Pair | Unfollowed:
    """Return the result of a ufunc without a rule."""
    with np.errstate(all="ignore"):
        dtype = ufunc(*(np.ones(1, x.dtype) if isinstance(x, Symbolic) else x for x in operands)).dtype
    return _unknown(pairs, operands, dtype, str(reason))


def _unknown(pairs: TilePairs, operands: Sequence[Any], dtype: np.dtype, reason: str) -> Pair | Unfollowed:
    """Return a value without a rule; its key is equal for tile pairs on which all operands are equal."""
    pairs.unfollowed.append(reason + "".join(pairs.source))
    key = None
    if pairs.with_keys:
        key = functools.reduce(combine, (cell_key(x) for x in operands if isinstance(x, Symbolic)))
    return undecided(pairs, key) if dtype == _BOOL else Unfollowed(pairs, key, dtype)


def cell_key(x: Any) -> np.ndarray | None:
    """Return a key: on tile pairs with equal keys, `x` has the same values in every cell."""
    return combine(*(of_box[x.box] for of_box in x.cells.shape_and_base)) if isinstance(x, OneSide) else x.key


def is_truth(x: Any) -> bool:
    return isinstance(x, (bool, np.bool_)) or bool(getattr(x, "is_truth", False))


def truth(pairs: TilePairs, x: Any) -> Pair:
    """Convert a boolean to a Pair; raise NoRule for integers, whose intervals do not describe bits."""
    value = _operand(pairs, x)
    if is_truth(x):
        return value
    raise NoRule("&, | and ~ of integers in an expression of query and key")
