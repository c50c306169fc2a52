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

__all__ = [
    "ROWS",
    "ROWS_AT_ONCE",
    "Counts",
    "Features",
    "RowCounts",
    "count",
    "count_dense",
    "count_pairs",
    "count_rows",
    "predicted_ms",
    "row_counts",
]

_STEP = 32  # keys of a step of panel products
_KEYS = 8  # keys of a block of scores, the granularity of skipping
ROWS = 6  # rows of an output block: keys that none of them attends to are skipped
ROWS_AT_ONCE = 4  # rows of a few-query block: only the key range that any of them attends to is computed
_MOST_MASKS = 4096  # masks inspected; of more, an evenly spaced sample


class Counts(NamedTuple):
    """Features of a forward, summed over batch entries and heads.

    Attributes
    ----------
    items, tiles : float
        Work items and tiles.
    rows : float
        Elements of packed queries and written results.
    scores, weights, output : float
        Vectors of the first product times features, vectors of weights, and vectors of the second product.
    gathered : float
        Elements of keys and values copied before the products.
    merged : float
        Elements of split-KV partials to combine.
    """

    items: float
    tiles: float
    rows: float
    scores: float
    weights: float
    output: float
    gathered: float
    merged: float


class RowCounts(NamedTuple):
    """Features of a forward that runs row by row, or a few rows at once, with dot products along head_dim.

    Attributes
    ----------
    rows : float
        Queries.
    elements : float
        Elements of queries and results.
    weights : float
        Computed pairs.
    products : float
        Computed pairs times the features of K and V.
    """

    rows: float
    elements: float
    weights: float
    products: float


class Features(NamedTuple):
    """Properties of the call and the kernels that the features depend on.

    Attributes
    ----------
    head_dim, head_dim_v : int
        Of the call.
    lanes : int
        Elements of a vector.
    copies : bool
        Whether all keys are copied.
    panel : int
        Queries of a panel; 0 without panels.
    """

    head_dim: int
    head_dim_v: int
    lanes: int
    copies: bool = False
    panel: int = 0


def predicted_ms(counts: tuple[float, ...], coefficients: tuple[float, ...]) -> float:
    """Return the predicted milliseconds, for coefficients in nanoseconds."""
    return 1e-6 * sum(number * cost for number, cost in zip(counts, coefficients, strict=True))


def count(plan: Plan, batch: int, heads: int, of: Features) -> Counts:
    """Return the features of a call."""
    return _with_features(_of_plan(plan, batch, heads, of.lanes, of.panel), of)


def count_rows(plan: Plan, batch: int, heads: int, of: Features) -> RowCounts:
    """Return the features of a plan with few-query tiles, which run row by row."""
    rows, pairs = _of_rows(plan, batch, heads, of.lanes)
    return row_counts(rows, pairs, of.head_dim + of.head_dim_v)


def count_pairs(plan: Plan, batch: int, heads: int, of: Features) -> RowCounts:
    """Return the features of the plan's pairs in one-query tiles, of which only allowed pairs are computed."""
    pairs = batch * heads * plan.nnz / max(plan.variants, 1)
    return row_counts(batch * heads * plan.q_len, pairs, of.head_dim + of.head_dim_v)


def row_counts(rows: float, pairs: float, features: int) -> RowCounts:
    """Return the features of `rows` rows and `pairs` pairs, with `features` features of K and V in total."""
    return RowCounts(rows, rows * features, pairs, pairs * features)


def count_dense(q_len: int, kv_len: int, batch: int, heads: int, tile: tuple[int, int], of: Features) -> Counts:
    """Return the features of dense attention in tiles of this size, without a plan."""
    tiles, rest = divmod(q_len, tile[0])
    items = tiles + (rest > 0)
    side, step = (of.panel, _STEP) if of.panel else (ROWS, _KEYS)
    vectors, blocks = (tiles * -(-tile[0] // rows) + -(-rest // rows) for rows in (of.lanes, side))
    each, key_tiles = vectors * -(-kv_len // step) * step, -(-kv_len // tile[1])
    output = blocks * (key_tiles if of.panel else kv_len)
    # In the order of _OfPlan; keys and values are contiguous.
    own = items, items * key_tiles, q_len, each, each, output, 0, 0, kv_len, 0
    return _with_features(_OfPlan(*(float(batch * heads * number) for number in own)), of)


class _OfPlan(NamedTuple):
    """Features before head_dim is known; `output` counts row blocks times keys. Of the `keys` used, `uneven` are not
    evenly spaced and `apart` are not adjacent.
    """

    items: float
    tiles: float
    rows: float
    vectors: float
    weights: float
    output: float
    uneven: float
    apart: float
    keys: float
    merged: float


def _with_features(own: _OfPlan, of: Features) -> Counts:
    """Keys are read in place if evenly spaced, values if adjacent and in whole vectors."""
    wide = -(-of.head_dim_v // of.lanes)
    copied = own.keys if of.copies else own.uneven
    copied_values = own.keys if of.copies or of.head_dim_v % of.lanes else own.apart
    return Counts(
        items=own.items,
        tiles=own.tiles,
        rows=own.rows * (of.head_dim + of.head_dim_v),
        scores=own.vectors * (of.head_dim + (of.head_dim_v if of.panel else 0)),
        weights=own.weights,
        output=own.output * wide,
        gathered=copied * of.head_dim + copied_values * of.head_dim_v,
        merged=own.merged * of.head_dim_v,
    )


@kept_with_plan
def _of_plan(plan: Plan, batch: int, heads: int, lanes: int, panel: int) -> _OfPlan:
    times = _times(plan, batch, heads)
    of_item = np.repeat(times, np.diff(plan.work_indptr))
    views = plan.views[plan.components["query_view"][plan.work["component"]]]
    cells = real_extents(views, plan.work["query_tile"]).prod(axis=1)
    of_merge = np.repeat(times, np.diff(plan.merge_variants))
    runs = _runs_of(plan, times)
    vectors, weights, output = _of_runs(plan, runs, lanes, panel)
    uneven, apart, keys = _of_keys(plan, runs)
    return _OfPlan(
        items=float(of_item.sum()),
        tiles=float(runs.tiles.sum()),
        rows=float((of_item * cells).sum()),
        vectors=vectors,
        weights=weights,
        output=output,
        uneven=uneven,
        apart=apart,
        keys=keys,
        merged=float((of_merge * np.diff(plan.merge_indptr)).sum()),
    )


def _times(plan: Plan, batch: int, heads: int) -> np.ndarray:
    """Return the number of heads of all batch entries with each variant."""
    return np.bincount(plan.variant.ravel(), minlength=plan.variants) * (batch * heads / max(plan.variant.size, 1))


@kept_with_plan
def _of_rows(plan: Plan, batch: int, heads: int, lanes: int) -> tuple[float, float]:
    times = _times(plan, batch, heads)
    views = plan.views[plan.components["query_view"][plan.work["component"]]]
    cells = real_extents(views, plan.work["query_tile"]).prod(axis=1)
    runs = _runs_of(plan, times)
    keys = np.append(_reached_by_rows(plan, lanes), plan.block_kv)[plan.mask]  # -1: all of them
    return float(np.repeat(times, np.diff(plan.work_indptr)) @ cells), float((runs.tiles * runs.cells) @ keys)


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
