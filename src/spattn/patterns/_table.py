"""Look-ups by query and key at once, and patterns whose fields are arrays."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np

from .._cached import cached_property
from .._frozen import frozen
from .._index_checks import integer_array, plain_array
from ..arrays import NUMPY, kind_of, to_host

__all__ = ["BlockTable", "ByContent", "frozen_array"]

_EXACT_CELLS = 1 << 24  # the integral images of larger tables are made of coarser cells
_COARSE = 64


def frozen_array(name: str, value, dtype, ndims: tuple[int, ...]) -> np.ndarray:
    """A copy of an array of any framework that nobody can change, C-contiguous; its elements are copied unless nobody
    can change them.

    Raises
    ------
    TypeError
        If `value` is a masked array or has another kind of dtype: bool for `dtype` bool, integers otherwise.
    ValueError
        If its number of axes is not among `ndims`, or a number does not fit into `dtype`.
    """
    value = value if kind_of(value) in (None, NUMPY) else to_host(value)
    array = plain_array(name, value) if dtype is bool else integer_array(name, value, dtype)
    if dtype is bool and array.dtype != bool:
        raise TypeError(f"{name}: expected an array of dtype bool, got {array.dtype}")
    if array.ndim not in ndims:
        raise ValueError(f"{name}: expected {' or '.join(f'{n}-D' for n in ndims)}, got shape {array.shape}")
    return frozen(array)


class ByContent:
    """Equality, hash and repr of dataclasses with array fields (``@dataclass(frozen=True, eq=False, repr=False)``)."""

    @cached_property
    def _digest(self) -> bytes:
        digest = hashlib.blake2b(digest_size=16)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                digest.update(f"{field.name}:{value.dtype.str}{value.shape}".encode())
                digest.update(value.data if value.size else b"")
            else:
                digest.update(f"{field.name}={value!r};".encode())
        return digest.digest()

    def __eq__(self, other):
        return self._digest == other._digest if type(other) is type(self) else NotImplemented

    def __hash__(self):
        return hash((type(self).__qualname__, self._digest))

    def __repr__(self):
        def show(value):
            return f"<{value.dtype} {value.shape}>" if isinstance(value, np.ndarray) else repr(value)

        fields = ", ".join(f"{f.name}={show(getattr(self, f.name))}" for f in dataclasses.fields(self))
        return f"{type(self).__name__}({fields})"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BlockTable(ByContent):
    """A read-only boolean table over (rows, columns), False outside, that also answers for whole rectangles.

    Parameters
    ----------
    cells : (rows, columns) bool array
        Copied, unless nobody can change it.
    """

    cells: np.ndarray

    def __post_init__(self):
        object.__setattr__(self, "cells", frozen_array("cells", self.cells, bool, (2,)))

    def contains(self, a, b):
        """``cells[a, b]``; False out of range. `a` and `b` may be the planner's symbolic positions."""
        for side in (a, b):
            dispatch = getattr(side, "contains", None)
            if dispatch is not None:
                return dispatch(self, a, b)
        a, b = np.asarray(a), np.asarray(b)
        rows, columns = self.cells.shape
        row_exists, column_exists = (0 <= a) & (a < rows), (0 <= b) & (b < columns)
        if not self.cells.size:
            return row_exists & column_exists
        # Each side is clipped before the two are broadcast: a tile has far fewer rows and columns than cells.
        cell = np.clip(a, 0, rows - 1) * columns + np.clip(b, 0, columns - 1)
        found = self.cells.reshape(-1).take(cell)
        return found if row_exists.all() and column_exists.all() else found & row_exists & column_exists

    def any_in(self, a_lo, a_hi, b_lo, b_hi) -> np.ndarray:
        """Whether a cell of each rectangle ``[a_lo, a_hi] × [b_lo, b_hi]`` (inclusive) may be set.

        Exact up to 2^24 cells; larger tables are asked by coarse cells and may say True too often.
        """
        rows, columns = self.cells.shape
        a_lo, b_lo = np.maximum(a_lo, 0), np.maximum(b_lo, 0)
        a_hi, b_hi = np.minimum(a_hi, rows - 1), np.minimum(b_hi, columns - 1)
        return _rectangle(self._images[0], self._coarse, a_lo, a_hi, b_lo, b_hi) > 0

    def all_in(self, a_lo, a_hi, b_lo, b_hi) -> np.ndarray:
        """Whether every cell of each rectangle (inclusive) is known to be set; cells out of range are not.

        Exact up to 2^24 cells; larger tables are asked by coarse cells and may say False too often.
        """
        rows, columns = self.cells.shape
        a_lo, a_hi, b_lo, b_hi = np.broadcast_arrays(a_lo, a_hi, b_lo, b_hi)
        inside = (0 <= a_lo) & (a_hi < rows) & (0 <= b_lo) & (b_hi < columns)
        empty = (a_lo > a_hi) | (b_lo > b_hi)
        missing = _rectangle(self._images[1], self._coarse, a_lo, a_hi, b_lo, b_hi)
        return empty | (inside & (missing == 0))

    @property
    def _coarse(self) -> int:
        return _COARSE if self.cells.size > _EXACT_CELLS else 1

    @cached_property
    def _images(self) -> tuple[np.ndarray, np.ndarray]:
        """Integral images of the cells with a set entry, and of those with one missing."""
        if self._coarse == 1:
            return _integral(self.cells), _integral(~self.cells)
        return _integral(_coarsened(self.cells)), _integral(_coarsened(~self.cells))


def _coarsened(cells: np.ndarray) -> np.ndarray:
    """Whether any entry of each square of 64 × 64 is set."""
    by_row = np.logical_or.reduceat(cells, np.arange(0, cells.shape[0], _COARSE), axis=0)
    return np.logical_or.reduceat(by_row, np.arange(0, cells.shape[1], _COARSE), axis=1)


def _integral(cells: np.ndarray) -> np.ndarray:
    image = np.zeros((cells.shape[0] + 1, cells.shape[1] + 1), dtype=np.int32)
    np.cumsum(np.cumsum(cells, axis=0, dtype=np.int32), axis=1, out=image[1:, 1:])
    return image


def _rectangle(image: np.ndarray, coarse: int, a_lo, a_hi, b_lo, b_hi) -> np.ndarray:
    """Number of set (coarse) cells that each inclusive rectangle touches; 0 where it is empty."""
    rows, columns = image.shape
    top, bottom = np.clip(a_lo // coarse, 0, rows - 1), np.clip(a_hi // coarse + 1, 0, rows - 1)
    left, right = np.clip(b_lo // coarse, 0, columns - 1), np.clip(b_hi // coarse + 1, 0, columns - 1)
    count = image[bottom, right] - image[top, right] - image[bottom, left] + image[top, left]
    return np.where((a_lo > a_hi) | (b_lo > b_hi), 0, count)
