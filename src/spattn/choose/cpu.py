"""Choice of the CPU tile and query boxes: the default unless the cost model prefers another."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from ..patterns import Pattern
from ..planning import Plan
from ..planning.contract.cache import kept_with_plan
from ..planning.contract.types import grid_of
from ..planning.tiles.tiling import choose_box, last_cell
from ..request.call import Call
from ..schedule import compiler
from .boxes import Overlap, overlap_of_boxes
from .features_cpu import (
    ROWS,
    ROWS_AT_ONCE,
    Counts,
    Features,
    count,
    count_dense,
    count_pairs,
    count_rows,
    predicted_ms,
    row_counts,
)
from .machine_cpu import Device

__all__ = ["chosen", "dense_ms", "in_boxes", "cost_ms", "cost_of_pairs_ms"]

_EFFICIENT = 0.6  # efficiency above which no alternative is tried
_CELLS = range(17, 97)  # cells of a box: with more, the weights exceed the L1 cache
_MOST_KEYS = 128  # keys of a box with more rows than ROWS_AT_ONCE: one tile must hold them all
_MANY = 4  # ratio of dense tiles to tiles of an ordered plan up to which the unordered plan is made too
_MOST_SMALL_BOXES = 1 << 14  # boxes of few rows, which gain the most
_MOST_BOXES = 2560  # each has its own views
_TRIED, _ROWS_TRIED = 2, 1  # plans made beside the default: query-vectorized, and row by row


Sizes = tuple[int, int, int, int]  # batch entries, query heads, head_dim, head_dim_v


def cost_ms(plan: Plan, sizes: Sizes, device: Device) -> float:
    """Return the predicted milliseconds of a forward on one thread."""
    if plan.block_q == 1:
        return cost_of_pairs_ms(plan, sizes, device)
    of = *sizes[:2], _features(sizes, device)
    if plan.block_q <= device.few:
        return predicted_ms(count_rows(plan, *of), device.together)
    return predicted_ms(count(plan, *of), device.nanoseconds)


def cost_of_pairs_ms(plan: Plan, sizes: Sizes, device: Device) -> float:
    """Return the predicted milliseconds for the plan's pairs in one-query tiles."""
    return predicted_ms(count_pairs(plan, *sizes[:2], _features(sizes, device)), device.one)


def dense_ms(q_len: int, kv_len: int, tile: tuple[int, int], sizes: Sizes, device: Device) -> float:
    """Return the predicted milliseconds of dense attention, without a plan."""
    counts = count_dense(q_len, kv_len, *sizes[:2], tile, _features(sizes, device))
    return predicted_ms(counts, device.nanoseconds)


def _features(sizes: Sizes, device: Device) -> Features:
    return Features(*sizes[2:], device.lanes, device.copies, device.panel)


def chosen(
    pattern: Pattern, call: Call, tile: tuple[int, int], workers: int, max_bytes: int | None, device: Device
) -> Plan:
    """Return the cheapest of the default plan and, if it is inefficient, a few plans in query boxes."""
    plan = compiler.plan_for(pattern, call, tile, workers, max_bytes, ordered=pattern._has_order)
    if plan.ordered:
        return _or_in_a_row(plan, pattern, call, tile, workers, max_bytes, device)
    if plan.efficiency >= _EFFICIENT or not pattern.grids():
        return plan
    shape = _shape(plan, (call.batch, call.heads_q, call.head_dim, call.head_dim_v), workers, device)
    if shape is None:
        return plan
    return compiler.planned_or(plan, pattern, call, shape.tile, workers, max_bytes, box=shape.box)


def _or_in_a_row(
    plan: Plan,
    pattern: Pattern,
    call: Call,
    tile: tuple[int, int],
    workers: int,
    max_bytes: int | None,
    device: Device,
) -> Plan:
    """Return the cheaper of a permuted plan and the unpermuted one, if its tiles can be at most _MANY times more."""
    every = plan.variants * math.prod(grid_of((call.q_len, call.kv_len), tile))
    if plan.efficiency >= _EFFICIENT or every > _MANY * plan.tiles:
        return plan
    other = compiler.planned_or(plan, pattern, call, tile, workers, max_bytes)
    sizes = call.batch, call.heads_q, call.head_dim, call.head_dim_v
    return min(plan, other, key=lambda own: cost_ms(own, sizes, device))


def in_boxes(plan: Plan, sizes: Sizes, workers: int, device: Device) -> Plan | None:
    """Return a plan in boxes that is predicted faster than `plan`, or None."""
    shape = _shape(plan, sizes, workers, device)
    return None if shape is None else _plan_of(plan, sizes, shape, workers)


class _Shape(NamedTuple):
    """A box of queries and the keys of a tile for it."""

    box: tuple[int, ...]
    block_kv: int

    @property
    def tile(self) -> tuple[int, int]:
        return math.prod(self.box), self.block_kv


