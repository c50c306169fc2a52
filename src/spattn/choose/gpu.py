"""Choice of tile, query box and split-KV pieces on compute capability 9.0.

The default is ``tile()`` with two pieces for each SM; the cost model must predict that an alternative is cheaper.
"""

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

BLOCKS = 2  # resident CTAs per SM

_FEWEST_QUERIES = 256  # the cost model was fitted to calls of at least this q_len
_LONG = 1024  # length, in tiles, of a list with few queries
_EFFICIENT = 0.7  # no boxes are tried from this efficiency on
_HARDLY = 1.25  # ratio of times up to which a whole list is tried
_HALVES = 0.875  # share of non-empty half tiles from which smaller tiles are not tried
_MOST_MASKS = 4096  # bitmasks that are inspected; larger sets are sampled evenly
_SCATTERED = 0.4  # efficiency below which permuted and gathered plans are tried
_CELLS = range(33, ROWS + 1)  # cells of a box
_SMALL = (ROWS, TILE[1])  # one warpgroup
_MOST_BOXES = 2560  # each box has views of its own
_LIKELY, _TRIED = 32, 2  # boxes that are estimated, and boxes that are planned
_NEAR = 1.25  # of the boxes within this ratio of the best estimate, the one with the fewest tiles is planned too


class How(NamedTuple):
    """Parameters of a plan: tile, box, workers per head, and whether it is permuted or gathered."""

    tile: tuple[int, int]
    box: tuple[int, ...] | None
    workers: int
    ordered: bool = False
    gathered: bool = False


def chosen(pattern: Pattern, call: Call, each: int, max_bytes: int | None, sms: int) -> Plan:
    """The cheapest of the default plan, the one with whole lists, and a few with smaller tiles.

    Calls outside the fitted range get the default plan, scattered pairs a gathered one.
    """
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
    """Candidate plans of a call that shares the device, without split lists: the default tile, and the smaller tiles
    that :func:`chosen` prefers, if any."""
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
    """Resident CTAs per head."""
    return workers(BLOCKS * sms, batch * heads)


def pieces_of(call: Call, rows: int, sms: int) -> int:
    """Split-KV pieces per list if one query tile holds a group of heads, else 0.

    Independent of kv_len, because plans are length-polymorphic; a short list has fewer pieces.
    """
    few = 0 < call.q_len * call.group <= rows
    return pieces(sms, call.batch * call.heads_kv, _LONG) if few else 0


def sizes_of(call: Call) -> Sizes:
    """The sizes that the cost model takes."""
    return Sizes(call.batch, call.heads_q, call.heads_kv, call.head_dim, call.head_dim_v)


def _is_known(call: Call) -> bool:
    """Whether the call is in the range that the cost model was fitted to."""
    few = call.q_len < _FEWEST_QUERIES or 0 in (call.batch, call.heads_q, call.kv_len)
    return not few and max(call.head_dim, call.head_dim_v) <= LARGEST_HEAD_DIM


def cheapest(pattern: Pattern, q_len: int, kv_len: int, sizes: Sizes, sms: int) -> Plan:
    """The plan of :func:`chosen` for contiguous arrays, of any q_len."""
    batch, heads = sizes.batch, sizes.heads_q
    each = workers_of(batch, heads, sms)
    if compiler.are_scattered(pattern, q_len, kv_len, batch, heads, TILE):
        return compiler.plan(pattern, q_len, kv_len, batch=batch, heads=heads, tile=_SMALL, workers=each, gathered=True)
    first = compiler.plan(pattern, q_len, kv_len, batch=batch, heads=heads, tile=TILE, workers=each)
    return _made(first, sizes, _cheapest(first, sizes, each, sms, 1), each) or first


def _how(first: Plan, call: Call, each: int, sms: int) -> How:
    """Parameters of the cheapest plan; `first` is the default plan."""
    return _cheapest(first, sizes_of(call), each, sms, 1 if _joint(call) else call.batch)


def _joint(call: Call) -> bool:
    """Whether batch entries share tensor maps."""
    if call.kind.ordinal(call.q) is None:  # host arrays are copied to contiguous ones
        return True
    return all(joint_heads(call.kind.operand(x)) for x in (call.q, call.k, call.v))


@kept_with_plan
def _cheapest(first: Plan, sizes: Sizes, each: int, sms: int, copies: int) -> How:
    """Parameters of the cheapest plan; `copies` is the number of sets of tensor maps."""
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
        if in_order is None or in_order.ordered:  # otherwise the pattern has no order, and this plan is already made
            tried(how)
    while len(found) > 1:
        how = min(found, key=price)
        if _fits(found[how], copies):
            return how
        del found[how]
    return next(iter(found))


