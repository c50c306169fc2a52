"""Arrays that nobody can change."""

from __future__ import annotations

import numpy as np

__all__ = ["frozen", "twin"]


def frozen(array: np.ndarray) -> np.ndarray:
    """A C-contiguous copy over a ``bytes`` object, which NumPy cannot make writeable again; `array` if it is one.

    Arrays of Python objects have no bytes to copy and come back as they are.
    """
    if array.dtype.hasobject or _is_frozen(array):
        return array
    return np.ndarray(array.shape, array.dtype, array.tobytes())


def twin(array: np.ndarray) -> np.ndarray:
    """Another array object over the same bytes: nobody can set the shape or dtype of one that he does not hold."""
    array = frozen(array)
    return array if array.dtype.hasobject else np.ndarray(array.shape, array.dtype, array.base)


def _is_frozen(array: np.ndarray) -> bool:
    whole = type(array) is np.ndarray and type(array.base) is bytes and array.nbytes == len(array.base)
    return whole and array.flags.c_contiguous
