"""Divide a plan among ranks: whose rows, which keys a rank needs, and which part of the plan it computes.

A part has the tiles of the whole plan, at the positions of the whole sequence, so that each sum has the same terms in
the same order at every number of ranks.

- The *stages* of a rank have the whole tile lists of all query tiles with a row of the rank: first the lists whose keys
  are all on the rank, which do not wait for others.
- Its *backward part* has these lists and, of all others, the tiles from the first to the last with a key of the rank.
  The gradients of a key are thus summed on one rank, in the whole plan's order, and each rank needs the rows of all
  queries that attend to its keys.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from .._util.frozen import frozen
from .._util.ragged import offsets, ramp
from ..planning import Plan
from ..planning.contract.cache import kept_with_plan
from ..planning.contract.types import real_cells
from ..planning.contract.validated import Part, mark_part, validated
from .gradients import runs_of_items
from .item_order import by_rows, row_order
from .placement import HOME, LATE, LENT, OWN, Bytes, Partials, Placement, Runs, place

__all__ = [
    "LOCAL",
    "ListsOfTables",
    "Sharding",
    "Stage",
    "TileRows",
    "backward_part",
    "closed",
    "covered",
    "forward_stages",
    "foreign",
    "in_ranges",
    "keys_of_rows",
    "lists_of_tables",
    "pairs_of_rows",
    "place_lists",
    "rows_of_items",
    "rows_of_keys",
    "rows_of_tiles",
    "tile_rows",
    "spans_of",
    "tiles_in_runs",
]

LOCAL, BEFORE, AFTER = 0, 1, 2  # bits of :func:`foreign`

_AT_ONCE = 1 << 12  # tiles with bitmasks that are expanded together


class Sharding(NamedTuple):
    """The rows of each rank.

    Parameters
    ----------
    bounds : tuple of int
        Chunk c has the positions ``bounds[c]`` to ``bounds[c + 1] - 1``.
    ranks : tuple of int
        Rank of each chunk.
    world_size : int
        Number of ranks.
    """

    bounds: tuple[int, ...]
    ranks: tuple[int, ...]
    world_size: int

    @property
    def length(self) -> int:
        """Number of positions."""
        return self.bounds[-1]

    def owners(self) -> np.ndarray:
        """Return the rank of each position.

        Returns
        -------
        (length,) int32 array
        """
        return np.repeat(np.array(self.ranks, np.int32), np.diff(self.bounds))

    def rows(self, rank: int) -> np.ndarray:
        """Return the positions of a rank's rows: local row i has position ``rows(rank)[i]``.

        Index token embeddings, position ids and labels with it; it is the same for all layers.

        Parameters
        ----------
        rank : int
            A rank of the sharding.

        Returns
        -------
        (n,) int64 array
            Ascending.
        """
        own = [np.arange(*self.bounds[c : c + 2]) for c, of in enumerate(self.ranks) if of == rank]
        return np.concatenate([np.zeros(0, np.int64), *own])


class Spans(NamedTuple):
    """A plan's items in row order, their runs, and the rows of all their tiles; -1 stands for padding."""

    work: np.ndarray  # (items,) WORK
    lists: np.ndarray  # (items,) list of each item: its component and query tile
    queries: np.ndarray  # (lists, block_q) query rows
    of_list: np.ndarray  # (lists,) variant
    keys: np.ndarray  # (key tiles, block_kv) keys; tiles of one variant and view are adjacent
    of_tile: np.ndarray  # (key tiles,) variant
    item: np.ndarray  # (runs,) item of each run; an item may have a part of a run
    number: np.ndarray  # (runs,) number of its first tile, as in `work`
    start: np.ndarray  # (runs,) index of its first tile in `keys`
    stop: np.ndarray  # (runs,)
    mask: np.ndarray  # (runs,)


