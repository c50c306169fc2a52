"""Interval rules for integers that depend on query and key: bounds, a step and a key per tile.

A comparison counts as *always* or *never* true on a tile only if every cell agrees. A rule that cannot bound its result
raises NoRule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from .bits import bitwise, shifted
from .cells import MOST
from .fractions import FRACTIONS
from .labels import match_key, may_meet
from .residues import fewest, residue_key
from .symbols import (
    NoRule,
    OneSide,
    Pair,
    Symbolic,
    TilePairs,
    as_pair,
    boolean,
    combine,
    is_truth,
    truth,
    within_range,
)

Rule = Callable[..., Pair]  # called with the tile pairs and the ufunc's operands


def _sum(sign: int) -> Rule:
    def rule(pairs: TilePairs, a: Any, b: Any) -> Pair:
        x, y = as_pair(pairs, a), as_pair(pairs, b)
        lo, hi = (x.lo + y.lo, x.hi + y.hi) if sign > 0 else (x.lo - y.hi, x.hi - y.lo)
        if pairs.with_keys and isinstance(a, OneSide) and isinstance(b, OneSide):
            (shape_a, base_a), (shape_b, base_b) = a.integers.shape_and_base, b.integers.shape_and_base
            # The sum of the bases suffices: a sliding window then has the same key everywhere.
            key = combine(combine(shape_a[a.box], shape_b[b.box]), base_a[a.box] + sign * base_b[b.box])
        else:
            key = combine(x.key, y.key)
        return Pair(pairs, lo, hi, int(np.gcd(x.step, y.step)), key)

    return rule


_subtract = _sum(-1)


def _compare(decide: Callable[[Pair], tuple[np.ndarray, np.ndarray]]) -> Rule:
    def rule(pairs: TilePairs, a: Any, b: Any) -> Pair:
        difference = _subtract(pairs, a, b)
        always, never_not = decide(difference)
        return boolean(pairs, always, never_not, difference.key)

    return rule


def _equality(pairs: TilePairs, a: Any, b: Any) -> Pair:
    difference = _subtract(pairs, a, b)
    always, possible = _equal(difference)
    key = difference.key
    if isinstance(a, OneSide) and isinstance(b, OneSide):
        possible = possible & (always | may_meet(pairs, a, b, possible & ~always))
        key = fewest(key, match_key(pairs, a, b))
    return boolean(pairs, always, possible, key)


def _inequality(pairs: TilePairs, a: Any, b: Any) -> Pair:
    return _not(pairs, _equality(pairs, a, b))


def _equal(d: Pair) -> tuple[np.ndarray, np.ndarray]:
    possible = (d.lo <= 0) & (d.hi >= 0) & (d.lo % d.step == 0 if d.step else d.lo == 0)
    return (d.lo == 0) & (d.hi == 0), possible


def _not_equal(d: Pair) -> tuple[np.ndarray, np.ndarray]:
    always, possible = _equal(d)
    return ~possible, ~always


def _product(pairs: TilePairs, a: Any, b: Any) -> Pair:
    x, y = as_pair(pairs, a), as_pair(pairs, b)
    if _largest(x) * _largest(y) > MOST:
        raise NoRule(f"products beyond {MOST} in an expression of query and key")
    corners = np.stack([x.lo * y.lo, x.lo * y.hi, x.hi * y.lo, x.hi * y.hi])
    step, key = math.gcd(x.step, y.step), combine(x.key, y.key)
    return Pair(pairs, corners.min(axis=0), corners.max(axis=0), step, key)


def _power(pairs: TilePairs, a: Any, exponent: Any) -> Pair:
    x = as_pair(pairs, a)
    if not isinstance(exponent, (int, np.integer)) or not 0 <= exponent < MOST.bit_length():
        raise NoRule("** of a value that depends on query and key requires a constant exponent")
    if _largest(x) ** int(exponent) > MOST:
        raise NoRule(f"powers beyond {MOST} in an expression of query and key")
    base = _absolute(pairs, a) if exponent % 2 == 0 else x
    made_of = (np.multiply, (a, a)) if exponent == 2 else None
    return Pair(pairs, base.lo**exponent, base.hi**exponent, 1, x.key, made_of=made_of)


def _gcd(pairs: TilePairs, a: Any, b: Any) -> Pair:
    """Bound the gcd: gcd(a, b) divides a - b, and gcd(a, 0) = a.

    These bounds rarely decide a comparison, so gcd is also reported as an operation without a rule.
    """
    pairs.unfollowed.append("gcd of values that depend on query and key, except for its bounds")
    x, y, apart = _absolute(pairs, a), _absolute(pairs, b), _absolute(pairs, _subtract(pairs, a, b))
    hi = np.where((x.lo > 0) & (y.lo > 0), np.minimum(x.hi, y.hi), np.maximum(x.hi, y.hi))
    hi = np.where(apart.lo > 0, np.minimum(hi, apart.hi), hi)
    return Pair(pairs, np.minimum(np.maximum(x.lo, y.lo), 1), hi, 1, combine(x.key, y.key))


def _largest(x: Pair) -> int:
    """Return the maximum absolute value as a Python int, which cannot overflow."""
    return max(-int(x.lo.min(initial=0)), int(x.hi.max(initial=0)))


def _remainder(pairs: TilePairs, a: Any, m: Any) -> Pair:
    x = _constant_operand(pairs, a, m)
    key = residue_key(pairs, a, m)
    if x.step % m == 0:
        return Pair(pairs, x.lo % m, x.lo % m, 0, key)
    wraps = x.lo // m != x.hi // m
    return Pair(pairs, np.where(wraps, 0, x.lo % m), np.where(wraps, m - 1, x.hi % m), 1, key)


def _floor_divide(pairs: TilePairs, a: Any, m: Any) -> Pair:
    x = _constant_operand(pairs, a, m)
    return Pair(pairs, x.lo // m, x.hi // m, 1, x.key)


def _constant_operand(pairs: TilePairs, a: Any, m: Any) -> Pair:
    if not isinstance(m, (int, np.integer)) or m <= 0:
        raise NoRule("// and % of a value that depends on query and key require a positive constant")
    return as_pair(pairs, a)


def _absolute(pairs: TilePairs, a: Any) -> Pair:
    x = as_pair(pairs, a)
    lo = np.where((x.lo <= 0) & (x.hi >= 0), 0, np.minimum(np.abs(x.lo), np.abs(x.hi)))
    return Pair(pairs, lo, np.maximum(np.abs(x.lo), np.abs(x.hi)), 1, x.key)


def _extreme(pick: np.ufunc) -> Rule:
    def rule(pairs: TilePairs, a: Any, b: Any) -> Pair:
        x, y = as_pair(pairs, a), as_pair(pairs, b)
        return Pair(pairs, pick(x.lo, y.lo), pick(x.hi, y.hi), 1, combine(x.key, y.key))

    return rule


def _logical(operation: np.ufunc) -> Rule:
    def rule(pairs: TilePairs, a: Any, b: Any) -> Pair:
        x, y = truth(pairs, a), truth(pairs, b)
        return boolean(pairs, operation(x.lo, y.lo), operation(x.hi, y.hi), combine(x.key, y.key))

    return rule


def _not(pairs: TilePairs, a: Any) -> Pair:
    x = truth(pairs, a)
    return boolean(pairs, 1 - x.hi, 1 - x.lo, x.key)


def _followed(rule: Rule, ufunc: np.ufunc) -> Rule:
    """Wrap a rule: raise NoRule if values exceed MOST or overflow NumPy's result dtype."""

    def checked(pairs: TilePairs, *operands: Any) -> Pair:
        result = rule(pairs, *operands)
        dtype = np.result_type(*(x.dtype if isinstance(x, Symbolic) else x for x in operands))
        within_range(result.lo, result.hi, dtype)
        return replace(result, dtype=dtype, made_of=result.made_of or (ufunc, operands))

    return checked