def _made(first: Plan, sizes: Sizes, how: How, tiled_for: int) -> Plan | None:
    """The plan, None if it exceeds the memory limit."""
    assert first.pattern is not None, "the default plan is compiled from a pattern"
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
    """Whether the tensor maps fit the kernel parameters, with one set for each of `copies`."""
    most = MAPS[-1] // copies
    return 2 * len(plan.views) <= most or maps_of(plan, sealed(plan).slides) <= most


def _may_stay_whole(plan: Plan, sizes: Sizes, sms: int) -> bool:
    """Whether a list is split although an SM would take hardly longer for it than for an even share."""
    lists = np.diff(plan.tile_indptr[plan.indptr])
    longest, longest_piece = (int(own.max(initial=0)) for own in (lists, plan.work["end"] - plan.work["begin"]))
    share = sizes.batch * sizes.heads_q * plan.tiles / plan.variants / sms
    return longest > longest_piece and longest <= _HARDLY * share


def _smaller(
    plan: Plan, sizes: Sizes, sms: int, copies: int
) -> Iterator[tuple[tuple[int, int], tuple[int, ...] | None]]:
    """Smaller tiles, with their boxes, that may be cheaper."""
    if _halves(plan) < _HALVES:
        yield _SMALL, None
    if plan.efficiency < _EFFICIENT and plan.pattern is not None and plan.pattern.grids():
        met = met_by_boxes(plan, sizes.batch, sizes.heads_q, ROWS)
        for box in [] if met is None else _promising(met, sizes, sms, copies):
            yield (math.prod(box), TILE[1]), box


def _looked_up(plan: Plan) -> Iterator[tuple[bool, bool]]:
    """(ordered, gathered) alternatives: permuted tokens, or keys gathered for each query tile."""
    if plan.pattern is not None and plan.efficiency < _SCATTERED and plan.pattern._has_order:
        yield True, False
        yield False, True


def _halves(plan: Plan) -> float:
    """Approximate share of non-empty half tiles (ROWS queries each); halves without a query may count twice."""
    every = max(1, -(-len(plan.masks) // _MOST_MASKS))
    held = np.bitwise_or.reduceat(plan.masks[::every], [0, ROWS], axis=1).any(axis=2).mean(axis=1)
    of_mask = np.append(np.repeat(held, every)[: len(plan.masks)], 1.0)  # last: full tiles
    tiles, work = np.diff(plan.tile_indptr), plan.work
    views = plan.views[plan.components["query_view"][work["component"]]]
    queries = real_extents(views, work["query_tile"]).prod(axis=1)
    length = work["end"] - work["begin"]
    filled = (-(-queries // ROWS) * length).sum() * ROWS / plan.block_q / max(1, int(length.sum()))
    return float((of_mask[plan.mask] * tiles).sum() / max(1, int(tiles.sum())) * filled)


def _promising(met: Met, sizes: Sizes, sms: int, copies: int) -> list[tuple[int, ...]]:
    """The boxes with the lowest estimates for evenly loaded SMs, and the one with the fewest tiles among near ties."""
    row = build(ROWS, max(sizes.head_dim, sizes.head_dim_v), keys=0)  # items of boxes have few keys
    of = coefficients(row)
    of_step = row.rows * row.step_kv * (of.weights + of.products * row.head_dim + of.partial)

    def estimate(box: tuple[int, ...]) -> tuple[float, int]:
        """Cost and number of tiles."""
        cost, tiles = 0.0, 0
        for keys, boxes in met.kinds(box):
            own = math.prod(grid_of(keys, choose_box(keys, TILE[1])))
            cost += boxes * (of.items + of_step * -(-own * TILE[1] // row.step_kv))
            tiles += boxes * own
        return cost, tiles

    fitting = [
        (max(boxes, math.prod(met.keys_along(box)) / TILE[1]), box)
        for box, boxes in met.candidates(_CELLS, _MOST_BOXES)
        # Views in a row share one tensor map, unless they use all of its axes.
        if copies * 4 * (boxes if len(box) == 3 else boxes // max(met.boxes(box))) <= MAPS[-1]
    ]
    found = sorted((*estimate(box), box) for _, box in sorted(fitting)[:_LIKELY])
    alike = [one for one in found if one[0] <= _NEAR * found[0][0]]
    few = [min(alike, key=lambda one: one[1:])] if alike else []
    return list(dict.fromkeys(box for *_, box in found[:_TRIED] + few))
