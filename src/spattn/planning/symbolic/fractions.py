"""Interval rules for floating-point values that depend on query and key.

A function that is monotone in each operand is evaluated at the ends of the operands' intervals: rounding is monotone,
so NumPy's result in every cell lies in between. If an operand or the result may be NaN or infinite, the interval is
unbounded, and comparisons with it are undecided.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .cells import MOST
from .symbols import NoRule, OneSide, Pair, Symbolic, TilePairs, Unfollowed, boolean, cell_key, combine, within_range

__all__ = ["FRACTIONS", "between", "interval", "summed"]

Interval = tuple[Any, Any]  # (lo, hi), scalars or (pairs,) arrays in the operand's dtype
Rule = Callable[..., Pair]

_ULPS = 8  # NumPy guarantees 4 ULP for functions that are not correctly rounded
_FLOATS = (np.float16, np.float32, np.float64)


def interval(pairs: TilePairs, x: Any) -> Interval:
    """Return an operand's interval in its own dtype, non-finite where unknown; raise NoRule if it has none."""
    if not isinstance(x, Symbolic):
        if not (abs(x) <= MOST if isinstance(x, int) else np.isfinite(x)):
            raise NoRule(f"the number {x} in an expression of query and key")
        return x, x
    if isinstance(x, Unfollowed):
        raise NoRule(pairs.unfollowed[-1])
    if x.dtype not in _FLOATS and not np.can_cast(x.dtype, np.int64):
        raise NoRule(f"{x.dtype} values in an expression of query and key")
    ends = (end[x.box] for end in x.cells.bounds) if isinstance(x, OneSide) else (x.lo, x.hi)  # type: ignore[attr-defined]
    lo, hi = (end.astype(x.dtype) for end in ends)
    return lo, hi


def between(pairs: TilePairs, lo: Any, hi: Any, known: Any, operands: tuple[Any, ...]) -> Pair:
    """Return a value with the interval [lo, hi], unbounded where not `known`. lo has NumPy's result dtype."""
    lo, hi, known = np.broadcast_arrays(lo, hi, known)
    key = functools.reduce(combine, (cell_key(x) for x in operands if isinstance(x, Symbolic)))
    key = key if pairs.with_keys else None
    if lo.dtype == bool:
        return boolean(pairs, lo & known, hi | ~known, key)
    if lo.dtype.kind in "iu":
        whole = within_range(lo.astype(np.int64), hi.astype(np.int64), lo.dtype)
        return Pair(pairs, *whole, 1, key, lo.dtype)
    least, most = np.where(known, lo, -np.inf), np.where(known, hi, np.inf)
    return Pair(pairs, least.astype(float), most.astype(float), 1, key, lo.dtype)


def summed(pairs: TilePairs, terms: Sequence[Any]) -> Pair:
    """Add floats of one dtype in any order, with any rounding of the partial sums."""
    ends = [interval(pairs, x) for x in terms]
    dtype = np.result_type(*(x.dtype for x in terms))
    with np.errstate(all="ignore"):
        lo, hi = (functools.reduce(np.add, (np.asarray(x, float) for x in side)) for side in zip(*ends, strict=True))
        sizes = (np.maximum(*np.abs(np.array(np.broadcast_arrays(*own), float))) for own in ends)
        error = 2 * len(terms) * float(np.finfo(dtype).eps) * functools.reduce(np.add, sizes)
        lo, hi = (lo - error).astype(dtype), (hi + error).astype(dtype)
    return between(pairs, lo, hi, _finite(lo, hi), tuple(terms))


def _finite(*values: Any) -> Any:
    return functools.reduce(np.logical_and, map(np.isfinite, values))


def _everywhere(*operands: Interval) -> Any:
    return True


def _monotone(ufunc: np.ufunc, where: Callable[..., Any] = _everywhere, ulps: int = 0) -> Rule:
    """Return the rule of a function that, where `where` is true, is monotone in each operand up to `ulps` ULP."""

    def rule(pairs: TilePairs, *operands: Any) -> Pair:
        ends = [interval(pairs, x) for x in operands]
        with np.errstate(all="ignore"):
            corners = np.stack([ufunc(*corner) for corner in itertools.product(*ends)])
            lo, hi = corners.min(axis=0), corners.max(axis=0)
            if ulps:
                lo, hi = lo - ulps * np.spacing(np.abs(lo)), hi + ulps * np.spacing(np.abs(hi))
            known = _finite(lo, hi, *itertools.chain(*ends)) & where(*ends)
        return between(pairs, lo, hi, known, operands)

    return rule


def _even(rule: Rule) -> Rule:
    """Extend a rule for monotone functions to a function with its minimum 0 at 0, monotone on either side."""

    def turned(pairs: TilePairs, a: Any, *more: Any) -> Pair:
        found, (lo, hi) = rule(pairs, a, *more), interval(pairs, a)
        with np.errstate(invalid="ignore"):
            least = np.where((lo <= 0) & (hi >= 0), np.minimum(found.lo, 0), found.lo)
        return Pair(pairs, least, found.hi, 1, found.key, found.dtype)

    return turned


def _power(pairs: TilePairs, a: Any, exponent: Any) -> Pair:
    if not isinstance(exponent, Symbolic) and exponent == 2:
        return _SQUARE(pairs, a, exponent)
    return _OF_POSITIVE(pairs, a, exponent)


_SQUARE = _even(_monotone(np.power, ulps=_ULPS))
_OF_POSITIVE = _monotone(np.power, lambda base, exponent: base[0] > 0, ulps=_ULPS)


def _equal(pairs: TilePairs, a: Any, b: Any) -> Pair:
    (a_lo, a_hi), (b_lo, b_hi) = interval(pairs, a), interval(pairs, b)
    same = (a_lo == a_hi) & (b_lo == b_hi) & (a_lo == b_lo)
    return between(pairs, same, (a_lo <= b_hi) & (b_lo <= a_hi), _finite(a_lo, a_hi, b_lo, b_hi), (a, b))


def _not_equal(pairs: TilePairs, a: Any, b: Any) -> Pair:
    found = _equal(pairs, a, b)
    return boolean(pairs, 1 - found.hi, 1 - found.lo, found.key)


_MONOTONE = (np.add, np.subtract, np.multiply, np.negative, np.positive, np.minimum, np.maximum, np.sign)
_ROUNDED = (np.floor, np.ceil, np.trunc, np.rint)
_COMPARISONS = (np.less, np.less_equal, np.greater, np.greater_equal)
_NEARLY_ROUNDED = (np.sqrt, np.exp, np.exp2, np.expm1, np.log, np.log2, np.log10, np.log1p, np.cbrt, np.arctan, np.tanh)

FRACTIONS: dict[np.ufunc, Rule] = {
    **{ufunc: _monotone(ufunc) for ufunc in _MONOTONE + _ROUNDED + _COMPARISONS},
    **{ufunc: _monotone(ufunc, ulps=_ULPS) for ufunc in _NEARLY_ROUNDED},
    np.divide: _monotone(np.divide, lambda a, b: (np.minimum(*b) > 0) | (np.maximum(*b) < 0)),
    np.absolute: _even(_monotone(np.absolute)),
    np.square: _even(_monotone(np.square)),
    np.power: _power,
    np.equal: _equal,
    np.not_equal: _not_equal,
}
