"""Plan selection for compute capability 9.0: the fastest predicted tiles, query boxes and splits."""

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
from ..planning.contract.validated import validated
from ..planning.tiles.tiling import choose_box
from ..request.call import Call
from ..schedule import compiler
from ..schedule.group import pieces, workers
from ..schedule.tensor_maps import MAPS, joint_heads, maps_of
from .boxes import Overlap, overlap_of_boxes
from .features_gpu import Sizes
from .machine_gpu import LARGEST_HEAD_DIM, coefficients, cost_ms
from .specializations import ROWS, TILE, build

__all__ = ["BLOCKS", "How", "among_others", "cheapest", "chosen", "pieces_of", "sizes_of", "workers_of"]

BLOCKS = 2  # resident CTAs per SM

_FEWEST_QUERIES = 256  # smallest q_len measured
_LONG = 1024  # tiles per list, for calls of few queries
_EFFICIENT = 0.7  # efficiency from which on no boxes are tried
_HARDLY = 1.25  # ratio of predicted times
_HALVES = 0.875  # share of half tiles with a pair, from which on smaller tiles are not tried
_MOST_MASKS = 4096  # masks examined; a larger number is sampled evenly
_SCATTERED = 0.4  # efficiency from which on tokens are neither permuted nor gathered
_CELLS = range(33, ROWS + 1)  # cells per box
_SMALL = (ROWS, TILE[1])  # one warpgroup
_MOST_BOXES = 2560  # each box has its own views
_LIKELY, _TRIED = 32, 2  # boxes estimated in detail, and boxes planned
_NEAR = 1.25  # also plan the box of fewest tiles among those within this factor of the lowest cost


class How(NamedTuple):
    """How to plan a pattern: tile, box, workers per head, and whether tokens are permuted or keys gathered."""

    tile: tuple[int, int]
    box: tuple[int, ...] | None
    workers: int
    ordered: bool = False
    gathered: bool = False


def chosen(pattern: Pattern, call: Call, each: int, max_bytes: int | None, sms: int) -> Plan:
    """The plan of lowest predicted time: with split lists, whole lists, or smaller tiles.

    Calls not covered by the cost model get the first. Scattered pairs always get gathered keys.
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
    """Options for a call of a group, with whole lists: the common tile shape, and the smaller tiles that :func:`chosen`
    would use."""
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
    """Number of resident CTAs per head."""
    return workers(BLOCKS * sms, batch * heads)


def pieces_of(call: Call, rows: int, sms: int) -> int:
    """Pieces per list if a tile of `rows` rows holds all queries of a group of heads (decoding), else 0.

    Independent of kv_len, so that length-polymorphic plans agree: a shorter list simply has fewer.
    """
    few = 0 < call.q_len * call.group <= rows
    return pieces(sms, call.batch * call.heads_kv, _LONG) if few else 0


def sizes_of(call: Call) -> Sizes:
    """Sizes that the cost model needs beside the plan."""
    return Sizes(call.batch, call.heads_q, call.heads_kv, call.head_dim, call.head_dim_v)


def _is_known(call: Call) -> bool:
    """Whether the cost model covers the call."""
    few = call.q_len < _FEWEST_QUERIES or 0 in (call.batch, call.heads_q, call.kv_len)
    return not few and max(call.head_dim, call.head_dim_v) <= LARGEST_HEAD_DIM


def cheapest(pattern: Pattern, q_len: int, kv_len: int, sizes: Sizes, sms: int) -> Plan:
    """What :func:`chosen` picks for contiguous arrays and any number of queries."""
    batch, heads = sizes.batch, sizes.heads_q
    each = workers_of(batch, heads, sms)
    if compiler.are_scattered(pattern, q_len, kv_len, batch, heads, TILE):
        return compiler.plan(pattern, q_len, kv_len, batch=batch, heads=heads, tile=_SMALL, workers=each, gathered=True)
    first = compiler.plan(pattern, q_len, kv_len, batch=batch, heads=heads, tile=TILE, workers=each)
    return _made(first, sizes, _cheapest(first, sizes, each, sms, 1), each) or first


def _how(first: Plan, call: Call, each: int, sms: int) -> How:
    """How to plan a call at the lowest predicted time; `first` is its plan in the common tile shape."""
    return _cheapest(first, sizes_of(call), each, sms, 1 if _joint(call) else call.batch)


def _joint(call: Call) -> bool:
    """Whether batch entries share tensor maps."""
    if call.kind.ordinal(call.q) is None:  # will be copied contiguously
        return True
    return all(joint_heads(call.kind.operand(x)) for x in (call.q, call.k, call.v))


@kept_with_plan
def _cheapest(first: Plan, sizes: Sizes, each: int, sms: int, copies: int) -> How:
    """How to plan at the lowest predicted time; `copies` is the number of copies of the tensor maps."""
    own = How(TILE, None, each)
    found = {own: first}

    def tried(how: How) -> None:
        if (made := _made(first, sizes, how, each)) is not None:
            found[how] = made

    @functools.cache
    def cost(how: How) -> float:
        return cost_ms(found[how], sizes, sms)

    if each > 1 and _may_stay_whole(first, sizes, sms):
        tried(own._replace(workers=1))
    shared = min(found, key=cost).workers if len(found) > 1 else each
    for ordered, gathered in _looked_up(first):
        tried(How(_SMALL, None, shared, ordered, gathered))
    for tile, box in _smaller(first, sizes, sms, copies):
        how = How(tile, box, shared)
        in_order = found.get(how._replace(ordered=True))
        if in_order is None or in_order.ordered:  # without a permutation in the pattern this is the same plan
            tried(how)
    while len(found) > 1:
        how = min(found, key=cost)
        if _fits(found[how], copies):
            return how
        del found[how]
    return next(iter(found))


def _made(first: Plan, sizes: Sizes, how: How, tiled_for: int) -> Plan | None:
    """The plan, or None if it exceeds the memory limit."""
    assert first.pattern is not None, "requires the pattern of the plan"
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
    """Whether the kernel parameters have room for `copies` copies of the plan's tensor maps."""
    most = MAPS[-1] // copies
    return 2 * len(plan.views) <= most or maps_of(plan, validated(plan).slides) <= most


