"""Rules for NumPy functions that are not ufuncs, and for astype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .cells import evaluate
from .fractions import between, interval
from .symbols import NoRule, OneSide, Symbolic, is_truth, truth, within_range

__all__ = ["FUNCTIONS", "converted"]


def converted(x: Symbolic, dtype: Any) -> Symbolic:
    """Return ``x.astype(dtype)``: rounding and truncation are monotone, so the ends of the interval suffice."""
    dtype = np.dtype(dtype)
    if isinstance(x, OneSide):
        return x.map(lambda values: values.astype(dtype))
    lo, hi = interval(x.pairs, x)
    if dtype.kind not in "iuf":
        raise NoRule(f"conversion to {dtype} in an expression of query and key")
    known = np.isfinite(lo) & np.isfinite(hi)
    if dtype.kind in "iu":
        if not known.all():
            raise NoRule(f"conversion to {dtype} of possibly non-finite values in an expression of query and key")
        within_range(np.trunc(lo), np.trunc(hi), dtype)
    with np.errstate(all="ignore"):
        return between(x.pairs, lo.astype(dtype), hi.astype(dtype), known, (x,))


def _where(condition: Any, a: Any, b: Any) -> Symbolic:
    symbols = [x for x in (condition, a, b) if isinstance(x, Symbolic)]
    first = symbols[0]
    if isinstance(first, OneSide) and all(isinstance(x, OneSide) and x.box is first.box for x in symbols):
        choose: Any = np.where  # elementwise like a ufunc with three operands
        cells = evaluate(choose, tuple(x.cells if isinstance(x, OneSide) else x for x in (condition, a, b)))
        return OneSide(first.pairs, first.box, cells)
    if all(map(is_truth, (a, b))):
        return (condition & a) | (~condition & b)
    pairs = first.pairs
    chosen = truth(pairs, condition)
    (a_lo, a_hi), (b_lo, b_hi) = interval(pairs, a), interval(pairs, b)
    lo = np.where(chosen.lo > 0, a_lo, np.where(chosen.hi > 0, np.minimum(a_lo, b_lo), b_lo))
    hi = np.where(chosen.lo > 0, a_hi, np.where(chosen.hi > 0, np.maximum(a_hi, b_hi), b_hi))
    return between(pairs, lo, hi, np.isfinite(lo) & np.isfinite(hi), (chosen, a, b))


def _isin(element: Any, test_elements: Any, assume_unique: bool = False, invert: bool = False, **kind: Any) -> Any:
    found = element.member(np.unique(np.asarray(test_elements)))
    return ~found if invert else found


def _clip(a: Any, a_min: Any = None, a_max: Any = None, **ends: Any) -> Any:
    return a.clip(ends.get("min", a_min), ends.get("max", a_max))


FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {np.where: _where, np.isin: _isin, np.clip: _clip}
