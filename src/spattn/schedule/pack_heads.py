"""Packed GQA: the query heads of a group share a query tile, with (query head, query) rows.

With few queries, most rows of a tile are padding, and every query head reads the keys of its group again. Here the
heads become an axis of the query view, so that one work item serves the group and reads each key once. Of a group that
does not fit, as many heads as do share a tile. The result is an ordinary plan, for a call with fewer heads and more
queries in the same memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..planning.contract.cache import kept_with_plan
from ..planning.contract.types import Plan
from .roles import roles

__all__ = ["heads_that_fit", "pack_heads", "variant_of_groups"]


def heads_that_fit(group: int, q_len: int, rows: int) -> int:
    """Return how many heads of a group of `group` heads :func:`pack_heads` can pack into a tile of `rows` queries."""
    return next((n for n in range(group, 1, -1) if group % n == 0 and q_len << (n - 1).bit_length() <= rows), 1)


@kept_with_plan
def pack_heads(plan: Plan, group: int) -> Plan | None:
    """Return the plan with each `group` heads in one query tile; None if they do not fit or differ in variant."""
    heads = 1 << (group - 1).bit_length()
    rows = plan.block_q // heads
    queries, keys, _ = roles(plan)
    views = plan.views[queries]
    shared = np.isin(queries, keys).any()
    one_tile = (views["tiles"] == 1).all() and (views["extent"][:, :2] == 1).all() and (views["box"][:, :2] == 1).all()
    variant = variant_of_groups(plan.variant, group)
    if not rows or shared or not one_tile or (views["extent"][:, 2] > rows).any() or variant is None:
        return None
    all_views = plan.views.copy()
    for name, values in (("stride", plan.q_len), ("extent", group), ("box", heads)):
        all_views[name][queries, 1] = values
    all_views["box"][queries, 2] = rows
    masks = np.zeros_like(plan.masks)
    for head in range(group):
        masks[:, head * rows : (head + 1) * rows] = plan.masks[:, :rows]
    merges = _repeat_merges(plan, group, rows)
    q_len, nnz = plan.q_len * group, plan.nnz * group
    return replace(plan, views=all_views, masks=masks, variant=variant, q_len=q_len, nnz=nnz, **merges)


def variant_of_groups(variant: np.ndarray, group: int) -> np.ndarray | None:
    """Return the variant of each group of heads; None if the heads of a group differ."""
    if variant.shape[1] == 1:
        return variant
    grouped = variant.reshape(variant.shape[0], -1, group)
    same = (grouped == grouped[:, :, :1]).all()
    return np.ascontiguousarray(grouped[:, :, 0]) if same else None


def _repeat_merges(plan: Plan, group: int, rows: int) -> dict[str, Any]:
    """Return the ``merge_*`` fields, with the rows of each variant repeated for every head of a group."""
    counts, head_rows, head_counts, head_sources = np.diff(plan.merge_indptr), [], [], []
    for variant in range(plan.variants):
        first, last = plan.merge_variants[variant : variant + 2]
        sources = plan.merge_sources[plan.merge_indptr[first] : plan.merge_indptr[last]]
        for head in range(group):
            head_rows.append(plan.merge_rows[first:last] + head * plan.q_len)
            head_counts.append(counts[first:last])
            head_sources.append(sources + head * rows)
    indptr = np.concatenate([[0], np.cumsum(np.concatenate(head_counts))])
    return {
        "merge_rows": np.concatenate(head_rows).astype(np.int32),
        "merge_indptr": indptr.astype(np.int32),
        "merge_sources": np.concatenate(head_sources).astype(np.int32),
        "merge_variants": (plan.merge_variants * group).astype(np.int32),
    }
