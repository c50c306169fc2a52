"""Features of the CPU cost model: operation counts of a plan's kernels.

The features count iterations of the CPU kernels (``cpu/kernels/forward/products.h``): a partial tile costs only its
blocks with an allowed pair. Coefficients are measured per device.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .._util.ragged import ramp
from ..planning import Plan
from ..planning.contract.cache import kept_with_plan
from ..planning.contract.types import real_extents
from .chooser import Sizes

__all__ = [
    "ROWS",
    "ROWS_AT_ONCE",
    "Counts",
    "Kernels",
    "RowCounts",
    "count",
    "count_dense",
    "count_pairs",
    "count_rows",
    "row_counts",
]

_STEP = 32  # keys of a step of panel products
_KEYS = 8  # keys of a block of scores, the granularity of skipping
ROWS = 6  # rows of an output block: keys that none of them attends to are skipped
ROWS_AT_ONCE = 4  # rows of a few-query block: only the key range that any of them attends to is computed
_MOST_MASKS = 4096  # masks inspected; of more, an evenly spaced sample


class Counts(NamedTuple):
    """Features of a forward, summed over batch entries and heads."""

    items: float
    tiles: float
    rows: float  # elements of packed queries and written results
    scores: float  # vectors of the first product times features
    weights: float  # vectors of weights
    output: float  # vectors of the second product
    gathered: float  # elements of keys and values copied before the products
    merged: float  # elements of split-KV partials to combine


class RowCounts(NamedTuple):
    """Features of a forward that runs row by row, or a few rows at once, with dot products along head_dim."""

    rows: float
    elements: float  # of queries and results
    weights: float  # computed pairs
    products: float  # computed pairs times the features of K and V


class Kernels(NamedTuple):
    """How the kernels of an instruction set and dtype execute tiles."""

    lanes: int  # elements of a vector
    copies: bool = False  # keys and values are always copied, because they are converted
    panel: int = 0  # queries of a panel (``kernels/amx/panel.h``); 0 without panels


def count_pairs(plan: Plan, sizes: Sizes) -> RowCounts:
    """Return the features of the plan's pairs in one-query tiles, of which only allowed pairs are computed."""
    pairs = sizes.batch * sizes.heads_q * plan.nnz / max(plan.variants, 1)
    return row_counts(sizes.batch * sizes.heads_q * plan.q_len, pairs, sizes.head_dim + sizes.head_dim_v)


def row_counts(rows: float, pairs: float, features: int) -> RowCounts:
    """Return the features of `rows` rows and `pairs` pairs, with `features` features of K and V in total."""
    return RowCounts(rows, rows * features, pairs, pairs * features)


