"""Which views a plan uses for queries and which for keys."""

from __future__ import annotations

import numpy as np

from ..plan._types import Plan

__all__ = ["roles"]


def roles(plan: Plan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The roles of a plan's views.

    Returns
    -------
    queries, keys : (n,) int64 arrays
        Numbers of the views that are used for queries, and of those for keys, ascending.
    row_component : (rows,) int64 array
        For each CSR row a component that owns it.
    """
    row_component = np.zeros(len(plan.indptr) - 1, dtype=np.int64)
    keys = []
    for number, component in enumerate(plan.components):
        rows = slice(component["first_row"], component["first_row"] + component["query_tiles"])
        row_component[rows] = number
        used = plan.key_view[plan.indptr[rows.start] : plan.indptr[rows.stop]]
        keys.append(component["key_view"] + np.arange(used.max(initial=-1) + 1))
    key_ids = np.unique(np.concatenate(keys)) if keys else np.zeros(0, np.int64)
    return np.unique(plan.components["query_view"]), key_ids, row_component
