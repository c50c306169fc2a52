"""NumPy dtypes of structs shared with kernels, packed with ``struct``."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np

__all__ = ["fields", "packer"]

_CODES = {"i4": "i", "i8": "q", "u4": "I", "u8": "Q", "f4": "f", "f8": "d"}


def fields(dtype: np.dtype) -> dict[str, tuple[np.dtype, int]]:
    """Return (dtype, offset) of each field of a struct, in order; nothing for a scalar."""
    return {name: (inner, offset) for name, (inner, offset, *_) in (dtype.fields or {}).items()}


def packer(dtype: np.dtype) -> struct.Struct:
    """Return a Struct that packs all scalars of a struct, including nested ones, in one call."""
    codes, at = "@", 0
    for offset, scalar in _scalars(dtype, 0):
        codes += f"{offset - at}x{_CODES[scalar.str[1:]]}"
        at = offset + scalar.itemsize
    return struct.Struct(f"{codes}{dtype.itemsize - at}x")


def _scalars(dtype: np.dtype, start: int) -> Iterator[tuple[int, np.dtype]]:
    """Yield (offset, dtype) of each scalar."""
    if dtype.names is not None:
        for inner, offset in fields(dtype).values():
            yield from _scalars(inner, start + offset)
    elif dtype.subdtype is not None:
        inner, shape = dtype.subdtype
        for number in range(int(np.prod(shape))):
            yield from _scalars(inner, start + number * inner.itemsize)
    else:
        yield start, dtype
