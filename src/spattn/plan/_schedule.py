"""Work items, workspace slots and merges: who computes which rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .._ragged import ramp
from ._types import WORK, real_cells


class Schedule(NamedTuple):
    """One variant's share of a plan's work arrays."""

    work: np.ndarray
    slots: int
    merge_rows: np.ndarray
    merge_counts: np.ndarray
    merge_sources: np.ndarray


def schedule(views, components, first_component, indptr, q_len, block_q, longest) -> Schedule:
    """Cuts the tile lists of a variant's components into items of at most `longest` tiles.

    A list stays whole, and its item writes the output itself, when nobody else touches its rows.
    """
    nothing = (np.zeros(0, np.int64),) * 4
    listed = [nothing, *(_lists(c, number, indptr) for number, c in enumerate(components, first_component))]
    component, query_tile, begin, end = (np.concatenate(column) for column in zip(*listed, strict=True))
    owner, cell, row = real_cells(views[components["query_view"][component - first_component]], query_tile)
    pieces = -(-(end - begin) // longest)
    covered = np.bincount(row, minlength=q_len)
    shared = np.zeros(len(begin), dtype=bool)
    np.logical_or.at(shared, owner, covered[row] > 1)
    shared |= pieces > 1
    work, piece_list = _pieces(component, query_tile, begin, end, pieces, shared)
    rows, counts, sources = _merges(work, piece_list, row, owner, cell, shared, q_len, block_q)
    order = np.argsort(work["begin"] - work["end"], kind="stable")
    return Schedule(work[order], int((work["slot"] >= 0).sum()), rows, counts, sources)


def _lists(component, number: int, indptr: np.ndarray):
    """The component's non-empty lists: (component number, query tile, begin, end)."""
    ends = indptr[component["first_row"] : component["first_row"] + component["query_tiles"] + 1]
    tile = np.nonzero(np.diff(ends))[0]
    return np.full(len(tile), number), tile, ends[tile].astype(np.int64), ends[tile + 1].astype(np.int64)


def _pieces(component, query_tile, begin, end, pieces, shared):
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


def _merges(work, piece_list, row, owner, cell, shared, q_len, block_q):
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
