"""Lookup tables by query and key: boolean ones, dense or sparse, and numbers."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..._util.cached import cached_property
from ..base.content import ByContent, frozen_array

__all__ = ["BlockTable", "ListedCells", "NumberTable", "SortedCells"]

_FALLBACK_CELLS = 1 << 24  # larger tables have integral images of coarse cells
_COARSE = 64
_MOST_BITS = (1 << 27) - 39  # a prime, modulo which larger bitmaps wrap around


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BlockTable(ByContent):
    """A read-only boolean table with lookups of cells and rectangles; False out of range."""

    cells: np.ndarray

    def __post_init__(self) -> None:
        object.__setattr__(self, "cells", frozen_array("cells", self.cells, bool, (2,)))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.cells.shape

    def contains(self, a: Any, b: Any) -> Any:
        """Return ``cells[a, b]``; False out of range. Accepts the planner's symbolic positions."""
        for side in (a, b):
            dispatch = getattr(side, "contains", None)
            if dispatch is not None:
                return dispatch(self, a, b)
        a, b = np.asarray(a), np.asarray(b)
        rows, columns = self.cells.shape
        row_exists, column_exists = (0 <= a) & (a < rows), (0 <= b) & (b < columns)
        if not self.cells.size:
            return row_exists & column_exists
        # Clip before broadcasting: a tile has far fewer rows and columns than cells.
        cell = np.clip(a, 0, rows - 1) * columns + np.clip(b, 0, columns - 1)
        found = self.cells.reshape(-1).take(cell)
        return found if row_exists.all() and column_exists.all() else found & row_exists & column_exists

    def excerpts(self, a: np.ndarray, b: np.ndarray, height: int, width: int) -> np.ndarray:
        """Return the height × width cells that start at each (a, b) as a row-major bitmask of at most 62 bits."""
        bits = np.zeros(len(a), np.int64)
        for row, column in np.ndindex(height, width):
            bits = 2 * bits + self.contains(a + row, b + column)
        return bits

    def any_in(self, a_lo: np.ndarray, a_hi: np.ndarray, b_lo: np.ndarray, b_hi: np.ndarray) -> np.ndarray:
        """Return True where an inclusive rectangle ``[a_lo, a_hi] × [b_lo, b_hi]`` may contain a set cell.

        Exact up to 2^24 cells; larger tables use coarse cells and err towards True.
        """
        rows, columns = self.cells.shape
        a_lo, b_lo = np.maximum(a_lo, 0), np.maximum(b_lo, 0)
        a_hi, b_hi = np.minimum(a_hi, rows - 1), np.minimum(b_hi, columns - 1)
        return _rectangle(self._images[0], self._coarse, a_lo, a_hi, b_lo, b_hi) > 0

    def all_in(self, a_lo: np.ndarray, a_hi: np.ndarray, b_lo: np.ndarray, b_hi: np.ndarray) -> np.ndarray:
        """Return True where an inclusive rectangle is known to be full; cells out of range are unset.

        Exact up to 2^24 cells; larger tables use coarse cells and err towards False.
        """
        rows, columns = self.cells.shape
        a_lo, a_hi, b_lo, b_hi = np.broadcast_arrays(a_lo, a_hi, b_lo, b_hi)
        inside = (0 <= a_lo) & (a_hi < rows) & (0 <= b_lo) & (b_hi < columns)
        empty = (a_lo > a_hi) | (b_lo > b_hi)
        missing = _rectangle(self._images[1], self._coarse, a_lo, a_hi, b_lo, b_hi)
        return empty | (inside & (missing == 0))

    @property
    def _coarse(self) -> int:
        return _COARSE if self.cells.size > _FALLBACK_CELLS else 1

    @cached_property
    def _images(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the integral images of the set and of the unset cells."""
        if self._coarse == 1:
            some = _integral(self.cells)
            every = np.multiply.outer(*(np.arange(n, dtype=np.int32) for n in some.shape))
            return some, np.subtract(every, some, out=every)
        some, missing = _coarsened(self.cells)
        return _integral(some), _integral(missing)


def _coarsened(cells: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where a 64 × 64 block has a set cell, and where it has an unset one."""
    rows, columns = cells.shape
    words, starts = -(-columns // _COARSE), np.arange(0, rows, _COARSE)
    bits = np.zeros((rows, 8 * words), np.uint8)
    bits[:, : -(-columns // 8)] = np.packbits(cells, axis=1, bitorder="little")
    whole = np.packbits(np.arange(_COARSE * words) < columns, bitorder="little").view(np.uint64)
    packed = bits.view(np.uint64)
    some, every = (ufunc.reduceat(packed, starts, axis=0) for ufunc in (np.bitwise_or, np.bitwise_and))
    return some != 0, every != whole


def _integral(cells: np.ndarray) -> np.ndarray:
    image = np.zeros((cells.shape[0] + 1, cells.shape[1] + 1), dtype=np.int32)
    inner = image[1:, 1:]
    np.cumsum(cells, axis=1, dtype=np.int32, out=inner)
    np.cumsum(inner, axis=0, out=inner)
    return image


def _rectangle(
    image: np.ndarray, coarse: int, a_lo: np.ndarray, a_hi: np.ndarray, b_lo: np.ndarray, b_hi: np.ndarray
) -> np.ndarray:
    """Count the set (coarse) cells that each inclusive rectangle overlaps."""
    rows, columns = image.shape
    top, bottom = np.clip(a_lo // coarse, 0, rows - 1), np.clip(a_hi // coarse + 1, 0, rows - 1)
    left, right = np.clip(b_lo // coarse, 0, columns - 1), np.clip(b_hi // coarse + 1, 0, columns - 1)
    count = image[bottom, right] - image[top, right] - image[bottom, left] + image[top, left]
    return np.where((a_lo > a_hi) | (b_lo > b_hi), 0, count)


class SortedCells:
    """A sparse boolean table with the interface of :class:`BlockTable` for cells and small rectangles.

    `codes` holds ``row * columns + column`` of each set cell, sorted and without repeats.
    """

    def __init__(self, codes: np.ndarray, shape: tuple[int, int]):
        self._codes, self._shape = codes, shape

    def contains(self, a: Any, b: Any) -> Any:
        """Return True where cell (a, b) is set; False out of range. Accepts the planner's symbolic positions."""
        for side in (a, b):
            dispatch = getattr(side, "contains", None)
            if dispatch is not None:
                return dispatch(self, a, b)
        a, b = np.asarray(a), np.asarray(b)
        inside = (0 <= a) & (a < self._shape[0]) & (0 <= b) & (b < self._shape[1])
        if not len(self._codes):
            return np.zeros_like(inside)
        code = a * self._shape[1] + b
        index = np.minimum(np.searchsorted(self._codes, code), len(self._codes) - 1)
        return inside & (self._codes[index] == code)

    def excerpts(self, a: np.ndarray, b: np.ndarray, height: int, width: int) -> np.ndarray:
        """Return the height × width cells that start at each (a, b) as a row-major bitmask of at most 62 bits."""
        bits, columns = np.zeros(len(a), np.int64), self._shape[1]
        if not len(self._codes):
            return bits
        for row in range(height):
            code = (a + row) * columns + b
            low, high = np.maximum(-b, 0), np.minimum(columns - b, width)  # excerpt columns inside the table
            high = np.where((0 <= a + row) & (a + row < self._shape[0]), high, 0)
            first = np.searchsorted(self._codes, code + low)
            for index in range(width):
                at = first + index
                column = self._codes[np.minimum(at, len(self._codes) - 1)] - code
                inside = (at < len(self._codes)) & (column < high)
                if not inside.any():
                    break
                bits[inside] |= 1 << (width * (height - row) - 1 - column[inside])
        return bits


class ListedCells(SortedCells):
    """A sparse boolean table that also supports large rectangles, by bitmaps of coarse blocks."""

    def __init__(self, row: np.ndarray, column: np.ndarray, shape: tuple[int, int]):
        super().__init__(np.unique(row * shape[1] + column), shape)
        self._row, self._column = row, column
        self._made: dict[tuple[int, ...], np.ndarray] = {}

    def any_in(self, a_lo: np.ndarray, a_hi: np.ndarray, b_lo: np.ndarray, b_hi: np.ndarray) -> np.ndarray:
        """Return True where an inclusive rectangle ``[a_lo, a_hi] × [b_lo, b_hi]`` may contain a set cell.

        Tests at most four blocks per rectangle, each at least as large as any rectangle. Errs towards True for cells
        next to the rectangle, and for blocks that share a bit of a wrapped bitmap.
        """
        sides = (a_lo, a_hi), (b_lo, b_hi)
        levels = [int((hi - lo).max(initial=0)).bit_length() for lo, hi in sides]
        bits, (height, width) = self._bits(*levels), self._blocks(levels)
        rows, columns = (
            [np.clip(end >> level, 0, most - 1) for end in (ends if ((ends[0] ^ ends[1]) >> level).any() else ends[:1])]
            for ends, level, most in zip(sides, levels, (height, width), strict=True)
        )
        found = np.zeros(np.broadcast(a_lo, b_lo).shape, bool)
        for a, b in itertools.product(rows, columns):
            code = (a * width + b) % _MOST_BITS
            found |= (bits[code >> 3] >> (code & 7).astype(np.uint8) & 1).view(bool)
        return found & (a_lo <= a_hi) & (b_lo <= b_hi)

    def all_in(self, a_lo: np.ndarray, a_hi: np.ndarray, b_lo: np.ndarray, b_hi: np.ndarray) -> np.ndarray:
        """Return True where an inclusive rectangle is known to be full; decides only empty and 1 × 1 rectangles."""
        a_lo, a_hi, b_lo, b_hi = np.broadcast_arrays(a_lo, a_hi, b_lo, b_hi)
        found = (a_lo > a_hi) | (b_lo > b_hi)
        single = np.nonzero((a_lo == a_hi) & (b_lo == b_hi))[0]
        found[single] = self.contains(a_lo[single], b_lo[single])
        return found

    def _blocks(self, levels: Sequence[int]) -> list[int]:
        """Return the number of blocks per axis, for blocks of ``2**level`` cells."""
        return [max(0, n - 1 >> level) + 1 for n, level in zip(self._shape, levels, strict=True)]

    def _bits(self, *levels: int) -> np.ndarray:
        """Return the bitmap of non-empty blocks, wrapped at `_MOST_BITS`."""
        if levels not in self._made:
            height, width = self._blocks(levels)
            bits = np.zeros(-(-min(height * width, _MOST_BITS) // 8), np.uint8)
            code = ((self._row >> levels[0]) * width + (self._column >> levels[1])) % _MOST_BITS
            np.bitwise_or.at(bits, code >> 3, (1 << (code & 7)).astype(np.uint8))
            self._made[levels] = bits
        return self._made[levels]


class NumberTable:
    """A table of numbers or booleans with one or two axes, and the least and the greatest value of any box.

    For each box, at most four boxes whose sides are powers of two cover it; tables of their extremes are made at first
    use.
    """

    def __init__(self, values: np.ndarray):
        self.values = values
        self.shape = values.shape
        self._made = {(0,) * values.ndim: (values, values)}

    def bounds(self, lows: Sequence[np.ndarray], highs: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Return the least and the greatest value in each inclusive box; all indices must be in the table."""
        lows, highs = (np.broadcast_arrays(*ends) for ends in (lows, highs))
        level = [np.frexp(high - low + 1)[1] - 1 for low, high in zip(lows, highs, strict=True)]
        code = functools.reduce(lambda a, b: 64 * a + b, level)
        least, greatest = (np.empty(code.shape, self.values.dtype) for _ in range(2))
        for one in np.unique(code):
            some = np.nonzero(code == one)[0]
            levels = tuple(int(own[some[0]]) for own in level)
            starts = [
                (low[some], high[some] + 1 - (1 << own)) for low, high, own in zip(lows, highs, levels, strict=True)
            ]
            of_boxes = self._extremes(levels)
            corners = list(itertools.product(*starts))
            least[some] = functools.reduce(np.minimum, (of_boxes[0][corner] for corner in corners))
            greatest[some] = functools.reduce(np.maximum, (of_boxes[1][corner] for corner in corners))
        return least, greatest

    def _extremes(self, levels: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Return the extremes of the boxes of ``2**level`` elements along each axis, by their first element."""
        if levels not in self._made:
            axis = int(np.argmax(levels))
            halves = self._extremes((*levels[:axis], levels[axis] - 1, *levels[axis + 1 :]))
            half = 1 << (levels[axis] - 1)
            first, second = (slice(None),) * axis + (slice(None, -half),), (slice(None),) * axis + (slice(half, None),)
            least, greatest = halves
            self._made[levels] = np.minimum(least[first], least[second]), np.maximum(greatest[first], greatest[second])
        return self._made[levels]
