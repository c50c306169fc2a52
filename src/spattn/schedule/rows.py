"""Rows as their views have them: what is known of each tile, or asked of it, goes to its rows and back by strides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ..plan._build import repeats
from ..plan._types import AXES

__all__ = ["Place", "places"]


class Place(NamedTuple):
    """Rows that lists write: those of a view, and of `copies` views in all, each moved by `step` from the one before.

    Attributes
    ----------
    view : VIEW record
    step, copies : int
    number : (tiles,) int array
        The list that each tile of the first view belongs to, -1 for none; those of the others are `lists` further on
        each time.
    lists : int
    cell : (tiles,) int array
        Where the cells of each tile start among those of its list.
    """

    view: np.void
    step: int
    copies: int
    number: np.ndarray
    lists: int
    cell: np.ndarray

    def rows(self, of_row: np.ndarray) -> np.ndarray:
        """(copies, *extent) of an array with an element for each row: no copy, and no row twice."""
        size = of_row.itemsize
        strides = (self.step * size, *(int(stride) * size for stride in self.view["stride"]))
        return as_strided(of_row[int(self.view["offset"]) :], self._shape, strides)

    def of_tiles(self, values: np.ndarray) -> np.ndarray:
        """(copies, *extent) of (copies, tiles): each row has the value of its tile."""
        cells = values.reshape(self.copies, *self.view["grid"])
        for axis in range(AXES):
            if self.view["box"][axis] > 1:
                cells = np.repeat(cells, self.view["box"][axis], axis=1 + axis)
                cells = cells[(slice(None),) * (1 + axis) + (slice(int(self.view["extent"][axis])),)]
        return cells

    def any_of_tiles(self, cells: np.ndarray) -> np.ndarray:
        """(copies, tiles) of (copies, *extent): whether any row of a tile is true."""
        for axis in range(AXES):
            if self.view["box"][axis] > 1:
                starts = np.arange(0, self.view["extent"][axis], self.view["box"][axis])
                cells = np.logical_or.reduceat(cells, starts, axis=1 + axis)
        return cells.reshape(self.copies, -1)

    def of_lists(self, values: np.ndarray, nothing: int) -> np.ndarray:
        """(copies, *extent): each row has the value of its list, `nothing` where it has none."""
        number = self.numbers()
        return self.of_tiles(np.where(number < 0, values.dtype.type(nothing), values[number]))

    def numbers(self) -> np.ndarray:
        """(copies, tiles): the list of each tile, -1 for none."""
        further = self.lists * np.arange(self.copies)[:, None]
        return np.where(self.number < 0, -1, self.number + further)

    def cells(self) -> np.ndarray:
        """(copies, *extent) int32: the number of each row among the cells of its list."""
        found = self.of_tiles(np.broadcast_to(self.cell.astype(np.int32), (self.copies, len(self.cell))))
        size = 1
        for axis in reversed(range(AXES)):
            box = int(self.view["box"][axis])
            inside = (np.arange(self.view["extent"][axis], dtype=np.int32) % box * size).reshape(-1, *(1,) * (2 - axis))
            found, size = found + inside, size * box
        return found

    @property
    def _shape(self) -> tuple[int, ...]:
        return (self.copies, *map(int, self.view["extent"]))


def places(views: np.ndarray, number: np.ndarray, first: int) -> Iterator[Place]:
    """The places of views of one shape, which differ in where they start: lists are numbered from `first` on, those of
    tiles where `number` is not -1, view after view."""
    lists, cell = int((number >= 0).sum()), np.zeros(len(number), np.int64)
    start = 0
    for count in _evenly(views["offset"]):
        view, step = views[start], int(views["offset"][start + 1] - views["offset"][start]) if count > 1 else 0
        shape = (step, *view["stride"].tolist()), (count, *view["extent"].tolist())
        at_once = 1 if repeats(*shape) else count
        for one in range(start, start + count, at_once):
            own = np.where(number < 0, -1, number + first + lists * one)
            yield Place(views[one], step, at_once, own, lists, cell)
        start += count


def _evenly(offsets: np.ndarray) -> Iterator[int]:
    """How many numbers at a time are evenly spaced, from the first one on."""
    start, steps = 0, np.diff(offsets)
    changes = np.append(np.nonzero(np.diff(steps))[0] + 1, len(steps))  # the steps before are like the one before
    while start < len(offsets):
        same = changes[np.searchsorted(changes, start, side="right")] if start < len(steps) else len(steps)
        yield int(same) + 1 - start
        start = int(same) + 1
