"""The order in which CPU threads run work items; results do not depend on it."""

from __future__ import annotations

import numpy as np

from .._util.frozen import frozen
from ..planning import Plan
from ..planning.contract.cache import kept_with_plan

__all__ = ["by_rows", "neighbours_together", "row_order"]

_STRIP = 8  # width of a strip in query tiles; the keys of a row of tiles stay in the L2 cache for the next row


@kept_with_plan
def by_rows(plan: Plan) -> np.ndarray:
    """Return each variant's items in row order."""
    return frozen(plan.work[row_order(plan)])


def row_order(plan: Plan) -> np.ndarray:
    """Return the index of each item of :func:`by_rows`."""
    work = plan.work
    return np.lexsort((work["begin"], work["query_tile"], work["component"], _variants(plan)))


@kept_with_plan
def neighbours_together(plan: Plan) -> np.ndarray:
    """Return each variant's items in strips of the query grid, so that adjacent items share key tiles.

    Components with one query tile are in row order. Items are first sorted by descending length, rounded to multiples
    of the mean, so that all threads finish together.
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
