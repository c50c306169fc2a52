"""Work items, workspace slots and merges: who computes which rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .._frozen import frozen
from .._ragged import offsets, ramp
from ..plan._build import Tiled
from ..plan._types import LARGEST, WORK, real_cells

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
    """Lists of tiles that are to be cut into items: whose they are, where they begin and end, and the rows that each
    writes, as (number of the list, cell of its tile, row)."""

    component: np.ndarray
    query_tile: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    cells: tuple[np.ndarray, np.ndarray, np.ndarray]


class Share(NamedTuple):
    """One variant's part of them; `counts` are the sources of each merge."""

    work: np.ndarray
    slots: int
    rows: np.ndarray
    counts: np.ndarray
    sources: np.ndarray


def share_out(tiled: Tiled, q_len: int, block_q: int, workers: int) -> Items:
    """Cuts the lists of every variant into items, about four for each of `workers`.

    Raises
    ------
    ValueError
        If the workspace would have 2³¹ rows or more.
    """
    ends = tiled.variant_components
    shares = [_share(tiled, first, last, q_len, block_q, workers) for first, last in zip(ends, ends[1:], strict=False)]
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
        return np.concatenate([getattr(share, name) for share in shares])

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
    return frozen(array.astype(np.int32))


def _share(tiled: Tiled, first: int, last: int, q_len: int, block_q: int, workers: int) -> Share:
    """The items of the components [first, last)."""
    components, indptr = tiled.components[first:last], tiled.indptr
    ends = indptr[components["first_row"] + components["query_tiles"]]
    tiles = int((ends - indptr[components["first_row"]]).sum(dtype=np.int64))
    nothing = (np.zeros(0, np.int64),) * 4
    listed = [nothing, *(_lists(c, number, indptr) for number, c in enumerate(components, first))]
    component, query_tile, begin, end = (np.concatenate(column) for column in zip(*listed, strict=True))
    cells = real_cells(tiled.views[components["query_view"][component - first]], query_tile)
    return cut_lists(Lists(component, query_tile, begin, end, cells), tiles, q_len, block_q, workers)


def cut_lists(lists: Lists, tiles: int, q_len: int, block_q: int, workers: int) -> Share:
    """The items of lists that have so many tiles in all.

    A list stays whole, and its item writes the output itself, when nobody else touches its rows.
    """
    component, query_tile, begin, end, (owner, cell, row) = lists
    longest = max(_SHORTEST_PIECE, 1 << (tiles // (_PIECES_PER_WORKER * workers)).bit_length())
    pieces = -(-(end - begin) // longest)
    covered = np.bincount(row, minlength=q_len)
    shared = np.zeros(len(begin), dtype=bool)
    np.logical_or.at(shared, owner, covered[row] > 1)
    shared |= pieces > 1
    work, piece_list = _pieces(component, query_tile, begin, end, pieces, shared)
    rows, counts, sources = _merges(work, piece_list, row, owner, cell, shared, q_len, block_q)
    order = np.argsort(work["begin"] - work["end"], kind="stable")
    return Share(work[order], int((work["slot"] >= 0).sum()), rows, counts, sources)


def _lists(component: np.void, number: int, indptr: np.ndarray) -> tuple[np.ndarray, ...]:
    """The component's non-empty lists: (component number, query tile, begin, end)."""
    ends = indptr[component["first_row"] : component["first_row"] + component["query_tiles"] + 1]
    tile = np.nonzero(np.diff(ends))[0]
    return np.full(len(tile), number), tile, ends[tile].astype(np.int64), ends[tile + 1].astype(np.int64)


def _pieces(
    component: np.ndarray,
    query_tile: np.ndarray,
    begin: np.ndarray,
    end: np.ndarray,
    pieces: np.ndarray,
    shared: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """(items, list of each item); the items of shared lists have a slot each, in order."""
    which = np.repeat(np.arange(len(begin)), pieces)
    number = ramp(pieces)
    length = (end - begin)[which]
    work = np.zeros(len(which), dtype=WORK)
    work["component"], work["query_tile"] = component[which], query_tile[which]
    work["begin"] = begin[which] + length * number // pieces[which]
    work["end"] = begin[which] + length * (number + 1) // pieces[which]
    work["slot"] = np.where(shared[which], np.cumsum(shared[which]) - 1, -1)
    return work, which


def _merges(
    work: np.ndarray,
    piece_list: np.ndarray,
    row: np.ndarray,
    owner: np.ndarray,
    cell: np.ndarray,
    shared: np.ndarray,
    q_len: int,
    block_q: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows that no item writes alone, how many sources each has, and the sources in slot order."""
    written = np.zeros(q_len, dtype=bool)
    written[row[~shared[owner]]] = True
    slotted = np.nonzero(work["slot"] >= 0)[0]
    # Join: every row of a shared list meets every piece of that list.
    in_shared = np.nonzero(shared[owner])[0]
    by_list = in_shared[np.argsort(owner[in_shared], kind="stable")]
    first = np.searchsorted(owner[by_list], piece_list[slotted], side="left")
    count = np.searchsorted(owner[by_list], piece_list[slotted], side="right") - first
    at = by_list[np.repeat(first, count) + ramp(count)]
    slot = np.repeat(work["slot"][slotted].astype(np.int64), count)
    order = np.lexsort((slot, row[at]))
    counts = np.bincount(row[at], minlength=q_len)[~written]
    return np.nonzero(~written)[0], counts, (slot * block_q + cell[at])[order]
