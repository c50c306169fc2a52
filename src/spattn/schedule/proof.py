"""Proof that each row is written once and each partial result is read once, for every list of work items."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..planning.contract.types import NO_ORDER
from ._proof import find_fault

__all__ = ["Writers", "prove"]

# The faults of kernels/proof.h, from number 1 on; {at} is a row, a slot or an item.
_FAULTS = (
    "work item {at} names a view or a tile that does not exist",
    "row {at} is outside of the sequence",
    "row {at} is written twice",
    "row {at} is not written",
    "slot {at} is outside of the workspace, or two work items share it",
    "a merge of row {at} reads a partial result of another row, or one twice",
    "{at} rows of partial results are not read by exactly one merge",
)


class Writers(NamedTuple):
    """Who writes the rows of each variant: work items, and merges of partial results; in the order of `find_fault`.

    Attributes
    ----------
    views : (views,) array of VIEW
    query_view : (owners,) int32 array
        The view of rows of each owner of work items.
    owner, tile : (items,) int32 arrays
        Owner and (first) tile of each work item.
    slot : (items,) int64 array
    work_indptr, merge_variants : (variants + 1,) int32 arrays
    slots : int
    merge_rows, merge_indptr, merge_sources : int32 arrays
        As in a plan.
    length : int
        Rows of a variant.
    block : int
        Cells of a tile.
    together : int, optional
        Tiles of a work item, default 1: slots have ``together * block`` rows.
    order : (variants, length) or (0, 0) int32 array, optional
        The row at each place.
    """

    views: np.ndarray
    query_view: np.ndarray
    owner: np.ndarray
    tile: np.ndarray
    slot: np.ndarray
    work_indptr: np.ndarray
    slots: int
    merge_rows: np.ndarray
    merge_indptr: np.ndarray
    merge_sources: np.ndarray
    merge_variants: np.ndarray
    length: int
    block: int
    together: int = 1
    order: np.ndarray = NO_ORDER


def prove(writers: Writers) -> None:
    """RuntimeError unless, in every variant, one work item or one merge writes each row, and exactly one merge, that of
    its own row, reads each row of each slot.

    Notes
    -----
    It runs on every plan, so that a fault of the planner is an error and never a wrong result. Time is O(items +
    rows / 64 + merges + sources), memory one bit a row and 16 bytes a slot.
    """
    fault, variant, at = find_fault(*writers._replace(views=writers.views.view(np.uint8)))
    if fault:
        what = _FAULTS[fault - 1].format(at=at)
        raise RuntimeError(
            f"plan: {what} (variant {variant}); this is a bug in spattn, please report the pattern and lengths"
        )
