"""What a plan makes the workers of a GPU do, counted: persistent blocks that take tasks in turn until none is left.

Times are sums over these counts, each with a coefficient of the device. What is shared by all workers evenly would be a
worker's share of the total; a launch takes as long as the worker that is done last. How much longer that is than the
share follows from dealing out the tasks in their order (``schedule/tasks.py::order_tasks``), by their steps alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .._util.ragged import ramp
from ..planning import Plan
from ..planning.contract.cache import kept_with_plan
from ..planning.contract.types import real_extents
from ..schedule.finishers import find_finishers

__all__ = ["GpuCounts", "Kernel", "Sizes", "count_on_gpu", "last_done"]

_ITEM, _PARTIAL = 0.75, 0.25  # steps that an item takes beside its own, and a step that loads bitmasks
_BINS = 32  # of items by their steps, when they are dealt out
_DEALT = 64  # kinds of tasks that are dealt out one after the other; those before them keep all workers equally busy


class Kernel(NamedTuple):
    """How a device executes plans of a tile shape.

    Attributes
    ----------
    rows : int
        That a tile of queries is computed as.
    tiles : int
        Of keys, in a step.
    head_dim : int
        That K and V are computed as.
    workers : int
        Blocks that run at the same time.
    keys_together : int
        See :func:`~spattn.schedule.tasks.order_tasks`.
    """

    rows: int
    tiles: int
    head_dim: int
    workers: int
    keys_together: int


class Sizes(NamedTuple):
    """Those of a call."""

    batch: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int


class GpuCounts(NamedTuple):
    """What a forward does; `items` to `joined` are those of the worker that is done last.

    Attributes
    ----------
    launches, merging : float
        Launches that compute items, one or two, and launches that merge, none or one.
    items : float
        Work items.
    weights : float
        Pairs in its steps.
    products : float
        The same, times features of K.
    partial : float
        Pairs in those of its steps that load a bitmask.
    written, joined : float
        Elements of rows that it writes for others to merge, and of those that it reads and joins with its own.
    merged : float
        Elements of rows that merges read, on the whole device.
    elements : float
        Of the arrays of the call.
    """

    launches: float
    merging: float
    items: float
    weights: float
    products: float
    partial: float
    written: float
    joined: float
    merged: float
    elements: float


def count_on_gpu(plan: Plan, sizes: Sizes, kernel: Kernel, alone: bool = True) -> GpuCounts:
    """The counts of a call, whose launches are others', too, where it is not `alone`: then no worker is left idle."""
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
    """When the last worker is done, if each takes the next task as soon as it has done one.

    Parameters
    ----------
    tasks : (groups, kinds) array
        How many of each kind, group after group.
    cost : (kinds,) array
        Of a task; it falls.
    workers : int
    """
    several = np.argwhere(tasks)  # in their order
    dealt = several[-_DEALT:]
    before = several[: len(several) - len(dealt)]
    done = np.full(workers, float(tasks[tuple(before.T)] @ cost[before[:, 1]]) / workers)
    for group, kind in dealt:
        done = _deal(done, int(tasks[group, kind]), float(cost[kind]))
    return float(done.max())


def _deal(done: np.ndarray, tasks: int, cost: float) -> np.ndarray:
    """When each worker is done with what it had and with its share of so many equal tasks."""
    each = np.ceil((done.max() - done) / cost).astype(np.int64)  # that it can take before all have something to do
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
    """The items of a launch: of each variant the sums over its items of what a worker does (items, steps, steps with
    bitmasks, rows written, rows joined), and how many items of each kind it has; and what an item of each kind costs,
    in steps."""

    sums: np.ndarray
    bins: np.ndarray
    cost: np.ndarray


class _OfPlan(NamedTuple):
    """Phases, rows that merges of each variant read, and whether there are merges."""

    phases: tuple[_Phase, _Phase]
    merged: np.ndarray
    merging: bool


@kept_with_plan
def _of_plan(plan: Plan, tiles: int) -> _OfPlan:
    found, work = find_finishers(plan), plan.work
    steps = -(-(work["end"] - work["begin"]) // tiles)
    partial = _partial_steps(plan, tiles)
    rows = real_extents(plan.views[plan.components["query_view"][work["component"]]], work["query_tile"]).prod(axis=1)
    finishes = found.finishes
    variant = np.repeat(np.arange(plan.variants), np.diff(plan.work_indptr))
    written, joined = np.where(found.slots >= 0, rows, 0), np.where(finishes, rows, 0)
    columns = np.stack([np.ones(len(work)), steps, partial, written, joined], axis=1).astype(float)
    phases = tuple(_phase(columns[own], variant[own], plan.variants) for own in (~finishes, finishes))
    sources = found.merges.indptr[found.merges.variants]
    return _OfPlan((phases[0], phases[1]), np.diff(sources).astype(float), len(found.merges.rows) > 0)


def _phase(columns: np.ndarray, variant: np.ndarray, variants: int) -> _Phase:
    cost = _ITEM + columns[:, 1] + _PARTIAL * columns[:, 2]
    # The longest first.
    kind = _BINS - 1 - np.minimum(_BINS - 1, _BINS * cost / max(cost.max(initial=0), 1)).astype(np.int64)
    bins = np.bincount(variant * _BINS + kind, minlength=variants * _BINS).reshape(variants, _BINS)
    mean = np.bincount(kind, cost, _BINS) / np.maximum(np.bincount(kind, minlength=_BINS), 1)
    sums = np.stack([np.bincount(variant, column, variants) for column in columns.T], axis=1)
    return _Phase(sums, bins, mean)


def _partial_steps(plan: Plan, tiles: int) -> np.ndarray:
    """(items,) int64: how many steps of each item hold a tile with a bitmask, or fewer tiles than the others."""
    begin, end = plan.work["begin"], plan.work["end"]
    whole = end - (end - begin) % tiles
    runs = np.nonzero(plan.mask >= 0)[0]
    count = np.diff(plan.tile_indptr)[runs]
    masked = np.repeat(plan.tile_indptr[runs], count) + ramp(count)
    found = (whole < end).astype(np.int64)
    for first in range(tiles):  # of items that begin so many tiles behind a multiple of `tiles`
        own = begin % tiles == first
        step = (masked - first) // tiles
        steps = np.zeros(len(step) + 1, np.int64)  # that lie before each tile with a bitmask, and hold one
        np.cumsum(np.diff(step, prepend=-2) > 0, out=steps[1:])
        found[own] += steps[np.searchsorted(masked, whole[own])] - steps[np.searchsorted(masked, begin[own])]
    return found
