"""Which tile, and which boxes of queries, a plan for the CPU has: the default unless others are priced below it."""

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
from .boxes import Met, met_by_boxes
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

__all__ = ["chosen", "dense_ms", "in_boxes", "price_ms", "price_of_pairs_ms"]

_EFFICIENT = 0.6  # from here on nothing else is tried
_CELLS = range(17, 97)  # of a box: of more the weights leave the first-level cache
_MOST_KEYS = 128  # of a tile for a box of more rows than are computed at once, and all that the box meets
_MANY = 4  # times as many tiles as an ordered plan has: where there cannot be more, the other plan is made too
_MOST_SMALL_BOXES = 1 << 14  # of a few rows, which gain most
_MOST_BOXES = 2560  # each has views of its own
_TRIED, _ROWS_TRIED = 2, 1  # plans that are made beside the default: computed by vectors of queries, and by rows


Sizes = tuple[int, int, int, int]  # batch entries, query heads, head_dim, head_dim_v


def price_ms(plan: Plan, sizes: Sizes, device: Device) -> float:
    """The predicted milliseconds of a forward on one thread."""
    if plan.block_q == 1:
        return price_of_pairs_ms(plan, sizes, device)
    of = *sizes[:2], _features(sizes, device)
    if plan.block_q <= device.few:
        return predicted_ms(count_rows(plan, *of), device.together)
    return predicted_ms(count(plan, *of), device.nanoseconds)


def price_of_pairs_ms(plan: Plan, sizes: Sizes, device: Device) -> float:
    """The same of the plan with these pairs whose tiles have one query."""
    return predicted_ms(count_pairs(plan, *sizes[:2], _features(sizes, device)), device.one)


def dense_ms(q_len: int, kv_len: int, tile: tuple[int, int], sizes: Sizes, device: Device) -> float:
    """The same of attention over all pairs, which nobody has to plan for this."""
    counts = count_dense(q_len, kv_len, *sizes[:2], tile, _features(sizes, device))
    return predicted_ms(counts, device.nanoseconds)


def _features(sizes: Sizes, device: Device) -> Features:
    return Features(*sizes[2:], device.lanes, device.copies, device.panel)


def chosen(
    pattern: Pattern, call: Call, tile: tuple[int, int], workers: int, max_bytes: int | None, device: Device
) -> Plan:
    """The cheapest of the plan with this tile, tokens in an order of the pattern's if it has one, and of a few in boxes
    of queries with keys of their own, where the former computes many pairs that are not allowed."""
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
    """The cheaper of an ordered plan and of that of tokens in a row, which is made only where its tiles cannot be many
    times as many."""
    every = plan.variants * math.prod(grid_of((call.q_len, call.kv_len), tile))
    if plan.efficiency >= _EFFICIENT or every > _MANY * plan.tiles:
        return plan
    other = compiler.planned_or(plan, pattern, call, tile, workers, max_bytes)
    sizes = call.batch, call.heads_q, call.head_dim, call.head_dim_v
    return min(plan, other, key=lambda own: price_ms(own, sizes, device))


def in_boxes(plan: Plan, sizes: Sizes, workers: int, device: Device) -> Plan | None:
    """The plan in boxes that costs less than this one, None where there is none."""
    shape = _shape(plan, sizes, workers, device)
    return None if shape is None else _plan_of(plan, sizes, shape, workers)


class _Shape(NamedTuple):
    """A box of queries, and how many keys a tile of the plan in such boxes has."""

    box: tuple[int, ...]
    block_kv: int

    @property
    def tile(self) -> tuple[int, int]:
        return math.prod(self.box), self.block_kv


