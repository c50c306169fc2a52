"""Order in which CPU threads run work items; results do not depend on it."""

from __future__ import annotations

import numpy as np

from .._util.frozen import frozen
from ..planning import Plan
from ..planning.contract.cache import kept_with_plan

__all__ = ["by_rows", "neighbours_together"]

_STRIP = 8  # adjacent query tiles taken row by row of a grid: their keys stay in the L2 cache


@kept_with_plan
def by_rows(plan: Plan) -> np.ndarray:
    """Return each variant's items in row order."""
    work = plan.work
    return frozen(work[np.lexsort((work["begin"], work["query_tile"], work["component"], _variants(plan)))])


@kept_with_plan
def neighbours_together(plan: Plan) -> np.ndarray:
    """Return each variant's items in strips of the query grid, whose neighbours share key tiles.

    Components of one query tile come in row order. Items are sorted by falling length, in multiples of the mean, so
    that all threads finish together.
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
