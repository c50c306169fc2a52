"""Checks of what index sets are made of: lengths, integers, affine runs and CSR rows. Nothing here costs O(pairs)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .ragged import ramp

__all__ = [
    "LONGEST",
    "check_csr",
    "check_disjoint",
    "check_lengths",
    "check_runs",
    "integer_array",
    "plain_array",
    "q_offset",
]

LONGEST = 2**31 - 1  # tokens of a sequence: plans and kernels hold positions as int32


def check_lengths(q_len: int, kv_len: int) -> tuple[int, int]:
    """Both as Python integers, which do not wrap; ValueError unless they are integers in ``[0, LONGEST]``."""
    for what, length in (("q_len", q_len), ("kv_len", kv_len)):
        integer = isinstance(length, (int, np.integer)) and not isinstance(length, bool)
        if not integer or not 0 <= length <= LONGEST:
            raise ValueError(f"{what}: expected an integer in [0, {LONGEST}], got {length!r}")
    return int(q_len), int(kv_len)


def q_offset(q_len: int, kv_len: int) -> int:
    """Position of the first query: the last query stands beside the last key, as in a cache of keys that grows."""
    return kv_len - q_len


def plain_array(name: str, value: Any) -> np.ndarray:
    """`value` as NumPy sees it; TypeError for a masked array, whose mask NumPy would drop without a word."""
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name}: expected a plain array, got a masked one; make it plain, as by .filled(False)")
    return np.asarray(value)


def integer_array(name: str, value: Any, dtype: npt.DTypeLike = np.int64) -> np.ndarray:
    """`value` as an array of `dtype`; TypeError unless it holds integers, ValueError unless `dtype` can hold them."""
    array = plain_array(name, value)
    if array.dtype.kind not in "iu":
        # Of a list with integers beyond int64 NumPy makes floats, and of an empty one too.
        exact = array if isinstance(value, np.ndarray) else np.asarray(value, dtype=object)
        if exact.dtype != object or not all(isinstance(x, int) and not isinstance(x, bool) for x in exact.flat):
            raise TypeError(f"{name}: expected an array of integers, got one of {array.dtype}")
        array = exact
    if not np.can_cast(array.dtype, dtype) and array.size:
        limits = np.iinfo(dtype)
        for number in (array.min(), array.max()):
            if not limits.min <= number <= limits.max:
                raise ValueError(f"{name}: expected integers in [{limits.min}, {limits.max}], got {number}")
    return array.astype(dtype, copy=False)


def check_csr(indptr: np.ndarray, indices: np.ndarray, kv_len: int) -> None:
    """ValueError unless rows are sorted, without repeats and inside of ``[0, kv_len)``."""
    if indices.ndim != 1:
        raise ValueError(f"indices: expected one axis, got shape {indices.shape}")
    rising = indptr.ndim == 1 and len(indptr) > 0 and (indptr[1:] >= indptr[:-1]).all()
    if not rising or indptr[0] != 0 or indptr[-1] != len(indices):
        raise ValueError(f"indptr: expected a rising array from 0 to {len(indices)} (the number of indices)")
    if len(indices) and (indices.min() < 0 or indices.max() >= kv_len):
        raise ValueError(f"indices: expected keys in [0, {kv_len}), got {indices.min()} to {indices.max()}")
    rises = indices[1:] > indices[:-1]
    rises[indptr[1:-1][(indptr[1:-1] > 0) & (indptr[1:-1] < len(indices))] - 1] = True
    if not rises.all():
        raise ValueError("indices: expected each row sorted and without repeats")


def check_runs(start: np.ndarray, step: np.ndarray, count: np.ndarray, kv_len: int) -> None:
    """ValueError unless these int64 arrays are runs of keys in ``[0, kv_len)``; absent ones may have any start."""
    for name, array in (("start", start), ("step", step), ("count", count)):
        if array.ndim != 2 or array.shape != start.shape:
            expected = start.shape if start.ndim == 2 else "(rows, runs)"
            raise ValueError(f"{name}: expected shape {expected}, got {array.shape}")
    if count.min(initial=0) < 0:
        raise ValueError(f"count: expected numbers >= 0, got {count.min()}")
    outside = (count > 0) & ((start < 0) | (start >= kv_len))
    if outside.any():
        raise ValueError(f"start: expected keys in [0, {kv_len}), got {start[outside][0]}")
    still = (count > 1) & (step < 1)  # the step of a single key means nothing
    if still.any():
        raise ValueError(f"step: expected numbers >= 1, got {step[still][0]}")
    # Divided, because start + step · (count - 1) may wrap.
    beyond = (count > 1) & (count - 1 > (kv_len - 1 - start) // np.maximum(step, 1))
    if beyond.any():
        first, by, keys = (array[beyond][0] for array in (start, step, count))
        raise ValueError(f"count: expected keys in [0, {kv_len}), got {keys} from {first} in steps of {by}")


def check_disjoint(indptr: np.ndarray, start: np.ndarray, step: np.ndarray, count: np.ndarray) -> None:
    """ValueError if a row (or a class of rows) has a key in two runs, which are sorted by start."""
    last = start + step * (count - 1)
    row = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    a, lag = np.arange(len(start)), 0
    # A run that ends before the n-th run after it starts also ends before all later ones: it is done.
    while len(a):
        lag += 1
        a = a[a + lag < len(start)]
        a = a[(row[a] == row[a + lag]) & (last[a] >= start[a + lag])]
        _check_pairs(a, a + lag, start, step, count, last)


def _check_pairs(
    a: np.ndarray, b: np.ndarray, start: np.ndarray, step: np.ndarray, count: np.ndarray, last: np.ndarray
) -> None:
    """ValueError if run ``a[i]`` shares a key with run ``b[i]``: the keys of the shorter one decide."""
    meet = (start[b] - start[a]) % np.gcd(step[a], step[b]) == 0
    a, b = a[meet], b[meet]
    few, many = np.where(count[a] < count[b], (a, b), (b, a))
    lengths = count[few]
    place = ramp(lengths)
    few, many = np.repeat(few, lengths), np.repeat(many, lengths)
    key = start[few] + step[few] * place
    if ((key >= start[many]) & (key <= last[many]) & ((key - start[many]) % step[many] == 0)).any():
        raise ValueError("runs: expected each key of a row once, got two runs that share one")
