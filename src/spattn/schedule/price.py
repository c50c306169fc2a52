"""What a plan costs: what its kernels will do, counted, and the time that this takes on a device.

The counts are of steps that the kernels of a CPU make (``cpu/kernels/forward/products.h``): a partial tile costs only
the blocks of it that hold an allowed pair. Coefficients are measured, and belong to the device.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..plan import Plan
from ..plan._cache import kept_with_plan
from ..plan._types import real_extents

__all__ = ["ROWS", "Counts", "count", "predicted_ms"]

_KEYS = 8  # of a block of scores, which is skipped as a whole
ROWS = 6  # of a block of the output: a key that none of them attends to is skipped
_MOST_MASKS = 4096  # looked at; of more, evenly spaced ones stand for all


class Counts(NamedTuple):
    """What a forward does, summed over batch entries and heads.

    Attributes
    ----------
    items, tiles : float
        Work items and tiles.
    rows : float
        Elements of queries that are packed and of results that are written.
    scores, weights, output : float
        Vectors of the first product times features, vectors of weights, and vectors of the second product.
    gathered : float
        Elements of keys and values that are copied before they are multiplied.
    merged : float
        Elements of partial rows that merges read.
    """

    items: float
    tiles: float
    rows: float
    scores: float
    weights: float
    output: float
    gathered: float
    merged: float


def predicted_ms(counts: Counts, coefficients: tuple[float, ...]) -> float:
    """Milliseconds, of nanoseconds for one of each."""
    return 1e-6 * sum(number * cost for number, cost in zip(counts, coefficients, strict=True))


def count(
    plan: Plan, batch: int, heads: int, head_dim: int, head_dim_v: int, lanes: int, copies: bool = False
) -> Counts:
    """The counts of a call; vectors have so many lanes, and with `copies` no key is read in place."""
    own = _of_plan(plan, batch, heads, lanes)
    both, wide = head_dim + head_dim_v, -(-head_dim_v // lanes)
    return Counts(
        items=own.items,
        tiles=own.tiles,
        rows=own.rows * both,
        scores=own.vectors * head_dim,
        weights=own.weights,
        output=own.output * wide,
        gathered=(own.keys if copies else own.gathered) * both,
        merged=own.merged * head_dim_v,
    )


class _OfPlan(NamedTuple):
    """The same before features come in; `output` is in blocks of rows times keys, `keys` are all that `gathered` would
    be if none were read in place."""

    items: float
    tiles: float
    rows: float
    vectors: float
    weights: float
    output: float
    gathered: float
    keys: float
    merged: float


@kept_with_plan
def _of_plan(plan: Plan, batch: int, heads: int, lanes: int) -> _OfPlan:
    times = np.bincount(np.broadcast_to(plan.variant, (batch, heads)).ravel(), minlength=plan.variants)
    of_item = np.repeat(times, np.diff(plan.work_indptr))
    views = plan.views[plan.components["query_view"][plan.work["component"]]]
    cells = real_extents(views, plan.work["query_tile"]).prod(axis=1)
    of_mask, filled, gathered, keys = _of_lists(plan, times, lanes)
    vectors, weights, output = _of_masks(plan, lanes)
    of_merge = np.repeat(times, np.diff(plan.merge_variants))
    return _OfPlan(
        items=float(of_item.sum()),
        tiles=float(of_mask.sum()),
        rows=float((of_item * cells).sum()),
        vectors=float(filled @ vectors),
        weights=float(filled @ weights),
        output=float(filled @ output),
        gathered=gathered,
        keys=keys,
        merged=float((of_merge * np.diff(plan.merge_indptr)).sum()),
    )


def _of_lists(plan: Plan, times: np.ndarray, lanes: int) -> tuple[np.ndarray, np.ndarray, float, float]:
    """How many tiles each bitmask has (those without one first), the same by the share of their vectors that hold
    queries, and the keys that are copied: those that cannot be read in place, and all of them."""
    of_mask, filled = np.zeros((2, len(plan.masks) + 1))
    gathered, keys = 0.0, 0.0
    most = -(-plan.block_q // lanes)
    first = plan.components["first_row"]
    for row in np.unique(first):  # families
        family = plan.components[first == row]
        copies = float(times[family["variant"]].sum())
        query, tiles = plan.views[family["query_view"][0]], int(family["query_tiles"][0])
        runs = slice(plan.indptr[row], plan.indptr[row + tiles])
        length, mask = np.diff(plan.tile_indptr[runs.start : runs.stop + 1]) * copies, plan.mask[runs] + 1
        cells = real_extents(np.broadcast_to(query, tiles), np.arange(tiles)).prod(axis=1)
        share = np.repeat(-(-cells // lanes) / most, np.diff(plan.indptr[row : row + tiles + 1]))
        of_mask += np.bincount(mask, length, len(of_mask))
        filled += np.bincount(mask, length * share, len(of_mask))
        for number, met in enumerate(np.bincount(plan.key_view[runs], length / copies if copies else length)):
            view = plan.views[family["key_view"][0] + number]
            own = copies * min(met / int(view["tiles"]), 1.0) * float(view["extent"].prod(dtype=np.int64))
            in_place = view["box"][:2].max() == 1 and view["stride"][2] == 1
            gathered, keys = gathered + (0.0 if in_place else own), keys + own
    return of_mask, filled, gathered, keys


def _of_masks(plan: Plan, lanes: int) -> list[np.ndarray]:
    """For a tile without a bitmask and for one of each: vectors of scores, vectors of weights, and blocks of rows of
    the output times keys."""
    every = max(1, -(-len(plan.masks) // _MOST_MASKS))
    masks = plan.masks[::every]
    starts = np.arange(0, plan.block_q, lanes)
    # (masks, vectors, blocks of keys)
    of_vector = np.greater(np.bitwise_or.reduceat(masks, starts, axis=1).view(np.uint8), 0)
    reached = np.logical_or.reduce(of_vector, axis=1)
    keys = _KEYS * (reached.shape[1] - reached.argmax(axis=1) - reached[:, ::-1].argmax(axis=1))
    of_rows = np.bitwise_or.reduceat(masks, np.arange(0, plan.block_q, ROWS), axis=1)
    found = (
        (len(starts) * plan.block_kv, _KEYS * of_vector.sum(axis=(1, 2))),
        (len(starts) * plan.block_kv, len(starts) * keys),
        (-(-plan.block_q // ROWS) * plan.block_kv, np.bitwise_count(of_rows).sum(axis=(1, 2))),
    )
    return [np.append(full, np.repeat(partial, every)[: len(plan.masks)]) for full, partial in found]
