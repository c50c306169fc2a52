"""A predicate evaluated on whole tiles at once.

``pattern.allows(q, k)`` is called with symbolic positions. What depends on one side only is computed concretely for
every cell of that side (O(q_len) work); where both sides meet, two things are tracked for every tile pair:

- an interval ``[lo, hi]`` (with a step: every value is ``lo`` modulo ``step``), so that a comparison can be *never* or
  *always* true on a tile, and
- a key, such that tile pairs with equal keys have equal values in every cell; a translation-invariant predicate has a
  handful of keys at any length. Only one tile pair of each key is ever evaluated cell by cell.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from .._cached import cached_property
from ..patterns._predicate import NO_TRUTH_VALUE, allowed

if TYPE_CHECKING:
    from ..patterns import Pattern
    from ..patterns._table import BlockTable

    Rule = Callable[..., "Pair"]  # of the tile pairs and a ufunc's operands

_INT64, _BOOL = np.dtype(np.int64), np.dtype(bool)
_MOST = 1 << 61  # the largest value that is followed: sums and differences of two stay within int64


@dataclass(frozen=True, eq=False)
class Boxes:
    """Positions of the boxes of one view: (boxes, cells) int64, padding repeating a real cell."""

    positions: np.ndarray


@dataclass(frozen=True, eq=False)
class TilePairs:
    """The tile pairs under consideration: pair n joins query box ``query_box[n]`` and key box ``key_box[n]``."""

    query: Boxes
    key: Boxes
    query_box: np.ndarray
    key_box: np.ndarray
    with_keys: bool

    def evaluate(self, pattern: Pattern) -> Pair:
        """The predicate on these pairs; raises TypeError where it uses an operation that tiles do not have."""
        q = OneSide(self, self.query_box, self.query.positions)
        k = OneSide(self, self.key_box, self.key.positions)
        return _truth(self, allowed(pattern, q, k))


class Symbolic(NDArrayOperatorsMixin):
    """Routes NumPy operators and ufuncs to the rules below."""

    pairs: TilePairs
    dtype: np.dtype
    """That of NumPy's result."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self.pairs.query_box)} tiles>"

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        symbols = [x for x in inputs if isinstance(x, Symbolic)]
        if method != "__call__" or kwargs or not all(isinstance(x, Symbolic) or np.ndim(x) == 0 for x in inputs):
            return NotImplemented
        first = symbols[0]
        if isinstance(first, OneSide) and all(isinstance(x, OneSide) and x.box is first.box for x in symbols):
            return OneSide(first.pairs, first.box, ufunc(*(x.values if isinstance(x, OneSide) else x for x in inputs)))
        rule = _RULES.get(ufunc)
        return rule(first.pairs, *inputs) if rule is not None else NotImplemented

    def clip(self, min: Any = None, max: Any = None, out: None = None) -> Any:
        """As an array's method, which np.clip() calls too."""
        at_least: Any = self  # which NumPy's types do not know
        at_least = at_least if min is None else np.maximum(at_least, min)
        return at_least if max is None else np.minimum(at_least, max)

    def contains(self, table: BlockTable, a: Any, b: Any) -> Symbolic:
        """Two-sided look-up in a BlockTable."""
        pairs = self.pairs
        if isinstance(a, OneSide) and isinstance(b, OneSide) and a.box is b.box:
            return OneSide(pairs, a.box, table.contains(a.values, b.values))
        x, y = _pair(pairs, a), _pair(pairs, b)
        lo, hi = table.all_in(x.lo, x.hi, y.lo, y.hi), table.any_in(x.lo, x.hi, y.lo, y.hi)
        return _boolean(pairs, lo, hi, _excerpt_key(table, a, b, x, y))

    @property
    def is_truth(self) -> bool:
        """Whether this is a truth value: an interval's ends are 0 or 1."""
        return self.dtype == _BOOL

    def __bool__(self) -> bool:
        raise TypeError(NO_TRUTH_VALUE)


