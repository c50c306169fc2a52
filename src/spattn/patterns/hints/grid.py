"""Grids of tokens in row-major order, and boxes of keys in them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ..._util.index_checks import LONGEST
from ...index_set import Runs
from ..base.check import integer, integers
from ..base.pattern import Pattern
from ..listed.masks import block_runs

__all__ = ["GridPattern", "box_runs", "by_axis", "coordinates", "lengths", "row_major", "table_runs"]

_MOST_RUNS = 1 << 23


_T = TypeVar("_T", int, bool)


@dataclass(frozen=True)
class GridPattern(Pattern):
    """A pattern of a grid of tokens: it suits as many keys as fill the grid."""

    grid: int | tuple[int, ...]
    fixes_lengths = True

    @staticmethod
    def random_grid(draw: Any, sizes: Any) -> tuple[tuple[int, ...], Any]:
        """A grid of one to three axes of at most kv_len tokens, and the sizes that fit it; q_len mostly all of it."""
        axes = draw.integer(1, 3)
        longest = 2 * int(sizes.kv_len ** (1 / axes))
        shape: tuple[int, ...] = ()
        for _ in range(axes):
            shape += (draw.integer(1, min(longest, sizes.kv_len // math.prod(shape))),)
        return shape, draw.fitted(sizes, math.prod(shape))

    def grids(self) -> frozenset[tuple[int, ...]]:
        return frozenset({by_axis(self.grid)})

    def bind(self, q_len: int, kv_len: int) -> Pattern:
        tokens = math.prod(by_axis(self.grid))
        if kv_len != tokens:
            shape = " × ".join(map(str, by_axis(self.grid)))
            raise ValueError(f"kv_len: expected {tokens} (a grid of {shape} tokens), got {kv_len}")
        return self


def by_axis(value: _T | tuple[_T, ...]) -> tuple[_T, ...]:
    """A parameter with one value for each axis, as which a pattern keeps what it was given."""
    return value if isinstance(value, tuple) else (value,)


def lengths(grid: Any) -> tuple[int, ...]:
    """The tokens along each axis of a grid that a sequence can hold; a single number is a grid of one axis."""
    shape = integers("grid", grid, 1) if hasattr(grid, "__iter__") else (integer("grid", grid, 1),)
    if math.prod(shape) > LONGEST:
        raise ValueError(f"grid: expected at most {LONGEST} tokens, got {math.prod(shape)}")
    return shape


def row_major(grid: tuple[int, ...]) -> tuple[int, ...]:
    """Distance in tokens of neighbours along each axis."""
    return tuple(math.prod(grid[axis + 1 :]) for axis in range(len(grid)))


def coordinates(positions: Any, grid: tuple[int, ...]) -> list[Any]:
    """Coordinates of tokens along each axis.

    A position before the first token has a negative coordinate on the outermost axis: it lies outside the grid, not at
    its far end.
    """
    stride = row_major(grid)
    return [positions // stride[0]] + [positions // stride[a] % grid[a] for a in range(1, len(grid))]


def box_runs(
    start: Sequence[np.ndarray],
    count: Sequence[np.ndarray],
    step: Sequence[int],
    most: Sequence[int],
    grid: tuple[int, ...],
    kv_len: int,
) -> Runs:
    """A box of keys for each query, one run for each of its rows along the last axis.

    Parameters
    ----------
    start, count : list of (rows,) int64 arrays
        First coordinate and number of coordinates of each query's box, by axis; coordinates lie in the grid.
    step, most : tuple of int
        Distance of the coordinates and the largest count, by axis.
    """
    stride = row_major(grid)
    *outer, inner = range(len(grid))
    runs = []
    for corner in itertools.product(*(range(most[a]) for a in outer)):
        inside = np.ones(len(start[0]), dtype=bool)
        first = start[inner].copy()
        for axis, c in zip(outer, corner, strict=True):
            inside &= c < count[axis]
            first += (start[axis] + c * step[axis]) * stride[axis]
        runs.append((first, np.where(inside, count[inner], 0)))
    first, length = (np.stack(each, axis=1) for each in zip(*runs, strict=True))
    length = np.where(first < kv_len, length, 0)
    return Runs(first, np.full_like(first, step[inner]), length)


def table_runs(tables: Sequence[np.ndarray], grid: tuple[int, ...], q: np.ndarray) -> Runs | None:
    """The keys whose coordinate along each axis a table allows to the query's, run by run along the last axis; None if
    these are too many for one array.

    Parameters
    ----------
    tables : list of bool arrays (tokens of the axis, tokens of the axis)
        By axis: coordinates of queries and of keys.
    """
    *outer, last = coordinates(q, grid)
    found = block_runs(tables[-1], last, 1, grid[-1])
    start, count = found.start, found.count
    for table, x, step in zip(tables, outer, row_major(grid), strict=False):
        row, key = np.nonzero(table)
        line = Runs.single(row, key, len(table))
        shape = len(q), line.start.shape[1] * start.shape[1]
        if math.prod(shape) > _MOST_RUNS:
            return None
        start = (line.start[x][:, :, None] * step + start[:, None]).reshape(shape)
        count = (line.count[x][:, :, None] * count[:, None]).reshape(shape)
    return Runs(start, np.ones_like(start), count)
