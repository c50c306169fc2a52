"""Arrays that nobody can change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["content", "frozen", "frozen_part", "frozen_whole"]


def frozen(array: np.ndarray) -> np.ndarray:
    """A C-contiguous array over a ``bytes`` object with the same elements, which NumPy cannot make writeable.

    The bytes are a copy, unless `array` lies on such an object itself. The array object is always another one: NumPy
    lets anybody who holds an array set its shape and dtype. Arrays of Python objects come back as they are.
    """
    if array.dtype.hasobject:
        return array
    return np.ndarray(array.shape, array.dtype, content(array))


def content(array: np.ndarray) -> bytes:
    """The elements of an array in C's order: what it lies on where that is bytes and no more, otherwise a copy."""
    base: Any = array.base  # of which NumPy's types say that it is an array
    whole = type(base) is bytes and array.nbytes == len(base) and array.flags.c_contiguous
    return base if whole else array.tobytes()


def frozen_part(array: np.ndarray, index: tuple[int, ...]) -> np.ndarray:
    """One entry of the first axes of a frozen array, without a copy: it lies on the same bytes."""
    base: Any = array.base
    if type(base) is not bytes or array.nbytes != len(base) or not base:
        return frozen(array[index])
    first = sum(number * step for number, step in zip(index, array.strides, strict=False))
    return np.ndarray(array.shape[len(index) :], array.dtype, base, first)


def frozen_whole(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Arrays of one axis and one dtype, one behind the other. NumPy's own function would look at each field of each."""
    dtype = arrays[0].dtype
    whole = content(arrays[0]) if len(arrays) == 1 else b"".join(map(content, arrays))
    return np.ndarray(len(whole) // dtype.itemsize, dtype, whole)