def _may_stay_whole(plan: Plan, sizes: Sizes, sms: int) -> bool:
    """Whether lists are split although the longest one, unsplit, would hardly outlast the mean work of an SM."""
    lists = np.diff(plan.tile_indptr[plan.indptr])
    longest, longest_piece = (int(own.max(initial=0)) for own in (lists, plan.work["end"] - plan.work["begin"]))
    share = sizes.batch * sizes.heads_q * plan.tiles / plan.variants / sms
    return longest > longest_piece and longest <= _HARDLY * share


def _smaller(
    plan: Plan, sizes: Sizes, sms: int, copies: int
) -> Iterator[tuple[tuple[int, int], tuple[int, ...] | None]]:
    """Smaller tiles, with their boxes, that may be faster."""
    if _halves(plan) < _HALVES:
        yield _SMALL, None
    if plan.efficiency < _EFFICIENT and plan.pattern is not None and plan.pattern.grids():
        overlap = overlap_of_boxes(plan, sizes.batch, sizes.heads_q, ROWS)
        for box in [] if overlap is None else _promising(overlap, sizes, sms, copies):
            yield (math.prod(box), TILE[1]), box


def _looked_up(plan: Plan) -> Iterator[tuple[bool, bool]]:
    """Whether to try (permuted tokens, gathered keys)."""
    if plan.pattern is not None and plan.efficiency < _SCATTERED and plan.pattern._has_order:
        yield True, False
        yield False, True


def _halves(plan: Plan) -> float:
    """Share of half tiles (ROWS queries) with an allowed pair; approximate, since halves without a query may count
    twice."""
    every = max(1, -(-len(plan.masks) // _MOST_MASKS))
    held = np.bitwise_or.reduceat(plan.masks[::every], [0, ROWS], axis=1).any(axis=2).mean(axis=1)
    of_mask = np.append(np.repeat(held, every)[: len(plan.masks)], 1.0)  # the last entry is for tiles without a bitmask
    tiles, work = np.diff(plan.tile_indptr), plan.work
    views = plan.views[plan.components["query_view"][work["component"]]]
    queries = real_extents(views, work["query_tile"]).prod(axis=1)
    length = work["end"] - work["begin"]
    filled = (-(-queries // ROWS) * length).sum() * ROWS / plan.block_q / max(1, int(length.sum()))
    return float((of_mask[plan.mask] * tiles).sum() / max(1, int(tiles.sum())) * filled)


def _promising(overlap: Overlap, sizes: Sizes, sms: int, copies: int) -> list[tuple[int, ...]]:
    """Boxes with the lowest estimated cost of items and products on evenly loaded SMs, and the one with fewest tiles
    among nearly equal costs."""
    row = build(ROWS, max(sizes.head_dim, sizes.head_dim_v), keys=0)  # boxes nearly always have few keys
    of = coefficients(row)
    of_step = row.rows * row.step_kv * (of.weights + of.products * row.head_dim + of.partial)

    def estimate(box: tuple[int, ...]) -> tuple[float, int]:
        """Cost and tiles."""
        cost, tiles = 0.0, 0
        for keys, boxes in overlap.kinds(box):
            own = math.prod(grid_of(keys, choose_box(keys, TILE[1])))
            cost += boxes * (of.items + of_step * -(-own * TILE[1] // row.step_kv))
            tiles += boxes * own
        return cost, tiles

    fitting = [
        (max(boxes, math.prod(overlap.keys_along(box)) / TILE[1]), box)
        for box, boxes in overlap.candidates(_CELLS, _MOST_BOXES)
        # Views at constant offsets share a tensor map, unless they use all of its axes.
        if copies * 4 * (boxes if len(box) == 3 else boxes // max(overlap.boxes(box))) <= MAPS[-1]
    ]
    found = sorted((*estimate(box), box) for _, box in sorted(fitting)[:_LIKELY])
    alike = [one for one in found if one[0] <= _NEAR * found[0][0]]
    few = [min(alike, key=lambda one: one[1:])] if alike else []
    return list(dict.fromkeys(box for *_, box in found[:_TRIED] + few))
