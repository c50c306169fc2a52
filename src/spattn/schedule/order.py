"""The order in which threads take a plan's work items. It changes no result."""

from __future__ import annotations

import numpy as np

from .._util.frozen import frozen
from ..planning import Plan
from ..planning.contract.cache import kept_with_plan

__all__ = ["by_rows", "neighbours_together"]

_STRIP = 8  # query tiles side by side that are taken row after row of a grid: their keys stay in a second-level cache


@kept_with_plan
def by_rows(plan: Plan) -> np.ndarray:
    """Each variant's items in the order of their rows. Kept with the plan."""
    work = plan.work
    return frozen(work[np.lexsort((work["begin"], work["query_tile"], work["component"], _variants(plan)))])


@kept_with_plan
def neighbours_together(plan: Plan) -> np.ndarray:
    """The same in strips of a grid of query tiles, which meet the same key tiles one soon after the other; query tiles
    that are components of their own in the order of their rows.

    Items much longer than most come first and much shorter ones last, so that all threads end together. Kept with the
    plan.
    """
    work = plan.work
    width = plan.views["grid"][plan.components["query_view"][work["component"]], -1]
    row, column = np.divmod(work["query_tile"], width)
    starts = plan.views["offset"][plan.components["query_view"]]
    alone = np.where(plan.components["query_tiles"] == 1, starts, -1)[work["component"]]
    length = work["end"] - work["begin"]
    size = np.rint(length / length.mean()) if len(work) else length
    order = np.lexsort((work["begin"], column, row, column // _STRIP, work["component"], alone, -size, _variants(plan)))
    return frozen(work[order])


def _variants(plan: Plan) -> np.ndarray:
    return np.repeat(np.arange(plan.variants), np.diff(plan.work_indptr))
