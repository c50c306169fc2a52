"""Which tile, which boxes of queries and how many pieces of long lists a plan for compute capability 9.0 has: what
``tile()`` says and two pieces for each SM, unless others are priced below that."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..patterns import Pattern
from ..planning import Plan
from ..planning.contract.cache import kept_with_plan
from ..planning.contract.types import grid_of, real_extents
from ..planning.contract.validated import sealed
from ..planning.tiles.tiling import choose_box
from ..request.call import Call
from ..schedule import compiler
from ..schedule.group import pieces, workers
from ..schedule.tensor_maps import MAPS, joint_heads, maps_of
from .boxes import Met, met_by_boxes
from .features_gpu import Sizes
from .machine_gpu import LARGEST_HEAD_DIM, coefficients, price_ms
from .specializations import ROWS, TILE, build

__all__ = ["BLOCKS", "How", "among_others", "cheapest", "chosen", "pieces_of", "sizes_of", "workers_of"]

BLOCKS = 2  # of an SM, that run side by side

_FEWEST_QUERIES = 256  # of a call: of fewer none was measured
_LONG = 1024  # tiles of a list of few queries
_EFFICIENT = 0.7  # from here on no boxes are tried
_HARDLY = 1.25  # times as long
_HALVES = 0.875  # of all half tiles hold a pair: where more do, smaller tiles are not tried
_MOST_MASKS = 4096  # looked at; of more, evenly spaced ones stand for all
_SCATTERED = 0.4  # efficiency from which on no places are looked up
_CELLS = range(33, ROWS + 1)  # of a box
_SMALL = (ROWS, TILE[1])  # one warpgroup
_MOST_BOXES = 2560  # each has views of its own
_LIKELY, _TRIED = 32, 2  # boxes that are looked at closely, and those that are planned
_NEAR = 1.25  # times the cost of the best box: of all that cost no more one is planned, too


class How(NamedTuple):
    """A plan of a pattern: tile, box, the number of workers that share a head, and whether places are looked up."""

    tile: tuple[int, int]
    box: tuple[int, ...] | None
    workers: int
    ordered: bool = False
    gathered: bool = False


def chosen(pattern: Pattern, call: Call, each: int, max_bytes: int | None, sms: int) -> Plan:
    """The cheapest of the plan for these workers, the one whose lists stay whole, and a few in smaller tiles; the first
    where calls like this one were not measured. Keys of scattered pairs are gathered, and nothing else is planned."""
    known = _is_known(call)
    if known and compiler.are_scattered(pattern, call.q_len, call.kv_len, call.batch, call.heads_q, TILE):
        return compiler.plan_for(pattern, call, _SMALL, each, max_bytes, True, gathered=True)
    first = compiler.plan_for(pattern, call, TILE, each, max_bytes, True, pieces=pieces_of(call, TILE[0], sms))
    if not known:
        return first
    how = _how(first, call, each, sms)
    if how == How(TILE, None, each):
        return first
    look_up = how.ordered, how.gathered
    return compiler.planned_or(first, pattern, call, how.tile, how.workers, max_bytes, True, how.box, *look_up)


def among_others(pattern: Pattern, call: Call, each: int, sms: int) -> list[How]:
    """How a call may be planned that shares the machine with others, which want none of its lists split: in the tiles
    of most plans, and in smaller ones, those that :func:`chosen` takes for it if it takes any."""
    found = [How(TILE, None, 1)]
    if _is_known(call):
        first = compiler.plan_for(pattern, call, TILE, each, tile_by_tile=True)
        own = _how(first, call, each, sms)
        if own.tile != TILE and not (own.ordered or own.gathered):
            found.append(own._replace(workers=1))
        elif _halves(first) < _HALVES:
            found.append(How(_SMALL, None, 1))
    return found


def workers_of(batch: int, heads: int, sms: int) -> int:
    """How many of all blocks share the work of one head."""
    return workers(BLOCKS * sms, batch * heads)


def pieces_of(call: Call, rows: int, sms: int) -> int:
    """Into how many pieces lists are cut where a tile of so many queries has room for those of a group of heads, else
    0; the same for any number of keys, as plans may grow: a short list has fewer."""
    few = 0 < call.q_len * call.group <= rows
    return pieces(sms, call.batch * call.heads_kv, _LONG) if few else 0


def sizes_of(call: Call) -> Sizes:
    """What its price depends on beside the plan."""
    return Sizes(call.batch, call.heads_q, call.heads_kv, call.head_dim, call.head_dim_v)


def _is_known(call: Call) -> bool:
    """Whether calls like this one were measured."""
    few = call.q_len < _FEWEST_QUERIES or 0 in (call.batch, call.heads_q, call.kv_len)
    return not few and max(call.head_dim, call.head_dim_v) <= LARGEST_HEAD_DIM


def cheapest(pattern: Pattern, q_len: int, kv_len: int, sizes: Sizes, sms: int) -> Plan:
    """What :func:`chosen` takes for arrays in order, whatever their number of queries."""
    batch, heads = sizes.batch, sizes.heads_q
    each = workers_of(batch, heads, sms)
    if compiler.are_scattered(pattern, q_len, kv_len, batch, heads, TILE):
        return compiler.plan(pattern, q_len, kv_len, batch=batch, heads=heads, tile=_SMALL, workers=each, gathered=True)
    first = compiler.plan(pattern, q_len, kv_len, batch=batch, heads=heads, tile=TILE, workers=each)
    return _made(first, sizes, _cheapest(first, sizes, each, sms, 1), each) or first


def _how(first: Plan, call: Call, each: int, sms: int) -> How:
    """How the plan of a call is made that costs least, `first` being the one in the tiles of most plans."""
    return _cheapest(first, sizes_of(call), each, sms, 1 if _joint(call) else call.batch)


def _joint(call: Call) -> bool:
    """Whether batch entries share tensor maps."""
    if call.kind.ordinal(call.q) is None:  # which are copied in order
        return True
    return all(joint_heads(call.kind.operand(x)) for x in (call.q, call.k, call.v))


@kept_with_plan
def _cheapest(first: Plan, sizes: Sizes, each: int, sms: int, copies: int) -> How:
    """How the plan is made that costs least; `copies` are those of its tensor maps."""
    own = How(TILE, None, each)
    found = {own: first}

    def tried(how: How) -> None:
        if (made := _made(first, sizes, how, each)) is not None:
            found[how] = made

    @functools.cache
    def price(how: How) -> float:
        return price_ms(found[how], sizes, sms)

    if each > 1 and _may_stay_whole(first, sizes, sms):
        tried(own._replace(workers=1))
    shared = min(found, key=price).workers if len(found) > 1 else each
    for ordered, gathered in _looked_up(first):
        tried(How(_SMALL, None, shared, ordered, gathered))
    for tile, box in _smaller(first, sizes, sms, copies):
        how = How(tile, box, shared)
        in_order = found.get(how._replace(ordered=True))
        if in_order is None or in_order.ordered:  # else the pattern has no order, and the plan is this one
            tried(how)
    while len(found) > 1:
        how = min(found, key=price)
        if _fits(found[how], copies):
            return how
        del found[how]
    return next(iter(found))


def _made(first: Plan, sizes: Sizes, how: How, tiled_for: int) -> Plan | None:
    """The plan, None where it takes more memory than there is."""
    assert first.pattern is not None, "it is made of one"
    try:
        return compiler.plan(
            first.pattern,
            first.q_len,
            first.kv_len,
            batch=sizes.batch,
            heads=sizes.heads_q,
            tile=how.tile,
            box=how.box,
            ordered=how.ordered,
            gathered=how.gathered,
            workers=how.workers,
            tiled_for=tiled_for,
        )
    except ValueError:
        return None


def _fits(plan: Plan, copies: int) -> bool:
    """Whether the kernels have room for the tensor maps, so many for each batch entry that has its own."""
    most = MAPS[-1] // copies
    return 2 * len(plan.views) <= most or maps_of(plan, sealed(plan).slides) <= most


def _may_stay_whole(plan: Plan, sizes: Sizes, sms: int) -> bool:
    """Whether a list is cut into pieces although it takes an SM hardly longer than its share of all lists."""
    lists = np.diff(plan.tile_indptr[plan.indptr])
    longest, longest_piece = (int(own.max(initial=0)) for own in (lists, plan.work["end"] - plan.work["begin"]))
    share = sizes.batch * sizes.heads_q * plan.tiles / plan.variants / sms
    return longest > longest_piece and longest <= _HARDLY * share


def _smaller(
    plan: Plan, sizes: Sizes, sms: int, copies: int
) -> Iterator[tuple[tuple[int, int], tuple[int, ...] | None]]:
    """The smaller tiles, with their boxes, that may cost less."""
    if _halves(plan) < _HALVES:
        yield _SMALL, None
    if plan.efficiency < _EFFICIENT and plan.pattern is not None and plan.pattern.grids():
        met = met_by_boxes(plan, sizes.batch, sizes.heads_q, ROWS)
        for box in [] if met is None else _promising(met, sizes, sms, copies):
            yield (math.prod(box), TILE[1]), box


def _looked_up(plan: Plan) -> Iterator[tuple[bool, bool]]:
    """Whether places may be tokens in another order, or keys gathered for each query tile."""
    if plan.pattern is not None and plan.efficiency < _SCATTERED and plan.pattern._has_order:
        yield True, False
        yield False, True


def _halves(plan: Plan) -> float:
    """The share of the halves of all tiles, of ROWS queries each, that hold an allowed pair; about, as halves without a
    query may count twice."""
    every = max(1, -(-len(plan.masks) // _MOST_MASKS))
    held = np.bitwise_or.reduceat(plan.masks[::every], [0, ROWS], axis=1).any(axis=2).mean(axis=1)
    of_mask = np.append(np.repeat(held, every)[: len(plan.masks)], 1.0)  # the last one of tiles without a bitmask
    tiles, work = np.diff(plan.tile_indptr), plan.work
    views = plan.views[plan.components["query_view"][work["component"]]]
    queries = real_extents(views, work["query_tile"]).prod(axis=1)
    length = work["end"] - work["begin"]
    filled = (-(-queries // ROWS) * length).sum() * ROWS / plan.block_q / max(1, int(length.sum()))
    return float((of_mask[plan.mask] * tiles).sum() / max(1, int(tiles.sum())) * filled)


def _promising(met: Met, sizes: Sizes, sms: int, copies: int) -> list[tuple[int, ...]]:
    """The boxes whose plans would cost least, and of those that would cost about as much the one that computes least,
    by what items and products cost, if all SMs were busy alike."""
    row = build(ROWS, max(sizes.head_dim, sizes.head_dim_v), keys=0)  # boxes nearly always have few
    of = coefficients(row)
    of_step = row.rows * row.step_kv * (of.weights + of.products * row.head_dim + of.partial)

    def estimate(box: tuple[int, ...]) -> tuple[float, int]:
        """Cost and tiles."""
        cost, tiles = 0.0, 0
        for keys, boxes in met.kinds(box):
            own = math.prod(grid_of(keys, choose_box(keys, TILE[1])))
            cost += boxes * (of.items + of_step * -(-own * TILE[1] // row.step_kv))
            tiles += boxes * own
        return cost, tiles

    fitting = [
        (max(boxes, math.prod(met.keys_along(box)) / TILE[1]), box)
        for box, boxes in met.candidates(_CELLS, _MOST_BOXES)
        # Views in a row are one tensor map, unless all of its axes are theirs.
        if copies * 4 * (boxes if len(box) == 3 else boxes // max(met.boxes(box))) <= MAPS[-1]
    ]
    found = sorted((*estimate(box), box) for _, box in sorted(fitting)[:_LIKELY])
    alike = [one for one in found if one[0] <= _NEAR * found[0][0]]
    few = [min(alike, key=lambda one: one[1:])] if alike else []
    return list(dict.fromkeys(box for *_, box in found[:_TRIED] + few))
