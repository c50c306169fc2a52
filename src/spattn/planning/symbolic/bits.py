"""Rules for bitwise operations on integers that depend on query and key.

If lo and hi agree above bit b, the bits above b are constant on the tile, and so are those of the result.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .residues import fewest, residue_key
from .symbols import NoRule, Pair, TilePairs, as_pair, combine

__all__ = ["bitwise", "shifted"]

_MOST_SHIFT = 61


def bitwise(ufunc: np.ufunc, pairs: TilePairs, a: Any, b: Any) -> Pair:
    """Apply ``&``, ``|`` or ``^`` to integers."""
    x, y = as_pair(pairs, a), as_pair(pairs, b)
    differ = (x.lo ^ x.hi) | (y.lo ^ y.hi)
    low = _ones(differ)
    head = ufunc(x.lo, y.lo) & ~low
    # If an interval has both signs, its ends bound only the number of bits.
    most = _ones(np.maximum.reduce([np.abs(end) for end in (x.lo, x.hi, y.lo, y.hi)]))
    lo, hi = np.where(differ < 0, ~most, head), np.where(differ < 0, most, head + low)
    if ufunc is np.bitwise_and:
        for side in (x, y):
            lo, hi = np.where(side.lo >= 0, np.maximum(lo, 0), lo), np.where(side.lo >= 0, np.minimum(hi, side.hi), hi)
    return Pair(pairs, lo, hi, 1, _key(pairs, ufunc, (a, b), (x, y), differ))


def _key(
    pairs: TilePairs, ufunc: np.ufunc, operands: tuple[Any, Any], sides: tuple[Pair, Pair], differ: np.ndarray
) -> np.ndarray | None:
    """Return a key from the low bits that vary and the result of the operation on the constant bits above them."""
    x, y = sides
    found = [combine(x.key, y.key)]
    if not pairs.with_keys:
        return None
    if not (differ < 0).any():
        modulus = int(_ones(differ).max(initial=0)) + 1
        of_low_bits = combine(*(residue_key(pairs, operand, modulus) for operand in operands))
        found.append(combine(of_low_bits, ufunc(x.lo // modulus, y.lo // modulus)))
    for operand, mask in (operands, operands[::-1]):
        if ufunc is np.bitwise_and and isinstance(mask, (int, np.integer)) and mask >= 0:
            found.append(residue_key(pairs, operand, 1 << int(mask).bit_length()))
    return fewest(*found)


def _ones(numbers: np.ndarray) -> np.ndarray:
    """Return, for each number, a mask of all bits up to its highest set bit; rounding may add one bit."""
    return (np.int64(1) << np.frexp(np.maximum(numbers, 0).astype(float))[1].astype(np.int64)) - 1


def shifted(by: Any) -> int:
    """Return the power of two that a constant shift multiplies or divides by; raise NoRule for any other shift."""
    if not isinstance(by, (int, np.integer)) or not 0 <= by <= _MOST_SHIFT:
        raise NoRule("<< and >> of a value that depends on query and key require a constant shift >= 0")
    return 1 << int(by)
