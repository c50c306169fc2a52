"""Broadcast values of tiles to rows, and reduce values of rows to tiles, with strided views."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ..planning.contract.types import AXES
from ..planning.tiles.parts import repeats

__all__ = ["Place", "places"]


class Place(NamedTuple):
    """The rows that lists write: the rows of `copies` equally spaced copies of a view.

    Attributes
    ----------
    view : VIEW record
    copies : int
    number : (tiles,) int array
        The list of each tile of the first copy, -1 for none; in copy c the index is ``lists * c`` larger.
    lists : int
        Number of lists of a copy.
    cell : (tiles,) int array
        Index of each tile's first cell among the cells of its list.
    axes : list of (int, int, int, int)
        (stride, extent, box, number) of each axis, sorted by descending stride so that loops visit rows in memory
        order; number 0 is the axis of the copies.
    """

    view: np.void
    copies: int
    number: np.ndarray
    lists: int
    cell: np.ndarray
    axes: list[tuple[int, int, int, int]]

    @classmethod
    def of(
        cls, view: np.void, number: np.ndarray, cell: np.ndarray, copies: int = 1, step: int = 0, lists: int = 0
    ) -> Place:
        """Return the rows of `copies` copies of a view, `step` rows apart."""
        shape = zip(
            view["stride"].tolist(), view["extent"].tolist(), view["box"].tolist(), range(1, 1 + AXES), strict=True
        )
        axes = sorted([(step, copies, 1, 0), *shape], key=lambda axis: -abs(axis[0]) if axis[1] > 1 else -np.inf)
        return cls(view, copies, number, lists, cell, axes)

    @property
    def size(self) -> int:
        """Number of rows."""
        return math.prod(extent for _, extent, _, _ in self.axes)

    def rows(self, of_row: np.ndarray) -> np.ndarray:
        """Return the elements of `of_row` for these rows, each once, as a strided view, (*axes)."""
        strides = tuple(stride * of_row.itemsize for stride, *_ in self.axes)
        return as_strided(of_row[int(self.view["offset"]) :], [extent for _, extent, _, _ in self.axes], strides)

    def of_tiles(self, values: np.ndarray) -> np.ndarray:
        """Broadcast values of tiles, (copies, tiles), to rows, (*axes)."""
        cells = values.reshape(self.copies, *self.view["grid"]).transpose([number for *_, number in self.axes])
        for axis, (_, extent, box, _) in enumerate(self.axes):
            if box > 1:
                cells = np.repeat(cells, box, axis=axis)[(slice(None),) * axis + (slice(extent),)]
        return cells

    def any_of_tiles(self, cells: np.ndarray) -> np.ndarray:
        """Return whether any row of each tile is true, (copies, tiles), given values of rows, (*axes)."""
        for axis, (_, extent, box, _) in enumerate(self.axes):
            if box > 1:
                cells = np.logical_or.reduceat(cells, np.arange(0, extent, box), axis=axis)
        return cells.transpose(np.argsort([number for *_, number in self.axes])).reshape(self.copies, -1)

    def of_lists(self, values: np.ndarray, nothing: int) -> np.ndarray:
        """Broadcast values of lists to rows, (*axes); rows without a list get `nothing`."""
        number = self.numbers()
        return self.of_tiles(np.where(number < 0, values.dtype.type(nothing), values[number]))

    def numbers(self) -> np.ndarray:
        """Return the list of each tile, (copies, tiles), or -1."""
        further = self.lists * np.arange(self.copies)[:, None]
        return np.where(self.number < 0, -1, self.number + further)

    def cells(self) -> np.ndarray:
        """Return the index of each row among the cells of its list, (*axes) int32."""
        found: np.ndarray = np.zeros((1,) * (1 + AXES), np.int32)
        if self.cell.any():
            found = self.of_tiles(np.broadcast_to(self.cell.astype(np.int32), (self.copies, len(self.cell))))
        # Distance in cell indices between neighbors along each axis.
        sizes = np.append(np.cumprod(self.view["box"][:0:-1])[::-1], 1).astype(np.int32)
        for axis, (_, extent, box, number) in enumerate(self.axes):
            if box > 1:
                inside = np.resize(np.arange(box, dtype=np.int32) * sizes[number - 1], extent)
                found = found + inside.reshape(-1, *(1,) * (AXES - axis))
        return np.broadcast_to(found, [extent for _, extent, _, _ in self.axes])


def places(views: np.ndarray, number: np.ndarray, first: int) -> Iterator[Place]:
    """Yield the rows that the lists of views write; the views differ only in their offset.

    `number` has the list of each tile, or -1, counted within a view. Over all views, lists are numbered from `first`.
    """
    lists, cell = int((number >= 0).sum()), np.zeros(len(number), np.int64)
    start = 0
    for count in _evenly(views["offset"]):
        view, step = views[start], int(views["offset"][start + 1] - views["offset"][start]) if count > 1 else 0
        shape = (step, *view["stride"].tolist()), (count, *view["extent"].tolist())
        at_once = 1 if repeats(*shape) else count
        for one in range(start, start + count, at_once):
            own = np.where(number < 0, -1, number + first + lists * one)
            yield Place.of(views[one], own, cell, at_once, step, lists)
        start += count


def _evenly(offsets: np.ndarray) -> Iterator[int]:
    """Split `offsets` into evenly spaced runs and yield their lengths."""
    start, at = 0, offsets.tolist()
    while start < len(at):
        stop = start + 1
        while stop < len(at) and at[stop] - at[stop - 1] == at[start + 1] - at[start]:
            stop += 1
        yield stop - start
        start = stop