_OF_TRUTHS: dict[np.ufunc, Rule] = {
    np.bitwise_and: _logical(np.minimum),
    np.bitwise_or: _logical(np.maximum),
    np.bitwise_xor: _compare(_not_equal),
    np.logical_and: _logical(np.minimum),
    np.logical_or: _logical(np.maximum),
    np.logical_xor: _compare(_not_equal),
    np.invert: _not,
    np.logical_not: _not,
}

_COMPARISONS: dict[np.ufunc, Rule] = {
    np.less_equal: _compare(lambda d: (d.hi <= 0, d.lo <= 0)),
    np.less: _compare(lambda d: (d.hi < 0, d.lo < 0)),
    np.greater_equal: _compare(lambda d: (d.lo >= 0, d.hi >= 0)),
    np.greater: _compare(lambda d: (d.lo > 0, d.hi > 0)),
    np.equal: _equality,
    np.not_equal: _inequality,
}

_ARITHMETIC: dict[np.ufunc, Rule] = {
    np.add: _sum(1),
    np.subtract: _subtract,
    np.multiply: _product,
    np.negative: lambda pairs, a: _subtract(pairs, 0, a),
    np.remainder: _remainder,
    np.floor_divide: _floor_divide,
    np.absolute: _absolute,
    np.minimum: _extreme(np.minimum),
    np.maximum: _extreme(np.maximum),
    np.square: lambda pairs, a: _power(pairs, a, 2),
    np.power: _power,
    np.gcd: _gcd,
    np.invert: lambda pairs, a: _subtract(pairs, -1, a),
    np.left_shift: lambda pairs, a, by: _product(pairs, a, shifted(by)),
    np.right_shift: lambda pairs, a, by: _floor_divide(pairs, a, shifted(by)),
    **{ufunc: partial(bitwise, ufunc) for ufunc in (np.bitwise_and, np.bitwise_or, np.bitwise_xor)},
}

_OF_INTEGERS = _COMPARISONS | {ufunc: _followed(rule, ufunc) for ufunc, rule in _ARITHMETIC.items()}


def rule_of(ufunc: np.ufunc, operands: tuple[Any, ...]) -> Rule:
    """Return the rule of a ufunc for these operands; raise NoRule if it has none."""
    if ufunc in _OF_TRUTHS and all(map(is_truth, operands)):
        return _OF_TRUTHS[ufunc]
    if ufunc in _OF_INTEGERS and all(map(_is_integer, operands)):
        return _OF_INTEGERS[ufunc]
    if ufunc in FRACTIONS:
        return FRACTIONS[ufunc]
    raise NoRule(f"{ufunc.__name__} in an expression of query and key")


def _is_integer(x: Any) -> bool:
    return isinstance(x, int) or np.dtype(getattr(x, "dtype", object)).kind in "biu"
