"""Features of the CPU cost model: operation counts of the kernels that execute a plan.

The features count iterations of the CPU kernels (``cpu/kernels/forward/products.h``), which skip the blocks of a
partial tile that have no allowed pair. Coefficients are measured on each device.
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

_STEP = 32  # keys of an iteration of panel products
_KEYS = 8  # keys of a block of scores, the granularity of skipping
ROWS = 6  # rows of an output block, which skips keys that none of its rows attends to
ROWS_AT_ONCE = 4  # rows of a block in few-query tiles, which computes the range of keys that its rows attend to
_MOST_MASKS = 4096  # maximum number of masks to inspect, evenly spaced


class Counts(NamedTuple):
    """The features of a forward pass, summed over batch entries and heads."""

    items: float
    tiles: float
    rows: float  # elements of packed queries and written results
    scores: float  # vectors of scores, times head_dim
    weights: float  # vectors of weights
    output: float  # vector operations of the product of weights and values
    gathered: float  # elements of keys and values copied before the products
    merged: float  # elements of split-KV partials to combine


class RowCounts(NamedTuple):
    """The features of a forward pass that computes one row, or a few rows at once, with dot products along head_dim."""

    rows: float
    elements: float  # elements of queries and results
    weights: float  # computed pairs
    products: float  # computed pairs times (head_dim + head_dim_v)


class Kernels(NamedTuple):
    """How the kernels of an instruction set and a dtype execute tiles."""

    lanes: int  # elements of a vector
    copies: bool = False  # whether keys and values are always copied, because their dtype is converted
    panel: int = 0  # queries of a panel (``kernels/amx/panel.h``); 0 for kernels without panels


def count_pairs(plan: Plan, sizes: Sizes) -> RowCounts:
    """Return the features of the plan's pairs in one-query tiles, whose kernel computes only allowed pairs."""
    pairs = sizes.batch * sizes.heads_q * plan.nnz / max(plan.variants, 1)
    return row_counts(sizes.batch * sizes.heads_q * plan.q_len, pairs, sizes.head_dim + sizes.head_dim_v)


