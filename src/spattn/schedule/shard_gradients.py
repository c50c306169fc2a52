"""Divide the dQ and dK/dV work of a GPU backward among ranks.

A rank runs the dQ items of its query rows, and the dK/dV items of its keys, both with the whole plan's lists: the sums
of each row have the same terms in the same order at every number of ranks. Separate dQ and dK/dV kernels compute the
same products on any number of ranks. Split items may be computed elsewhere (placement.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .._util.frozen import frozen
from ..planning import Plan
from .placement import HOME, LATE, LENT, OWN, Bytes, Partials, Placement, Runs, place
from .shard import (
    AFTER,
    BEFORE,
    LOCAL,
    Sharding,
    TileRows,
    closed,
    covered,
    foreign,
    forward_stages,
    in_ranges,
    rows_of_keys,
    rows_of_tiles,
    tile_rows,
)
from .subtiles import Pass

__all__ = ["GradientShare", "GradientStage", "KeyWork", "gradient_stages"]


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
    role : int
        As in :class:`~spattn.schedule.shard.Stage`.
    """

    items: np.ndarray
    rows: np.ndarray
    key_items: np.ndarray
    key_rows: np.ndarray
    where_queries: int
    where_keys: int
    queries: TileRows
    keys: TileRows
    role: int = OWN


class KeyWork(NamedTuple):
    """The dK/dV work of a plan, in items of some key tiles, and the rows of its tiles; -1 stands for padding."""

    plan: Plan
    made: Pass
    variant: np.ndarray  # (items,)
    keys: np.ndarray  # (items, cells) keys of each item
    queries: np.ndarray  # (query tiles, block_q) rows of the query tiles of the entries, each once
    entry: np.ndarray  # (entries,) query tile of each entry

    @classmethod
    def of(cls, plan: Plan, made: Pass, together: int) -> KeyWork:
        """Return the work `made`, in items of `together` key tiles."""
        variant = np.repeat(np.arange(len(made.work_indptr) - 1), np.diff(made.work_indptr))
        views, tile = plan.views[made.work["view"]], made.work["tile"]
        keys = np.concatenate([rows_of_tiles(views, tile + at, plan.block_kv) for at in range(together)], axis=1)
        which, entry = np.unique(
            made.entries["view"].astype(np.int64) << 32 | made.entries["tile"], return_inverse=True
        )
        queries = rows_of_tiles(plan.views[which >> 32], which & 0xFFFFFFFF, plan.block_q)
        return cls(plan, made, variant, keys, queries, entry)

    def place(self, partials: Partials, sharding: Sharding, cost: Bytes) -> Placement:
        """Return the placement of the items."""
        work = self.made.work
        length = work["end"] - work["begin"]
        # Entries are sub-tiles: a tile counts once.
        item = np.repeat(np.arange(len(work)), length)
        at = np.arange(len(item)) + np.repeat(work["begin"] - (np.cumsum(length) - length), length)
        item, tile = np.divmod(np.unique(item * len(self.queries) + self.entry[at]), len(self.queries))
        runs = Runs(self.queries, item, tile, tile + 1)
        heads = np.bincount(self.made.variant.ravel(), minlength=len(self.made.work_indptr) - 1)
        weight = heads[self.variant] * length.astype(np.int64) * work["heads"]
        return place(partials, self.keys, runs, weight, sharding.owners(), sharding.world_size, cost)

    def keys_of(self, items: np.ndarray) -> np.ndarray:
        """Return the keys of the tiles of some items, (kv_len,) bool."""
        return tile_rows(self.keys[items], self.plan.kv_len).mask

    def reads(self, items: np.ndarray) -> np.ndarray:
        """Return the rows of the query tiles that some items read, (tiles, block_q)."""
        work = self.made.work[items]
        return self.queries[np.unique(self.entry[covered(work["begin"], work["end"], len(self.entry))])]

    def rows(self, placement: Placement, sharding: Sharding, rank: int) -> np.ndarray:
        """Return the query rows that a rank's items need, (variants, q_len) bool; of lists with items elsewhere, maybe
        more rows of their tiles."""
        plan, owned = self.plan, sharding.owners() == rank
        of_item = placement.of_item

        def some(items: np.ndarray, keys: np.ndarray) -> np.ndarray:
            return rows_of_keys(plan, keys) & tile_rows(self.reads(items), plan.q_len).mask

        if not placement:
            return rows_of_keys(plan, owned)
        split = owned & self.keys_of(of_item != HOME)
        found = rows_of_keys(plan, owned & ~split)
        at_home = (of_item == HOME) & ((self.keys >= 0) & split[self.keys]).any(axis=1)
        return found | some(at_home, split) | some(of_item == rank, self.keys_of(of_item == rank))


