"""Tasks: work items and combines, repeated for every batch entry and head of their variant."""

from __future__ import annotations

import itertools
from typing import NamedTuple, Protocol

import numpy as np

from .._util.checks import show
from .._util.ragged import ramp
from ..planning.contract.types import Plan

__all__ = ["TASK", "LaunchLists", "Listed", "heads_together", "launch_lists", "merge_heads", "order_tasks"]

TASK = np.dtype([(name, "i4") for name in ("item", "batch", "head_q", "head_kv")])


class Listed(Protocol):
    """Work items grouped by variant: a plan, or the lists of a backward kernel."""

    @property
    def work(self) -> np.ndarray: ...
    @property
    def work_indptr(self) -> np.ndarray: ...
    @property
    def variant(self) -> np.ndarray: ...
    @property
    def kv_len(self) -> int: ...


def order_tasks(
    plan: Listed, chosen: np.ndarray, batch: int, heads_q: int, heads_kv: int, keys_together: int
) -> np.ndarray:
    """Return the tasks of the `chosen` work items in launch order: (tasks,) array of TASK.

    The launch processes a few heads at a time, so that their keys and values stay in the cache, and starts with their
    longest items, to balance the SMs. `keys_together` is the number of keys, over all heads, that fit the cache
    together with their values.
    """
    group = heads_q // heads_kv
    variant = np.broadcast_to(plan.variant, (batch, heads_q)).ravel()
    length = (plan.work["end"] - plan.work["begin"]).astype(np.int64)
    pieces = []
    for start, stop in itertools.pairwise(heads_together(len(variant), group, plan.kv_len, keys_together)):
        places = np.arange(start, stop)
        first, last = plan.work_indptr[variant[places]], plan.work_indptr[variant[places] + 1]
        place = np.repeat(places, last - first)
        rank = ramp(last - first)
        tasks = np.zeros(len(place), dtype=TASK)
        tasks["item"] = np.repeat(first, last - first) + rank
        tasks["batch"], tasks["head_q"] = place // heads_q, place % heads_q
        tasks["head_kv"] = tasks["head_q"] // group
        # Of items of equal length, list each for all heads before the next, so that adjacent tiles run concurrently.
        tasks = tasks[np.lexsort((place, rank, -length[tasks["item"]]))]
        pieces.append(tasks[chosen[tasks["item"]]])
    tasks = np.concatenate(pieces) if pieces else np.zeros(0, dtype=TASK)
    show("tasks", plan=plan, chosen=chosen, batch=batch, heads_q=heads_q, heads_kv=heads_kv, tasks=tasks)
    return tasks


def heads_together(heads: int, group: int, kv_len: int, keys_together: int) -> list[int]:
    """Return the boundaries of the sets of adjacent heads that a launch processes together, over all batch entries.

    Sets are about equally large: SMs idle at the end of a small last one, whose longest items start late.
    """
    entries = heads // group  # that have keys
    sets = -(-entries // max(1, keys_together // max(1, kv_len)))
    return [number * entries // sets * group for number in range(sets + 1)] if heads else [0]


def merge_heads(merge_variants: np.ndarray, variant: np.ndarray, batch: int, heads_q: int) -> np.ndarray:
    """Return (first and end index in ``merge_rows``, batch entry, head) of each head: (batch · heads_q, 4) int32."""
    own = np.broadcast_to(variant, (batch, heads_q)).ravel()
    place = np.arange(batch * heads_q)
    columns = (merge_variants[own], merge_variants[own + 1], place // heads_q, place % heads_q)
    return np.stack(columns, axis=1).astype(np.int32)


class LaunchLists(NamedTuple):
    """The numbering of tasks: by variant, then by head, then by work item or combined row."""

    heads: np.ndarray  # (batch · heads_q,) int32: the indices batch · heads_q + head, grouped by variant
    head_indptr: np.ndarray  # (variants + 1,) int32: start of the heads of each variant
    items: np.ndarray  # (variants + 1,) int32: start of the work items of each variant
    items_first: np.ndarray  # (variants + 1,) int64: first task of each variant, and the total
    merges: np.ndarray  # like `items`, for combined rows
    merges_first: np.ndarray  # like `items_first`, for combined rows


def launch_lists(plan: Plan, batch: int, heads_q: int) -> LaunchLists:
    """Return the launch lists of a plan; the tasks of a head are adjacent, so that its K and V stay in the cache."""
    variant = np.broadcast_to(plan.variant, (batch, heads_q)).reshape(-1)
    heads = np.argsort(variant, kind="stable").astype(np.int32)
    counts = np.bincount(variant, minlength=plan.variants)
    items, merges = plan.work_indptr, plan.merge_variants
    items_first, merges_first = (_indptr(np.diff(indptr).astype(np.int64) * counts) for indptr in (items, merges))
    return LaunchLists(heads, _indptr(counts).astype(np.int32), items, items_first, merges, merges_first)


def _indptr(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
