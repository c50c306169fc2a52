"""Arrays that nobody can change."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["frozen"]


def frozen(array: np.ndarray) -> np.ndarray:
    """A C-contiguous array over a ``bytes`` object with the same elements, which NumPy cannot make writeable.

    The bytes are a copy, unless `array` lies on such an object itself. The array object is always another one: NumPy
    lets anybody who holds an array set its shape and dtype. Arrays of Python objects come back as they are.
    """
    if array.dtype.hasobject:
        return array
    base: Any = array.base  # of which NumPy's types say that it is an array
    whole = type(base) is bytes and array.nbytes == len(base) and array.flags.c_contiguous
    return np.ndarray(array.shape, array.dtype, base if whole else array.tobytes())
