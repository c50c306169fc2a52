"""A predicate evaluated on whole tiles at once.

``pattern.allows(q, k)`` is called with symbolic positions. What depends on one side only is known in every cell of that
side, each kind of box stored once (``cells.py``); where both sides meet, two things are tracked for every tile pair:

- an interval ``[lo, hi]`` (with a step: every value is ``lo`` modulo ``step``), so that a comparison can be *never* or
  *always* true on a tile, and
- a key, such that tile pairs with equal keys have equal values in every cell; a translation-invariant predicate has a
  handful of keys at any length. Only one tile pair of each key is ever evaluated cell by cell.

Where no rule gives an interval, the key alone is followed, and what is compared with such a value is undecided. Where
a predicate cannot be called with symbols at all, it is undecided as a whole. In both cases what it is joined with, a
window for example, still says on which tiles it matters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
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
_TRIED = 64  # positions of either side on which a predicate shows whether it is at fault itself


class NoRule(TypeError):
    """No interval describes the result of an operation."""


class Rules(NamedTuple):
    """How symbols follow NumPy. The rules are themselves made of symbols, so that :class:`TilePairs` carries them."""

    of_ufunc: Callable[[np.ufunc, tuple[Any, ...]], Callable[..., Any]]
    of_function: Mapping[Callable[..., Any], Callable[..., Any]]
    converted: Callable[..., Any]
    looked_up: Callable[..., Any]


@dataclass(frozen=True, eq=False)
class TilePairs:
    """The tile pairs under consideration: pair n joins query box ``query_box[n]`` and key box ``key_box[n]``."""

    query: Cells
    key: Cells
    query_box: np.ndarray
    key_box: np.ndarray
    with_keys: bool
    rules: Rules
    unfollowed: list[str] = field(default_factory=list)
    """What the predicates that were evaluated did that no rule follows, in words."""

    def evaluate(self, pattern: Pattern) -> Pair:
        """The predicate on these pairs; TypeError where it does not return truth values."""
        q = OneSide(self, self.query_box, self.query)
        k = OneSide(self, self.key_box, self.key)
        return truth(self, allowed(pattern, q, k))


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
        """As an array's method."""
        found: Symbolic = self.pairs.rules.converted(self, dtype)
        return found

    def leave_open(self, pattern: Pattern, k: Any, error: Exception) -> Pair:
        """`pattern`, whose predicate raised `error` for this query and the key `k`, undecided on every tile.

        A predicate that raises it for positions too, of which a few are tried, is itself at fault.
        """
        if not isinstance(self, OneSide) or not isinstance(k, OneSide):
            raise error
        tried = (side.cells.take(np.arange(1)).values[:, :_TRIED] for side in (self, k))
        allowed(pattern, *(x.reshape(shape) for x, shape in zip(tried, ((1, -1, 1), (1, 1, -1)), strict=True)))
        self.pairs.unfollowed.append(str(error))
        return undecided(self.pairs, np.arange(len(self.pairs.query_box)) if self.pairs.with_keys else None)

    def clip(self, min: Any = None, max: Any = None, out: None = None) -> Any:
        """As an array's method, which np.clip() calls too."""
        at_least: Any = self  # which NumPy's types do not know
        at_least = at_least if min is None else np.maximum(at_least, min)
        return at_least if max is None else np.minimum(at_least, max)

    def contains(self, table: BlockTable, a: Any, b: Any) -> Symbolic:
        """Two-sided look-up in a BlockTable."""
        found: Symbolic = self.pairs.rules.looked_up(self.pairs, table, a, b)
        return found

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
    cells: Cells

    @property
    def dtype(self) -> np.dtype:  # type: ignore[override]
        return self.cells.dtype

    def map(self, function: Callable[[np.ndarray], np.ndarray]) -> OneSide:
        """`function` of every cell."""
        return OneSide(self.pairs, self.box, self.cells.map(function))

    def member(self, table: np.ndarray) -> OneSide:
        """Whether each cell is in the sorted `table`."""
        if np.can_cast(self.dtype, np.int64):
            return OneSide(self.pairs, self.box, self.cells.member(table))
        return self.map(lambda x: np.isin(x, table))

    def rank(self, table: np.ndarray) -> OneSide | Pair:
        """How many numbers of the sorted `table` each cell has reached: of intervals their ends alone are looked up."""
        if self.pairs.with_keys:
            return OneSide(self.pairs, self.box, self.integers.rank(table))
        return as_pair(self.pairs, self).rank(table)

    @cached_property
    def integers(self) -> Cells:
        """The values as int64; NoRule for fractions, for which steps and shapes mean nothing, and for uint64."""
        cells = self.cells
        if not np.can_cast(cells.dtype, np.int64):
            raise NoRule(f"{cells.dtype} values where query and key meet")
        return Cells(cells.table.astype(np.int64, copy=False), cells.kind, cells.base)

    @cached_property
    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Smallest and largest value of each box."""
        return within_range(*self.integers.bounds)


@dataclass(frozen=True, eq=False, repr=False)
class Pair(Symbolic):
    """A value that depends on both sides: known as an interval and a key for every tile pair. The ends of fractions are
    float64, not finite where they are unknown."""

    pairs: TilePairs
    lo: np.ndarray
    hi: np.ndarray
    step: int
    key: np.ndarray | None
    dtype: np.dtype = _INT64
    made_of: tuple[np.ufunc, tuple[Any, ...]] | None = None
    """The operation and its operands: remainders of some results depend on those of the operands alone."""

    def map(self, function: Callable[[np.ndarray], np.ndarray]) -> NoReturn:
        raise TypeError("apply(): expected positions of one side, got a value that depends on query and key")

    def member(self, table: np.ndarray) -> Pair:
        """Whether each cell is in the sorted `table`: decided by how many members the interval holds."""
        inside = np.searchsorted(table, self.hi, side="right") - np.searchsorted(table, self.lo, side="left")
        if self.dtype.kind == "f":  # between two members lie fractions that are none
            return boolean(self.pairs, np.zeros(len(inside)), inside > 0, self.key)
        return boolean(self.pairs, inside == self.hi - self.lo + 1, inside > 0, self.key)

    def rank(self, table: np.ndarray) -> Pair:
        """How many numbers of the sorted `table` each cell has reached."""
        lo, hi = (np.searchsorted(table, bound, side="right") for bound in (self.lo, self.hi))
        return Pair(self.pairs, lo, hi, 1, self.key)


@dataclass(frozen=True, eq=False, repr=False)
class Unfollowed(Symbolic):
    """A value that depends on both sides, of which no interval is known: a key for every tile pair."""

    pairs: TilePairs
    key: np.ndarray | None
    dtype: np.dtype

    map = Pair.map

    def member(self, table: np.ndarray) -> Pair:
        """Whether each cell is in the sorted `table`: undecided."""
        return undecided(self.pairs, self.key)


def within_range(lo: np.ndarray, hi: np.ndarray, dtype: np.dtype = _INT64) -> tuple[np.ndarray, np.ndarray]:
    """Both bounds; NoRule where one is so large that later sums might wrap, or that NumPy's result has wrapped."""
    least, most = -MOST, MOST
    if dtype.kind in "biu":
        own = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        least, most = max(least, own[0]), min(most, own[1])
    if lo.min(initial=0) < least or hi.max(initial=0) > most:
        raise NoRule(f"values beyond {least} and {most} where query and key meet")
    return lo, hi