@dataclass(frozen=True, eq=False, repr=False)
class OneSide(Symbolic):
    """A value that depends on the query or on the key alone: known in every cell."""

    pairs: TilePairs
    box: np.ndarray
    values: np.ndarray

    @property
    def dtype(self) -> np.dtype:  # type: ignore[override]
        return self.values.dtype

    def map(self, function: Callable[[np.ndarray], np.ndarray]) -> OneSide:
        """`function` of every cell."""
        return OneSide(self.pairs, self.box, function(self.values))

    def member(self, table: np.ndarray) -> OneSide:
        """Whether each cell is in the sorted `table`."""
        return self.map(lambda x: np.isin(x, table))

    @cached_property
    def integers(self) -> np.ndarray:
        """The values as int64; TypeError for fractions, for which steps and shapes mean nothing, and for uint64."""
        if not np.can_cast(self.values.dtype, np.int64):
            raise TypeError(f"{self.values.dtype} values where query and key meet")
        return self.values.astype(np.int64, copy=False)

    @cached_property
    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Smallest and largest value of each box."""
        return _within_range(self.integers.min(axis=1), self.integers.max(axis=1))

    @cached_property
    def step(self) -> int:
        """All values of a box are equal modulo this (0: they are equal)."""
        return int(np.gcd.reduce(np.diff(self.integers, axis=1), axis=None)) if self.integers.shape[1] > 1 else 0

    @cached_property
    def shape_and_base(self) -> tuple[np.ndarray, np.ndarray]:
        """Each box as (number of its shape, first value): boxes of one shape differ by a constant."""
        base = self.integers[:, 0]
        return unique_rows(self.integers - base[:, None])[1], base


@dataclass(frozen=True, eq=False, repr=False)
class Pair(Symbolic):
    """A value that depends on both sides: known as an interval and a key for every tile pair."""

    pairs: TilePairs
    lo: np.ndarray
    hi: np.ndarray
    step: int
    key: np.ndarray | None
    dtype: np.dtype = _INT64

    def map(self, function: Callable[[np.ndarray], np.ndarray]) -> NoReturn:
        raise TypeError("apply(): expected positions of one side, got a value that depends on query and key")

    def member(self, table: np.ndarray) -> Pair:
        """Whether each cell is in the sorted `table`: decided by how many members the interval holds."""
        inside = np.searchsorted(table, self.hi, side="right") - np.searchsorted(table, self.lo, side="left")
        return _boolean(self.pairs, inside == self.hi - self.lo + 1, inside > 0, self.key)


def _within_range(lo: np.ndarray, hi: np.ndarray, dtype: np.dtype = _INT64) -> tuple[np.ndarray, np.ndarray]:
    """Both bounds; TypeError where one is so large that later sums might wrap, or that NumPy's result has wrapped."""
    least, most = -_MOST, _MOST
    if dtype.kind in "biu":
        own = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        least, most = max(least, own[0]), min(most, own[1])
    if lo.min(initial=0) < least or hi.max(initial=0) > most:
        raise TypeError(f"values beyond {least} and {most} where query and key meet")
    return lo, hi


