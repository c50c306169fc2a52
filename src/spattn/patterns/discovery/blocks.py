"""Block candidates: documents, layouts of square blocks, and boxes of keys on a grid."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np

from ..._util.ragged import ramp
from ..base.pattern import Pattern
from ..grids.grid import coordinates
from ..grids.neighborhood import Neighborhood
from ..grids.per_axis import PerAxis, axial, windowed
from ..listed.masks import BlockLayout, Mask
from ..sequence.basic import BlockLocal, Full, Stride
from ..sequence.documents import Documents
from .evidence import Evidence, KeyRuns, Pairs
from .lines import TILE, Candidate

__all__ = ["boxes", "documents", "layouts", "scattered_layouts"]

_SIDE = 64  # number of tokens that are tested on either side of a possible document boundary
_BLOCKS = range(8, 1025)  # possible block sizes
_NEARLY = 0.9
_MOST_BLOCKS = 1 << 20
_NOISY_SHARE = 0.5  # in noisy masks, coordinates with at most this fraction of the maximum count are noise
_LONGEST_AXIS = 1 << 11
_MOST_RUNS = 1 << 22  # maximum runs of a candidate of boxes
_MOST_AXES = 3  # maximum axes of a Neighborhood


def documents(evidence: Evidence) -> Iterator[Candidate]:
    """Propose documents of any lengths, causal or not."""
    starts, pairs = _boundaries(evidence), evidence.pairs
    if not 0 < len(starts) <= pairs.kv_len // 2:
        return
    first, end = np.append(0, starts), np.append(starts, pairs.kv_len)
    document = np.repeat(np.arange(len(end)), end - first)
    used = int(np.flatnonzero(_inside(evidence.total.runs(None), document, first, end))[-1:].sum()) + 1
    if used < 2:
        return
    base = _named((end - first)[:used], pairs.kv_len)
    q, low = np.arange(max(pairs.first, 0), end[used - 1]), evidence.low
    stop = end[document[q]] if low is None else q + 1
    present, new = evidence.of_both(lambda each: int(_inside(each.runs(low), document, first, end)[:used].sum()))
    missing = int((stop - first[document[q]]).sum()) - present
    yield Candidate(base, low, None, new, missing, used if isinstance(base, Documents) else 0)


def _inside(runs: KeyRuns, document: np.ndarray, first: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Count the pairs within each document."""
    keep = runs.q >= 0
    runs = runs if keep.all() else KeyRuns(*(each[keep] for each in runs))
    own = document[runs.q]
    runs = runs.cut(first[own], end[own])
    return np.bincount(document[runs.q], runs.stop - runs.start, len(first)).astype(np.int64)


def _boundaries(evidence: Evidence) -> np.ndarray:
    """Return likely document boundaries: positions that almost no pair crosses, at local minima of the density."""
    kv_len = evidence.pairs.kv_len
    total, left = evidence.of_both(lambda each: _in_squares(each.runs(0), kv_len))
    t = np.arange(kv_len + 1)
    area = np.minimum(t, _SIDE) * (np.minimum(t + _SIDE, kv_len) - np.maximum(t, evidence.pairs.first)).clip(0)
    unknown = area - (total - left)
    share = np.where(unknown > 0, left / np.maximum(unknown, 1), 1.0)
    least = (share[1:-1] <= share[:-2]) & (share[1:-1] <= share[2:])
    return np.flatnonzero(least & (share[1:-1] <= 4 * (1 - evidence.fill))) + 1


def _in_squares(runs: KeyRuns, kv_len: int) -> np.ndarray:
    """Count, for each position t, the pairs of queries in ``[t, t + _SIDE)`` with keys in ``[t - _SIDE, t)``."""
    near = runs.cut(runs.q - 2 * _SIDE + 1, runs.q)
    count = near.stop - near.start
    q, k = np.repeat(near.q, count), np.repeat(near.start, count) + ramp(count)
    first, behind = np.maximum(k + 1, q - _SIDE + 1), np.minimum(q, k + _SIDE) + 1
    return np.cumsum(np.bincount(first, minlength=kv_len + 1) - np.bincount(behind, minlength=kv_len + 1))


def _named(lengths: np.ndarray, kv_len: int) -> BlockLocal | Documents:
    """Return BlockLocal if all documents, except a shorter last one, have equal lengths; else Documents."""
    length = int(lengths[0])
    if (lengths[:-1] == length).all() and lengths[-1] <= length and lengths.sum() == kv_len:
        return BlockLocal(length)
    return Documents(tuple(lengths.tolist()))


