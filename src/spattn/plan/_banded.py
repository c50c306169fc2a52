"""From bands and ranges of distances to tiles: partial tiles are told apart by a few words, not by their cells."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..patterns._bands import Bands
from ._budget import Budget
from ._masks import Masks
from ._sweep import Sweep
from ._tiles import Tiles

__all__ = ["tiles_of_bands"]

_WORDS_AT_ONCE = 1 << 15  # of bitmasks that are made at once: they fit into a cache


def tiles_of_bands(
    clauses: Sequence[Bands], query: np.void, key: np.void, shift: int, masks: Masks, budget: Budget
) -> Tiles:
    """The tiles that hold a pair which all clauses allow, on views of consecutive positions.

    Parameters are those of :func:`spattn.plan._tiling.find_tiles`. Costs O(runs of tiles + intervals that query tiles
    meet) time, and a bitmask for each shape of partial tiles.
    """
    offset, block_q, block_kv = int(query["offset"]) + shift, *masks.tile
    queries, keys = (offset, int(query["extent"][-1]), block_q), (int(key["offset"]), int(key["extent"][-1]), block_kv)
    sweep = Sweep(queries, keys, clauses)
    budget.need_runs(sweep.run(budget.most_runs))
    numbers = np.zeros(sweep.shapes(), np.int32)
    at_once = max(1, min(_WORDS_AT_ONCE // math.prod(masks.shape), len(numbers)))
    bits = np.empty((at_once, *masks.shape), np.uint64)
    whole, real = sweep.whole_shapes(), np.arange(block_q) < queries[1] % block_q
    for start in (*range(0, whole, at_once), *range(whole, len(numbers), at_once)):
        own = numbers[start : min(start + at_once, whole if start < whole else len(numbers))]
        sweep.masks(start, bits, own)
        partial = np.flatnonzero(own == 0)
        some = bits[: len(own)] if len(partial) == len(own) else bits[partial]
        # A tile with padding rows reuses a bitmask that others have where its real rows agree.
        own[partial] = masks.add(some) if start < whole else masks.add_rows(some, real)
    (query_tile, key_tile, length, mask), nnz = sweep.settle(numbers)
    return Tiles(query_tile, key_tile, length, mask, nnz)