def row_counts(rows: float, pairs: float, features: int) -> RowCounts:
    """Return the features of `rows` rows and `pairs` pairs, where `features` is head_dim + head_dim_v."""
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
    """Multiply counts of queries, vectors and row blocks by head dimensions, and count the copied keys and values.

    Of `keys` keys, `uneven` are not evenly spaced and `apart` are not adjacent. The kernels read keys in place if they
    are evenly spaced, and values in place if they are adjacent and head_dim_v fills whole vectors.
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
    """Return the features of a plan with few-query tiles, which are computed a few rows at once."""
    times = _times(plan, sizes)
    runs = _runs_of(plan, times)
    keys = np.append(_reached_by_rows(plan, lanes), plan.block_kv)[plan.mask]  # mask -1 selects the last: all keys
    rows = float(np.repeat(times, np.diff(plan.work_indptr)) @ _queries(plan))
    return row_counts(rows, float((runs.tiles * runs.cells) @ keys), sizes.head_dim + sizes.head_dim_v)


def _times(plan: Plan, sizes: Sizes) -> np.ndarray:
    """Return the number of batch heads that have each variant."""
    heads = sizes.batch * sizes.heads_q / max(plan.variant.size, 1)
    return np.bincount(plan.variant.ravel(), minlength=plan.variants) * heads


def _queries(plan: Plan) -> np.ndarray:
    """Return the number of queries of each work item."""
    views = plan.views[plan.components["query_view"][plan.work["component"]]]
    return real_extents(views, plan.work["query_tile"]).prod(axis=1)


def _reached_by_rows(plan: Plan, lanes: int) -> np.ndarray:
    """Return the mean key range of the row blocks of each bitmask, rounded up to whole vectors."""
    every = max(1, -(-len(plan.masks) // _MOST_MASKS))
    masks = plan.masks[::every]
    of_rows = np.bitwise_or.reduceat(masks, np.arange(0, plan.block_q, ROWS_AT_ONCE), axis=1)
    found = np.unpackbits(of_rows.view(np.uint8), axis=-1, bitorder="little").astype(bool)
    vectors = np.logical_or.reduceat(found, np.arange(0, found.shape[-1], lanes), axis=-1)
    keys = lanes * _reach(vectors)
    return np.repeat(keys.mean(axis=1), every)[: len(plan.masks)]


class _Runs(NamedTuple):
    """The runs of a plan."""

    copies: np.ndarray  # number of times that the run's list is executed
    tiles: np.ndarray  # number of executed tiles
    cells: np.ndarray  # number of queries of the query tile
    key_view: np.ndarray  # index in Plan.views


def _runs_of(plan: Plan, times: np.ndarray) -> _Runs:
    """Return the runs of each family of components, which share their lists."""
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
    """Count score vectors, weight vectors, and (output row block, key) pairs, without padding queries."""
    number, found = plan.mask + 1, []
    for left, side in zip(_of_masks(plan, lanes, panel), (lanes, lanes, panel or ROWS), strict=True):
        share = -(-runs.cells // side) / -(-plan.block_q // side)
        found.append(float((runs.tiles * share) @ left[number]))
    return tuple(found)


def _of_keys(plan: Plan, runs: _Runs) -> tuple[float, float, float]:
    """Count the keys of the views that tiles use: those not evenly spaced, those not adjacent, and all of them."""
    overlap = np.bincount(runs.key_view, runs.tiles, len(plan.views))
    copies = np.zeros(len(plan.views))
    copies[runs.key_view] = runs.copies
    views = plan.views
    keys = np.minimum(overlap / np.maximum(views["tiles"], 1), copies) * views["extent"].prod(axis=1, dtype=np.int64)
    uneven = (views["box"][:, :2].max(axis=1) > 1) | plan.ordered
    apart = uneven | (views["stride"][:, 2] != 1)
    return float(keys[uneven].sum()), float(keys[apart].sum()), float(keys.sum())


def _of_masks(plan: Plan, lanes: int, panel: int) -> list[np.ndarray]:
    """Count score vectors, weight vectors, and (output row block, key) pairs: of a full tile, then of each bitmask."""
    every = max(1, -(-len(plan.masks) // _MOST_MASKS))
    masks = plan.masks[::every]
    found = _in_panels(masks, lanes, panel) if panel else _in_vectors(masks, lanes)
    return [np.append(full, np.repeat(partial, every)[: len(plan.masks)]) for full, partial in found]


def _in_vectors(masks: np.ndarray, lanes: int) -> tuple[tuple[int, np.ndarray], ...]:
    """Return each feature as (count of a full tile, counts of the bitmasks), for query-vectorized tiles."""
    block_q, block_kv = masks.shape[1], 64 * masks.shape[2]
    starts = np.arange(0, block_q, lanes)
    # (masks, vectors, key blocks)
    of_vector = np.greater(np.bitwise_or.reduceat(masks, starts, axis=1).view(np.uint8), 0)
    keys = _KEYS * _reach(np.logical_or.reduce(of_vector, axis=1))
    of_rows = np.bitwise_or.reduceat(masks, np.arange(0, block_q, ROWS), axis=1)
    return (
        (len(starts) * block_kv, _KEYS * of_vector.sum(axis=(1, 2))),
        (len(starts) * block_kv, len(starts) * keys),
        (-(-block_q // ROWS) * block_kv, np.bitwise_count(of_rows).sum(axis=(1, 2))),
    )


def _in_panels(masks: np.ndarray, lanes: int, panel: int) -> tuple[tuple[int, np.ndarray], ...]:
    """Return each feature as (count of a full tile, counts of the bitmasks), for panels; the last one counts panels."""
    # A panel computes the range of vectors and of keys that have allowed pairs.
    block_q, block_kv = masks.shape[1], 64 * masks.shape[2]
    of_vector = np.bitwise_or.reduceat(masks, np.arange(0, block_q, lanes), axis=1).view(np.uint32) != 0
    side, (count, columns, steps) = panel // lanes, of_vector.shape
    of_vector = np.pad(of_vector, ((0, 0), (0, -columns % side), (0, 0)))
    of_vector = of_vector.reshape(count, -(-columns // side), side, steps)
    vectors, steps = (_reach(np.logical_or.reduce(of_vector, axis=axis)) for axis in (3, 2))  # (masks, panels)
    blocks = columns * block_kv, (vectors * steps).sum(axis=1) * _STEP
    return blocks, blocks, (-(-block_q // panel), np.count_nonzero(steps, axis=1))


def _reach(found: np.ndarray) -> np.ndarray:
    """Return the length of the range from the first to the last true element of the last axis; 0 if none is true."""
    reach = found.shape[-1] - found.argmax(axis=-1) - found[..., ::-1].argmax(axis=-1)
    return np.where(found.any(axis=-1), reach, 0)
