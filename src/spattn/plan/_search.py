"""The search for tiles: from coarse boxes to fine ones, refining only what is undecided.

What is decided on a coarse level stays a *run* of consecutive key boxes while the boxes get finer, so that the cost
follows the border of a pattern and not its area.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .._ragged import ramp
from ..patterns import Pattern
from ._budget import Budget
from ._cells import Cells
from ._symbolic import TilePairs
from ._types import AXES, LARGEST, VIEW, grid_of

__all__ = ["Found", "cut_view", "search"]

_PAIRS_AT_ONCE = 1 << 15  # tile pairs of the coarsest level of the search
_DECIDED_AT_ONCE = 1 << 17  # tile pairs that the rules are asked for at once
_PAIR_BYTES = 41  # of a tile pair while it is refined
_RUN_BYTES = 24
_COARSER = 4  # boxes joined along each axis from one level of the search to the next


class Found(NamedTuple):
    """What a search leaves: runs (query box, first key box, count) of the last axis in which every cell is allowed, by
    query box and key box, and pairs (query box, key box) that are undecided."""

    runs: np.ndarray  # (3, runs)
    open: np.ndarray  # (2, pairs)


def search(pattern: Pattern, query: np.void, key: np.void, shift: int, budget: Budget) -> Found:
    """Tile pairs that may hold an allowed pair; `shift` turns a row of the query view into a position."""
    levels = [(query, key)]
    while int(levels[-1][0]["tiles"]) * int(levels[-1][1]["tiles"]) > _PAIRS_AT_ONCE:
        coarser = _coarse(levels[-1][0]), _coarse(levels[-1][1])
        if all(a["tiles"] == b["tiles"] for a, b in zip(coarser, levels[-1], strict=True)):
            break
        levels.append(coarser)
    top_q, top_k = levels[-1]
    pairs = np.indices((int(top_q["tiles"]), int(top_k["tiles"]))).reshape(2, -1)
    runs = np.zeros((3, 0), np.int64)
    for level in range(len(levels) - 1, -1, -1):
        coarse = levels[level]
        always, pairs = _decide(pattern, *coarse, shift, pairs)
        runs = _join(np.concatenate([runs, np.insert(always, 2, 1, axis=0)], axis=1), int(coarse[1]["grid"][-1]))
        if level:
            fine = levels[level - 1]
            budget.need(_RUN_BYTES * _boxes_inside(coarse, fine, runs[:2], along=AXES - 1))
            budget.need(_PAIR_BYTES * _boxes_inside(coarse, fine, pairs, along=AXES))
            runs, pairs = _refine_runs(runs, coarse, fine), _refine(pairs, coarse, fine)
    return Found(runs, pairs)


def cut_view(offset: int, strides: Sequence[int], extents: Sequence[int], box: Sequence[int]) -> np.void:
    """The VIEW record of a lattice cut into boxes."""
    missing = AXES - len(extents)
    view = np.zeros(1, dtype=VIEW)[0]
    view["offset"] = offset
    view["stride"] = (0,) * missing + tuple(strides)
    view["extent"] = (1,) * missing + tuple(extents)
    view["box"] = (1,) * missing + tuple(box)
    view["grid"] = grid_of(view["extent"], view["box"])
    view["tiles"] = np.prod(view["grid"], dtype=np.int64)
    return view


def _coarse(view: np.void) -> np.void:
    """The view in boxes that join several along each axis, as far as their size is an int32."""
    sides = zip(view["box"].tolist(), view["grid"].tolist(), strict=True)
    box = [b * (_COARSER if g > 1 and _COARSER * b <= LARGEST else 1) for b, g in sides]
    return cut_view(view["offset"], view["stride"], view["extent"], box)


def _decide(
    pattern: Pattern, query: np.void, key: np.void, shift: int, pairs: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(pairs of which every cell is allowed, undecided pairs), asked for so many at once that memory is bounded."""
    sides = Cells.of_view(query, shift), Cells.of_view(key)
    always, undecided = [pairs[:, :0]], [pairs[:, :0]]
    for start in range(0, pairs.shape[1], _DECIDED_AT_ONCE):
        own = pairs[:, start : start + _DECIDED_AT_ONCE]
        result = TilePairs(*sides, own[0], own[1], with_keys=False).evaluate(pattern)
        always.append(own[:, result.lo > 0])
        undecided.append(own[:, (result.lo <= 0) & (result.hi > 0)])
    return np.concatenate(always, axis=1), np.concatenate(undecided, axis=1)


