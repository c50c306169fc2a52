"""Tasks: a plan's work items, and its merges, once for every batch entry and head that uses their variant."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from .._util.checks import show
from .._util.ragged import ramp
from ..planning.contract.types import Plan

__all__ = ["TASK", "LaunchLists", "Listed", "launch_lists", "merge_heads", "order_tasks"]

TASK = np.dtype([(name, "i4") for name in ("item", "batch", "head_q", "head_kv")])


class Listed(Protocol):
    """What has work items by variant: a plan, or a pass of its backward."""

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
    """The order in which to run the tasks of some work items: few heads at a time, so that their keys and values stay
    in the cache, and the longest work items of those heads first, so that no SM is left with a long one.

    Parameters
    ----------
    chosen : (items,) bool array
        Which work items to run.
    keys_together : int
        Keys, counted over all heads of K and V that run side by side, that the cache holds with their values.

    Returns
    -------
    (tasks,) array of TASK
    """
    group = heads_q // heads_kv
    together = max(1, keys_together // plan.kv_len) * group
    variant = np.broadcast_to(plan.variant, (batch, heads_q)).ravel()
    length = (plan.work["end"] - plan.work["begin"]).astype(np.int64)
    pieces = []
    for start in range(0, len(variant), together):
        places = np.arange(start, min(start + together, len(variant)))
        first, last = plan.work_indptr[variant[places]], plan.work_indptr[variant[places] + 1]
        place = np.repeat(places, last - first)
        rank = ramp(last - first)
        tasks = np.zeros(len(place), dtype=TASK)
        tasks["item"] = np.repeat(first, last - first) + rank
        tasks["batch"], tasks["head_q"] = place // heads_q, place % heads_q
        tasks["head_kv"] = tasks["head_q"] // group
        # Heads take turns item by item, so that equal items of neighbouring tiles run side by side.
        tasks = tasks[np.lexsort((place, rank, -length[tasks["item"]]))]
        pieces.append(tasks[chosen[tasks["item"]]])
    tasks = np.concatenate(pieces) if pieces else np.zeros(0, dtype=TASK)
    show("tasks", plan=plan, chosen=chosen, batch=batch, heads_q=heads_q, heads_kv=heads_kv, tasks=tasks)
    return tasks


def merge_heads(merge_variants: np.ndarray, variant: np.ndarray, batch: int, heads_q: int) -> np.ndarray:
    """(batch · heads_q, 4) int32: first and last merge of each head's variant, batch entry, head."""
    own = np.broadcast_to(variant, (batch, heads_q)).ravel()
    place = np.arange(batch * heads_q)
    columns = (merge_variants[own], merge_variants[own + 1], place // heads_q, place % heads_q)
    return np.stack(columns, axis=1).astype(np.int32)


class LaunchLists(NamedTuple):
    """Tasks numbered through: variant after variant, head after head, work item (or merge) after work item.

    Attributes
    ----------
    heads : (batch · heads_q,) int32 array
        The numbers batch · heads_q + head, those of one variant together.
    head_indptr : (variants + 1,) int32 array
        Where the heads of a variant start.
    items, merges : (variants + 1,) int32 arrays
        Where the work items, and the merges, of a variant start.
    items_first, merges_first : (variants + 1,) int64 arrays
        Numbers of the first tasks of a variant, and how many there are in all.
    """

    heads: np.ndarray
    head_indptr: np.ndarray
    items: np.ndarray
    items_first: np.ndarray
    merges: np.ndarray
    merges_first: np.ndarray


def launch_lists(plan: Plan, batch: int, heads_q: int) -> LaunchLists:
    """The launch lists of a plan's work items and merges. Tasks of one head lie together, so that heads that run at the
    same time share K and V in the cache."""
    variant = np.broadcast_to(plan.variant, (batch, heads_q)).reshape(-1)
    heads = np.argsort(variant, kind="stable").astype(np.int32)
    counts = np.bincount(variant, minlength=plan.variants)
    items, merges = plan.work_indptr, plan.merge_variants
    items_first, merges_first = (_indptr(np.diff(indptr).astype(np.int64) * counts) for indptr in (items, merges))
    return LaunchLists(heads, _indptr(counts).astype(np.int32), items, items_first, merges, merges_first)


def _indptr(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