def unique_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(index of one row of each kind, kind of each row), whole rows compared as bytes."""
    rows = np.ascontiguousarray(rows)
    if rows.shape[1] == 0 or rows.shape[0] == 0:
        return np.zeros(min(1, rows.shape[0]), np.int64), np.zeros(rows.shape[0], np.int64)
    opaque = rows.view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))).reshape(-1)
    _, first, kind = np.unique(opaque, return_index=True, return_inverse=True)
    return first, kind.reshape(-1)


def _combine(a: np.ndarray | None, b: np.ndarray | None) -> np.ndarray | None:
    """A key that is equal where both keys are."""
    if a is None or b is None:
        return None
    low = int(b.min(initial=0))
    width = int(b.max(initial=0)) - low + 1
    if (int(a.max(initial=0)) + 1) * width > _MOST:  # the pair would wrap: b by its rank instead
        low, b = 0, np.unique(b, return_inverse=True)[1].reshape(-1)
        width = len(b) + 1
    return np.unique(a * width + (b - low), return_inverse=True)[1].reshape(-1)


def _pair(pairs: TilePairs, x: Any) -> Pair:
    """Any operand as a Pair."""
    if isinstance(x, Pair):
        return x
    count = len(pairs.query_box)
    if not isinstance(x, OneSide):
        if not abs(x) <= _MOST or int(x) != x:
            raise TypeError(f"the number {x} where query and key meet")
        value = np.full(count, int(x), dtype=np.int64)
        return Pair(pairs, value, value, 0, np.zeros(count, dtype=np.int64) if pairs.with_keys else None)
    lo, hi = (bound[x.box] for bound in x.bounds)
    key = None
    if pairs.with_keys:
        shape, base = x.shape_and_base
        key = _combine(shape[x.box], base[x.box])
    return Pair(pairs, lo, hi, x.step, key, x.dtype)


def _boolean(pairs: TilePairs, always: np.ndarray, never_not: np.ndarray, key: np.ndarray | None) -> Pair:
    """A truth value; tiles on which it is decided share two keys."""
    lo, hi = always.astype(np.int64), never_not.astype(np.int64)
    if key is not None:
        key = np.where(lo == hi, lo, key + 2)
    return Pair(pairs, lo, hi, 1, key, _BOOL)


def _truth(pairs: TilePairs, x: Any) -> Pair:
    """A truth value as a Pair; TypeError for integers, whose bits intervals do not describe."""
    value = _pair(pairs, x)
    if isinstance(x, (bool, np.bool_)) or getattr(x, "is_truth", False):
        return value
    raise TypeError("&, | and ~ of integers that depend on query and key")


def _excerpt_key(table: BlockTable, a: Any, b: Any, x: Pair, y: Pair) -> np.ndarray | None:
    """Key of a table look-up: tiles that see equal excerpts of the table, through indices of equal shape, are equal.

    Excerpts of up to 62 cells are compared; larger ones are told apart by where they lie.
    """
    if not x.pairs.with_keys:
        return None
    height, width = (int((side.hi - side.lo).max(initial=0)) + 1 for side in (x, y))
    if height * width > 62 or not (isinstance(a, OneSide) and isinstance(b, OneSide)):
        return _combine(x.key, y.key)
    excerpt = np.zeros(len(x.lo), dtype=np.int64)
    for row, column in np.ndindex(height, width):
        excerpt = 2 * excerpt + table.contains(x.lo + row, y.lo + column)
    shapes = _combine(a.shape_and_base[0][a.box], b.shape_and_base[0][b.box])
    return _combine(shapes, np.unique(excerpt, return_inverse=True)[1].reshape(-1))


def _sum(sign: int) -> Rule:
    def rule(pairs: TilePairs, a: Any, b: Any) -> Pair:
        x, y = _pair(pairs, a), _pair(pairs, b)
        lo, hi = (x.lo + y.lo, x.hi + y.hi) if sign > 0 else (x.lo - y.hi, x.hi - y.lo)
        if pairs.with_keys and isinstance(a, OneSide) and isinstance(b, OneSide):
            (shape_a, base_a), (shape_b, base_b) = a.shape_and_base, b.shape_and_base
            # The two constants matter through their sum only: this is what makes a window's tiles equal everywhere.
            key = _combine(_combine(shape_a[a.box], shape_b[b.box]), base_a[a.box] + sign * base_b[b.box])
        else:
            key = _combine(x.key, y.key)
        return Pair(pairs, lo, hi, int(np.gcd(x.step, y.step)), key)

    return rule


_subtract = _sum(-1)


def _compare(decide: Callable[[Pair], tuple[np.ndarray, np.ndarray]]) -> Rule:
    def rule(pairs: TilePairs, a: Any, b: Any) -> Pair:
        difference = _subtract(pairs, a, b)
        always, never_not = decide(difference)
        return _boolean(pairs, always, never_not, difference.key)

    return rule


def _equal(d: Pair) -> tuple[np.ndarray, np.ndarray]:
    possible = (d.lo <= 0) & (d.hi >= 0) & (d.lo % d.step == 0 if d.step else d.lo == 0)
    return (d.lo == 0) & (d.hi == 0), possible


def _not_equal(d: Pair) -> tuple[np.ndarray, np.ndarray]:
    always, possible = _equal(d)
    return ~possible, ~always


def _remainder(pairs: TilePairs, a: Any, m: Any) -> Pair:
    x = _constant_operand(pairs, a, m)
    if x.step % m == 0:
        return Pair(pairs, x.lo % m, x.lo % m, 0, x.key)
    wraps = x.lo // m != x.hi // m
    return Pair(pairs, np.where(wraps, 0, x.lo % m), np.where(wraps, m - 1, x.hi % m), 1, x.key)


def _floor_divide(pairs: TilePairs, a: Any, m: Any) -> Pair:
    x = _constant_operand(pairs, a, m)
    return Pair(pairs, x.lo // m, x.hi // m, 1, x.key)


def _constant_operand(pairs: TilePairs, a: Any, m: Any) -> Pair:
    if isinstance(m, Symbolic) or m <= 0:
        raise TypeError("allows(): // and % of a value that depends on query and key need a positive constant")
    return _pair(pairs, a)


def _absolute(pairs: TilePairs, a: Any) -> Pair:
    x = _pair(pairs, a)
    lo = np.where((x.lo <= 0) & (x.hi >= 0), 0, np.minimum(np.abs(x.lo), np.abs(x.hi)))
    return Pair(pairs, lo, np.maximum(np.abs(x.lo), np.abs(x.hi)), 1, x.key)


def _extreme(pick: np.ufunc) -> Rule:
    def rule(pairs: TilePairs, a: Any, b: Any) -> Pair:
        x, y = _pair(pairs, a), _pair(pairs, b)
        return Pair(pairs, pick(x.lo, y.lo), pick(x.hi, y.hi), 1, _combine(x.key, y.key))

    return rule


def _logical(operation: np.ufunc) -> Rule:
    def rule(pairs: TilePairs, a: Any, b: Any) -> Pair:
        x, y = _truth(pairs, a), _truth(pairs, b)
        return _boolean(pairs, operation(x.lo, y.lo), operation(x.hi, y.hi), _combine(x.key, y.key))

    return rule


def _invert(pairs: TilePairs, a: Any) -> Pair:
    x = _truth(pairs, a)
    return _boolean(pairs, 1 - x.hi, 1 - x.lo, x.key)


def _followed(rule: Rule) -> Rule:
    """The rule's result, TypeError where its values grow out of what can be followed, or out of their dtype."""

    def checked(pairs: TilePairs, *operands: Any) -> Pair:
        result = rule(pairs, *operands)
        dtype = np.result_type(*(x.dtype if isinstance(x, Symbolic) else x for x in operands))
        _within_range(result.lo, result.hi, dtype)
        return replace(result, dtype=dtype)

    return checked


_RULES: dict[np.ufunc, Rule] = {
    np.add: _followed(_sum(1)),
    np.subtract: _followed(_subtract),
    np.negative: _followed(lambda pairs, a: _subtract(pairs, 0, a)),
    np.less_equal: _compare(lambda d: (d.hi <= 0, d.lo <= 0)),
    np.less: _compare(lambda d: (d.hi < 0, d.lo < 0)),
    np.greater_equal: _compare(lambda d: (d.lo >= 0, d.hi >= 0)),
    np.greater: _compare(lambda d: (d.lo > 0, d.hi > 0)),
    np.equal: _compare(_equal),
    np.not_equal: _compare(_not_equal),
    np.remainder: _followed(_remainder),
    np.floor_divide: _followed(_floor_divide),
    np.absolute: _followed(_absolute),
    np.minimum: _followed(_extreme(np.minimum)),
    np.maximum: _followed(_extreme(np.maximum)),
    np.bitwise_and: _logical(np.minimum),
    np.bitwise_or: _logical(np.maximum),
    np.logical_and: _logical(np.minimum),
    np.logical_or: _logical(np.maximum),
    np.invert: _invert,
    np.logical_not: _invert,
}
