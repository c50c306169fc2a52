"""Work items, workspace slots and merges: who computes which rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .._frozen import frozen
from .._ragged import offsets, ramp
from ..plan import Plan
from ..plan._build import Tiled
from ..plan._types import LARGEST, WORK
from .rows import Place, places

__all__ = ["Items", "Lists", "Share", "cut_lists", "join_shares", "share_out"]

_SHORTEST_PIECE = 16  # tiles: splitting a list further costs more in merging than it gains
_PIECES_PER_WORKER = 4


class Items(NamedTuple):
    """The fields of :class:`~spattn.plan.Plan` that say *who* computes what."""

    work: np.ndarray
    work_indptr: np.ndarray
    slots: int
    merge_rows: np.ndarray
    merge_indptr: np.ndarray
    merge_sources: np.ndarray
    merge_variants: np.ndarray


class Lists(NamedTuple):
    """Lists of tiles that are to be cut into items: whose they are, where they begin and end, and the rows that they
    write, in the order of the lists."""

    component: np.ndarray
    query_tile: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    places: Sequence[Place]


class Share(NamedTuple):
    """One variant's part of them; `counts` are the sources of each merge."""

    work: np.ndarray
    slots: int
    rows: np.ndarray
    counts: np.ndarray
    sources: np.ndarray


def share_out(tiled: Tiled | Plan, ends: Sequence[int], q_len: int, block_q: int, workers: int) -> Items:
    """Cuts the lists of every variant, whose components start at `ends`, into items, about four for each of `workers`.

    Raises
    ------
    ValueError
        If the workspace would have 2³¹ rows or more.
    """
    shares = [_share(tiled, first, last, q_len, block_q, workers) for first, last in zip(ends, ends[1:], strict=False)]
    if tiled.q_order.size:  # merges name rows
        shares = [own._replace(rows=rows[own.rows]) for own, rows in zip(shares, tiled.q_order, strict=True)]
    return join_shares(shares, block_q)


def join_shares(shares: list[Share], block_q: int) -> Items:
    """The items of all variants.

    Raises
    ------
    ValueError
        If the workspace would have 2³¹ rows or more.
    """
    slots = max(share.slots for share in shares)
    if slots * block_q > LARGEST:
        rows = slots * block_q
        raise ValueError(f"pattern: expected at most {LARGEST} rows of workspace, got {rows}; use fewer workers")

    def joined(name: str) -> np.ndarray:
        arrays = [getattr(share, name) for share in shares]
        return np.concatenate(arrays) if len(arrays) > 1 else arrays[0]

    return Items(
        frozen(joined("work")),
        _int32(offsets([len(share.work) for share in shares])),
        slots,
        _int32(joined("rows")),
        _int32(offsets(joined("counts"))),
        _int32(joined("sources")),
        _int32(offsets([len(share.rows) for share in shares])),
    )


def _int32(array: np.ndarray) -> np.ndarray:
    return frozen(array.astype(np.int32, copy=False))


def _share(tiled: Tiled | Plan, first: int, last: int, q_len: int, block_q: int, workers: int) -> Share:
    """The items of the components [first, last)."""
    starts, of_rows = tiled.tile_indptr[tiled.indptr], tiled.components["first_row"].tolist()
    columns: list[tuple[np.ndarray, ...]] = []
    where: list[Place] = []
    lists = tiles = 0
    for of_row, members in itertools.groupby(range(first, last), of_rows.__getitem__):
        family = np.array(list(members))
        ends = starts[of_row : of_row + int(tiled.components["query_tiles"][family[0]]) + 1]
        own = np.nonzero(ends[1:] > ends[:-1])[0]
        number = np.full(len(ends) - 1, -1)
        number[own] = np.arange(len(own))
        if len(own):
            where.extend(places(tiled.views[tiled.components["query_view"][family]], number, lists))
        each = np.tile(np.stack([own, ends[own], ends[own + 1]]), len(family))
        columns.append((np.repeat(family, len(own)), *each))
        lists, tiles = lists + len(family) * len(own), tiles + len(family) * int(ends[-1] - ends[0])
    columns = columns or [(np.zeros(0, np.int64),) * 4]
    component, query_tile, begin, end = (np.concatenate(column) for column in zip(*columns, strict=True))
    return cut_lists(Lists(component, query_tile, begin, end, where), tiles, q_len, block_q, workers)


