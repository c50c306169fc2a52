"""Divide the dQ and dK/dV work of a GPU backward among ranks.

A rank runs the dQ items of its query rows, and the dK/dV items of its keys, both with the whole plan's lists: the sums
of each row have the same terms in the same order at every number of ranks. Separate dQ and dK/dV kernels compute the
same products on any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .._util.frozen import frozen
from ..planning import Plan
from .shard import (
    LOCAL,
    Sharding,
    TileRows,
    closed,
    covered,
    foreign,
    forward_stages,
    in_ranges,
    rows_of_tiles,
    tile_rows,
)
from .subtiles import Pass

__all__ = ["GradientStage", "gradient_stages"]


@dataclass(frozen=True, eq=False)
class GradientStage:
    """A part of a backward that reads arrays of one range of queries and of one range of keys.

    Attributes
    ----------
    items : (items,) bool array
        The plan's work items whose dQ it computes.
    rows : (variants, q_len) bool array
        The rows of dq that it writes; other rows may be written or undefined.
    key_items : (items,) bool array
        The dK/dV items.
    key_rows : (variants of key-value heads, kv_len) bool array
        The rows of dk and dv likewise.
    where_queries, where_keys : int
        `LOCAL` if all queries, or keys, of its tiles are the rank's; see :func:`~spattn.schedule.shard.foreign`.
    queries, keys : TileRows
        Rows of its query tiles and of its key tiles.
    """

    items: np.ndarray
    rows: np.ndarray
    key_items: np.ndarray
    key_rows: np.ndarray
    where_queries: int
    where_keys: int
    queries: TileRows
    keys: TileRows


def gradient_stages(plan: Plan, made: Pass, together: int, sharding: Sharding, rank: int) -> tuple[GradientStage, ...]:
    """Return the stages of a rank's backward, the local one first; `made` is the dK/dV work, in items of `together`
    key tiles."""
    owned = sharding.owners() == rank
    variants = len(made.work_indptr) - 1
    variant = np.repeat(np.arange(variants), np.diff(made.work_indptr))
    views, tile = plan.views[made.work["view"]], made.work["tile"]
    tiles = [rows_of_tiles(views, tile + at, plan.block_kv) for at in range(together)]
    keys = np.concatenate(tiles, axis=1)
    mine = ((keys >= 0) & owned[keys]).any(axis=1)
    # The query tiles of the entries, each once.
    which, entry = np.unique(made.entries["view"].astype(np.int64) << 32 | made.entries["tile"], return_inverse=True)
    queries = rows_of_tiles(plan.views[which >> 32], which & 0xFFFFFFFF, plan.block_q)
    code = in_ranges(foreign(queries, owned)[entry], made.work["begin"], made.work["end"])
    code, of_row = closed(np.where(mine, code, 0), variant, keys, owned, variants)
    written = np.zeros((variants, plan.kv_len), bool)
    real = keys[mine] >= 0
    written[np.repeat(variant[mine], real.sum(axis=1)), keys[mine][real]] = True
    codes = np.unique(code[mine]) if mine.any() else np.array([LOCAL], np.uint8)
    of_row[~written] = codes[0]  # keys without a query
    no_items, no_rows = np.zeros(len(plan.work), bool), np.zeros((plan.variants, plan.q_len), bool)
    no_keys, no_key_rows = np.zeros(len(made.work), bool), np.zeros((variants, plan.kv_len), bool)
    found = [
        GradientStage(stage.items, stage.rows, no_keys, no_key_rows, LOCAL, stage.where, stage.queries, stage.keys)
        for stage in forward_stages(plan, sharding, rank)
    ]
    for where in codes:
        own = mine & (code == where)
        read = queries[np.unique(entry[covered(made.work["begin"][own], made.work["end"][own], len(entry))])]
        key_rows = frozen(owned & (of_row == where))
        reads = tile_rows(read, plan.q_len), tile_rows(keys[own], plan.kv_len)
        stage = GradientStage(no_items, no_rows, frozen(own), key_rows, int(where), LOCAL, *reads)
        if where == LOCAL and found and found[0].where_keys == LOCAL:
            found[0] = _joined(found[0], stage)
        else:
            found.append(stage)
    return tuple(found)


def _joined(queries: GradientStage, keys: GradientStage) -> GradientStage:
    """Return one stage that computes dQ as the first and dK and dV as the second."""
    tiles = (TileRows.of(x.mask | y.mask) for x, y in ((queries.queries, keys.queries), (queries.keys, keys.keys)))
    return GradientStage(queries.items, queries.rows, keys.key_items, keys.key_rows, LOCAL, LOCAL, *tiles)
