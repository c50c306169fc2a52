"""Grid candidates: boxes of keys, given by a table per axis."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np

from ..base.pattern import Pattern
from ..grids.neighborhood import Neighborhood
from ..grids.per import PerAxis
from ..grids.windowed import axial, windowed
from ..hints.grid import coordinates
from ..listed.masks import Mask
from ..sequence.basic import Full, Stride
from ._candidate import Candidate
from ._counts import Evidence
from ._pairs import KeyRuns

__all__ = ["boxes"]

_NOISY_SHARE = 0.5  # of the usual count: least count of a pair of coordinates in a noisy mask
_LONGEST_AXIS = 1 << 11
_MOST_RUNS = 1 << 22  # in the closed form of boxes
_MOST_AXES = 3  # of a Neighborhood


def boxes(evidence: Evidence) -> Iterator[Candidate]:
    """Propose boxes along some axes, of keys that share the query's coordinates along the other axes."""
    grid, pairs = evidence.grid, evidence.pairs
    if grid is None or max(grid) > _LONGEST_AXIS or pairs.first < 0:  # negative positions are outside the grid
        return
    total, left = evidence.of_both(lambda each: each.all_runs.split(grid[-1]))
    for free in (free for count in range(len(grid)) for free in itertools.combinations(range(len(grid)), count + 1)):
        shared = [axis for axis in range(len(grid)) if axis not in free]
        in_total, in_left = _sharing(total, grid, shared), _sharing(left, grid, shared)
        tables = [np.eye(n, dtype=bool) for n in grid]
        for axis in free:
            tables[axis] = _table(in_total, in_left, grid, axis, evidence.fill)
        if all(table.any() for table in tables) and pairs.q_len * _runs_of_row(tables) <= _MOST_RUNS:
            yield _candidate(evidence, grid, tables, total, left)


def _candidate(
    evidence: Evidence, grid: tuple[int, ...], tables: list[np.ndarray], total: KeyRuns, left: KeyRuns
) -> Candidate:
    """Name the boxes of these tables and count their pairs."""
    base = _named(grid, tables)
    x = coordinates(evidence.pairs.q, grid)
    sides = [table.sum(axis=1)[c] for table, c in zip(tables, x, strict=True)]
    room = int(np.prod(np.stack(sides), axis=0).sum())
    masks = sum(p.mask.size for p in base.patterns if isinstance(p, Mask)) if isinstance(base, PerAxis) else 0
    return Candidate(base, None, None, _in_box(left, grid, tables), room - _in_box(total, grid, tables), masks)


def _runs_of_row(tables: list[np.ndarray]) -> int:
    """Return the most runs of keys per row in the boxes of these tables."""
    starts = np.diff(tables[-1].astype(np.int8), prepend=0, axis=1) == 1
    return math.prod(int(each.sum(axis=1).max()) for each in (*tables[:-1], starts))


def _sharing(runs: KeyRuns, grid: tuple[int, ...], axes: list[int]) -> KeyRuns:
    """Keep the keys that share the query's coordinates along `axes`."""
    for axis in axes:
        if axis == len(grid) - 1:
            own = runs.start // grid[-1] * grid[-1] + runs.q % grid[-1]
            runs = runs.cut(own, own + 1)
        else:
            keep = coordinates(runs.q, grid)[axis] == coordinates(runs.start, grid)[axis]
            runs = KeyRuns(*(each[keep] for each in runs))
    return runs


def _table(total: KeyRuns, left: KeyRuns, grid: tuple[int, ...], axis: int, fill: float) -> np.ndarray:
    """Return which (query, key) coordinates occur along an axis: among the remaining pairs more often than noise, or
    among all pairs as often as any of the remaining."""
    times, times_left = (_times(runs, grid, axis) for runs in (total, left))
    most = times_left.max(initial=0)
    return (times_left > (0 if fill == 1 else _NOISY_SHARE * most)) | (times >= max(fill * most, 1))


def _times(runs: KeyRuns, grid: tuple[int, ...], axis: int) -> np.ndarray:
    """Count the pairs by query and key coordinate along an axis."""
    n, x, y = grid[axis], coordinates(runs.q, grid)[axis], coordinates(runs.start, grid)[axis]
    count = runs.stop - runs.start
    if axis < len(grid) - 1:
        return np.bincount(x * n + y, count, n * n).reshape(n, n)
    start, stop = (np.bincount(x * (n + 1) + at, minlength=n * (n + 1)) for at in (y, y + count))
    return np.cumsum((start - stop).reshape(n, n + 1), axis=1)[:, :n]


def _in_box(runs: KeyRuns, grid: tuple[int, ...], tables: list[np.ndarray]) -> int:
    """Count the pairs that all tables allow."""
    *outer, last = zip(coordinates(runs.q, grid), coordinates(runs.start, grid), tables, strict=True)
    inside = np.ones(len(runs.q), dtype=bool)
    for x, y, table in outer:
        inside &= table[x, y]
    x, y, table = last
    before = np.pad(np.cumsum(table, axis=1), ((0, 0), (1, 0)))
    return int((before[x, y + runs.stop - runs.start] - before[x, y])[inside].sum())


def _named(grid: tuple[int, ...], tables: list[np.ndarray]) -> Pattern:
    """Name the boxes: axial, windowed, Neighborhood, or else PerAxis."""
    full = [axis for axis, table in enumerate(tables) if table.all()]
    shared = [axis for axis, table in enumerate(tables) if np.array_equal(table, np.eye(len(table), dtype=bool))]
    if len(full) == 1 and len(full) + len(shared) == len(grid):
        return axial(grid, full[0])
    windows = [_window(table) for table in tables]
    if None not in windows:
        window, shift = zip(*windows, strict=True)
        return windowed(grid, *(each[0] if len(set(each)) == 1 else tuple(each) for each in (window, shift)))
    neighbors = [_neighbors(table) for table in tables]
    if None not in neighbors and len(grid) <= _MOST_AXES:
        kernel, dilation, causal = zip(*neighbors, strict=True)
        return Neighborhood(grid, kernel, dilation, causal=causal)
    return PerAxis(grid, tuple(_along(table) for table in tables))


def _along(table: np.ndarray) -> Pattern:
    """Name the pattern along one axis: a window, dilated or not, or else a mask."""
    distances = np.subtract(*np.nonzero(table))
    n, step = len(table), int(np.gcd.reduce(distances)) or len(table)
    low, high = (int(d) if abs(d) + step < n else None for d in (distances.min(), distances.max()))
    window = Candidate(Stride(step) if step > 1 else Full(), low, high, 0, 0).pattern()
    return window if np.array_equal(window.index_set(n, n).to_dense(), table) else Mask(table)


def _window(table: np.ndarray) -> tuple[int, int] | None:
    """Return (window, shift) if tokens see exactly their own window, else None."""
    n, window = len(table), int(table.sum(axis=1).max(initial=1))
    shift = int(table[0].sum()) % window
    same = np.array_equal(windowed(n, window, shift).index_set(n, n).to_dense(), table)
    return (window, shift) if same else None


def _neighbors(table: np.ndarray) -> tuple[int, int, bool] | None:
    """Return (kernel, dilation, causal) if tokens see their nearest neighbours, else None."""
    n, keys = len(table), np.flatnonzero(table[table.sum(axis=1).argmax()])
    kernel, dilation = len(keys), int(keys[1] - keys[0]) if len(keys) > 1 else 1
    for causal in (False, True) if kernel * dilation <= n else ():
        if np.array_equal(Neighborhood(n, kernel, dilation, causal=causal).index_set(n, n).to_dense(), table):
            return kernel, dilation, causal
    return None
