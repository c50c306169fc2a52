"""Broadcast per-tile values to rows, and reduce them back, with strided views."""

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
    """The rows that lists write: those of a view, and of `copies` equally spaced copies of it.

    Attributes
    ----------
    view : VIEW record
    copies : int
    number : (tiles,) int array
        The list of each tile of the first view, -1 for none; each further copy adds `lists`.
    lists : int
    cell : (tiles,) int array
        Offset of each tile's cells within its list.
    axes : list of (int, int, int, int)
        (stride, extent, box, number) of each axis by falling stride, so that loops over rows are in memory order;
        number 0 is the axis of the copies.
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
        """Return the rows of `copies` views, `step` rows apart."""
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
        """Return a strided view, (*axes), of a per-row array; it has each row at most once."""
        strides = tuple(stride * of_row.itemsize for stride, *_ in self.axes)
        return as_strided(of_row[int(self.view["offset"]) :], [extent for _, extent, _, _ in self.axes], strides)

    def of_tiles(self, values: np.ndarray) -> np.ndarray:
        """Broadcast (copies, tiles) values to rows, (*axes)."""
        cells = values.reshape(self.copies, *self.view["grid"]).transpose([number for *_, number in self.axes])
        for axis, (_, extent, box, _) in enumerate(self.axes):
            if box > 1:
                cells = np.repeat(cells, box, axis=axis)[(slice(None),) * axis + (slice(extent),)]
        return cells

    def any_of_tiles(self, cells: np.ndarray) -> np.ndarray:
        """Reduce (*axes) by tile to (copies, tiles): whether any row of a tile is true."""
        for axis, (_, extent, box, _) in enumerate(self.axes):
            if box > 1:
                cells = np.logical_or.reduceat(cells, np.arange(0, extent, box), axis=axis)
        return cells.transpose(np.argsort([number for *_, number in self.axes])).reshape(self.copies, -1)

    def of_lists(self, values: np.ndarray, nothing: int) -> np.ndarray:
        """Broadcast values of lists to rows, (*axes); `nothing` for rows without a list."""
        number = self.numbers()
        return self.of_tiles(np.where(number < 0, values.dtype.type(nothing), values[number]))

    def numbers(self) -> np.ndarray:
        """Return the list of each tile, (copies, tiles), -1 for none."""
        further = self.lists * np.arange(self.copies)[:, None]
        return np.where(self.number < 0, -1, self.number + further)

    def cells(self) -> np.ndarray:
        """Return the index of each row among the cells of its list, (*axes) int32."""
        found: np.ndarray = np.zeros((1,) * (1 + AXES), np.int32)
        if self.cell.any():
            found = self.of_tiles(np.broadcast_to(self.cell.astype(np.int32), (self.copies, len(self.cell))))
        # Cells between neighbours along each axis.
        sizes = np.append(np.cumprod(self.view["box"][:0:-1])[::-1], 1).astype(np.int32)
        for axis, (_, extent, box, number) in enumerate(self.axes):
            if box > 1:
                inside = np.resize(np.arange(box, dtype=np.int32) * sizes[number - 1], extent)
                found = found + inside.reshape(-1, *(1,) * (AXES - axis))
        return np.broadcast_to(found, [extent for _, extent, _, _ in self.axes])


def places(views: np.ndarray, number: np.ndarray, first: int) -> Iterator[Place]:
    """Yield the rows of views of one shape at different offsets. Lists are numbered from `first` on, view by view;
    tiles without one have -1 in `number`.
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
    """Yield the lengths of the evenly spaced runs of `offsets`."""
    start, at = 0, offsets.tolist()
    while start < len(at):
        stop = start + 1
        while stop < len(at) and at[stop] - at[stop - 1] == at[start + 1] - at[start]:
            stop += 1
        yield stop - start
        start = stop