def cut_lists(lists: Lists, tiles: int, q_len: int, block_q: int, workers: int, least: int | np.ndarray = 1) -> Share:
    """The items of lists that have so many tiles in all, each list in at least `least` pieces.

    A list stays whole, and its item writes the output itself, when nobody else touches its rows.
    """
    component, query_tile, begin, end, where = lists
    longest = max(_SHORTEST_PIECE, 1 << (tiles // (_PIECES_PER_WORKER * workers)).bit_length())
    pieces = np.maximum(-(-(end - begin) // longest), np.minimum(least, end - begin))
    shared = _meeting(where, len(begin), q_len) | (pieces > 1)
    work = _pieces(component, query_tile, begin, end, pieces, shared)
    rows, counts, sources = _merges(where, pieces, shared, q_len, block_q)
    order = np.argsort(work["begin"] - work["end"], kind="stable")
    return Share(work[order], int(pieces[shared].sum()), rows, counts, sources)


def _pieces(
    component: np.ndarray,
    query_tile: np.ndarray,
    begin: np.ndarray,
    end: np.ndarray,
    pieces: np.ndarray,
    shared: np.ndarray,
) -> np.ndarray:
    """The items; those of shared lists have a slot each, in order."""
    which = np.repeat(np.arange(len(begin)), pieces)
    number = ramp(pieces)
    length = (end - begin)[which]
    work = np.zeros(len(which), dtype=WORK)
    work["component"], work["query_tile"] = component[which], query_tile[which]
    work["begin"] = begin[which] + length * number // pieces[which]
    work["end"] = begin[which] + length * (number + 1) // pieces[which]
    work["slot"] = np.where(shared[which], np.cumsum(shared[which]) - 1, -1)
    return work


def _meeting(where: Sequence[Place], lists: int, q_len: int) -> np.ndarray:
    """(lists,) bool: which lists have a row that another one has, too."""
    covered, found = np.zeros(q_len, np.uint8), np.zeros(lists, bool)
    if len(where) == 1:  # which has no row twice
        return found
    for place in where:
        rows = place.rows(covered)
        np.minimum(rows, 1, out=rows)
        rows += place.of_tiles((place.numbers() >= 0).view(np.uint8))
    if covered.max(initial=0) > 1:
        for place in where:
            number = place.numbers()
            tiles = place.any_of_tiles(place.rows(covered) > 1) & (number >= 0)
            found[number[tiles]] = True
    return found


def _merges(
    where: Sequence[Place], pieces: np.ndarray, shared: np.ndarray, q_len: int, block_q: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows that no item writes alone, how many sources each has, and the sources in slot order."""
    some = shared.any()
    # Rows that are written once each, as many as there are.
    if not some and all((place.number >= 0).all() for place in where) and sum(place.size for place in where) == q_len:
        return (np.zeros(0, np.int32),) * 3
    written = np.zeros(q_len, bool)
    for place in where:
        place.rows(written)[...] |= place.of_lists(~shared, False)
    merged = np.nonzero(~written)[0].astype(np.int32)
    if not some:
        return merged, np.zeros(len(merged), np.int32), np.zeros(0, np.int32)
    own = np.where(shared, pieces, 0).astype(np.int32)  # pieces that have a slot
    following = np.zeros(1 + q_len, np.int32)  # the sources of each row, then where its next one goes
    each = [place.of_lists(own, 0) for place in where]
    for place, count in zip(where, each, strict=True):
        place.rows(following[1:])[...] += count
    counts = following[1:][~written]
    np.cumsum(following, out=following)
    sources = np.zeros(int(following[-1]), np.int32)
    slot = np.cumsum(own) - own
    for place, count in zip(where, each, strict=True):
        rows = place.rows(following)
        first = place.of_lists((slot * block_q).astype(np.int32), 0)
        first += place.cells()
        _fill(sources, rows, count, first, block_q)
        rows += count
    return merged, counts, sources


def _fill(sources: np.ndarray, at: np.ndarray, count: np.ndarray, first: np.ndarray, step: int) -> None:
    """Writes the `count` sources of each of some rows, `step` apart, from place `at` on."""
    at, count, first = (column.ravel() for column in (at, count, first))
    if not count.all():
        some = np.nonzero(count)[0]
        at, count, first = (column[some] for column in (at, count, first))
    sources[at] = first
    several = np.nonzero(count > 1)[0]
    count = count[several]
    number = ramp(count)
    sources[np.repeat(at[several], count) + number] = np.repeat(first[several], count) + step * number
