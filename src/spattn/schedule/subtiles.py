"""Sub-tile lists of the GPU backward, for the dQ kernel and the dK/dV kernel.

A query sub-tile has `side` cells of a query tile, chosen by a :class:`Cut`; a key sub-tile has 64 consecutive cells of
a key tile. A group of threads multiplies a pair of them at once. An item multiplies a few sub-tiles, its rows, by a
list of sub-tiles of the other side, its columns. In the dQ kernel, rows are queries. In the dK/dV kernel, rows are
keys, and the lists are the transpose of the plan's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .._util.checks import show
from .._util.frozen import frozen
from .._util.ragged import ramp
from ..planning.contract.types import Plan, TileLists, first_coordinates, real_cells, tile_lists
from .items import Items, Lists, Share, Sharing, cut_lists, join_shares
from .proof import Writers, prove
from .reductions import Merges
from .roles import roles
from .rounds import cut_for_rounds
from .rows import Place

__all__ = [
    "EMPTY",
    "FULL",
    "KEYS",
    "SUBTILE_ENTRY",
    "SUBTILE_WORK",
    "Cut",
    "Pass",
    "SubtileMasks",
    "by_keys",
    "by_queries",
    "subtile_masks",
]

KEYS = 64  # number of keys of a sub-tile
FULL, EMPTY = -1, -2  # mask indices of pairs of sub-tiles that need no bitmask
SUBTILE_WORK = np.dtype([(name, "i4") for name in ("view", "tile", "begin", "end", "columns", "slot", "heads")])
"""An item. Its rows are tile `tile` of view `view`, and the tiles after it if an item has several. Its columns are the
entries [begin, end), for each of `heads` query heads. `columns` is the first view of its columns, `slot` as in a plan.
"""
SUBTILE_ENTRY = np.dtype([(name, "i4") for name in ("view", "tile", "part", "head")])
"""Sub-tile `part` of a tile; `view` is relative to the item's `columns`, `head` to the item's first query head."""


class Cut(NamedTuple):
    """A partition of query tiles into sub-tiles."""

    side: int  # number of queries of a sub-tile
    orders: np.ndarray  # (n, block_q) int: permutations that list a tile's cells sub-tile by sub-tile
    of_view: np.ndarray  # (views,) int: index of each view's permutation

    @classmethod
    def consecutive(cls, plan: Plan, side: int) -> Cut:
        """Return the partition into consecutive cells."""
        return cls(side, np.arange(plan.block_q)[None], np.zeros(len(plan.views), np.int64))


class SubtileMasks(NamedTuple):
    """Bitmasks of pairs of sub-tiles.

    `numbers`, (orders, masks + 1, query sub-tiles of a tile, key sub-tiles of a tile) int32, has the index of each
    pair's mask, `FULL` or `EMPTY`. Index -1 of its second axis is for full tiles, whose mask is -1.
    """

    numbers: np.ndarray
    bits: np.ndarray  # (n, side, 64) bool
    cut: Cut

    def of(self, query_view: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Return the mask indices of the sub-tiles of tiles, given their query views and masks."""
        return self.numbers[self.cut.of_view[query_view], mask]


@dataclass(frozen=True)
class Pass:
    """The sub-tile lists of a backward kernel, in read-only arrays.

    The fields are as in a plan, but in the dK/dV kernel a variant belongs to a key-value head.
    """

    work: np.ndarray  # (items,) SUBTILE_WORK, grouped by variant, sorted by descending cost
    work_indptr: np.ndarray
    variant: np.ndarray
    slots: int
    entries: np.ndarray  # (entries,) SUBTILE_ENTRY
    masks: np.ndarray  # (entries, sub-tiles of an item's rows) int32: mask in SubtileMasks, FULL or EMPTY
    merges: Merges  # sums over workspace rows; source ``slot * rows of an item + row``
    kv_len: int


class _Visits(NamedTuple):
    """Pairs of a query tile and an entry of its key tile list, for each component."""

    component: np.ndarray
    query_tile: np.ndarray
    entry: np.ndarray