def _join(runs: np.ndarray, row: int) -> np.ndarray:
    """Runs by query box and key box, those that follow one another within a row of `row` key boxes as one."""
    runs = runs[:, np.lexsort(runs[1::-1])]
    query, key, count = runs
    starts = np.ones(len(query), bool)
    starts[1:] = (query[1:] != query[:-1]) | (key[1:] != key[:-1] + count[:-1]) | (key[1:] % row == 0)
    at = np.nonzero(starts)[0]
    return np.stack([query[at], key[at], np.add.reduceat(count, at) if len(at) else count])


def _refine(pairs: np.ndarray, coarse: tuple[np.void, np.void], fine: tuple[np.void, np.void]) -> np.ndarray:
    """Replaces every pair of coarse boxes by the pairs of fine boxes inside it."""
    (q_children, q_count), (k_children, k_count) = (
        _children(*views, along=AXES) for views in zip(coarse, fine, strict=True)
    )
    q_box, k_box = pairs
    inside = q_count[q_box] * k_count[k_box]
    parent = np.repeat(np.arange(len(q_box)), inside)
    q_number, k_number = np.divmod(ramp(inside), k_count[k_box[parent]])
    return np.stack([q_children[q_box[parent], q_number], k_children[k_box[parent], k_number]])


def _refine_runs(runs: np.ndarray, coarse: tuple[np.void, np.void], fine: tuple[np.void, np.void]) -> np.ndarray:
    """The same of runs: one for each fine query box and each row of fine key boxes."""
    q_children, q_count = _children(coarse[0], fine[0], along=AXES)
    rows, row_count = _children(coarse[1], fine[1], along=AXES - 1)
    q_box, k_box, count = runs
    k_row, first = np.divmod(k_box, int(coarse[1]["grid"][-1]))
    inside = q_count[q_box] * row_count[k_row]
    parent = np.repeat(np.arange(len(q_box)), inside)
    q_number, number = np.divmod(ramp(inside), row_count[k_row[parent]])
    ratio, length = int(coarse[1]["box"][-1] // fine[1]["box"][-1]), int(fine[1]["grid"][-1])
    first, stop = ratio * first, np.minimum(ratio * (first + count), length)
    key = rows[k_row[parent], number] * length + first[parent]
    return np.stack([q_children[q_box[parent], q_number], key, (stop - first)[parent]])


def _boxes_inside(coarse: tuple[np.void, np.void], fine: tuple[np.void, np.void], pairs: np.ndarray, along: int) -> int:
    """How many pairs of fine boxes, or rows of them, pairs of coarse boxes hold."""
    q_count, k_count = _children(coarse[0], fine[0], along=AXES)[1], _children(coarse[1], fine[1], along=along)[1]
    k_box = pairs[1] if along == AXES else pairs[1] // int(coarse[1]["grid"][-1])
    return int((q_count[pairs[0]] * k_count[k_box]).sum())


def _children(coarse: np.void, fine: np.void, along: int) -> tuple[np.ndarray, np.ndarray]:
    """Fine boxes inside each coarse box, of the first so many axes: (boxes, most) numbers with the real ones first, and
    how many are real."""
    grid, coarse_grid = tuple(fine["grid"][:along]), tuple(coarse["grid"][:along])
    fine_at = np.indices(grid).reshape(along, -1)
    ratio = (coarse["box"] // fine["box"])[:along, None]
    parent = np.ravel_multi_index(tuple(fine_at // ratio), coarse_grid)
    order = np.argsort(parent, kind="stable")
    count = np.bincount(parent, minlength=int(np.prod(coarse_grid)))
    children = np.zeros((len(count), int(count.max())), dtype=np.int64)
    children[np.arange(children.shape[1]) < count[:, None]] = order
    return children, count
