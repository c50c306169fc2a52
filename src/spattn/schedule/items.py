"""Work items, split-KV partials and combines, which together write every row once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from .._util.frozen import frozen, frozen_whole
from ..planning import Plan
from ..planning.contract.types import LARGEST, WORK
from ..planning.tiles.build import Tiled
from ._items import cut, fill, lists_of
from .proof import Writers, prove
from .rows import Place, places

__all__ = ["Items", "Lists", "Share", "Sharing", "cut_lists", "join_shares", "share_out"]

_SHORTEST_PIECE = 16  # in tiles; shorter items improve the balance less than combining their partials costs
_PIECES_PER_WORKER = 4
_NOTHING = np.zeros(0, np.int32)


class Sharing(NamedTuple):
    """How to split the lists of a variant: into `pieces` items, or if this is 0, about four items for each worker."""

    workers: int
    pieces: int = 0

    def longest(self, tiles: int) -> int:
        """Return the maximum number of tiles of an item, for lists with `tiles` tiles in total."""
        if self.pieces:
            return max(_SHORTEST_PIECE, -(-tiles // self.pieces))
        return max(_SHORTEST_PIECE, 1 << (tiles // (_PIECES_PER_WORKER * self.workers)).bit_length())


class Items(NamedTuple):
    """The fields of :class:`~spattn.Plan` that say which item or combine writes each row."""

    work: np.ndarray
    work_indptr: np.ndarray
    slots: int
    merge_rows: np.ndarray
    merge_indptr: np.ndarray
    merge_sources: np.ndarray
    merge_variants: np.ndarray


class Lists(NamedTuple):
    """Tile lists to split into items. If `alone`, each row has exactly one list; `places` returns the lists' rows."""

    component: np.ndarray
    query_tile: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    alone: bool
    places: Callable[[], Sequence[Place]]


class Share(NamedTuple):
    """The items and combines of one variant; `counts` has the number of sources of each combined row."""

    work: np.ndarray
    slots: int
    rows: np.ndarray
    counts: np.ndarray
    sources: np.ndarray


def share_out(tiled: Tiled | Plan, ends: Sequence[int], q_len: int, block_q: int, sharing: Sharing) -> Items:
    """Split the lists of every variant into items; variant v has the components ``ends[v]`` to ``ends[v + 1] - 1``."""
    lists = lists_of(tiled.components, tiled.indptr, tiled.tile_indptr)
    bounds = np.searchsorted(lists[0], ends)
    shares = [
        _share(tiled, lists[:, begin:end], first, last, q_len, block_q, sharing)
        for (first, last), (begin, end) in zip(itertools.pairwise(ends), itertools.pairwise(bounds), strict=True)
    ]
    if tiled.q_order.size:  # combines refer to rows, not to indices
        shares = [own._replace(rows=rows[own.rows]) for own, rows in zip(shares, tiled.q_order, strict=True)]
    made = join_shares(shares, block_q)
    prove(
        Writers(
            tiled.views,
            np.ascontiguousarray(tiled.components["query_view"]),
            made.work["component"],
            made.work["query_tile"],
            made.work["slot"],
            *made[1:],
            q_len,
            block_q,
            order=tiled.q_order,
        )
    )
    return made


def join_shares(shares: list[Share], block_q: int) -> Items:
    """Join the items of all variants; raise ValueError for 2³¹ or more workspace rows."""
    slots = max(share.slots for share in shares)
    if slots * block_q > LARGEST:
        most = slots * block_q
        raise ValueError(f"pattern: needs {most} rows of split-KV workspace (max {LARGEST}); use fewer workers")

    def whole(name: str) -> np.ndarray:
        return frozen_whole([getattr(share, name) for share in shares])

    counts = np.concatenate([share.counts for share in shares]) if len(shares) > 1 else shares[0].counts
    ends = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=ends[1:])
    indptr = frozen(ends)
    return Items(
        whole("work"),
        _offsets(shares, "work"),
        slots,
        whole("rows"),
        indptr,
        whole("sources"),
        _offsets(shares, "rows"),
    )


def _offsets(shares: list[Share], name: str) -> np.ndarray:
    """Return the start of each variant's elements of an array, and their total number."""
    return frozen(np.array([0, *itertools.accumulate(len(getattr(share, name)) for share in shares)], np.int32))


def _share(
    tiled: Tiled | Plan, lists: np.ndarray, first: int, last: int, q_len: int, block_q: int, sharing: Sharing
) -> Share:
    """Return the items of the components [first, last), whose lists are `lists`."""
    own, (component, query_tile, begin, end) = tiled.components[first:last], lists

    def where() -> list[Place]:
        views = tiled.views[own["query_view"]]
        return _where(own["first_row"].tolist(), views, component - first, query_tile, own["query_tiles"])

    alone, tiles = _is_alone(tiled, own, len(begin), q_len), int((end - begin).sum())
    return cut_lists(Lists(component, query_tile, begin, end, alone, where), tiles, q_len, block_q, sharing)