def layouts(evidence: Evidence) -> Iterator[Candidate]:
    """Propose layouts of square blocks, causal or not; empty cells of their tiles add to the cost."""
    for found in scattered_layouts(evidence):
        if isinstance(found.base, BlockLayout):
            yield found._replace(cost=found.cost + max(_cells(found.base) - found.new, 0) // 2)


def scattered_layouts(evidence: Evidence) -> Iterator[Candidate]:
    """Propose layouts of square blocks, causal or not, without a cost for empty cells of tiles."""
    pairs, low, block = evidence.pairs, evidence.low, _block(evidence)
    blocks = -(-pairs.kv_len // block) if block else 0
    if blocks < 2 or blocks * blocks > _MOST_BLOCKS + 4 * len(pairs.keys):
        return
    capacity = _capacity(pairs, block, blocks, low)
    total, left = evidence.of_both(lambda each: _in_blocks(each.runs(low), block, blocks))
    chosen = evidence.filled(capacity, total, left) & (left > 0)
    new, missing = int(left[chosen].sum()), int((capacity - total)[chosen].sum())
    yield Candidate(BlockLayout(chosen, block), low, None, new, missing, blocks * blocks)


def _cells(pattern: BlockLayout) -> int:
    """Count the cells of all tiles that contain an allowed block."""
    layout = pattern.layout
    rows, columns = (min(-(-side // block), len(layout)) for side, block in zip(TILE, pattern._tokens(), strict=True))
    padded = np.pad(layout, [(0, -len(layout) % side) for side in (rows, columns)])
    tiles = padded.reshape(len(padded) // rows, rows, -1, columns).any(axis=(1, 3))
    return int(tiles.sum()) * rows * columns * math.prod(pattern._tokens())


def _block(evidence: Evidence) -> int:
    """Return the largest block size at whose multiples nearly all runs start, ignoring noise; 0 = none."""
    starts = np.bincount(evidence.total.runs(None).start, minlength=evidence.pairs.kv_len)[1:]
    unusual = np.maximum(starts - 4 * np.median(starts), 0) if len(starts) else starts
    enough = max(_NEARLY * unusual.sum(), 1)
    return next((b for b in reversed(_BLOCKS) if unusual[b - 1 :: b].sum() >= enough), 0)


def _in_blocks(runs: KeyRuns, block: int, blocks: int) -> np.ndarray:
    """Count the pairs of each block, for queries at positions >= 0."""
    q, start, stop = runs.split(block)
    cell = q // block * blocks + start // block
    inside = cell >= 0
    count = np.bincount(cell[inside], (stop - start)[inside], blocks * blocks)
    return count.astype(np.int64).reshape(blocks, blocks)


def _capacity(pairs: Pairs, block: int, blocks: int, low: int | None) -> np.ndarray:
    """Return the possible number of pairs per block, or of causal pairs if `low` is 0, for positions q >= 0."""
    first = max(pairs.first, 0)
    edges = np.minimum(block * np.arange(blocks + 1), pairs.kv_len)
    queries, keys = np.diff(np.maximum(edges, first)), np.diff(edges)
    capacity = np.outer(queries, keys)
    if low is not None:
        capacity = np.tril(capacity)
        above = np.maximum(edges[:-1], first) - edges[:-1]  # positions of the block before the first query
        np.fill_diagonal(capacity, (keys * (keys + 1) - above * (above + 1)) // 2)
        capacity[queries == 0] = 0
    return capacity


def boxes(evidence: Evidence) -> Iterator[Candidate]:
    """Propose, for each subset of axes, boxes of keys along these axes that share the query's other coordinates."""
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
    """Return the candidate of the boxes that per-axis (query, key) tables describe."""
    base = _named_boxes(grid, tables)
    x = coordinates(evidence.pairs.q, grid)
    sides = [table.sum(axis=1)[c] for table, c in zip(tables, x, strict=True)]
    capacity = int(np.prod(np.stack(sides), axis=0).sum())
    masks = sum(p.mask.size for p in base.patterns if isinstance(p, Mask)) if isinstance(base, PerAxis) else 0
    return Candidate(base, None, None, _in_box(left, grid, tables), capacity - _in_box(total, grid, tables), masks)


def _runs_of_row(tables: list[np.ndarray]) -> int:
    """Return the maximum number of runs per row in the boxes that the tables describe."""
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
    """Return a boolean (query, key) table of the coordinates along an axis that belong to the box.

    A cell of the table is True if its uncovered pairs exceed the noise, or if all its pairs reach a fraction `fill` of
    the largest uncovered count.
    """
    times, times_left = (_times(runs, grid, axis) for runs in (total, left))
    most = times_left.max(initial=0)
    return (times_left > (0 if fill == 1 else _NOISY_SHARE * most)) | (times >= max(fill * most, 1))


def _times(runs: KeyRuns, grid: tuple[int, ...], axis: int) -> np.ndarray:
    """Count the pairs for each (query, key) coordinate along an axis."""
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


def _named_boxes(grid: tuple[int, ...], tables: list[np.ndarray]) -> Pattern:
    """Return the boxes as axial, windowed, Neighborhood, or else PerAxis."""
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
    """Return the pattern along one axis: a (dilated) window, or else a mask."""
    distances = np.subtract(*np.nonzero(table))
    n, step = len(table), int(np.gcd.reduce(distances)) or len(table)
    low, high = (int(d) if abs(d) + step < n else None for d in (distances.min(), distances.max()))
    window = Candidate(Stride(step) if step > 1 else Full(), low, high, 0, 0).pattern()
    return window if np.array_equal(window.index_set(n, n).to_dense(), table) else Mask(table)


def _window(table: np.ndarray) -> tuple[int, int] | None:
    """Return (window, shift) if tokens attend to exactly their own window, else None."""
    n, window = len(table), int(table.sum(axis=1).max(initial=1))
    shift = int(table[0].sum()) % window
    same = np.array_equal(windowed(n, window, shift).index_set(n, n).to_dense(), table)
    return (window, shift) if same else None


def _neighbors(table: np.ndarray) -> tuple[int, int, bool] | None:
    """Return (kernel, dilation, causal) if tokens attend to exactly their nearest neighbors, else None."""
    n, keys = len(table), np.flatnonzero(table[table.sum(axis=1).argmax()])
    kernel, dilation = len(keys), int(keys[1] - keys[0]) if len(keys) > 1 else 1
    for causal in (False, True) if kernel * dilation <= n else ():
        if np.array_equal(Neighborhood(n, kernel, dilation, causal=causal).index_set(n, n).to_dense(), table):
            return kernel, dilation, causal
    return None
