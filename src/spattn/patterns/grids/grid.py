"""Row-major token grids, and boxes of keys in them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ..._util.index_checks import LONGEST
from ...index_set import Runs
from ..base.check import MOST_RUNS, integer, integers
from ..base.pattern import Pattern
from ..listed.masks import block_runs

__all__ = ["GridPattern", "box_runs", "by_axis", "coordinates", "lengths", "row_major", "table_runs"]


_T = TypeVar("_T", int, bool)


@dataclass(frozen=True)
class GridPattern(Pattern):
    """Base class of patterns on a token grid, which determines kv_len."""

    grid: int | tuple[int, ...]
    fixes_lengths = True

    @staticmethod
    def random_grid(draw: Any, sizes: Any) -> tuple[tuple[int, ...], Any]:
        """Draw a grid of one to three axes and at most kv_len tokens, and matching sizes."""
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
    """Return a per-axis parameter as a tuple."""
    return value if isinstance(value, tuple) else (value,)


def lengths(grid: Any) -> tuple[int, ...]:
    """Check a grid and return its shape; an integer is a grid of one axis."""
    shape = integers("grid", grid, 1) if hasattr(grid, "__iter__") else (integer("grid", grid, 1),)
    if not shape:
        raise ValueError("grid: expected at least one axis, got ()")
    if math.prod(shape) > LONGEST:
        raise ValueError(f"grid: expected at most {LONGEST} tokens, got {math.prod(shape)}")
    return shape


def row_major(grid: tuple[int, ...]) -> tuple[int, ...]:
    """Return the row-major stride of each axis in tokens."""
    return tuple(math.prod(grid[axis + 1 :]) for axis in range(len(grid)))


def coordinates(positions: Any, grid: tuple[int, ...]) -> list[Any]:
    """Return the coordinates along each axis; at negative positions, only the first one is negative."""
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
    """Return the keys of one box per query, as runs along the last axis.

    Per axis, `start` and `count` hold each query's first coordinate and number of coordinates, `step` holds the
    distance between coordinates and `most` the maximum count.
    """
    stride = row_major(grid)
    *outer, inner = range(len(grid))
    runs = []
    for corner in itertools.product(*(range(max(most[a], 1)) for a in outer)):  # at least one run, which may be empty
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
    """Return the keys that the (query, key) tables of all axes allow, as runs; None if they exceed MOST_RUNS."""
    *outer, last = coordinates(q, grid)
    found = block_runs(tables[-1], last, 1, grid[-1])
    start, count = found.start, found.count
    for table, x, step in zip(tables, outer, row_major(grid), strict=False):
        row, key = np.nonzero(table)
        line = Runs.single(row, key, len(table))
        shape = len(q), line.start.shape[1] * start.shape[1]
        if math.prod(shape) > MOST_RUNS:
            return None
        start = (line.start[x][:, :, None] * step + start[:, None]).reshape(shape)
        count = (line.count[x][:, :, None] * count[:, None]).reshape(shape)
    return Runs(start, np.ones_like(start), count)
