"""Validate lengths, integer arrays, affine runs and CSR rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .ragged import ramp

if TYPE_CHECKING:
    import numpy.typing as npt

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

LONGEST = 2**31 - 1  # maximum length of a sequence: plans and kernels store positions as int32


def check_lengths(q_len: int, kv_len: int) -> tuple[int, int]:
    """Return both as Python ints; raise ValueError unless they are integers in ``[0, LONGEST]``."""
    for what, length in (("q_len", q_len), ("kv_len", kv_len)):
        integer = isinstance(length, (int, np.integer)) and not isinstance(length, bool)
        if not integer or not 0 <= length <= LONGEST:
            raise ValueError(f"{what}: expected an integer in [0, {LONGEST}], got {length!r}")
    return int(q_len), int(kv_len)


def q_offset(q_len: int, kv_len: int) -> int:
    """Return the position of the first query: queries are aligned with the last keys, as in a KV cache."""
    return kv_len - q_len


def plain_array(name: str, value: Any) -> np.ndarray:
    """Return ``np.asarray(value)``; raise TypeError for a masked array, whose mask would be dropped silently."""
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name}: expected a plain array, got a masked array; use .filled(False)")
    return np.asarray(value)


def integer_array(name: str, value: Any, dtype: npt.DTypeLike = np.int64) -> np.ndarray:
    """Convert `value` to `dtype`; raise TypeError unless it holds integers, ValueError if one is out of range."""
    if type(value) is np.ndarray and value.dtype == dtype:  # the usual case
        return value
    array = plain_array(name, value)
    if array.dtype.kind not in "iu":
        # NumPy converts an empty list, and a list with integers beyond int64, to floats.
        exact = array if isinstance(value, np.ndarray) else np.asarray(value, dtype=object)
        if exact.dtype != object or not all(isinstance(x, int) and not isinstance(x, bool) for x in exact.flat):
            raise TypeError(f"{name}: expected an array of integers, got {array.dtype}")
        array = exact
    if not np.can_cast(array.dtype, dtype) and array.size:
        limits = np.iinfo(dtype)
        for number in (array.min(), array.max()):
            if not limits.min <= number <= limits.max:
                raise ValueError(f"{name}: expected integers in [{limits.min}, {limits.max}], got {number}")
    return array.astype(dtype, copy=False)


def check_csr(indptr: np.ndarray, indices: np.ndarray, kv_len: int) -> None:
    """Raise ValueError unless each row is sorted, free of duplicates and within ``[0, kv_len)``."""
    if indices.ndim != 1:
        raise ValueError(f"indices: expected a 1-D array, got shape {indices.shape}")
    rising = indptr.ndim == 1 and len(indptr) > 0 and (indptr[1:] >= indptr[:-1]).all()
    if not rising or indptr[0] != 0 or indptr[-1] != len(indices):
        raise ValueError(f"indptr: expected a non-decreasing array from 0 to {len(indices)} (the number of indices)")
    if len(indices) and (indices.min() < 0 or indices.max() >= kv_len):
        raise ValueError(f"indices: expected keys in [0, {kv_len}), got {indices.min()} to {indices.max()}")
    rises = indices[1:] > indices[:-1]
    rises[indptr[1:-1][(indptr[1:-1] > 0) & (indptr[1:-1] < len(indices))] - 1] = True
    if not rises.all():
        raise ValueError("indices: expected sorted rows without duplicates")


def check_runs(start: np.ndarray, step: np.ndarray, count: np.ndarray, kv_len: int) -> None:
    """Raise ValueError unless the int64 arrays are runs of keys in ``[0, kv_len)``; empty runs may start anywhere."""
    for name, array in (("start", start), ("step", step), ("count", count)):
        if array.ndim != 2 or array.shape != start.shape:
            expected = start.shape if start.ndim == 2 else "(rows, runs)"
            raise ValueError(f"{name}: expected shape {expected}, got {array.shape}")
    if count.min(initial=0) < 0:
        raise ValueError(f"count: expected numbers >= 0, got {count.min()}")
    outside = (count > 0) & ((start < 0) | (start >= kv_len))
    if outside.any():
        raise ValueError(f"start: expected keys in [0, {kv_len}), got {start[outside][0]}")
    still = (count > 1) & (step < 1)  # the step of a single key is unused
    if still.any():
        raise ValueError(f"step: expected numbers >= 1, got {step[still][0]}")
    # Division avoids the int64 overflow of start + step · (count - 1).
    beyond = (count > 1) & (count - 1 > (kv_len - 1 - start) // np.maximum(step, 1))
    if beyond.any():
        first, by, keys = (array[beyond][0] for array in (start, step, count))
        raise ValueError(f"count: expected keys in [0, {kv_len}), got {keys} keys from {first} in steps of {by}")


def check_disjoint(indptr: np.ndarray, start: np.ndarray, step: np.ndarray, count: np.ndarray) -> None:
    """Raise ValueError if two runs of a row (or row class) share a key; the runs of a row must be sorted."""
    last = start + step * (count - 1)
    row = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    a, lag = np.arange(len(start)), 0
    # Runs are sorted by start: a run that ends before run a + lag starts cannot share a key with any later run.
    while len(a):
        lag += 1
        a = a[a + lag < len(start)]
        a = a[(row[a] == row[a + lag]) & (last[a] >= start[a + lag])]
        _check_pairs(a, a + lag, start, step, count, last)


def _check_pairs(
    a: np.ndarray, b: np.ndarray, start: np.ndarray, step: np.ndarray, count: np.ndarray, last: np.ndarray
) -> None:
    """Raise ValueError if run ``a[i]`` shares a key with run ``b[i]``; enumerate the keys of the shorter run."""
    meet = (start[b] - start[a]) % np.gcd(step[a], step[b]) == 0
    a, b = a[meet], b[meet]
    few, many = np.where(count[a] < count[b], (a, b), (b, a))
    lengths = count[few]
    place = ramp(lengths)
    few, many = np.repeat(few, lengths), np.repeat(many, lengths)
    key = start[few] + step[few] * place
    if ((key >= start[many]) & (key <= last[many]) & ((key - start[many]) % step[many] == 0)).any():
        raise ValueError("runs: expected disjoint runs in each row, got two that share a key")