def combine(a: np.ndarray | None, b: np.ndarray | None) -> np.ndarray | None:
    """A key that is equal where both keys are."""
    if a is None or b is None:
        return None
    if _width(a) * _width(b) > MOST:  # the pair would wrap: both by their ranks instead
        a, b = distinct(a)[1], distinct(b)[1]
    return (a - a.min(initial=0)) * _width(b) + (b - b.min(initial=0))


def _width(key: np.ndarray) -> int:
    """How many numbers lie from the least of a key, or 0, to its greatest, as a Python integer, which does not wrap."""
    return int(key.max(initial=0)) - int(key.min(initial=0)) + 1


def as_pair(pairs: TilePairs, x: Any) -> Pair:
    """Any operand as a Pair of int64; NoRule where it is none."""
    value = _operand(pairs, x)
    return value if value.lo.dtype == _INT64 else replace(value, lo=value.lo.astype(_INT64), hi=value.hi.astype(_INT64))


def _operand(pairs: TilePairs, x: Any) -> Pair:
    """Any operand as a Pair of integers, a truth value as one of int8; NoRule where it is none."""
    if isinstance(x, Pair):
        if x.dtype.kind == "f":
            raise NoRule(f"{x.dtype} values where query and key meet")
        return x
    if isinstance(x, Unfollowed):
        raise NoRule(pairs.unfollowed[-1])
    count = len(pairs.query_box)
    if not isinstance(x, OneSide):
        if not abs(x) <= MOST or int(x) != x:
            raise NoRule(f"the number {x} where query and key meet")
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
    """A truth value; tiles on which it is decided share two keys."""
    lo, hi = always.astype(np.int8, copy=False), never_not.astype(np.int8, copy=False)
    if key is not None:
        key = np.where(lo == hi, lo, key + 2)
    return Pair(pairs, lo, hi, 1, key, _BOOL)


def undecided(pairs: TilePairs, key: np.ndarray | None) -> Pair:
    """A truth value that may be either on every tile."""
    count = len(pairs.query_box)
    return boolean(pairs, np.zeros(count), np.ones(count), key)


def _unfollowed(pairs: TilePairs, ufunc: np.ufunc, operands: tuple[Any, ...], reason: NoRule) -> Pair | Unfollowed:
    """What is known of any ufunc's result: it is equal where all operands are."""
    pairs.unfollowed.append(str(reason))
    key = None
    if pairs.with_keys:
        key = functools.reduce(combine, (cell_key(x) for x in operands if isinstance(x, Symbolic)))
    with np.errstate(all="ignore"):
        dtype = ufunc(*(np.ones(1, x.dtype) if isinstance(x, Symbolic) else x for x in operands)).dtype
    return undecided(pairs, key) if dtype == _BOOL else Unfollowed(pairs, key, dtype)


def cell_key(x: Any) -> np.ndarray | None:
    """A key of tile pairs on which `x` is the same in every cell."""
    return combine(*(of_box[x.box] for of_box in x.cells.shape_and_base)) if isinstance(x, OneSide) else x.key


def is_truth(x: Any) -> bool:
    """Whether an operand is a truth value."""
    return isinstance(x, (bool, np.bool_)) or bool(getattr(x, "is_truth", False))


def truth(pairs: TilePairs, x: Any) -> Pair:
    """A truth value as a Pair; NoRule for integers, whose bits intervals do not describe."""
    value = _operand(pairs, x)
    if is_truth(x):
        return value
    raise NoRule("&, | and ~ of integers that depend on query and key")
