"""Compute capability 9.0 as a machine of the chooser.

Candidates are whole lists, smaller tiles, query boxes, and permuted or gathered tokens. A coefficient is the time of
one unit of a feature in nanoseconds. ``benchmarks/costs/price_cuda.py`` measures coefficients and prints the lines of
``_COEFFICIENTS``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..patterns import Pattern
from ..planning import Plan
from ..planning.contract.types import grid_of, real_extents
from ..planning.contract.validated import validated
from ..planning.tiles.tiling import choose_box
from ..request.call import Call
from ..schedule import compiler
from ..schedule.group import pieces, workers
from ..schedule.pack_heads import heads_that_fit
from ..schedule.tensor_maps import MAPS, can_halve, joint_heads, maps_of
from . import chooser
from .boxes import Overlap, overlap_of_boxes
from .chooser import How, Sizes, Tried, predicted_ms
from .features_gpu import GpuCounts, KernelShape, count_on_gpu
from .specializations import KEYS_TOGETHER, ROWS, TILE, WIDEST, Specialization, build, item_keys, terms_of

__all__ = [
    "BLOCKS",
    "KINDS",
    "LARGEST_HEAD_DIM",
    "LAUNCH_MS",
    "SMS",
    "Gpu",
    "among_others",
    "cheapest",
    "chosen",
    "coefficients",
    "cost_ms",
    "kernel_of",
    "kind_of",
    "pieces_of",
    "specialization_of",
    "workers_of",
]

LARGEST_HEAD_DIM = 128  # largest head_dim that was measured
SMS = 132  # SMs of the device on which the coefficients were measured
BLOCKS = 2  # resident CTAs per SM

_FEWEST_QUERIES = 256  # smallest q_len that was measured
_LONG = 1024  # assumed tiles of a list, for calls with few queries
_EFFICIENT = 0.7  # no boxes are tried from this efficiency on
_HARDLY = 1.25  # whole lists are tried if the longest has at most this multiple of an SM's mean work
_HALVES = 0.875  # smaller tiles are not tried if at least this share of half tiles has a pair
_MOST_MASKS = 4096  # maximum number of masks to inspect, evenly spaced
_SCATTERED = 0.4  # tokens are neither permuted nor gathered from this efficiency on
_CELLS = range(33, ROWS + 1)  # cells of a box
_SMALL = (ROWS, TILE[1])  # the tile of one warpgroup
_MOST_BOXES = 2560  # maximum number of boxes; each has its own views
_LIKELY, _TRIED = 32, 2  # number of boxes to estimate in detail, and to plan
_NEAR = 1.25  # within this factor of the lowest cost, the box with the fewest tiles is planned too

_WIDEST_DIM = 64  # largest head_dim whose kernel for tiles of WIDEST was measured
_LONG_ITEM = 1024  # keys of an item from which on tiles of WIDEST are tried

# Fields as in GpuCounts, for tiles of 192 queries, of 128, of fewer, with three CTAs per SM, and for permuted or
# gathered tokens.
_COEFFICIENTS = {
    "widest": GpuCounts(4.65e03, 4.55e03, 0, 0.0501, 0.00019, 0.0233, 0.283, 0.322, 0, 0.000344),
    "wide": GpuCounts(4.65e03, 4.55e03, 248, 0.0716, 0.00019, 0.011, 0.283, 0.322, 0, 0.000344),
    "narrow": GpuCounts(4.65e03, 4.55e03, 302, 0.0828, 0.00107, 0.0399, 0.36, 0.85, 0, 0.000344),
    "thirds": GpuCounts(4.65e03, 4.55e03, 549, 0.197, 0, 0.048, 0, 1.45, 0, 0.000344),
    "looked up": GpuCounts(4.65e03, 4.55e03, 931, 0, 0.0019, 0.0847, 0.23, 0.852, 0, 0.000344),
}
KINDS = tuple(_COEFFICIENTS)
# The same for float32, by number of terms and whether tiles have 128 queries: products take three to six times as long.
_COEFFICIENTS_OF_TERMS = {
    (3, True): GpuCounts(4.2e03, 5.4e03, 4.2e03, 0.03, 0.00325, 0, 0.216, 0.216, 0, 0.00195),
    (3, False): GpuCounts(5.9e03, 7.5e03, 970, 0.04, 0.0035, 0, 0.451, 0.451, 0, 0.00237),
    (2, True): GpuCounts(4.5e03, 2.6e03, 4.1e03, 0.03, 0.0015, 0.0093, 0.175, 0.175, 0, 0.00155),
    (2, False): GpuCounts(5.8e03, 7.8e03, 660, 0.04, 0.0018, 0, 0.428, 0.428, 0, 0.00206),
}
LAUNCH_MS = 1e-6 * _COEFFICIENTS["wide"].launches  # of a launch that computes items


def specialization_of(plan: Plan, dims: tuple[int, int], terms: int = 1) -> Specialization:
    """Return the kernel specialization of a plan for `dims` (head_dim, head_dim_v)."""
    return build(plan.block_q, dims, item_keys(plan), terms)


def kernel_of(row: Specialization, sms: int) -> KernelShape:
    """Return the shape of a specialization's kernel on `sms` SMs, for the cost model."""
    return KernelShape(row.rows, row.step_kv // TILE[1], row.mean_dim, row.ctas * sms, KEYS_TOGETHER)


def kind_of(row: Specialization, looked_up: bool = False) -> str:
    """Return the key of a specialization's coefficients."""
    if looked_up:
        return "looked up"
    if row.rows > TILE[0]:
        return "widest"
    return "wide" if row.rows > ROWS else "thirds" if row.ctas > 2 else "narrow"


def coefficients(row: Specialization, looked_up: bool = False) -> GpuCounts:
    """Return the coefficients of a specialization."""
    if row.terms > 1:
        return _COEFFICIENTS_OF_TERMS[row.terms, row.rows > ROWS]
    return _COEFFICIENTS[kind_of(row, looked_up)]


def cost_ms(plan: Plan, sizes: Sizes, sms: int, alone: bool = True, terms: int = 1) -> float:
    """Return the predicted milliseconds of a forward pass of arrays of `terms` terms, by default those of 16-bit types,
    without host time.

    If not `alone`, return the time that it adds to a grouped launch.
    """
    row = specialization_of(plan, (sizes.head_dim, sizes.head_dim_v), terms)
    return predicted_ms(count_on_gpu(plan, sizes, kernel_of(row, sms), alone), coefficients(row, plan.ordered))


@dataclass(frozen=True)
class Gpu:
    """The :class:`.chooser.Machine` of a call on a GPU with `sms` SMs. The call needs `copies` copies of the plan's
    tensor maps: one, or one per batch entry. Its elements have `terms` terms. A `scored` call has a score function,
    sinks or dropout."""

    sms: int
    copies: int = 1
    terms: int = 1
    scored: bool = False
    expands: ClassVar[bool] = True

    def cost_ms(self, plan: Plan, sizes: Sizes) -> float:
        return cost_ms(plan, sizes, self.sms, terms=self.terms)

    def scattered(self, how: How) -> How:
        return How(_SMALL, workers=how.workers, gathered=True)

    def settled(self, first: Plan) -> bool:
        return False

    def candidates(self, first: Plan, how: How, sizes: Sizes, tried: Tried) -> Iterator[How]:
        """Yield whole lists, then larger tiles, permuted tokens, gathered keys, smaller tiles and query boxes."""
        if how.workers > 1 and (self.terms > 1 or _may_stay_whole(first, sizes, self.sms)):
            yield how._replace(workers=1)
        if how.workers > 3 and self.terms > 1:  # items that take as long as a combine are worth fewer pieces
            yield how._replace(workers=how.workers // 2)
        shared = tried.best().workers
        if self.terms == 1 and not self.scored and _may_be_wider(first, sizes):
            yield How(WIDEST, None, shared)
        if first.pattern is not None and first.efficiency < _SCATTERED and first.pattern._has_order:
            yield How(_SMALL, None, shared, ordered=True)
            yield How(_SMALL, None, shared, gathered=True)
        in_order = tried.plans.get(How(_SMALL, None, shared, ordered=True))
        # If the pattern has no permutation, the ordered plan is already the plan with smaller tiles.
        if how.tile != _SMALL and (in_order is None or in_order.ordered):
            if self.terms > 1 or _halves(first) < _HALVES:  # with terms, small tiles of full blocks cost no more
                yield How(_SMALL, None, shared)
        if first.efficiency < _EFFICIENT and first.pattern is not None and first.pattern.grids():
            overlap = overlap_of_boxes(first, sizes.batch, sizes.heads_q, ROWS)
            for box in [] if overlap is None else _promising(overlap, sizes, self.copies, self.terms):
                yield How((math.prod(box), TILE[1]), box, shared)

    def fits(self, plan: Plan) -> bool:
        """Return whether warpgroups have boxes of their own, and the kernel parameters room for all tensor maps."""
        if plan.block_q > ROWS and not can_halve(plan, plan.block_q // ROWS):
            return False
        most = MAPS[-1] // self.copies
        return 2 * len(plan.views) <= most or maps_of(plan, validated(plan).slides) <= most


def chosen(
    pattern: Pattern, call: Call, each: int, max_bytes: int | None, sms: int, tile: tuple[int, int] = TILE
) -> Plan:
    """Return the plan with the lowest predicted time; if the model does not cover the call, a plan with `tile`."""
    lengths = call.q_len, call.kv_len
    if _is_known(call):
        return chooser.cheapest(pattern, *lengths, Sizes.of(call), How(tile, None, each), _gpu(call, sms), max_bytes)
    blocks = sms
    if tile == TILE and call.q_len << (call.group - 1).bit_length() <= ROWS:
        tile, blocks = _SMALL, BLOCKS * sms  # two CTAs per SM keep more copies in flight
    count = pieces_of(call, tile[0], blocks)
    return compiler.plan_for(pattern, call, tile, each, max_bytes, tile_by_tile=True, pieces=count)


def cheapest(pattern: Pattern, q_len: int, kv_len: int, sizes: Sizes, sms: int) -> Plan:
    """Return the plan that :func:`chosen` would return for contiguous arrays, without its lower limit on q_len."""
    how = How(TILE, None, workers_of(sizes.batch, sizes.heads_q, sms))
    return chooser.cheapest(pattern, q_len, kv_len, sizes, how, Gpu(sms))


def among_others(pattern: Pattern, call: Call, each: int, sms: int) -> list[How]:
    """Return planning options for a call of a group, all with whole lists.

    The first option is the common tile shape, the second, if there is one, smaller tiles.
    """
    found = [How(TILE)]
    if _is_known(call):
        first = compiler.plan_for(pattern, call, TILE, each, tile_by_tile=True)
        own = chooser.best(first, How(TILE, None, each), Sizes.of(call), _gpu(call, sms))
        if own.tile != TILE and not (own.ordered or own.gathered):
            found.append(own._replace(workers=1))
        elif _halves(first) < _HALVES:
            found.append(How(_SMALL))
    return found


def workers_of(batch: int, heads: int, sms: int) -> int:
    """Return the number of resident CTAs for each head."""
    return workers(BLOCKS * sms, batch * heads)


def pieces_of(call: Call, rows: int, blocks: int) -> int:
    """Return how many items to split a list into if one tile holds all queries of a head (decoding), else 0.

    `blocks` CTAs run concurrently. The number does not depend on kv_len, so that length-polymorphic plans agree; a
    shorter list gets fewer items.
    """
    lists = call.batch * call.heads_q // heads_that_fit(call.group, call.q_len, rows)
    return pieces(blocks, lists, _LONG) if 0 < call.q_len <= rows else 0


def _is_known(call: Call) -> bool:
    """Return whether the cost model covers the call."""
    few = call.q_len < _FEWEST_QUERIES or 0 in (call.batch, call.heads_q, call.kv_len)
    return not few and max(call.head_dim, call.head_dim_v) <= LARGEST_HEAD_DIM


def _gpu(call: Call, sms: int) -> Gpu:
    """Return the machine of a call, whose batch entries may need separate tensor maps."""
    copies = 1 if _joint(call) else call.batch
    return Gpu(sms, copies, terms_of(call.dtype, call.precision), call.score is not None)


def _joint(call: Call) -> bool:
    """Return whether batch entries share tensor maps."""
    if call.kind.ordinal(call.q) is None:  # the backend copies host arrays to contiguous device arrays
        return True
    return all(joint_heads(call.kind.operand(x)) for x in (call.q, call.k, call.v))


def _may_stay_whole(plan: Plan, sizes: Sizes, sms: int) -> bool:
    """Return whether lists are split although the longest list would hardly outlast the mean work of an SM."""
    lists = np.diff(plan.tile_indptr[plan.indptr])
    longest, longest_piece = (int(own.max(initial=0)) for own in (lists, plan.work["end"] - plan.work["begin"]))
    share = sizes.batch * sizes.heads_q * plan.tiles / plan.variants / sms
    return longest > longest_piece and longest <= _HARDLY * share


def _may_be_wider(plan: Plan, sizes: Sizes) -> bool:
    """Return whether tiles of WIDEST may be faster. A consumer of their kernel has no registers left for scores."""
    narrow = max(sizes.head_dim, sizes.head_dim_v) <= _WIDEST_DIM
    return narrow and plan.efficiency >= _EFFICIENT and item_keys(plan) >= _LONG_ITEM


def _halves(plan: Plan) -> float:
    """Return the share of half tiles, of ROWS queries each, that have an allowed pair.

    The share is a product of two estimates: of halves with a pair, and of halves with a query. A half without queries
    lowers both.
    """
    every = max(1, -(-len(plan.masks) // _MOST_MASKS))
    held = np.bitwise_or.reduceat(plan.masks[::every], [0, ROWS], axis=1).any(axis=2).mean(axis=1)
    of_mask = np.append(np.repeat(held, every)[: len(plan.masks)], 1.0)  # mask -1 selects the last: full tiles
    tiles, work = np.diff(plan.tile_indptr), plan.work
    views = plan.views[plan.components["query_view"][work["component"]]]
    queries = real_extents(views, work["query_tile"]).prod(axis=1)
    length = work["end"] - work["begin"]
    filled = (-(-queries // ROWS) * length).sum() * ROWS / plan.block_q / max(1, int(length.sum()))
    return float((of_mask[plan.mask] * tiles).sum() / max(1, int(tiles.sum())) * filled)


def _promising(overlap: Overlap, sizes: Sizes, copies: int, terms: int) -> list[tuple[int, ...]]:
    """Return the boxes with the lowest estimated cost, assuming balanced SMs; among nearly equal costs, also the one
    with the fewest tiles."""
    row = build(ROWS, (sizes.head_dim, sizes.head_dim_v), 0, terms)  # boxes nearly always have few keys
    of = coefficients(row)
    of_step = row.rows * row.step_kv * (of.weights + of.products * row.mean_dim + of.partial)

    def estimate(box: tuple[int, ...]) -> tuple[float, int]:
        """Return (cost, number of tiles)."""
        cost, tiles = 0.0, 0
        for keys, boxes in overlap.kinds(box):
            own = math.prod(grid_of(keys, choose_box(keys, TILE[1])))
            cost += boxes * (of.items + of_step * -(-own * TILE[1] // row.step_kv))
            tiles += boxes * own
        return cost, tiles

    fitting = [
        (max(boxes, math.prod(overlap.keys_along(box)) / TILE[1]), box)
        for box, boxes in overlap.candidates(_CELLS, _MOST_BOXES)
        # Views at evenly spaced offsets share a tensor map, unless they use all of its axes.
        if copies * 4 * (boxes if len(box) == 3 else boxes // max(overlap.boxes(box))) <= MAPS[-1]
    ]
    found = sorted((*estimate(box), box) for _, box in sorted(fitting)[:_LIKELY])
    alike = [one for one in found if one[0] <= _NEAR * found[0][0]]
    few = [min(alike, key=lambda one: one[1:])] if alike else []
    return list(dict.fromkeys(box for *_, box in found[:_TRIED] + few))
