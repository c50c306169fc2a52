"""Features of the GPU cost model: the work of persistent blocks, which take tasks until none is left.

The predicted time is a sum over features, each multiplied by a coefficient of the device. A launch takes as long as
its last worker. The ratio of this time to the workers' mean comes from a simulation of the task order
(``schedule/tasks.py::order_tasks``), in which a task's cost is counted in iterations.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from .._util.ragged import ramp
from ..planning import Plan
from ..planning.contract.cache import kept_with_plan
from ..planning.contract.types import real_extents
from ..schedule.reductions import find_reductions
from ..schedule.tasks import heads_together
from .chooser import Sizes

__all__ = ["GpuCounts", "KernelShape", "count_on_gpu", "last_done"]

_ITEM, _PARTIAL = 0.75, 0.25  # fixed cost of an item, and cost of an iteration's bitmasks, in iterations
_BINS = 32  # bins of the simulation's histogram of items, by cost
_DEALT = 64  # number of last (group, bin) pairs to simulate; earlier tasks are assumed to load all workers equally


class KernelShape(NamedTuple):
    """How a device executes plans with a tile shape."""

    rows: int  # computed rows of a query tile
    tiles: int  # key tiles of an iteration
    head_dim: int  # mean of the padded head dimensions of K and V
    workers: int  # concurrent blocks
    keys_together: int  # argument of :func:`~spattn.schedule.tasks.order_tasks`


class GpuCounts(NamedTuple):
    """The features of a forward pass; `items` to `joined` count the work of the last worker."""

    launches: float  # launches that compute items: one or two
    merging: float  # launches that combine partials: zero or one
    items: float
    weights: float  # computed pairs
    products: float  # computed pairs times head_dim
    partial: float  # computed pairs of iterations that load a bitmask
    written: float  # elements of partials that items write
    joined: float  # elements of partials that fix-up items read and combine
    merged: float  # elements that the combine kernel reads, over the whole device
    elements: float  # elements of the call's arrays


def count_on_gpu(plan: Plan, sizes: Sizes, kernel: KernelShape, alone: bool = True) -> GpuCounts:
    """Return the features of a call. If not `alone`, other calls share its launches, so that no worker is idle."""
    of, (batch, heads_q, heads_kv, head_dim, head_dim_v) = _of_plan(plan, kernel.tiles), sizes
    variant = np.broadcast_to(plan.variant, (batch, heads_q)).ravel()
    times = np.bincount(variant, minlength=plan.variants)
    bounds = heads_together(len(variant), heads_q // heads_kv, plan.kv_len, kernel.keys_together)
    groups = [np.bincount(variant[start:stop], minlength=plan.variants) for start, stop in itertools.pairwise(bounds)]
    own, launches = np.zeros(5), 0
    for phase in of.phases:
        total = times @ phase.sums
        tasks = np.stack(groups) @ phase.bins
        steps = tasks * phase.cost
        if steps.sum() > 0:
            launches += alone
            own += total * (last_done(tasks, phase.cost, kernel.workers) / steps.sum() if alone else 1 / kernel.workers)
    items, steps, partial, written, joined = own.tolist()
    area = kernel.rows * kernel.tiles * plan.block_kv
    return GpuCounts(
        launches=launches,
        merging=float(of.merging),
        items=items,
        weights=steps * area,
        products=steps * area * kernel.head_dim,
        partial=partial * area,
        written=written * head_dim_v,
        joined=joined * head_dim_v,
        merged=float(times @ of.merged) * head_dim_v,
        elements=batch * (heads_q * plan.q_len + heads_kv * plan.kv_len) * (head_dim + head_dim_v),
    )


def last_done(tasks: np.ndarray, cost: np.ndarray, workers: int) -> float:
    """Return the time at which the last worker finishes, under greedy list scheduling.

    `tasks` (groups, kinds) are numbers of tasks, scheduled group by group; `cost` (kinds,) is sorted descending.
    """
    several = np.argwhere(tasks)
    dealt = several[-_DEALT:]
    before = several[: len(several) - len(dealt)]
    done = np.full(workers, float(tasks[tuple(before.T)] @ cost[before[:, 1]]) / workers)
    for group, kind in dealt:
        done = _deal(done, int(tasks[group, kind]), float(cost[kind]))
    return float(done.max())


def _deal(done: np.ndarray, tasks: int, cost: float) -> np.ndarray:
    """Return the time at which each worker finishes after they greedily take `tasks` more tasks of equal cost."""
    each = np.ceil((done.max() - done) / cost).astype(np.int64)  # tasks that start before the last worker is done
    rest = tasks - int(each.sum())
    if rest >= 0:
        done = done + (each + rest // len(done)) * cost
        most = rest % len(done)
        if most:
            done[np.argpartition(done, most - 1)[:most]] += cost
        return done
    worker = np.repeat(np.arange(len(done)), each)
    starts = done[worker] + ramp(each) * cost
    taken = worker[np.argpartition(starts, tasks - 1)[:tasks]]
    return done + np.bincount(taken, minlength=len(done)) * cost


class _Phase(NamedTuple):
    """The items of a launch."""

    sums: np.ndarray  # (variants, 5): items, iterations, iterations with bitmasks, rows written, rows joined
    bins: np.ndarray  # (variants, bins): histogram of the items by cost
    cost: np.ndarray  # (bins,): mean cost of an item, in iterations


class _OfPlan(NamedTuple):
    """Both phases of a plan, the rows that the combine kernel reads for each variant, and whether that kernel runs."""

    phases: tuple[_Phase, _Phase]
    merged: np.ndarray
    merging: bool


@kept_with_plan
def _of_plan(plan: Plan, tiles: int) -> _OfPlan:
    found, work = find_reductions(plan), plan.work
    steps = -(-(work["end"] - work["begin"]) // tiles)
    partial = _partial_steps(plan, tiles)
    rows = real_extents(plan.views[plan.components["query_view"][work["component"]]], work["query_tile"]).prod(axis=1)
    reduces = found.reduces
    variant = np.repeat(np.arange(plan.variants), np.diff(plan.work_indptr))
    written, joined = np.where(found.slots >= 0, rows, 0), np.where(reduces, rows, 0)
    columns = np.stack([np.ones(len(work)), steps, partial, written, joined], axis=1).astype(float)
    phases = tuple(_phase(columns[own], variant[own], plan.variants) for own in (~reduces, reduces))
    sources = found.merges.indptr[found.merges.variants]
    return _OfPlan((phases[0], phases[1]), np.diff(sources).astype(float), len(found.merges.rows) > 0)


def _phase(columns: np.ndarray, variant: np.ndarray, variants: int) -> _Phase:
    cost = _ITEM + columns[:, 1] + _PARTIAL * columns[:, 2]
    # The longest items are in bin 0.
    kind = _BINS - 1 - np.minimum(_BINS - 1, _BINS * cost / max(cost.max(initial=0), 1)).astype(np.int64)
    bins = np.bincount(variant * _BINS + kind, minlength=variants * _BINS).reshape(variants, _BINS)
    mean = np.bincount(kind, cost, _BINS) / np.maximum(np.bincount(kind, minlength=_BINS), 1)
    sums = np.stack([np.bincount(variant, column, variants) for column in columns.T], axis=1)
    return _Phase(sums, bins, mean)


def _partial_steps(plan: Plan, tiles: int) -> np.ndarray:
    """Count the iterations of each item that load a bitmask or have fewer than `tiles` tiles: (items,) int64."""
    begin, end = plan.work["begin"], plan.work["end"]
    whole = end - (end - begin) % tiles
    runs = np.nonzero(plan.mask >= 0)[0]
    count = np.diff(plan.tile_indptr)[runs]
    masked = np.repeat(plan.tile_indptr[runs], count) + ramp(count)
    found = (whole < end).astype(np.int64)
    for first in range(tiles):  # items with begin % tiles == first
        own = begin % tiles == first
        step = (masked - first) // tiles
        steps = np.zeros(len(step) + 1, np.int64)  # number of iterations with a bitmask before each masked tile
        np.cumsum(np.diff(step, prepend=-2) > 0, out=steps[1:])
        found[own] += steps[np.searchsorted(masked, whole[own])] - steps[np.searchsorted(masked, begin[own])]
    return found