def count_dense(q_len: int, kv_len: int, tile: tuple[int, int], sizes: Sizes, kernels: Kernels) -> Counts:
    """Return the features of dense attention in tiles of this size, without a plan."""
    tiles, rest = divmod(q_len, tile[0])
    items = tiles + (rest > 0)
    side, step = (kernels.panel, _STEP) if kernels.panel else (ROWS, _KEYS)
    vectors, blocks = (tiles * -(-tile[0] // rows) + -(-rest // rows) for rows in (kernels.lanes, side))
    each, key_tiles = vectors * -(-kv_len // step) * step, -(-kv_len // tile[1])
    output = blocks * (key_tiles if kernels.panel else kv_len)
    own = items, items * key_tiles, q_len, each, each, output, 0, 0
    of_head = Counts(*(float(sizes.batch * sizes.heads_q * number) for number in own))
    return _with_head_dim(of_head, 0.0, 0.0, float(sizes.batch * sizes.heads_q * kv_len), sizes, kernels)


def _with_head_dim(own: Counts, uneven: float, apart: float, keys: float, sizes: Sizes, kernels: Kernels) -> Counts:
    """Return the features for counts of queries, vectors and row blocks times keys, none of them gathered.

    Of `keys`, `uneven` are not evenly spaced and `apart` not adjacent. Keys are read in place if evenly spaced, values
    if adjacent and in whole vectors.
    """
    copied = keys if kernels.copies else uneven
    copied_values = keys if kernels.copies or sizes.head_dim_v % kernels.lanes else apart
    return own._replace(
        rows=own.rows * (sizes.head_dim + sizes.head_dim_v),
        scores=own.scores * (sizes.head_dim + (sizes.head_dim_v if kernels.panel else 0)),
        output=own.output * -(-sizes.head_dim_v // kernels.lanes),
        gathered=copied * sizes.head_dim + copied_values * sizes.head_dim_v,
        merged=own.merged * sizes.head_dim_v,
    )


@kept_with_plan
def count(plan: Plan, sizes: Sizes, kernels: Kernels) -> Counts:
    """Return the features of a call."""
    times = _times(plan, sizes)
    of_item = np.repeat(times, np.diff(plan.work_indptr))
    of_merge = np.repeat(times, np.diff(plan.merge_variants))
    runs = _runs_of(plan, times)
    scores, weights, output = _of_runs(plan, runs, kernels.lanes, kernels.panel)
    own = Counts(
        items=float(of_item.sum()),
        tiles=float(runs.tiles.sum()),
        rows=float((of_item * _queries(plan)).sum()),
        scores=scores,
        weights=weights,
        output=output,
        gathered=0,
        merged=float((of_merge * np.diff(plan.merge_indptr)).sum()),
    )
    return _with_head_dim(own, *_of_keys(plan, runs), sizes, kernels)


@kept_with_plan
def count_rows(plan: Plan, sizes: Sizes, lanes: int) -> RowCounts:
    """Return the features of a plan with few-query tiles, which run row by row."""
    times = _times(plan, sizes)
    runs = _runs_of(plan, times)
    keys = np.append(_reached_by_rows(plan, lanes), plan.block_kv)[plan.mask]  # -1: all of them
    rows = float(np.repeat(times, np.diff(plan.work_indptr)) @ _queries(plan))
    return row_counts(rows, float((runs.tiles * runs.cells) @ keys), sizes.head_dim + sizes.head_dim_v)


def _times(plan: Plan, sizes: Sizes) -> np.ndarray:
    """Return the number of heads of all batch entries with each variant."""
    heads = sizes.batch * sizes.heads_q / max(plan.variant.size, 1)
    return np.bincount(plan.variant.ravel(), minlength=plan.variants) * heads


def _queries(plan: Plan) -> np.ndarray:
    """Return the queries of each work item."""
    views = plan.views[plan.components["query_view"][plan.work["component"]]]
    return real_extents(views, plan.work["query_tile"]).prod(axis=1)


def _reached_by_rows(plan: Plan, lanes: int) -> np.ndarray:
    """Return, per bitmask, the mean key range of its row blocks, in whole vectors."""
    every = max(1, -(-len(plan.masks) // _MOST_MASKS))
    masks = plan.masks[::every]
    of_rows = np.bitwise_or.reduceat(masks, np.arange(0, plan.block_q, ROWS_AT_ONCE), axis=1)
    found = np.unpackbits(of_rows.view(np.uint8), axis=-1, bitorder="little").astype(bool)
    vectors = np.logical_or.reduceat(found, np.arange(0, found.shape[-1], lanes), axis=-1)
    keys = lanes * _reach(vectors)
    return np.repeat(keys.mean(axis=1), every)[: len(plan.masks)]


class _Runs(NamedTuple):
    """Runs: executions of their lists (`copies`), tiles executed, queries of the query tile, key view in the plan."""

    copies: np.ndarray
    tiles: np.ndarray
    cells: np.ndarray
    key_view: np.ndarray


def _runs_of(plan: Plan, times: np.ndarray) -> _Runs:
    """Return the runs of each family: components that start at one CSR row share its lists."""
    components = plan.components
    _, index, family = np.unique(components["first_row"], return_index=True, return_inverse=True)
    shared, taken = components[index], np.bincount(family, times[components["variant"]], len(index))
    of_row = np.repeat(np.arange(len(index)), shared["query_tiles"])
    cells = real_extents(plan.views[shared["query_view"][of_row]], ramp(shared["query_tiles"])).prod(axis=1)
    row = np.repeat(np.arange(len(of_row)), np.diff(plan.indptr))
    copies = taken[of_row[row]]
    key_view = shared["key_view"][of_row[row]] + plan.key_view
    return _Runs(copies, np.diff(plan.tile_indptr) * copies, cells[row], key_view)


def _of_runs(plan: Plan, runs: _Runs, lanes: int, panel: int) -> tuple[float, ...]:
    """Return score vectors, weight vectors, and output row blocks times keys, scaled to rows with queries."""
    number, found = plan.mask + 1, []
    for left, side in zip(_of_masks(plan, lanes, panel), (lanes, lanes, panel or ROWS), strict=True):
        share = -(-runs.cells // side) / -(-plan.block_q // side)
        found.append(float((runs.tiles * share) @ left[number]))
    return tuple(found)


def _of_keys(plan: Plan, runs: _Runs) -> tuple[float, float, float]:
    """Return the keys of the tiles, once per view: uneven ones, non-adjacent ones, and all."""
    overlap = np.bincount(runs.key_view, runs.tiles, len(plan.views))
    copies = np.zeros(len(plan.views))
    copies[runs.key_view] = runs.copies
    views = plan.views
    keys = np.minimum(overlap / np.maximum(views["tiles"], 1), copies) * views["extent"].prod(axis=1, dtype=np.int64)
    uneven = (views["box"][:, :2].max(axis=1) > 1) | plan.ordered
    apart = uneven | (views["stride"][:, 2] != 1)
    return float(keys[uneven].sum()), float(keys[apart].sum()), float(keys.sum())


def _of_masks(plan: Plan, lanes: int, panel: int) -> list[np.ndarray]:
    """Return, for full tiles (first) and each bitmask: score vectors, weight vectors, output row blocks times keys."""
    every = max(1, -(-len(plan.masks) // _MOST_MASKS))
    masks = plan.masks[::every]
    found = _in_panels(masks, lanes, panel) if panel else _in_vectors(masks, lanes)
    return [np.append(full, np.repeat(partial, every)[: len(plan.masks)]) for full, partial in found]


def _in_vectors(masks: np.ndarray, lanes: int) -> tuple[tuple[int, np.ndarray], ...]:
    """Return (full tile, each bitmask) of each feature for query-vectorized tiles."""
    block_q, block_kv = masks.shape[1], 64 * masks.shape[2]
    starts = np.arange(0, block_q, lanes)
    # (masks, vectors, blocks of keys)
    of_vector = np.greater(np.bitwise_or.reduceat(masks, starts, axis=1).view(np.uint8), 0)
    keys = _KEYS * _reach(np.logical_or.reduce(of_vector, axis=1))
    of_rows = np.bitwise_or.reduceat(masks, np.arange(0, block_q, ROWS), axis=1)
    return (
        (len(starts) * block_kv, _KEYS * of_vector.sum(axis=(1, 2))),
        (len(starts) * block_kv, len(starts) * keys),
        (-(-block_q // ROWS) * block_kv, np.bitwise_count(of_rows).sum(axis=(1, 2))),
    )


def _in_panels(masks: np.ndarray, lanes: int, panel: int) -> tuple[tuple[int, np.ndarray], ...]:
    """Return (full tile, each bitmask) of each feature for panels of queries, which compute the range of vectors and of
    keys with an allowed pair; the last feature is the number of panels.
    """
    block_q, block_kv = masks.shape[1], 64 * masks.shape[2]
    of_vector = np.bitwise_or.reduceat(masks, np.arange(0, block_q, lanes), axis=1).view(np.uint32) != 0
    side, (count, columns, steps) = panel // lanes, of_vector.shape
    of_vector = np.pad(of_vector, ((0, 0), (0, -columns % side), (0, 0)))
    of_vector = of_vector.reshape(count, -(-columns // side), side, steps)
    vectors, steps = (_reach(np.logical_or.reduce(of_vector, axis=axis)) for axis in (3, 2))  # of each panel
    blocks = columns * block_kv, (vectors * steps).sum(axis=1) * _STEP
    return blocks, blocks, (-(-block_q // panel), np.count_nonzero(steps, axis=1))


def _reach(found: np.ndarray) -> np.ndarray:
    """Return the distance from the first to the last true element of the last axis, inclusive; 0 if there is none."""
    reach = found.shape[-1] - found.argmax(axis=-1) - found[..., ::-1].argmax(axis=-1)
    return np.where(found.any(axis=-1), reach, 0)