def _is_alone(tiled: Tiled | Plan, components: np.ndarray, lists: int, q_len: int) -> bool:
    """Return whether each row has exactly one list: true of a single component that covers all rows."""
    if len(components) != 1 or lists != components["query_tiles"][0]:
        return False
    return math.prod(tiled.views["extent"][components["query_view"][0]].tolist()) == q_len


def _where(
    of_rows: Sequence[int], views: np.ndarray, component: np.ndarray, query_tile: np.ndarray, query_tiles: np.ndarray
) -> list[Place]:
    """Return the rows that the lists of the components write, family by family."""
    found: list[Place] = []
    begins = np.searchsorted(component, np.arange(len(views) + 1)).tolist()
    for _, members in itertools.groupby(range(len(views)), of_rows.__getitem__):
        family = list(members)
        begin, end = begins[family[0]], begins[family[0] + 1]  # the lists of the family's first component
        number = np.full(query_tiles[family[0]], -1)
        number[query_tile[begin:end]] = np.arange(end - begin)
        if end > begin:
            found.extend(places(views[family], number, begin))
    return found


def cut_lists(
    lists: Lists, tiles: int, q_len: int, block_q: int, sharing: Sharing, least: np.ndarray | None = None
) -> Share:
    """Split lists into items; list i gets at least ``least[i]`` items, if it has that many tiles.

    `tiles` is the number of tiles of all lists. An item that has a whole list, and whose rows no other list shares,
    writes the output. Others write partials.
    """
    longest = sharing.longest(tiles)
    where = None if lists.alone else lists.places()
    meeting = None if where is None else _meeting(where, len(lists.begin), q_len)
    work, pieces, slots = cut(lists[:4], longest, least, None if meeting is None else meeting.view(np.uint8), WORK)
    if lists.alone and not slots:
        return Share(work, 0, *(_NOTHING,) * 3)
    shared = pieces > 1 if meeting is None else meeting | (pieces > 1)
    where = lists.places() if where is None else where
    return Share(work, slots, *_merges(where, pieces, shared, q_len, block_q))


def _meeting(where: Sequence[Place], lists: int, q_len: int) -> np.ndarray:
    """Return whether each list shares a row with another list: (lists,) bool."""
    covered, found = np.zeros(q_len, np.uint8), np.zeros(lists, bool)
    if len(where) == 1:  # lists of one Place have disjoint rows
        return found
    for place in where:
        rows = place.rows(covered)
        rows += place.of_tiles((place.numbers() >= 0).view(np.uint8))
        np.minimum(rows, 2, out=rows)  # uint8 must not overflow; 2 stands for two or more writers
    if covered.max(initial=0) > 1:
        for place in where:
            number = place.numbers()
            tiles = place.any_of_tiles(place.rows(covered) > 1) & (number >= 0)
            found[number[tiles]] = True
    return found


def _merges(
    where: Sequence[Place], pieces: np.ndarray, shared: np.ndarray, q_len: int, block_q: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the rows that no item writes alone, the number of sources of each, and all sources, row by row."""
    some = shared.any()
    # Every row has exactly one writer.
    if not some and all((place.number >= 0).all() for place in where) and sum(place.size for place in where) == q_len:
        return (_NOTHING,) * 3
    written = np.zeros(q_len, bool)
    for place in where:
        place.rows(written)[...] |= place.of_lists(~shared, False)
    rest = ~written
    merged = np.nonzero(rest)[0].astype(np.int32) if written.any() else np.arange(q_len, dtype=np.int32)
    if not some:
        return merged, np.zeros(len(merged), np.int32), _NOTHING
    own = np.where(shared, pieces, 0).astype(np.int32)  # number of partials of each list
    following = np.zeros(1 + q_len, np.int32)  # number of sources of each row, then the index of its next source
    each = [place.of_lists(own, 0) for place in where]
    for place, count in zip(where, each, strict=True):
        place.rows(following[1:])[...] += count
    counts = following[1:][rest] if len(merged) < q_len else following[1:].copy()
    np.cumsum(following, out=following)
    sources = np.zeros(int(following[-1]), np.int32)
    slot = np.cumsum(own) - own
    for place, count in zip(where, each, strict=True):
        first = place.of_lists((slot * block_q).astype(np.int32), 0)
        fill(sources, place.rows(following), count, first + place.cells(), block_q)
    return merged, counts, sources