@kept_with_plan
def _shape(plan: Plan, sizes: Sizes, workers: int, device: Device) -> _Shape | None:
    """That of the plan that costs least, None where that is the plan itself."""
    least, best = price_ms(plan, sizes, device), None
    for shape in _promising(plan, sizes, device):
        own = price_ms(_plan_of(plan, sizes, shape, workers), sizes, device)
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
    """The shapes that would cost least, by the spans of the part that has the most queries."""
    batch, heads, head_dim, head_dim_v = sizes
    met = met_by_boxes(plan, batch, heads, _CELLS.stop)
    if met is None:
        return []
    whole = head_dim % device.lanes == head_dim_v % device.lanes == 0  # others are copied for each box
    rows = list(_estimates_of_rows(met, head_dim + head_dim_v, plan.block_kv, device)) if whole else []
    # Of boxes that cost the same those of more rows have fewer items.
    rows.sort(key=lambda each: (each[0], -math.prod(each[1].box), each[1]))
    tiles = sorted(_estimates_of_tiles(met, head_dim, head_dim_v, plan.block_kv, device))
    return [shape for _, shape in rows[:_ROWS_TRIED] + tiles[:_TRIED]]


def _estimates_of_rows(met: Met, features: int, block_kv: int, device: Device) -> Iterator[tuple[float, _Shape]]:
    """A head's cost in boxes of each shape whose rows are computed a few together, with the keys that these meet."""
    for box, boxes in met.candidates(range(ROWS_AT_ONCE, device.few + 1, ROWS_AT_ONCE), _MOST_SMALL_BOXES):
        kinds, cells = list(met.kinds(box)), math.prod(box)
        most = max(math.prod(own) for own, _ in kinds)
        together = cells == ROWS_AT_ONCE
        if not together and most > _MOST_KEYS:
            continue
        own_kv = block_kv if together else block_kv * -(-most // block_kv)
        reached = _met_by_one(met, _neighbours(box, ROWS_AT_ONCE))
        pairs = cells * sum(count * _keys_reached(own, reached, own_kv, device.lanes) for own, count in kinds)
        yield predicted_ms(row_counts(boxes * cells, pairs, features), device.together), _Shape(box, own_kv)


def _keys_reached(own: tuple[int, ...], reached: tuple[int, ...], block_kv: int, lanes: int) -> int:
    """Of the keys that a box meets, how many are computed for rows that reach so many of them along each axis: whole
    vectors from the first one on. That others begin within a vector is left out, as is what they share with these."""
    box = choose_box(own, block_kv)
    tiles = math.prod(grid_of(own, box))
    if tiles > 1:
        return block_kv * tiles
    last = last_cell(tuple(map(min, own, reached)), box)
    return -(-(1 + last) // lanes) * lanes


def _met_by_one(met: Met, sides: tuple[int, ...]) -> tuple[int, ...]:
    """How many keys a box meets along each axis, in the mean."""
    return tuple(-(-keys // count) for keys, count in zip(met.keys_along(sides), met.boxes(sides), strict=True))


def _estimates_of_tiles(
    met: Met, head_dim: int, head_dim_v: int, block_kv: int, device: Device
) -> Iterator[tuple[float, _Shape]]:
    """The same of each shape that is computed by vectors of queries."""
    for box, boxes in met.candidates(_CELLS, _MOST_BOXES):

        def met_by(cells: int, box: tuple[int, ...] = box) -> float:
            inside = _neighbours(box, cells)
            return math.prod(met.keys_along(inside)) * math.prod(inside) / cells

        counts = Counts(
            items=boxes,
            tiles=0,
            rows=0,
            scores=met_by(device.lanes) * head_dim,
            weights=-(-math.prod(box) // device.lanes) * math.prod(met.keys_along(box)),
            output=met_by(ROWS) * -(-head_dim_v // device.lanes),
            gathered=math.prod(met.keys_along(box)) * (head_dim + head_dim_v),
            merged=0,
        )
        yield predicted_ms(counts, device.nanoseconds), _Shape(box, block_kv)


def _neighbours(box: tuple[int, ...], cells: int) -> tuple[int, ...]:
    """The sides of what so many neighbouring cells of a box reach over: of its last axis all, if they are as many."""
    sides: tuple[int, ...] = ()
    for side in reversed(box):
        sides = min(side, cells), *sides
        cells = max(1, round((cells + side - 1) / side) if cells % side else cells // side)
    return sides