class GradientShare(NamedTuple):
    """A rank's part of a backward.

    Attributes
    ----------
    stages : tuple of GradientStage
    work : KeyWork
    of_queries, of_keys : Placement
        Of the dQ items and of the dK/dV items.
    partials : tuple of (int, (batch, heads, rows, width))
        Offset in the workspace, in bytes, and shape of the float32 partials of dq, dk and dv.
    workspace_bytes : int
    """

    stages: tuple[GradientStage, ...]
    work: KeyWork
    of_queries: Placement
    of_keys: Placement
    partials: tuple[tuple[int, tuple[int, int, int, int]], ...]
    workspace_bytes: int


def gradient_stages(
    work: KeyWork, sharding: Sharding, rank: int, of_queries: Placement, of_keys: Placement
) -> tuple[GradientStage, ...]:
    """Return the stages of a rank's backward, the local one first, then those for other ranks, and one that sums the
    rows with partials of other ranks."""
    plan, made, variant, keys = work.plan, work.made, work.variant, work.keys
    owners, variants = sharding.owners(), len(made.work_indptr) - 1
    owned = owners == rank
    at, late = of_keys.of_item, of_keys.late(owners, rank)
    mine = ((keys >= 0) & owned[keys]).any(axis=1) & (at == HOME)
    code = in_ranges(foreign(work.queries, owned)[work.entry], made.work["begin"], made.work["end"])
    code, of_row = closed(np.where(mine, code, 0), variant, keys, mine, owned & ~late)
    written = np.zeros((variants, plan.kv_len), bool)
    real = keys[mine] >= 0
    written[np.repeat(variant[mine], real.sum(axis=1)), keys[mine][real]] = True
    codes = np.unique(code[mine]) if mine.any() else np.array([LOCAL], np.uint8)
    of_row[~written] = codes[0]  # keys without a query
    no_items, no_rows = np.zeros(len(plan.work), bool), np.zeros((plan.variants, plan.q_len), bool)
    no_keys, no_key_rows = np.zeros(len(made.work), bool), np.zeros((variants, plan.kv_len), bool)

    def of_keys_alone(items: np.ndarray, rows: np.ndarray, where: int, role: int = OWN) -> GradientStage:
        reads = tile_rows(work.reads(items), plan.q_len), tile_rows(keys[items], plan.kv_len)
        return GradientStage(no_items, no_rows, frozen(items), frozen(rows), where, LOCAL, *reads, role)

    found, lent, last = list[GradientStage](), list[GradientStage](), list[GradientStage]()
    for stage in forward_stages(plan, sharding, rank, True, of_queries):
        to = {OWN: found, LENT: lent, LATE: last}[stage.role]
        tiles = stage.queries, stage.keys
        where_queries = LOCAL if stage.role == OWN else BEFORE | AFTER
        of = stage.items, stage.rows, no_keys, no_key_rows, where_queries, stage.where
        to.append(GradientStage(*of, *tiles, stage.role))
    for where in codes:
        of_where = of_keys_alone(mine & (code == where), owned & ~late & (of_row == where), int(where))
        if where == LOCAL and found and found[0].where_keys == LOCAL:
            found[0] = _joined(found[0], of_where)
        else:
            found.append(of_where)
    if (at == rank).any():
        lent.append(of_keys_alone(at == rank, no_key_rows, BEFORE | AFTER, LENT))
    if late.any():
        last.append(of_keys_alone(no_keys, late, BEFORE | AFTER, LATE))
    stages = *found, *lent, *last
    of_keys.prove(rank, owners, [(x.key_items, x.key_rows, x.role) for x in stages])
    return stages


def _joined(queries: GradientStage, keys: GradientStage) -> GradientStage:
    """Return one stage that computes dQ as the first and dK and dV as the second."""
    of_queries, of_keys = ((queries.queries, keys.queries), (queries.keys, keys.keys))
    tiles = TileRows.of(of_queries[0].mask | of_queries[1].mask), TileRows.of(of_keys[0].mask | of_keys[1].mask)
    return GradientStage(queries.items, queries.rows, keys.key_items, keys.key_rows, LOCAL, LOCAL, *tiles)