def subtile_masks(plan: Plan, cut: Cut) -> SubtileMasks:
    """Split the bitmasks of a plan into bitmasks of pairs of sub-tiles."""
    count, block_q, words = plan.masks.shape
    little = np.ascontiguousarray(plan.masks).astype("<u8").view(np.uint8)
    rows = np.unpackbits(little, bitorder="little").reshape(count, block_q, words, KEYS)
    subtiles = block_q // cut.side
    bits = rows[:, cut.orders].swapaxes(0, 1).reshape(len(cut.orders), count, subtiles, cut.side, words, KEYS)
    bits = bits.swapaxes(3, 4).astype(bool)
    numbers = np.arange(bits[..., 0, 0].size, dtype=np.int32).reshape(bits.shape[:4])
    numbers[bits.all(axis=(4, 5))] = FULL
    numbers[~bits.any(axis=(4, 5))] = EMPTY
    last = np.full((len(numbers), 1, subtiles, words), FULL, np.int32)
    return SubtileMasks(np.concatenate([numbers, last], axis=1), bits.reshape(-1, cut.side, KEYS), cut)


def by_queries(plan: Plan, cut: Cut) -> Pass:
    """Return the lists of the dQ kernel, which has the plan's items, with key sub-tiles as columns."""
    parts = plan.block_kv // KEYS
    components = plan.components[plan.work["component"]]
    work = np.zeros(len(plan.work), SUBTILE_WORK)
    work["view"], work["columns"], work["heads"] = components["query_view"], components["key_view"], 1
    work["tile"], work["slot"] = plan.work["query_tile"], plan.work["slot"]
    work["begin"], work["end"] = plan.work["begin"] * parts, plan.work["end"] * parts
    lists = tile_lists(plan)
    entries = np.zeros(len(lists.indices) * parts, SUBTILE_ENTRY)
    entries["view"], entries["tile"] = np.repeat(lists.key_view, parts), np.repeat(lists.indices, parts)
    entries["part"] = np.tile(np.arange(parts), len(lists.indices))
    query_view = plan.components["query_view"][np.repeat(roles(plan)[2], np.diff(lists.indptr))]
    numbers = subtile_masks(plan, cut).of(query_view, lists.mask)
    masks = numbers.transpose(0, 2, 1).reshape(len(entries), plan.block_q // cut.side)
    merges = Merges(plan.merge_rows, plan.merge_indptr, _sources(plan, cut), plan.merge_variants)
    made = Pass(
        frozen(work), plan.work_indptr, plan.variant, plan.slots, frozen(entries), frozen(masks), merges, plan.kv_len
    )
    show("pass by queries", plan=plan, made=made, cut=cut)
    return made


def _sources(plan: Plan, cut: Cut) -> np.ndarray:
    """Return the sources of a plan's combines, for items whose rows are ordered sub-tile by sub-tile."""
    query_view = plan.components["query_view"][plan.work["component"]]
    variant = np.repeat(np.arange(plan.variants), np.diff(plan.work_indptr))
    order = np.zeros((plan.variants, plan.slots + 1), np.int64)  # the last column is for items without a partial
    order[variant, plan.work["slot"]] = cut.of_view[query_view]
    of_variant = np.diff(plan.merge_indptr[plan.merge_variants])
    slot, cell = np.divmod(plan.merge_sources, plan.block_q)
    place = np.argsort(cut.orders, axis=1)[order[np.repeat(np.arange(plan.variants), of_variant), slot], cell]
    return frozen((slot * plan.block_q + place).astype(np.int32))


def by_keys(
    plan: Plan,
    batch: int,
    heads_q: int,
    heads_kv: int,
    cut: Cut,
    together: int,
    workers: int,
    rounds: int | None = None,
) -> Pass:
    """Return the lists of the dK/dV kernel: the query sub-tiles that attend to each group of `together` key tiles.

    An item processes the heads of a group one after the other, so that sums have a fixed order. The lists of all
    components with the same key view are joined. Long lists are split for the `workers` that share a key-value head.
    With `rounds`, that many workers share the items of all heads; further lists are split so that they finish together.
    """
    groups = np.broadcast_to(plan.variant, (batch, heads_q)).reshape(batch * heads_kv, -1)
    alike = bool((groups == groups[:, :1]).all())
    repeat = heads_q // heads_kv if alike else 1
    kinds, kind = np.unique(groups[:, :1] if alike else groups, axis=0, return_inverse=True)
    views = _first_equal(plan.views, roles(plan)[1])
    subtiles = subtile_masks(plan, cut)
    shares: list[Share] = []
    work: list[np.ndarray] = []
    entries: list[np.ndarray] = []
    masks: list[np.ndarray] = []
    first = 0
    for variants in kinds:
        taken = None if rounds is None or len(kinds) > 1 else (batch * heads_kv, rounds)
        share, own, columns, own_masks = _transpose(plan, variants, views, subtiles, together, repeat, workers, taken)
        for name in ("begin", "end"):
            own[name] += first
        first += len(columns)
        shares.append(share)
        work.append(own)
        entries.append(columns)
        masks.append(own_masks)
    items: Items = join_shares(shares, together * plan.block_kv)
    joined = np.concatenate(work)
    prove(
        Writers(
            plan.views,
            np.arange(len(plan.views), dtype=np.int32),
            joined["view"],
            joined["tile"],
            joined["slot"].astype(np.int64),
            *items[1:],
            plan.kv_len,
            plan.block_kv,
            together,
        )
    )
    made = Pass(
        frozen(joined),
        items.work_indptr,
        frozen(kind.reshape(batch, heads_kv).astype(np.int32)),
        items.slots,
        frozen(np.concatenate(entries)),
        frozen(np.concatenate(masks)),
        Merges(*items[3:]),
        plan.kv_len,
    )
    show("pass by keys", plan=plan, made=made, cut=cut, heads=(batch, heads_q, heads_kv), together=together)
    return made


def _transpose(
    plan: Plan,
    variants: np.ndarray,
    canonical: np.ndarray,
    subtiles: SubtileMasks,
    together: int,
    repeat: int,
    workers: int,
    taken: tuple[int, int] | None,
) -> tuple[Share, np.ndarray, np.ndarray, np.ndarray]:
    """Return (share, work, entries, masks) of the key-value heads whose query heads have these variants, in order."""
    listed = tile_lists(plan)
    visits = [_visits(plan, listed, int(variant)) for variant in variants]
    head = np.repeat(np.arange(len(visits)), [len(v.entry) for v in visits])
    component, query_tile, entry = (np.concatenate(column) for column in zip(*visits, strict=True))
    relative, tile = listed.key_view[entry], listed.indices[entry]
    view = canonical[plan.components["key_view"][component] + relative]
    parts_q, parts_kv = subtiles.numbers.shape[2:]
    # From here on, arrays have an element for each pair of sub-tiles.
    pair = np.repeat(np.arange(len(entry)), parts_q * parts_kv)
    part_q, part_kv = np.divmod(np.tile(np.arange(parts_q * parts_kv), len(entry)), parts_kv)
    query_view = plan.components["query_view"][component]
    masks = subtiles.of(query_view, listed.mask[entry])
    masks[~_with_cells(plan, query_view, query_tile, subtiles.cut)] = EMPTY  # also in full tiles
    number = masks.reshape(-1)
    kept = number != EMPTY
    pair, part_q, part_kv, number = pair[kept], part_q[kept], part_kv[kept], number[kept]
    row, subtile = tile[pair] // together, tile[pair] % together * parts_kv + part_kv
    # Key tiles descend: if every item visits the queries near its keys in ascending order, earlier items have already
    # added to the sums that a later item adds to, so that the later item need not wait (turns.py).
    column = (view[pair], -row, head[pair], component[pair], query_tile[pair], part_q, relative[pair])
    order = np.lexsort((subtile, *column[::-1]))
    sorted_columns = np.stack(column)[:, order].astype(np.int64)
    differs = np.ones((2, len(order)), bool)  # whether the list, or the column, differs from the previous element's
    differs[0, 1:] = (sorted_columns[:2, 1:] != sorted_columns[:2, :-1]).any(axis=0)
    differs[1, 1:] = (sorted_columns[:, 1:] != sorted_columns[:, :-1]).any(axis=0)
    at, place = order[differs[1]], np.cumsum(differs[1]) - 1
    masks = np.full((len(at), together * parts_kv), EMPTY, np.int32)
    masks[place, subtile[order]] = number[order]
    if (masks != EMPTY).sum() != len(order):
        raise ValueError("plan: lists must not repeat a key tile")
    entries = np.zeros(len(at), SUBTILE_ENTRY)
    entries["view"] = plan.components["query_view"][component[pair[at]]]
    entries["tile"], entries["part"], entries["head"] = query_tile[pair[at]], part_q[at], head[pair[at]]
    begin = place[differs[0]]
    lists = sorted_columns[:2, differs[0]] * [[1], [-1]]
    least = None if taken is None else cut_for_rounds(np.diff(begin, append=len(entries)), *taken)
    share = _share(plan, lists, begin, len(entries), together, workers, least)
    work = np.zeros(len(share.work), SUBTILE_WORK)
    work["view"], work["tile"] = lists[0, share.work["component"]], lists[1, share.work["component"]] * together
    work["heads"] = repeat
    for name in ("begin", "end", "slot"):
        work[name] = share.work[name]
    return share, work, entries, masks


def _with_cells(plan: Plan, view: np.ndarray, tile: np.ndarray, cut: Cut) -> np.ndarray:
    """Return whether each sub-tile of some query tiles has a query: (tiles, sub-tiles) bool."""
    code, index = np.unique(view.astype(np.int64) << 32 | tile, return_inverse=True)
    view, tile = code >> 32, code & 0xFFFFFFFF
    found = np.ones((len(code), plan.block_q // cut.side), bool)
    own = plan.views[view]
    (padded,) = np.nonzero((first_coordinates(own, tile) + own["box"] > own["extent"]).any(axis=1))
    found[padded] = False
    number, cell, _ = real_cells(own[padded], tile[padded])
    place = np.argsort(cut.orders, axis=1)[cut.of_view[view[padded[number]]], cell]
    found[padded[number], place // cut.side] = True
    return found[index]


def _share(
    plan: Plan,
    lists: np.ndarray,
    begin: np.ndarray,
    entries: int,
    together: int,
    workers: int,
    least: np.ndarray | None,
) -> Share:
    """Return the items of lists; list n's rows are the ``lists[1, n]``-th group of tiles of view ``lists[0, n]``."""
    end, number = np.append(begin, entries)[1:], np.arange(len(begin))
    where = []
    for view in np.unique(lists[0]):
        own = np.nonzero(lists[0] == view)[0]
        where.append(_place(plan.views[view], lists[1][own], own, together, plan.block_kv))
    listed = Lists(number, np.zeros_like(number), begin, end, False, lambda: where)
    return cut_lists(listed, entries, plan.kv_len, together * plan.block_kv, Sharing(workers), least)


def _place(view: np.void, row: np.ndarray, number: np.ndarray, together: int, block: int) -> Place:
    """Return the rows of lists that have `together` tiles of a view each."""
    tiles = int(view["tiles"])
    of_row = np.full(-(-tiles // together), -1)
    of_row[row] = number
    tile = np.arange(tiles)
    return Place.of(view, of_row[tile // together], tile % together * block)


def _visits(plan: Plan, lists: TileLists, variant: int) -> _Visits:
    """Return all entries of a variant's components; components of a family share lists."""
    number = np.nonzero(plan.components["variant"] == variant)[0]
    tiles = plan.components["query_tiles"][number]
    component, query_tile = np.repeat(number, tiles), ramp(tiles)
    row = plan.components["first_row"][component] + query_tile
    count = np.diff(lists.indptr)[row]
    entry = np.repeat(lists.indptr[row], count) + ramp(count)
    return _Visits(np.repeat(component, count), np.repeat(query_tile, count), entry)


def _first_equal(views: np.ndarray, used: np.ndarray) -> np.ndarray:
    """Map each view in `used` to the first equal view; other views, which no kernel reads, map to themselves."""
    names = "offset", "stride", "extent", "box"
    table = np.column_stack([views[name][used] for name in names])
    _, first, same = np.unique(table, axis=0, return_index=True, return_inverse=True)
    equal = np.arange(len(views))
    equal[used] = used[first[same.ravel()]]
    return equal
