"""Tiles of bands and ranges of distances; partial tiles are compared by descriptors, not by cells."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...patterns.hints.closed_forms import Bands
from ..contract.budget import Budget
from ._lists import RunLists
from ._sweep import sweep
from .masks import Masks

__all__ = ["tiles_of_bands"]


def tiles_of_bands(
    conjuncts: Sequence[Bands], query: np.void, key: np.void, shift: int, masks: Masks, lists: RunLists, budget: Budget
) -> int:
    """Append the tiles of the pairs that all conjuncts allow to `lists`; return the number of pairs.

    The views must have consecutive positions. Parameters as in :func:`~.tiling.find_tiles`. The cost is O(runs of tiles
    + intervals per query tile), and one bitmask for each equivalence class of partial tiles.
    """
    queries = int(query["offset"]) + shift, int(query["extent"][-1])
    keys = int(key["offset"]), int(key["extent"][-1])
    before = lists.runs
    nnz = sweep(queries, keys, conjuncts, masks.compiled, lists, budget.most_runs)
    budget.add_runs(lists.runs - before)
    masks.need()
    return nnz
