"""Congruences: the remainder of a sum or product depends only on its operands' remainders."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from .cells import distinct, evaluate
from .symbols import OneSide, Pair, Symbolic, TilePairs, combine

__all__ = ["fewest", "residue_key"]

_OF_REMAINDERS = {np.add, np.subtract, np.negative, np.multiply}
_OF_LOW_BITS = {np.bitwise_and, np.bitwise_or, np.bitwise_xor}  # only modulo powers of two


def residue_key(pairs: TilePairs, x: Any, modulus: int) -> np.ndarray | None:
    """Return a key: tile pairs with equal keys have values of `x` congruent modulo `modulus` in every cell."""
    if not pairs.with_keys:
        return None
    if not isinstance(x, Symbolic):
        return np.zeros(len(pairs.query_box), np.int64)
    if isinstance(x, OneSide):
        return combine(*(of_box[x.box] for of_box in _remainders(x, modulus).shape_and_base))
    if not isinstance(x, Pair) or x.made_of is None:
        return getattr(x, "key", None)
    ufunc, operands = x.made_of
    if ufunc not in _OF_REMAINDERS and (ufunc not in _OF_LOW_BITS or modulus & (modulus - 1)):
        return x.key
    of_operands = functools.reduce(combine, (residue_key(pairs, y, modulus) for y in operands))
    if ufunc in (np.add, np.subtract) and all(isinstance(y, OneSide) for y in operands):
        return fewest(x.key, of_operands, _of_sum(ufunc, operands, modulus))
    return fewest(x.key, of_operands)


def fewest(*keys: np.ndarray | None) -> np.ndarray | None:
    """Return the key with the fewest distinct values."""
    there = [key for key in keys if key is not None]
    return min(there, key=lambda key: len(distinct(key)[0]), default=None)


def _of_sum(ufunc: np.ufunc, operands: tuple[Any, ...], modulus: int) -> np.ndarray | None:
    """Return the key of a sum or difference: its remainders depend on the boxes' shapes and the sum of their bases."""
    a, b = operands
    (shape_a, base_a), (shape_b, base_b) = a.integers.shape_and_base, b.integers.shape_and_base
    return combine(combine(shape_a[a.box], shape_b[b.box]), ufunc(base_a[a.box], base_b[b.box]) % modulus)


def _remainders(x: OneSide, modulus: int) -> Any:
    return evaluate(np.remainder, (x.integers, modulus))
