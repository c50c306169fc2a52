"""From bands and ranges of distances to tiles: partial tiles are told apart by a few words, not by their cells."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...patterns.hints.bands import Bands
from ..contract.budget import Budget
from ._lists import RunLists
from ._sweep import sweep
from .masks import Masks

__all__ = ["tiles_of_bands"]


def tiles_of_bands(
    clauses: Sequence[Bands], query: np.void, key: np.void, shift: int, masks: Masks, lists: RunLists, budget: Budget
) -> int:
    """Adds the tiles that hold a pair which all clauses allow, on views of consecutive positions, to `lists`; returns
    how many pairs these are.

    Parameters are those of :func:`~.tiling.find_tiles`. Costs O(runs of tiles + intervals that query tiles
    meet) time, and a bitmask for each look of partial tiles.
    """
    queries = int(query["offset"]) + shift, int(query["extent"][-1])
    keys = int(key["offset"]), int(key["extent"][-1])
    before = lists.runs
    nnz = sweep(queries, keys, clauses, masks.compiled, lists, budget.most_runs)
    budget.add_runs(lists.runs - before)
    masks.need()
    return nnz
