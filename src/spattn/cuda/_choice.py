"""Which tile, which boxes of queries and how many pieces of long lists a plan for compute capability 9.0 has: what
``tile()`` says and two pieces for each SM, unless others are priced below that."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .. import compiler
from ..call import Call
from ..patterns import Pattern
from ..patterns._lattice import Lattice
from ..plan import Plan
from ..plan._cache import kept_with_plan
from ..plan._sealed import sealed
from ..plan._tiling import make_view
from ..schedule.boxes import Met, met_by_boxes
from ..schedule.price import predicted_ms
from ..schedule.price_gpu import GpuCounts, Sizes
from ._coefficients import LARGEST_HEAD_DIM, coefficients, kernel_of, price_ms
from .hopper.builds import ROWS, TILE
from .hopper.layout import maps_of
from .hopper.maps import joint_heads
from .hopper.params import MAPS

__all__ = ["chosen"]

_FEWEST_QUERIES = 256  # of a call: of fewer none was measured
_EFFICIENT = 0.6  # from here on no boxes are tried
_HALVES = 0.875  # of all half tiles hold a pair: where more do, smaller tiles are not tried
_MOST_MASKS = 4096  # looked at; of more, evenly spaced ones stand for all
_CELLS = range(33, ROWS + 1)  # of a box
_MOST_BOXES = 2560  # each has views of its own
_TRIED = 2  # boxes


class How(NamedTuple):
    """A plan of a pattern: tile, box, and the number of workers that share a head."""

    tile: tuple[int, int]
    box: tuple[int, ...] | None
    workers: int


def chosen(pattern: Pattern, call: Call, workers: int, max_bytes: int | None, sms: int) -> Plan:
    """The cheapest of the plan for these workers, the one whose lists stay whole, and a few in smaller tiles; the first
    where calls like this one were not measured."""
    first = compiler.plan_for(pattern, call, TILE, workers, max_bytes, tile_by_tile=True)
    dim = max(call.head_dim, call.head_dim_v)
    if call.q_len < _FEWEST_QUERIES or dim > LARGEST_HEAD_DIM or 0 in (call.batch, call.heads_q, call.kv_len):
        return first
    sizes = Sizes(call.batch, call.heads_q, call.heads_kv, call.head_dim, call.head_dim_v)
    how = _cheapest(first, sizes, workers, sms, 1 if _joint(call) else call.batch)
    if how == How(TILE, None, workers):
        return first
    return compiler.planned_or(first, pattern, call, how.tile, how.workers, max_bytes, True, how.box)


def _joint(call: Call) -> bool:
    """Whether batch entries share tensor maps."""
    if call.kind.ordinal(call.q) is None:  # which are copied in order
        return True
    return all(joint_heads(call.kind.operand(x)) for x in (call.q, call.k, call.v))


@kept_with_plan
def _cheapest(first: Plan, sizes: Sizes, workers: int, sms: int, copies: int) -> How:
    """How the plan is made that costs least; `copies` are those of its tensor maps."""

    def price(plan: Plan) -> float:
        return price_ms(plan, sizes, sms) if copies * _maps(plan) <= MAPS[-1] else math.inf

    def tried(how: How) -> None:
        if (made := _made(first, sizes, how, workers)) is not None:
            found[how] = made

    found = {How(TILE, None, workers): first}
    if workers > 1 and _cuts(first):
        tried(How(TILE, None, 1))
    best = min(found, key=lambda how: price(found[how])) if len(found) > 1 else How(TILE, None, workers)
    for tile, box in _smaller(first, sizes, sms, copies):
        tried(How(tile, box, best.workers))
    return min(found, key=lambda how: price(found[how])) if len(found) > 1 else best


def _made(first: Plan, sizes: Sizes, how: How, tiled_for: int) -> Plan | None:
    """The plan, None where it takes more memory than there is."""
    assert first.pattern is not None, "it is made of one"
    own = {"batch": sizes.batch, "heads": sizes.heads_q, "tiled_for": tiled_for}
    try:
        return compiler.plan(first.pattern, first.q_len, first.kv_len, **how._asdict(), **own)
    except ValueError:
        return None


@kept_with_plan
def _maps(plan: Plan) -> int:
    """Tensor maps of a batch entry."""
    own = sealed(plan)
    return maps_of(plan, own.least is not None and own.growth is None)


def _cuts(plan: Plan) -> bool:
    """Whether a list is cut into pieces."""
    lists = np.diff(plan.tile_indptr[plan.indptr])
    return bool(lists.max(initial=0) > (plan.work["end"] - plan.work["begin"]).max(initial=0))


def _smaller(plan: Plan, sizes: Sizes, sms: int, copies: int) -> Iterator[tuple[tuple[int, int], tuple[int, ...] | None]]:
    """The smaller tiles, with their boxes, that may cost less."""
    if _halves(plan) < _HALVES:
        yield (ROWS, TILE[1]), None
    if plan.efficiency < _EFFICIENT and plan.pattern is not None and plan.pattern.grids():
        met = met_by_boxes(plan, sizes.batch, sizes.heads_q, ROWS)
        each = [] if met is None else sorted(_estimates(met, sizes, sms, copies))
        for _, box in each[:_TRIED]:
            yield (math.prod(box), TILE[1]), box


def _halves(plan: Plan) -> float:
    """The share of the halves of all tiles, of ROWS queries each, that hold an allowed pair."""
    every = max(1, -(-len(plan.masks) // _MOST_MASKS))
    held = np.bitwise_or.reduceat(plan.masks[::every], [0, ROWS], axis=1).any(axis=2).mean(axis=1)
    of_mask = np.append(1.0, np.repeat(held, every)[: len(plan.masks)])
    tiles = np.diff(plan.tile_indptr)
    return float(of_mask[plan.mask + 1] @ tiles) / max(1, int(tiles.sum()))


def _estimates(met: Met, sizes: Sizes, sms: int, copies: int) -> Iterator[tuple[float, tuple[int, ...]]]:
    """What plans in boxes of each shape would cost, if all SMs were busy alike, by what items and products cost."""
    kernel = kernel_of(ROWS, max(sizes.head_dim, sizes.head_dim_v), sms)
    of, area = coefficients(ROWS), kernel.rows * kernel.tiles * TILE[1]
    for box, boxes in met.candidates(lambda cells: cells in _CELLS, _MOST_BOXES):
        # Views in a row are one tensor map, unless all of its axes are theirs.
        maps = 4 * (boxes if len(box) == 3 else boxes // max(met.boxes(box)))
        if copies * maps <= MAPS[-1]:
            tiles = int(make_view(Lattice(0, (1,) * len(box), met.keys_of_one(box)), TILE[1])["tiles"])
            pairs = boxes * -(-tiles // kernel.tiles) * area
            nothing = GpuCounts(*(0.0,) * len(GpuCounts._fields))
            counts = nothing._replace(items=boxes, weights=pairs, products=pairs * kernel.head_dim, partial=pairs)
            yield predicted_ms(counts, of), box
