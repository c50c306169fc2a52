"""Immutable NumPy arrays backed by ``bytes``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["content", "frozen", "frozen_part", "frozen_whole"]


def frozen(array: np.ndarray) -> np.ndarray:
    """Return a C-contiguous array backed by ``bytes``, which NumPy cannot make writeable.

    The elements are copied unless `array` is already backed by ``bytes``. The array object is always new, because the
    shape and dtype of an array stay mutable. Arrays of Python objects are returned unchanged.
    """
    if array.dtype.hasobject:
        return array
    return np.ndarray(array.shape, array.dtype, content(array))


def content(array: np.ndarray) -> bytes:
    """Return the elements in C order: the backing ``bytes`` if they match exactly, otherwise a copy."""
    base: Any = array.base  # NumPy's stubs declare an ndarray
    whole = type(base) is bytes and array.nbytes == len(base) and array.flags.c_contiguous
    return base if whole else array.tobytes()


def frozen_part(array: np.ndarray, index: tuple[int, ...]) -> np.ndarray:
    """Index the leading axes of a frozen array without a copy."""
    base: Any = array.base
    if type(base) is not bytes or array.nbytes != len(base) or not base:
        return frozen(array[index])
    first = sum(number * step for number, step in zip(index, array.strides, strict=False))
    return np.ndarray(array.shape[len(index) :], array.dtype, base, first)


def frozen_whole(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate 1-D arrays of one dtype, faster than np.concatenate, which inspects a structured dtype's fields."""
    dtype = arrays[0].dtype
    whole = content(arrays[0]) if len(arrays) == 1 else b"".join(map(content, arrays))
    return np.ndarray(len(whole) // dtype.itemsize, dtype, whole)