@kept_with_plan
def spans_of(plan: Plan) -> Spans:
    """Return the spans of a plan."""
    work, views, components = by_rows(plan), plan.views, plan.components
    code, lists = np.unique(work["component"].astype(np.int64) << 32 | work["query_tile"], return_inverse=True)
    component, query_tile = code >> 32, code & 0xFFFFFFFF
    item, run, first, last = runs_of_items(plan, work)
    own = components[work["component"][item]]
    pairs, pair = np.unique(
        own["variant"].astype(np.int64) * len(views) + own["key_view"] + plan.key_view[run], return_inverse=True
    )
    variant, view = np.divmod(pairs, len(views))
    base = offsets(views["tiles"][view])
    start = base[pair] + plan.indices[run] + first - plan.tile_indptr[run]
    of_tile, of_list = np.repeat(variant, np.diff(base)), components["variant"][component]
    return Spans(
        work,
        lists,
        _rows(views[components["query_view"][component]], query_tile, plan.block_q, of_list, plan.q_order),
        of_list,
        _rows(np.repeat(views[view], np.diff(base)), ramp(np.diff(base)), plan.block_kv, of_tile, plan.kv_order),
        of_tile,
        item,
        first,
        start,
        start + last - first + 1,
        plan.mask[run],
    )


def _rows(views: np.ndarray, tiles: np.ndarray, block: int, variant: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Return the rows of tiles, (tiles, block) int32."""
    rows = rows_of_tiles(views, tiles, block)
    return np.where(rows >= 0, order[variant[:, None], rows], -1) if order.size else rows


def rows_of_tiles(views: np.ndarray, tiles: np.ndarray, block: int) -> np.ndarray:
    """Return the rows of tiles in a view's order, (tiles, block) int32; tiles after the last have only padding."""
    rows, there = np.full((len(tiles), block), -1, np.int32), np.nonzero(tiles < views["tiles"])[0]
    tile, cell, index = real_cells(views[there], tiles[there])
    rows[there[tile], cell] = index
    return rows


def pairs_of_rows(plan: Plan) -> np.ndarray:
    """Return the number of allowed pairs of each query row of each variant, (variants, q_len) int64."""
    spans = spans_of(plan)
    in_mask = np.bitwise_count(plan.masks).sum(axis=2, dtype=np.int64)
    of_run = np.where(spans.mask[:, None] < 0, plan.block_kv, in_mask[spans.mask] if len(in_mask) else 0)
    cells = np.zeros(spans.queries.shape, np.int64)
    np.add.at(cells, spans.lists[spans.item], of_run * (spans.stop - spans.start)[:, None])
    pairs = np.zeros((plan.variants, plan.q_len), np.int64)
    real = spans.queries >= 0
    np.add.at(pairs, (np.repeat(spans.of_list, real.sum(axis=1)), spans.queries[real]), cells[real])
    return pairs


def keys_of_rows(plan: Plan, owned: np.ndarray, items: np.ndarray | None = None) -> np.ndarray:
    """Return the keys that the rows `owned`, (q_len,) bool, attend to, for each variant: (variants, kv_len) bool; only
    those of some work items with `items`, (items,) bool."""
    spans, found = spans_of(plan), np.zeros((plan.variants, plan.kv_len), bool)
    mine = _held(spans.queries, owned)
    of_list, full = np.any(mine, axis=1), spans.mask < 0
    of_run = of_list[spans.lists[spans.item]]
    if items is not None:
        of_run &= items[row_order(plan)][spans.item]
    reached = _covered(spans, of_run & full)
    _add(found, spans.of_tile[reached], spans.keys[reached])
    for run, tile in tiles_in_runs(spans, of_run & ~full):
        cells = mine[spans.lists[spans.item[run]]][:, :, None]
        words = np.bitwise_or.reduce(np.where(cells, plan.masks[spans.mask[run]], np.uint64(0)), axis=1)
        bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").view(bool)
        _add(found, spans.of_tile[tile], np.where(bits, spans.keys[tile], -1))
    return found


def rows_of_keys(plan: Plan, owned: np.ndarray) -> np.ndarray:
    """Return the rows that attend to one of the keys `owned`, (kv_len,) bool: (variants, q_len) bool."""
    spans, found = spans_of(plan), np.zeros((plan.variants, plan.q_len), bool)
    mine = _held(spans.keys, owned)
    before = offsets(mine.any(axis=1))
    touched, full = before[spans.stop] > before[spans.start], spans.mask < 0
    lists = np.unique(spans.lists[spans.item[touched & full]])
    _add(found, spans.of_list[lists], spans.queries[lists])
    words = np.packbits(mine, axis=1, bitorder="little").view(np.uint64)
    for run, tile in tiles_in_runs(spans, touched & ~full):
        of_list = spans.lists[spans.item[run]]
        cells = (plan.masks[spans.mask[run]] & words[tile][:, None]).any(axis=2)
        _add(found, spans.of_list[of_list], np.where(cells, spans.queries[of_list], -1))
    return found


def _held(rows: np.ndarray, owned: np.ndarray) -> np.ndarray:
    """Return which cells of tiles have a row that is owned."""
    return owned[rows] & (rows >= 0)


def _add(found: np.ndarray, variant: np.ndarray, rows: np.ndarray) -> None:
    real = rows >= 0
    found[np.repeat(variant, real.sum(axis=1)), rows[real]] = True


def _covered(spans: Spans, runs: np.ndarray) -> np.ndarray:
    """Return the indices of the key tiles of some runs."""
    return covered(spans.start[runs], spans.stop[runs], len(spans.keys))


def covered(start: np.ndarray, stop: np.ndarray, size: int) -> np.ndarray:
    """Return the indices, below `size`, in any of the ranges."""
    steps = np.bincount(start, minlength=size + 1) - np.bincount(stop, minlength=size + 1)
    return np.nonzero(np.cumsum(steps)[:-1])[0]


def tiles_in_runs(spans: Spans, runs: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the run and the index of each key tile of some runs, in portions."""
    run = np.nonzero(runs)[0]
    count = spans.stop[run] - spans.start[run]
    tile = np.repeat(spans.start[run], count) + ramp(count)
    run = np.repeat(run, count)
    for first in range(0, len(run), _AT_ONCE):
        yield run[first : first + _AT_ONCE], tile[first : first + _AT_ONCE]


class TileRows(NamedTuple):
    """The rows of some tiles: (length,) bool, the first of them, and the end."""

    mask: np.ndarray
    first: int
    stop: int

    @classmethod
    def of(cls, mask: np.ndarray) -> TileRows:
        """Return the rows where `mask` is true."""
        (at,) = np.nonzero(mask)
        return cls(frozen(mask), *((int(at[0]), int(at[-1]) + 1) if at.size else (0, 0)))


@dataclass(frozen=True, eq=False)
class Stage:
    """A part of a plan, for a part of a rank's rows.

    Attributes
    ----------
    whole : Plan
    items : (items,) bool array
        Which of the whole plan's work items it has.
    rows : (variants, q_len) bool array
        The rows of out that it writes; other rows may be written or undefined.
    where : int
        `LOCAL` if all keys of its tiles are the rank's, otherwise where the others are; see :func:`foreign`.
    queries, keys : TileRows
        Rows of its query tiles and of its key tiles.
    role : int
        `OWN`; `LENT` if its items are computed for all ranks; `LATE` if it only combines, also partials of others.
    """

    whole: Plan
    items: np.ndarray
    rows: np.ndarray
    where: int
    queries: TileRows
    keys: TileRows
    role: int = OWN

    @functools.cached_property
    def plan(self) -> Plan:
        """The part as a plan, whose items are the whole plan's."""
        items = np.nonzero(self.items[row_order(self.whole)])[0]
        return _part(self.whole, items, spans_of(self.whole).work[items], self.rows)


@kept_with_plan
def forward_stages(
    plan: Plan, sharding: Sharding, rank: int, sides: bool = True, placement: Placement | None = None
) -> tuple[Stage, ...]:
    """Return the stages of a rank's forward, the local one first; without `sides`, all others are one stage.

    All items that contribute to a row are in one stage. With a placement, a stage of the items that the rank computes
    for others follows, and one that combines the rows of such items.
    """
    spans, owners = spans_of(plan), sharding.owners()
    owned, order = owners == rank, row_order(plan)
    at = np.full(len(plan.work), HOME) if placement is None else placement.of_item[order]
    late = np.zeros((plan.variants, plan.q_len), bool) if placement is None else placement.late(owners, rank)
    own = np.any(_held(spans.queries, owned), axis=1)[spans.lists] & (at == HOME)  # of each item
    mine = np.zeros(len(spans.queries), bool)
    mine[spans.lists[own]] = True
    code = np.zeros(len(spans.queries), np.uint8)
    run = own[spans.item]
    reads = in_ranges(foreign(spans.keys, owned), spans.start[run], spans.stop[run])
    np.bitwise_or.at(code, spans.lists[spans.item[run]], reads)
    code, of_row = closed(code, spans.of_list, spans.queries, mine, owned & ~late)
    if not sides:
        code, of_row = np.minimum(code, 1), np.minimum(of_row, 1)
    codes = np.unique(code[mine]) if mine.any() else np.array([LOCAL], np.uint8)
    written = np.zeros((plan.variants, plan.q_len), bool)
    _add(written, spans.of_list[mine], spans.queries[mine])
    of_row[~written] = codes[0]  # rows without a pair

    def stage(items: np.ndarray, rows: np.ndarray, where: int, role: int = OWN) -> Stage:
        lists, tiles = np.unique(spans.lists[items]), _covered(spans, items[spans.item])
        chosen = np.zeros(len(plan.work), bool)
        chosen[order[items]] = True
        read = tile_rows(spans.queries[lists], plan.q_len), tile_rows(spans.keys[tiles], plan.kv_len)
        if role != LENT:
            _prove(plan, spans.lists[items & (spans.work["slot"] < 0)], _merged(plan, rows), rows)
        return Stage(plan, frozen(chosen), frozen(rows), where, *read, role)

    found = [
        stage(own & (code == where)[spans.lists], owned & ~late & (of_row == where), int(where)) for where in codes
    ]
    if placement is not None:
        if (at == rank).any():
            found.append(stage(at == rank, np.zeros_like(late), BEFORE | AFTER, LENT))
        if late.any():
            found.append(stage(np.zeros_like(own), late, BEFORE | AFTER, LATE))
        placement.prove(rank, owners, [(x.items, x.rows, x.role) for x in found])
    return tuple(found)


def place_lists(plan: Plan, partials: Partials, sharding: Sharding, batch: int, heads_q: int, cost: Bytes) -> Placement:
    """Return the placement of a plan's items; `partials` are those of a kernel with these items."""
    spans, order = spans_of(plan), row_order(plan)
    lists = np.empty_like(spans.lists)
    lists[order] = spans.lists
    runs = Runs(spans.keys, order[spans.item], spans.start, spans.stop)
    heads = np.bincount(np.broadcast_to(plan.variant, (batch, heads_q)).ravel(), minlength=plan.variants)
    weight = heads[partials.variant] * (plan.work["end"] - plan.work["begin"])
    return place(partials, spans.queries[lists], runs, weight, sharding.owners(), sharding.world_size, cost)


def rows_of_items(plan: Plan, items: np.ndarray) -> np.ndarray:
    """Return the rows of the query tiles of some work items, (variants, q_len) bool."""
    spans, found = spans_of(plan), np.zeros((plan.variants, plan.q_len), bool)
    lists = np.unique(spans.lists[items[row_order(plan)]])
    _add(found, spans.of_list[lists], spans.queries[lists])
    return found


def foreign(rows: np.ndarray, owned: np.ndarray) -> np.ndarray:
    """Return, for tiles of (tiles, cells) rows, whether another rank's are before (bit 1) and after (bit 2) a rank's.

    Rows between those of the rank count as both; -1 stands for padding.
    """
    (own,) = np.nonzero(owned)
    if own.size == 0:
        return np.where((rows >= 0).any(axis=1), BEFORE | AFTER, LOCAL).astype(np.uint8)
    others = (rows >= 0) & ~owned[rows]
    before, after = (others & (rows < own[-1])).any(axis=1), (others & (rows > own[0])).any(axis=1)
    return (BEFORE * before | AFTER * after).astype(np.uint8)


def in_ranges(code: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """Return the bitwise or of ``code[start:stop]`` for each range."""
    found = np.zeros(len(start), np.uint8)
    for bit in (BEFORE, AFTER):
        count = offsets(code & bit)
        found |= (bit * (count[stop] > count[start])).astype(np.uint8)
    return found


def closed(
    code: np.ndarray, variant: np.ndarray, rows: np.ndarray, items: np.ndarray, counted: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the codes of items and of rows, (variants, length), after joining the codes of items with a common row.

    Item i writes the rows ``rows[i]`` of its variant; only `items`, (items,) bool, and rows that are `counted`,
    (variants, length) bool, count.
    """
    item, cell = np.nonzero((rows >= 0) & items[:, None] & counted[variant[:, None], rows])
    at = variant[item], rows[item, cell]
    while True:
        of_row = np.zeros(counted.shape, np.uint8)
        np.bitwise_or.at(of_row, at, code[item])
        joined = code.copy()
        np.bitwise_or.at(joined, item, of_row[at])
        if (joined == code).all():
            return code, of_row
        code = joined


def tile_rows(rows: np.ndarray, length: int) -> TileRows:
    """Return the rows, of `length`, in an array; -1 stands for padding."""
    mask = np.zeros(length, bool)
    mask[rows[rows >= 0]] = True
    return TileRows.of(mask)


class ListsOfTables(NamedTuple):
    """The lists whose terms of table gradients a rank adds, (lists,) bool, and their rows, (variants, q_len) bool."""

    lists: np.ndarray
    rows: np.ndarray

    def items(self, part: Plan) -> np.ndarray:
        """Return the items of these lists in the rank's backward part, (items,) bool; check that it has all of them."""
        of = validated(part).part
        assert of is not None
        spans = spans_of(of.whole)
        found = self.lists[spans.lists[of.items]]
        tiles = [np.sum(x["end"] - x["begin"]) for x in (by_rows(part)[found], spans.work[self.lists[spans.lists]])]
        if tiles[0] != tiles[1]:
            raise RuntimeError("plan: a part lacks tiles of table gradients; this is a bug in spattn, please report it")
        return found


@kept_with_plan
def lists_of_tables(plan: Plan, sharding: Sharding, rank: int) -> ListsOfTables:
    """Return the lists whose terms of table gradients a rank adds.

    Kernels first add the terms of a tile, of all its rows: one rank does it, one that has a row of the tile, and needs
    the others.
    """
    spans, real = spans_of(plan), spans_of(plan).queries >= 0
    number, count = np.arange(len(real)), real.sum(axis=1)
    cell = np.argsort(~real, axis=1, kind="stable")[number, number % count]  # evenly among the ranks
    mine = sharding.owners()[spans.queries[number, cell]] == rank
    rows = np.zeros((plan.variants, plan.q_len), bool)
    _add(rows, spans.of_list[mine], spans.queries[mine])
    return ListsOfTables(frozen(mine), frozen(rows))


@kept_with_plan
def backward_part(plan: Plan, sharding: Sharding, rank: int) -> Plan:
    """Return the part of a plan that writes a rank's rows of dq, dk and dv; others may be written or undefined."""
    owned = sharding.owners() == rank
    return _part(plan, *_backward_items(plan, owned), np.broadcast_to(owned, (plan.variants, plan.q_len)))


def _backward_items(plan: Plan, owned: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of a backward part's items among the plan's items in row order, and the items."""
    spans = spans_of(plan)
    own = np.any(_held(spans.queries, owned), axis=1)[spans.lists]
    # The other items are cut to the tiles from the first to the last with a key of the rank.
    tile = np.nonzero(_held(spans.keys, owned).any(axis=1))[0]
    low, high = np.searchsorted(tile, spans.start), np.searchsorted(tile, spans.stop) - 1
    run = np.nonzero((low <= high) & ~own[spans.item])[0]
    shift = spans.number[run] - spans.start[run]
    begin, end = spans.work["end"].copy(), spans.work["begin"].copy()
    np.minimum.at(begin, spans.item[run], tile[low[run]] + shift)
    np.maximum.at(end, spans.item[run], tile[high[run]] + shift + 1)
    work = spans.work.copy()
    work["begin"][~own], work["end"][~own] = begin[~own], end[~own]
    kept = work["begin"] < work["end"]
    return np.nonzero(kept)[0], work[kept]


def _part(plan: Plan, items: np.ndarray, work: np.ndarray, owned: np.ndarray) -> Plan:
    """Return the part with some items, and the combines of the rows `owned`, (variants, q_len) bool."""
    of_merge = np.repeat(np.arange(plan.variants), np.diff(plan.merge_variants))
    number, merged = np.diff(plan.merge_indptr), _merged(plan, owned)
    sources = np.repeat(merged, number)
    slot, cell = np.divmod(plan.merge_sources[sources], plan.block_q)
    old = np.repeat(of_merge, number)[sources], slot
    # Slots are numbered anew, from 0 for each variant.
    variant, slots, new = (
        np.searchsorted(plan.work_indptr, items, side="right") - 1,
        0,
        np.full((plan.variants, plan.slots), -1),
    )
    for of in range(plan.variants):
        here = (variant == of) & (work["slot"] >= 0)
        new[of, work["slot"][here]] = np.arange(here.sum())
        work["slot"][here] = np.arange(here.sum())
        slots = max(slots, int(here.sum()))
    if (new[old] < 0).any():
        raise RuntimeError("plan: a part lacks a partial that it reads; this is a bug in spattn, please report it")
    part = replace(
        plan,
        pattern=None,
        work=frozen(work),
        work_indptr=frozen(np.searchsorted(items, plan.work_indptr).astype(np.int32)),
        slots=slots,
        merge_rows=frozen(plan.merge_rows[merged]),
        merge_indptr=frozen(offsets(number[merged]).astype(np.int32)),
        merge_sources=frozen((new[old] * plan.block_q + cell).astype(np.int32)),
        merge_variants=frozen(offsets(merged)[plan.merge_variants].astype(np.int32)),
    )
    _prove(plan, spans_of(plan).lists[items[work["slot"] < 0]], merged, owned)
    return mark_part(part, Part(plan, frozen(items)))


def _merged(plan: Plan, rows: np.ndarray) -> np.ndarray:
    """Return which combines are of `rows`, (variants, q_len) bool."""
    return rows[np.repeat(np.arange(plan.variants), np.diff(plan.merge_variants)), plan.merge_rows]


def _prove(plan: Plan, alone: np.ndarray, merged: np.ndarray, owned: np.ndarray) -> None:
    """Raise RuntimeError unless each row of the rank has one writer: a combine, or an item with a list of `alone`."""
    spans = spans_of(plan)
    writers = np.zeros((plan.variants, plan.q_len), np.int64)
    rows = spans.queries[alone]
    np.add.at(writers, (np.repeat(spans.of_list[alone], (rows >= 0).sum(axis=1)), rows[rows >= 0]), 1)
    of_merge = np.repeat(np.arange(plan.variants), np.diff(plan.merge_variants))
    np.add.at(writers, (of_merge[merged], plan.merge_rows[merged]), 1)
    if (writers[owned] != 1).any():
        raise RuntimeError("plan: a row of a rank has no writer or several; this is a bug in spattn, please report it")
