"""The search for tiles: from coarse boxes to fine ones, refining only what is undecided.

What is decided on a coarse level stays a *run* of consecutive key boxes while the boxes get finer, so that the cost
follows the border of a pattern and not its area.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..patterns import Pattern
from ._budget import Budget
from ._cells import Cells
from ._symbolic import TilePairs
from ._types import AXES, LARGEST, VIEW, grid_of

__all__ = ["Found", "cut_view", "search"]

_PAIRS_AT_ONCE = 1 << 15  # tile pairs of the coarsest level of the search
_DECIDED_AT_ONCE = 3 << 16  # tile pairs that the rules are asked for at once
_PAIR_BYTES = 41  # of a tile pair while it is refined
_RUN_BYTES = 24
_COARSER = 4  # boxes joined along an axis from one level of the search to the next


class Found(NamedTuple):
    """What a search leaves: runs (query box, first key box, length) in which every cell is allowed, and pairs (query
    box, key box) that are undecided."""

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
    runs = [np.zeros((3, 0), np.int64)] * AXES
    for level in range(len(levels) - 1, -1, -1):
        coarse = levels[level]
        always, pairs = _decide(pattern, *coarse, shift, pairs)
        runs = _settle([*runs[:-1], np.concatenate([runs[-1], np.insert(always, 2, 1, axis=0)], axis=1)], coarse[1])
        if level:
            fine = levels[level - 1]
            in_query, in_key = (_children(*views, AXES) for views in zip(coarse, fine, strict=True))
            runs = [_refine_runs(runs[axis], in_query, coarse[1], fine[1], axis, budget) for axis in range(AXES)]
            budget.need(_PAIR_BYTES * _inside(in_query, in_key, pairs))
            pairs = _cross(in_query[pairs[0]], in_key[pairs[1]])
    sizes = [int(np.prod(key["grid"][axis + 1 :])) for axis in range(AXES)]
    found = [own * [[1], [size], [size]] for own, size in zip(runs, sizes, strict=True)]
    return Found(np.concatenate(found, axis=1), pairs)


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
    """The view in boxes that join several along the axis with the most boxes, as far as their size is an int32."""
    box, axis = view["box"].tolist(), int(np.argmax(view["grid"]))
    if view["grid"][axis] > 1 and _COARSER * box[axis] <= LARGEST:
        box[axis] *= _COARSER
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


def _settle(runs: list[np.ndarray], key: np.void) -> list[np.ndarray]:
    """Runs that follow one another as one, and those that are a whole row as a part of a run of rows.

    Those of axis a are of (query box, first, length) in boxes along this axis and those before it: of the axes behind
    it they have all boxes.
    """
    runs = list(runs)
    for axis in reversed(range(AXES)):
        most = int(key["grid"][axis])
        query, first, length = runs[axis][:, np.argsort(runs[axis][0] * int(key["tiles"]) + runs[axis][1])]
        starts = np.ones(len(query), bool)
        starts[1:] = (query[1:] != query[:-1]) | (first[1:] != first[:-1] + length[:-1]) | (first[1:] % most == 0)
        at = np.nonzero(starts)[0]
        joined = np.stack([query[at], first[at], np.add.reduceat(length, at) if len(at) else length])
        whole = joined[2] == most if axis else np.zeros(len(at), bool)
        runs[axis] = joined[:, ~whole]
        rows = np.stack([joined[0, whole], joined[1, whole] // most, np.ones(int(whole.sum()), np.int64)])
        runs[axis - 1] = np.concatenate([runs[axis - 1], rows], axis=1) if axis else runs[axis - 1]
    return runs


def _cross(query: np.ndarray, key: np.ndarray) -> np.ndarray:
    """(2, pairs): of each row of two arrays all pairs of numbers, without those that are missing (-1)."""
    shape = *query.shape, key.shape[1]
    pairs = np.stack([np.broadcast_to(query[:, :, None], shape), np.broadcast_to(key[:, None, :], shape)])
    pairs = pairs.reshape(2, -1)
    there = (pairs >= 0).all(axis=0)
    return pairs if there.all() else pairs[:, there]


def _refine_runs(
    runs: np.ndarray, in_query: np.ndarray, coarse: np.void, fine: np.void, axis: int, budget: Budget
) -> np.ndarray:
    """Replaces every run of coarse key boxes by one for each fine query box and each row of fine key boxes."""
    in_row, most = _children(coarse, fine, axis), int(fine["grid"][axis])
    row, first = np.divmod(runs[1], int(coarse["grid"][axis]))
    budget.need(_RUN_BYTES * _inside(in_query, in_row, np.stack([runs[0], row])))
    ratio = int(coarse["box"][axis] // fine["box"][axis])
    first, stop = ratio * first, np.minimum(ratio * (first + runs[2]), most)
    rows = in_row[row]
    query, place = _cross(in_query[runs[0]], np.where(rows < 0, -1, np.arange(rows.size).reshape(rows.shape)))
    number, of_run = rows.ravel()[place], place // rows.shape[1]
    return np.stack([query, number * most + first[of_run], (stop - first)[of_run]])


def _inside(in_query: np.ndarray, in_key: np.ndarray, pairs: np.ndarray) -> int:
    """How many pairs of fine boxes some pairs of coarse boxes hold."""
    q_count, k_count = ((children >= 0).sum(axis=1) for children in (in_query, in_key))
    return int((q_count[pairs[0]] * k_count[pairs[1]]).sum())


def _children(coarse: np.void, fine: np.void, axes: int) -> np.ndarray:
    """(boxes, most): fine boxes inside each coarse box, of the first so many axes, -1 for none."""
    found, missing = np.zeros((1, 1), np.int64), np.zeros((1, 1), bool)
    for axis in range(axes):
        ratio, most = int(coarse["box"][axis] // fine["box"][axis]), int(fine["grid"][axis])
        child = ratio * np.arange(coarse["grid"][axis])[None, :, None, None] + np.arange(ratio)
        boxes = len(found) * child.shape[1]
        found = (found[:, None, :, None] * most + child).reshape(boxes, -1)
        missing = (missing[:, None, :, None] | (child >= most)).reshape(boxes, -1)
    found[missing] = -1
    return found