@kept_with_plan
def _shape(plan: Plan, sizes: Sizes, workers: int, device: Device) -> _Shape | None:
    """Return the shape of the cheapest plan, None if that is `plan` itself."""
    least, best = cost_ms(plan, sizes, device), None
    for shape in _promising(plan, sizes, device):
        own = cost_ms(_plan_of(plan, sizes, shape, workers), sizes, device)
        if own < least:
            least, best = own, shape
    return best


def _plan_of(plan: Plan, sizes: Sizes, shape: _Shape, workers: int) -> Plan:
    assert plan.pattern is not None, "boxes come from a pattern's spans"
    batch, heads, *_ = sizes
    return compiler.plan(
        plan.pattern, plan.q_len, plan.kv_len, batch=batch, heads=heads, tile=shape.tile, box=shape.box, workers=workers
    )


def _promising(plan: Plan, sizes: Sizes, device: Device) -> list[_Shape]:
    """Return the shapes with the least estimated cost, from the spans of the part with the most queries."""
    batch, heads, head_dim, head_dim_v = sizes
    overlap = overlap_of_boxes(plan, batch, heads, _CELLS.stop)
    if overlap is None:
        return []
    whole = head_dim % device.lanes == head_dim_v % device.lanes == 0  # the kernels copy other widths for each box
    rows = list(_estimates_of_rows(overlap, head_dim + head_dim_v, plan.block_kv, device)) if whole else []
    # At equal cost, boxes of more rows have fewer items.
    rows.sort(key=lambda each: (each[0], -math.prod(each[1].box), each[1]))
    tiles = sorted(_estimates_of_tiles(overlap, head_dim, head_dim_v, plan.block_kv, device))
    return [shape for _, shape in rows[:_ROWS_TRIED] + tiles[:_TRIED]]


def _estimates_of_rows(
    overlap: Overlap, features: int, block_kv: int, device: Device
) -> Iterator[tuple[float, _Shape]]:
    """Yield a head's cost in boxes of each shape that runs a few rows at once, over the keys of the box."""
    for box, boxes in overlap.candidates(range(ROWS_AT_ONCE, device.few + 1, ROWS_AT_ONCE), _MOST_SMALL_BOXES):
        kinds, cells = list(overlap.kinds(box)), math.prod(box)
        most = max(math.prod(own) for own, _ in kinds)
        together = cells == ROWS_AT_ONCE
        if not together and most > _MOST_KEYS:
            continue
        own_kv = block_kv if together else block_kv * -(-most // block_kv)
        reached = _overlap_of_one(overlap, _neighbours(box, ROWS_AT_ONCE))
        pairs = cells * sum(count * _keys_reached(own, reached, own_kv, device.lanes) for own, count in kinds)
        yield predicted_ms(row_counts(boxes * cells, pairs, features), device.together), _Shape(box, own_kv)


def _keys_reached(own: tuple[int, ...], reached: tuple[int, ...], block_kv: int, lanes: int) -> int:
    """Return the computed keys of a box for rows that reach `reached` keys along each axis, in whole vectors."""
    box = choose_box(own, block_kv)
    tiles = math.prod(grid_of(own, box))
    if tiles > 1:
        return block_kv * tiles
    last = last_cell(tuple(map(min, own, reached)), box)
    return -(-(1 + last) // lanes) * lanes


def _overlap_of_one(overlap: Overlap, sides: tuple[int, ...]) -> tuple[int, ...]:
    """Return the mean number of keys of a box along each axis."""
    return tuple(-(-keys // count) for keys, count in zip(overlap.keys_along(sides), overlap.boxes(sides), strict=True))


def _estimates_of_tiles(
    overlap: Overlap, head_dim: int, head_dim_v: int, block_kv: int, device: Device
) -> Iterator[tuple[float, _Shape]]:
    """Yield a head's cost in boxes of each query-vectorized shape."""
    for box, boxes in overlap.candidates(_CELLS, _MOST_BOXES):

        def overlap_of(cells: int, box: tuple[int, ...] = box) -> float:
            inside = _neighbours(box, cells)
            return math.prod(overlap.keys_along(inside)) * math.prod(inside) / cells

        counts = Counts(
            items=boxes,
            tiles=0,
            rows=0,
            scores=overlap_of(device.lanes) * head_dim,
            weights=-(-math.prod(box) // device.lanes) * math.prod(overlap.keys_along(box)),
            output=overlap_of(ROWS) * -(-head_dim_v // device.lanes),
            gathered=math.prod(overlap.keys_along(box)) * (head_dim + head_dim_v),
            merged=0,
        )
        yield predicted_ms(counts, device.nanoseconds), _Shape(box, block_kv)


def _neighbours(box: tuple[int, ...], cells: int) -> tuple[int, ...]:
    """Return the sides of the bounding box of `cells` consecutive cells of `box`."""
    sides: tuple[int, ...] = ()
    for side in reversed(box):
        sides = min(side, cells), *sides
        cells = max(1, round((cells + side - 1) / side) if cells % side else cells // side)
    return sides
