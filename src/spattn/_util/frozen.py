"""Immutable NumPy arrays backed by ``bytes``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

__all__ = ["content", "frozen", "frozen_part", "frozen_whole", "owner_of", "writeable"]

_views: WeakValueDictionary[int, _View] = WeakValueDictionary()  # by address, of live arrays


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


class _View:
    """The memory of a read-only array, which this object keeps alive, as that of an array that says it is writeable."""

    def __init__(self, array: np.ndarray):
        self.array = array
        about = array.__array_interface__
        self.address = about["data"][0]
        self.__array_interface__ = about | {"data": (self.address, False)}


def writeable(array: np.ndarray) -> np.ndarray:
    """Return a writeable view of a frozen array, for libraries that reject read-only arrays. Nobody may write to it."""
    if array.dtype.hasobject:
        return array
    view = _View(array)
    if array.size:
        _views[view.address] = view
    return np.asarray(view)


def owner_of(array: np.ndarray) -> np.ndarray:
    """Return the frozen array of which `array` is the writeable view, or `array`."""
    view = _views.get(array.ctypes.data) if array.size else None
    if view is None or (view.array.dtype, view.array.shape) != (array.dtype, array.shape):
        return array
    return view.array if array.flags.c_contiguous else array
