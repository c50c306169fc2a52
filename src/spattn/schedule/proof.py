"""Proof that each row is written once and each partial is read once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..planning.contract.types import NO_ORDER
from ._proof import find_fault

__all__ = ["Writers", "prove"]

# The faults of kernels/proof.h, from 1 on; {at} is a row, a partial or an item.
_FAULTS = (
    "work item {at} has an invalid view or tile",
    "row {at} is out of range",
    "row {at} is written twice",
    "row {at} is never written",
    "partial {at} is out of range or shared by two work items",
    "combining row {at} reads a partial of another row, or reads one twice",
    "{at} partial rows are not read exactly once",
)


class Writers(NamedTuple):
    """Writers of each variant's rows: work items and combined partials; fields in the order of `find_fault`."""

    views: np.ndarray
    query_view: np.ndarray  # (owners,) int32: the view of rows of each owner of work items
    owner: np.ndarray  # (items,) int32
    tile: np.ndarray  # (items,) int32: the first tile of each work item
    slot: np.ndarray  # (items,) int64
    work_indptr: np.ndarray
    slots: int
    merge_rows: np.ndarray
    merge_indptr: np.ndarray
    merge_sources: np.ndarray
    merge_variants: np.ndarray
    length: int  # rows of a variant
    block: int  # cells of a tile
    together: int = 1  # tiles of a work item: partials have together * block rows
    order: np.ndarray = NO_ORDER  # (variants, length) or (0, 0) int32: permutation of the rows


def prove(writers: Writers) -> None:
    """Raise RuntimeError unless each row has one writer and each partial row one reader, which writes its row.

    Runs on every plan, so that a planner bug is an error and never a wrong result. O(items + rows / 64 + merges +
    sources) time, one bit per row and 16 bytes per partial of memory.
    """
    fault, variant, at = find_fault(*writers._replace(views=writers.views.view(np.uint8)))
    if fault:
        what = _FAULTS[fault - 1].format(at=at)
        raise RuntimeError(
            f"plan: {what} (variant {variant}); this is a bug in spattn, please report the pattern and the lengths"
        )
