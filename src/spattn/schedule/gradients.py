"""Gradient units of the CPU backward, which fix the order in which contributions to a row of dK are added."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .._util.checks import show
from .._util.frozen import frozen
from .._util.ragged import offsets, ramp
from ..planning import Plan
from ..planning.contract.cache import kept_with_plan
from ..planning.contract.types import AXES
from ..planning.contract.validated import validated
from .item_order import by_rows

__all__ = ["UNIT", "Units", "runs_of_items", "units"]

UNIT = np.dtype(
    [
        ("batch", "i8"),
        ("head_kv", "i8"),
        ("first", "i8"),
        ("last", "i8"),
        ("begin", "i8"),
        ("end", "i8"),
        ("offset", "i8"),
    ]
)
"""A unit runs the items [first, last) of a list: the work items of all query heads of one key-value head, head by head.
It accumulates dK and dV of the keys [begin, end) in a shared workspace, in the rows from `offset` on.
"""

_PARALLEL_UNITS = 8  # minimum number of units of a call; every further unit of a head needs another copy of dK and dV


@dataclass(frozen=True)
class Units:
    """A plan's work items in backward order, and its units, in read-only arrays."""

    work: np.ndarray  # (items,) WORK: each variant's items in row order, so that a slice reads few keys
    units: np.ndarray  # (batch · heads_kv · per_head,) UNIT: a key-value head's units are adjacent
    per_head: int  # number of units of each key-value head of each batch entry
    rows: int  # number of rows of the workspace


@kept_with_plan
def units(plan: Plan, batch: int, heads_q: int, heads_kv: int, whole: int | None = None) -> Units:
    """Return the units for these numbers of heads; they do not depend on the thread count.

    `whole` is the number of key-value heads, over the batch, of a call of which these are some: its units are the same.
    """
    work, per_head = by_rows(plan), -(-_PARALLEL_UNITS // (whole or batch * heads_kv))
    groups = np.broadcast_to(plan.variant, (batch, heads_q)).reshape(batch * heads_kv, -1)
    kinds, kind = np.unique(groups, axis=0, return_inverse=True)
    # With permuted keys each unit covers all keys.
    ranges = _key_ranges(plan, work) if per_head > 1 and not plan.ordered else None
    cuts = np.stack([_cut(plan, work, ranges, variants, per_head) for variants in kinds])
    made = cuts[kind.ravel()].ravel()
    made["batch"], made["head_kv"] = np.divmod(np.repeat(np.arange(len(kind)), per_head), heads_kv)
    rows = np.cumsum(made["end"] - made["begin"])
    made["offset"][1:] = rows[:-1]
    split = Units(work, frozen(made), per_head, int(rows[-1]))
    show("units", plan=plan, split=split, heads=(batch, heads_q, heads_kv))
    return split


def _cut(
    plan: Plan, work: np.ndarray, ranges: tuple[np.ndarray, np.ndarray] | None, variants: np.ndarray, count: int
) -> np.ndarray:
    """Split the concatenated items of the variants into `count` units with nearly equal numbers of tiles.

    The units of a part of a plan have the items that the whole plan's units have.
    """
    part = validated(plan).part
    whole, of_whole = (plan, work) if part is None else (part.whole, by_rows(part.whole))
    item = _items(whole, variants)
    cost = np.concatenate([[0], np.cumsum(of_whole["end"][item] - of_whole["begin"][item])])
    bound = np.searchsorted(cost, cost[-1] * np.arange(count + 1) // count)
    if part is not None:
        bound = offsets(np.isin(item, part.items))[bound]
        item = _items(plan, variants)
    cut = np.zeros(count, UNIT)
    cut["first"], cut["last"] = bound[:-1], bound[1:]
    if ranges is None:
        cut["end"] = plan.kv_len
        return cut
    for unit in cut:
        own = item[unit["first"] : unit["last"]]
        if len(own):
            unit["begin"], unit["end"] = ranges[0][own].min(), ranges[1][own].max() + 1
    return cut


def _items(plan: Plan, variants: np.ndarray) -> np.ndarray:
    return np.concatenate([np.arange(plan.work_indptr[v], plan.work_indptr[v + 1]) for v in variants])


def runs_of_items(plan: Plan, work: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return item, run, number of the first and of the last tile of each run, or piece of a run, of work items."""
    tiles = plan.tile_indptr
    first, last = (np.searchsorted(tiles, number, side="right") - 1 for number in (work["begin"], work["end"] - 1))
    count = last - first + 1
    item = np.repeat(np.arange(len(work)), count)
    run = first[item] + ramp(count)
    return item, run, np.maximum(tiles[run], work["begin"][item]), np.minimum(tiles[run + 1], work["end"][item]) - 1


def _key_ranges(plan: Plan, work: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the smallest and largest key of each item, without padding."""
    tiles = plan.tile_indptr
    item, run, low, high = runs_of_items(plan, work)
    views = plan.views[plan.components["key_view"][work["component"][item]] + plan.key_view[run]]
    first = plan.indices[run].astype(np.int64)
    least, greatest = np.full(len(work), plan.kv_len), np.full(len(work), -1)
    for of_range, start, stop in _boxes(
        views["grid"].astype(np.int64), first + low - tiles[run], first + high - tiles[run]
    ):
        view = views[of_range]
        ends = start * view["box"], np.minimum((stop + 1) * view["box"], view["extent"]) - 1
        ends = tuple(coordinate * view["stride"] for coordinate in ends)
        np.minimum.at(least, item[of_range], view["offset"] + np.minimum(*ends).sum(axis=1))
        np.maximum.at(greatest, item[of_range], view["offset"] + np.maximum(*ends).sum(axis=1))
    return least, greatest


def _boxes(
    grid: np.ndarray, first: np.ndarray, last: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Decompose ranges of row-major grid indices into boxes; yield (range of each box, first and last coordinates)."""
    of_range = np.arange(len(first))
    for axis in reversed(range(AXES)):
        (row, start), (last_row, stop) = (np.divmod(number, grid[of_range, axis]) for number in (first, last))
        one = row == last_row
        end = grid[of_range, axis] - 1
        yield of_range, *_box(grid[of_range], axis, row, start, np.where(one, stop, end))
        several = ~one
        yield (
            of_range[several],
            *_box(grid[of_range[several]], axis, last_row[several], 0 * stop[several], stop[several]),
        )
        between = last_row > row + 1
        of_range, first, last = of_range[between], row[between] + 1, last_row[between] - 1


def _box(
    grid: np.ndarray, axis: int, row: np.ndarray, start: np.ndarray, stop: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the (first, last) coordinates of boxes.

    `row` is the row-major index of a box on the axes before `axis`, [start, stop] its range along `axis`. It covers all
    later axes.
    """
    low, high = np.zeros_like(grid), grid - 1
    low[:, axis], high[:, axis] = start, stop
    for before in reversed(range(axis)):
        row, low[:, before] = np.divmod(row, grid[:, before])
        high[:, before] = low[:, before]
    return low, high
