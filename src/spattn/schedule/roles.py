"""Query and key views of a plan."""

from __future__ import annotations

import numpy as np

from ..planning.contract.types import Plan

__all__ = ["key_views_of", "roles"]


def roles(plan: Plan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the query views and the key views of a plan, ascending, and a component for each CSR row."""
    row_component = np.zeros(len(plan.indptr) - 1, dtype=np.int64)
    keys = []
    for number, component in enumerate(plan.components):
        rows = slice(component["first_row"], component["first_row"] + component["query_tiles"])
        row_component[rows] = number
        keys.append(key_views_of(plan, component))
    key_ids = np.unique(np.concatenate(keys)) if keys else np.zeros(0, np.int64)
    return np.unique(plan.components["query_view"]), key_ids, row_component


def key_views_of(plan: Plan, component: np.void) -> np.ndarray:
    """Return the indices of the key views that a component's lists use."""
    first = component["first_row"]
    used = plan.key_view[plan.indptr[first] : plan.indptr[first + component["query_tiles"]]]
    return component["key_view"] + np.arange(used.max(initial=-1) + 1)
