"""Prove that each row is written once and each partial is read once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..planning.contract.types import NO_ORDER
from ._proof import find_fault

__all__ = ["Writers", "prove"]

# Messages for the faults of kernels/proof.h, from fault 1 on; {at} is a row, a partial or an item.
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
    """The work items and combines that write the rows of each variant; fields are in the order of `find_fault`."""

    views: np.ndarray
    query_view: np.ndarray  # (owners,) int32: each owner's view of rows; an owner is a component or, for dK/dV, a view
    owner: np.ndarray  # (items,) int32
    tile: np.ndarray  # (items,) int32: the first tile of each work item
    slot: np.ndarray  # (items,) int64
    work_indptr: np.ndarray
    slots: int
    merge_rows: np.ndarray
    merge_indptr: np.ndarray
    merge_sources: np.ndarray
    merge_variants: np.ndarray
    length: int  # number of rows of a variant
    block: int  # number of cells of a tile
    together: int = 1  # number of tiles of a work item; partials have together * block rows
    order: np.ndarray = NO_ORDER  # (variants, length) or (0, 0) int32: permutation of the rows


def prove(writers: Writers) -> None:
    """Raise RuntimeError unless each row has one writer, and each row of a partial is read once, for its own row.

    This check runs on every plan, so that a planner bug raises an error instead of returning a wrong result. It takes
    O(items + rows / 64 + merges + sources) time, and one bit for each row and 16 bytes for each partial.
    """
    fault, variant, at = find_fault(writers[0].view(np.uint8), *writers[1:])
    if fault:
        what = _FAULTS[fault - 1].format(at=at)
        raise RuntimeError(
            f"plan: {what} (variant {variant}); this is a bug in spattn, please report the pattern and the lengths"
        )
