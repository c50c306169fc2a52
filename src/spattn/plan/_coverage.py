"""Every tile is computed and every row of the output written exactly once."""

from __future__ import annotations

import numpy as np

from ._cells import real_cells
from ._require import require
from ._types import Plan

__all__ = ["check_merges", "check_work"]


def check_work(p: Plan, lists: int) -> None:
    """ValueError unless the work items are pieces of the plan's `lists` lists that are not empty, and all of them."""
    w, c = p.work, p.components
    require((w["component"] >= 0) & (w["component"] < len(c)), "work", "numbers of components")
    own = c[w["component"]]
    require(own["variant"] == _variant(p.work_indptr), "work", "components of the item's variant")
    require((w["query_tile"] >= 0) & (w["query_tile"] < own["query_tiles"]), "work", "query tiles of the component")
    row = own["first_row"] + w["query_tile"]
    order = np.lexsort((w["begin"], w["query_tile"], w["component"]))
    w, row = w[order], row[order]
    starts = np.ones(len(w) + 1, dtype=bool)  # where another list starts, and where the last one ends
    starts[1:-1] = (w["query_tile"][1:] != w["query_tile"][:-1]) | (w["component"][1:] != w["component"][:-1])
    before = np.roll(w["end"], 1)
    pieces = (w["begin"] == np.where(starts[:-1], p.indptr[row], before)) & (w["begin"] < w["end"])
    require(pieces & (~starts[1:] | (w["end"] == p.indptr[row + 1])), "work", "pieces that make up their lists")
    require(starts[:-1].sum() == lists, "work", f"{lists} lists")


def check_merges(p: Plan) -> None:
    """ValueError unless each row of each variant is written by one item or one merge, and merges read what is written."""
    slots = 0
    owner = np.repeat(np.arange(len(p.merge_rows)), np.diff(p.merge_indptr))
    for variant in range(p.variants):
        items = p.work[slice(*p.work_indptr[variant : variant + 2])]
        number = np.sort(items["slot"][items["slot"] >= 0])
        require((items["slot"] >= -1).all(), "work", "slots or -1")
        require(np.array_equal(number, np.arange(len(number))), "work", "a slot of its own for each item that has one")
        slots = max(slots, len(number))
        item, cell, position = real_cells(p.views[p.components["query_view"][items["component"]]], items["query_tile"])
        slot = items["slot"][item].astype(np.int64)
        merges = slice(*p.merge_variants[variant : variant + 2])
        rows = np.sort(np.concatenate([position[slot < 0], p.merge_rows[merges]]))
        once = len(rows) == p.q_len and (rows == np.arange(p.q_len)).all()
        require(once, "work, merge_rows", "each row to be written once")
        written = np.column_stack([slot * p.block_q + cell, position])[slot >= 0]
        sources = slice(*p.merge_indptr[[merges.start, merges.stop]])
        read = np.column_stack([p.merge_sources[sources], p.merge_rows[owner[sources]]])
        same = np.array_equal(*(pairs[np.argsort(pairs[:, 0])] for pairs in (written, read)))
        require(same, "merge_sources", "each row of the workspace to be read once, for its own row")
    require(p.slots == slots, "slots", f"{slots}, the most that a variant has")


def _variant(ends: np.ndarray) -> np.ndarray:
    return np.repeat(np.arange(len(ends) - 1), np.diff(ends))
