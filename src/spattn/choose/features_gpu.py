"""Features of the GPU cost model: work of persistent blocks that take tasks until none is left.

Times are sums over features, each with a coefficient of the device. A launch takes as long as its last worker; how much
that exceeds the mean follows from simulating the task order (``schedule/tasks.py::order_tasks``) with iterations as
cost.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .._util.ragged import ramp
from ..planning import Plan
from ..planning.contract.cache import kept_with_plan
from ..planning.contract.types import real_extents
from ..schedule.reductions import find_reductions
from .chooser import Sizes

__all__ = ["GpuCounts", "KernelShape", "count_on_gpu", "last_done"]

_ITEM, _PARTIAL = 0.75, 0.25  # cost of an item beside its iterations, and of loading bitmasks, in iterations
_BINS = 32  # histogram bins of items by iterations, for the simulation
_DEALT = 64  # kinds of tasks simulated one by one; earlier ones load all workers equally


class KernelShape(NamedTuple):
    """How a device executes plans of a tile shape."""

    rows: int  # computed, of a query tile
    tiles: int  # key tiles of an iteration
    head_dim: int  # of K and V, padded
    workers: int  # concurrent blocks
    keys_together: int  # of :func:`~spattn.schedule.tasks.order_tasks`


class GpuCounts(NamedTuple):
    """Features of a forward; `items` to `joined` are those of the last worker."""

    launches: float  # that compute items: one or two
    merging: float  # launches that combine partials: none or one
    items: float
    weights: float  # computed pairs
    products: float  # computed pairs times features of K
    partial: float  # pairs of iterations that load a bitmask
    written: float  # elements of partials written
    joined: float  # elements of partials read and combined by fix-up items
    merged: float  # elements that the combine kernel reads, over the whole device
    elements: float  # of the call's arrays


def count_on_gpu(plan: Plan, sizes: Sizes, kernel: KernelShape, alone: bool = True) -> GpuCounts:
    """Return the features of a call. Unless `alone`, other calls share its launches and leave no worker idle."""
    of, (batch, heads_q, heads_kv, head_dim, head_dim_v) = _of_plan(plan, kernel.tiles), sizes
    variant = np.broadcast_to(plan.variant, (batch, heads_q)).ravel()
    times = np.bincount(variant, minlength=plan.variants)
    together = max(1, kernel.keys_together // max(1, plan.kv_len)) * (heads_q // heads_kv)
    groups = [
        np.bincount(variant[at : at + together], minlength=plan.variants) for at in range(0, len(variant), together)
    ]
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
    """Return the finish time of the last worker, under greedy list scheduling.

    `tasks` (groups, kinds) are the numbers of tasks, group by group, `cost` (kinds,) the falling costs of a task.
    """
    several = np.argwhere(tasks)  # in order
    dealt = several[-_DEALT:]
    before = several[: len(several) - len(dealt)]
    done = np.full(workers, float(tasks[tuple(before.T)] @ cost[before[:, 1]]) / workers)
    for group, kind in dealt:
        done = _deal(done, int(tasks[group, kind]), float(cost[kind]))
    return float(done.max())


def _deal(done: np.ndarray, tasks: int, cost: float) -> np.ndarray:
    """Return the finish time of each worker after greedily taking `tasks` more tasks of equal cost."""
    each = np.ceil((done.max() - done) / cost).astype(np.int64)  # tasks that fit before the last worker is done
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
    """Items of a launch: per variant, sums over its items (items, iterations, iterations with bitmasks, rows written,
    rows joined) and a histogram of kinds; and the cost of an item of each kind, in iterations.
    """

    sums: np.ndarray
    bins: np.ndarray
    cost: np.ndarray


class _OfPlan(NamedTuple):
    """Phases, rows of each variant that the combine kernel reads, and whether it runs."""

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
    # Longest first.
    kind = _BINS - 1 - np.minimum(_BINS - 1, _BINS * cost / max(cost.max(initial=0), 1)).astype(np.int64)
    bins = np.bincount(variant * _BINS + kind, minlength=variants * _BINS).reshape(variants, _BINS)
    mean = np.bincount(kind, cost, _BINS) / np.maximum(np.bincount(kind, minlength=_BINS), 1)
    sums = np.stack([np.bincount(variant, column, variants) for column in columns.T], axis=1)
    return _Phase(sums, bins, mean)


def _partial_steps(plan: Plan, tiles: int) -> np.ndarray:
    """(items,) int64: iterations of each item with a bitmask, or with fewer tiles than the others."""
    begin, end = plan.work["begin"], plan.work["end"]
    whole = end - (end - begin) % tiles
    runs = np.nonzero(plan.mask >= 0)[0]
    count = np.diff(plan.tile_indptr)[runs]
    masked = np.repeat(plan.tile_indptr[runs], count) + ramp(count)
    found = (whole < end).astype(np.int64)
    for first in range(tiles):  # items that start at this remainder
        own = begin % tiles == first
        step = (masked - first) // tiles
        steps = np.zeros(len(step) + 1, np.int64)  # iterations before each tile with a bitmask that have one
        np.cumsum(np.diff(step, prepend=-2) > 0, out=steps[1:])
        found[own] += steps[np.searchsorted(masked, whole[own])] - steps[np.searchsorted(masked, begin[own])]
    return found
