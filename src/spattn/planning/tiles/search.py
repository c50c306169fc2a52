"""Coarse-to-fine search for tiles, which refines only undecided boxes.

Boxes that are full on a coarse level stay *runs* of consecutive key boxes on finer levels, so that the cost is
proportional to the pattern's boundary and not to its area.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..._util.ragged import offsets, ramp
from ...patterns import Pattern
from ..contract.budget import Budget
from ..contract.types import AXES, LARGEST, VIEW, grid_of
from ..symbolic import combine, tile_pairs
from ..symbolic.cells import Cells, distinct

__all__ = ["Found", "alike", "cut_view", "decide", "search"]

_PAIRS_AT_ONCE = 1 << 15  # largest number of tile pairs on the coarsest level
_DECIDED_AT_ONCE = 3 << 16  # tile pairs in one symbolic evaluation
_PAIR_BYTES = 41  # memory of a tile pair during refinement
_RUN_BYTES = 24
_COMPARED_FROM = 1 << 12  # smallest number of undecided tile pairs that are deduplicated
_COMPARED_FIRST = 1 << 10  # size of the sample that estimates the gain of deduplication
_COARSER = 4  # refinement factor along an axis


class Found(NamedTuple):
    """The result of a search: runs of full tiles (query box, first key box, length) and undecided pairs of boxes.

    Undecided pair n has the same allowed cells and padding as its representative, ``samples[:, sample[n]]``.
    """

    runs: np.ndarray  # (3, runs)
    open: np.ndarray  # (2, pairs)
    samples: np.ndarray  # (2, samples)
    sample: np.ndarray  # (pairs,)


def search(pattern: Pattern, query: np.void, key: np.void, shift: int, budget: Budget) -> Found:
    """Find all tile pairs that may be non-empty; `shift` is the difference between query positions and rows."""
    levels = [(query, key)]
    while int(levels[-1][0]["tiles"]) * int(levels[-1][1]["tiles"]) > _PAIRS_AT_ONCE:
        coarser = _coarse(levels[-1][0]), _coarse(levels[-1][1])
        if all(a["tiles"] == b["tiles"] for a, b in zip(coarser, levels[-1], strict=True)):
            break
        levels.append(coarser)
    top_q, top_k = levels[-1]
    pairs = np.indices((int(top_q["tiles"]), int(top_k["tiles"]))).reshape(2, -1)
    always, undecided = decide(pattern, top_q, top_k, shift, pairs)
    runs = _settle([np.zeros((3, 0), np.int64)] * (AXES - 1) + [_singles(pairs[:, always])], top_k)
    open_ = _Open.each(pairs[:, undecided])
    for coarse, fine in itertools.pairwise(reversed(levels)):
        in_query, in_key = (_children(*views, AXES) for views in zip(coarse, fine, strict=True))
        runs = [_refine_runs(runs[axis], in_query, coarse[1], fine[1], axis, budget) for axis in range(AXES)]
        open_ = _shared(pattern, *coarse, shift, open_)
        budget.need(_PAIR_BYTES * _inside(in_query, in_key, open_.pairs))
        children = _cross(in_query[open_.samples[0]], in_key[open_.samples[1]])
        always, undecided = decide(pattern, *fine, shift, children.pairs)
        more = open_.refined(children.some(always), in_query, in_key)
        open_ = open_.refined(children.some(undecided), in_query, in_key)
        runs = _settle([*runs[:-1], np.concatenate([runs[-1], _singles(more.pairs)], axis=1)], fine[1])
    sizes = [int(np.prod(key["grid"][axis + 1 :])) for axis in range(AXES)]
    found = [own * [[1], [size], [size]] for own, size in zip(runs, sizes, strict=True)]
    return Found(np.concatenate(found, axis=1), *open_)


class _Children(NamedTuple):
    """Pairs of fine boxes, sorted by coarse pair: pair n is the row-major child ``column[n]`` of ``owner[n]``."""

    pairs: np.ndarray
    owner: np.ndarray
    column: np.ndarray

    def some(self, which: np.ndarray) -> _Children:
        return _Children(self.pairs[:, which], self.owner[which], self.column[which])


class _Open(NamedTuple):
    """Undecided pairs of boxes and their representatives, as in :class:`Found`; only representatives are evaluated."""

    pairs: np.ndarray
    samples: np.ndarray
    sample: np.ndarray

    @classmethod
    def each(cls, pairs: np.ndarray) -> _Open:
        """Let every pair represent itself."""
        return cls(pairs, pairs, np.arange(pairs.shape[1]))

    def refined(self, children: _Children, in_query: np.ndarray, in_key: np.ndarray) -> _Open:
        """Replace each pair by those of its children that `children` has for its representative."""
        if self.pairs is self.samples:
            return _Open.each(children.pairs)
        starts = offsets(np.bincount(children.owner, minlength=self.samples.shape[1]))
        count = np.diff(starts)[self.sample]
        sample = np.repeat(starts[self.sample], count) + ramp(count)
        of_query, of_key = np.divmod(children.column, in_key.shape[1])
        query, key = (np.repeat(boxes, count) for boxes in self.pairs)
        pairs = np.stack([in_query[query, of_query[sample]], in_key[key, of_key[sample]]])
        return _Open(pairs, children.pairs, sample)


def _shared(pattern: Pattern, query: np.void, key: np.void, shift: int, open_: _Open) -> _Open:
    """Deduplicate the representatives if that removes a quarter of them; try a sample first, to save time."""
    count = open_.samples.shape[1]
    if count < _COMPARED_FROM:
        return open_
    for some in (open_.samples[:, :: count // _COMPARED_FIRST], open_.samples):
        first, kind, _ = alike(pattern, query, key, shift, some)
        if 4 * len(first) > 3 * len(kind):
            return open_
    return _Open(open_.pairs, open_.samples[:, first], kind[open_.sample])


def _side(view: np.void, shift: int, boxes: np.ndarray) -> tuple[Cells, np.ndarray]:
    """Return the cells of the distinct boxes, and the index of each box among them."""
    place, which = distinct(boxes)
    return Cells.of_view(view, shift, boxes[place]), which


def alike(
    pattern: Pattern, query: np.void, key: np.void, shift: int, pairs: np.ndarray
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Group pairs of boxes with equal cells and padding; return (representatives, group of each pair, `unfollowed`)."""
    (q_cells, q_box), (k_cells, k_box) = _side(query, shift, pairs[0]), _side(key, 0, pairs[1])
    found = tile_pairs(q_cells, k_cells, q_box, k_box, with_keys=True)
    content: Any = found.evaluate(pattern).key  # not None, because of with_keys
    padding = q_cells.kind[q_box] * len(k_cells.table) + k_cells.kind[k_box]
    key_of: Any = combine(content, padding)
    return *distinct(key_of), found.unfollowed


def cut_view(offset: int, strides: Sequence[int], extents: Sequence[int], box: Sequence[int]) -> np.void:
    """Return the VIEW record of a lattice with boxes of this shape."""
    one = (1,) * (AXES - len(extents))
    grid = grid_of(extents, box)
    fields = (
        offset,
        (0,) * len(one) + tuple(strides),
        one + tuple(extents),
        one + tuple(box),
        one + grid,
        math.prod(grid),
    )
    return np.array([fields], VIEW)[0]


def _coarse(view: np.void) -> np.void:
    """Return the view with boxes _COARSER times as long along the axis with the most boxes, unless int32 overflows."""
    box, axis = view["box"].tolist(), int(np.argmax(view["grid"]))
    if view["grid"][axis] > 1 and _COARSER * box[axis] <= LARGEST:
        box[axis] *= _COARSER
    return cut_view(view["offset"], view["stride"], view["extent"], box)


def decide(
    pattern: Pattern, query: np.void, key: np.void, shift: int, pairs: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return (indices of full pairs, indices of undecided pairs); evaluate in chunks to limit memory."""
    (q_cells, q_box), (k_cells, k_box) = _side(query, shift, pairs[0]), _side(key, 0, pairs[1])
    always, undecided = (np.zeros(pairs.shape[1], bool) for _ in range(2))
    for start in range(0, pairs.shape[1], _DECIDED_AT_ONCE):
        own = slice(start, start + _DECIDED_AT_ONCE)
        result = tile_pairs(q_cells, k_cells, q_box[own], k_box[own], with_keys=False).evaluate(pattern)
        always[own] = result.lo > 0
        undecided[own] = (result.lo <= 0) & (result.hi > 0)
    return np.nonzero(always)[0], np.nonzero(undecided)[0]


def _singles(pairs: np.ndarray) -> np.ndarray:
    """Return pairs of boxes as runs of length one."""
    return np.concatenate([pairs, np.ones((1, pairs.shape[1]), np.int64)])


def _settle(runs: list[np.ndarray], key: np.void) -> list[np.ndarray]:
    """Merge adjacent runs, and replace runs that fill a row of boxes by a run along the axis before.

    A run along axis a is (query box, first, length), counted in boxes along axes 0 to a; it covers all boxes along
    later axes.
    """
    runs = list(runs)
    for axis in reversed(range(AXES)):
        most = int(key["grid"][axis])
        number = runs[axis][0] * int(key["tiles"]) + runs[axis][1]
        rises = (number[1:] > number[:-1]).all()
        query, first, length = runs[axis] if rises else runs[axis][:, np.argsort(number, kind="stable")]
        starts = np.ones(len(query), bool)
        starts[1:] = (query[1:] != query[:-1]) | (first[1:] != first[:-1] + length[:-1]) | (first[1:] % most == 0)
        at = np.nonzero(starts)[0]
        joined = np.stack([query[at], first[at], np.add.reduceat(length, at) if len(at) else length])
        whole = joined[2] == most if axis else np.zeros(len(at), bool)
        runs[axis] = joined[:, ~whole]
        rows = np.stack([joined[0, whole], joined[1, whole] // most, np.ones(int(whole.sum()), np.int64)])
        runs[axis - 1] = np.concatenate([runs[axis - 1], rows], axis=1) if axis else runs[axis - 1]
    return runs


def _cross(query: np.ndarray, key: np.ndarray) -> _Children:
    """Return the Cartesian product of each row of `query` and the same row of `key`, without missing entries (-1)."""
    shape = *query.shape, key.shape[1]
    pairs = np.stack([np.broadcast_to(query[:, :, None], shape), np.broadcast_to(key[:, None, :], shape)])
    number = np.arange(pairs[0].size, dtype=np.int32 if pairs[0].size <= LARGEST else np.int64)  # int32 saves memory
    owner, column = np.divmod(number, shape[1] * shape[2] or 1)
    children = _Children(pairs.reshape(2, -1), owner, column)
    there = (children.pairs >= 0).all(axis=0)
    return children if there.all() else children.some(np.nonzero(there)[0])


def _refine_runs(
    runs: np.ndarray, in_query: np.ndarray, coarse: np.void, fine: np.void, axis: int, budget: Budget
) -> np.ndarray:
    """Split each run of coarse key boxes into a run for each fine query box and each row of fine key boxes."""
    in_row, most = _children(coarse, fine, axis), int(fine["grid"][axis])
    row, first = np.divmod(runs[1], int(coarse["grid"][axis]))
    budget.need(_RUN_BYTES * _inside(in_query, in_row, np.stack([runs[0], row])))
    ratio = int(coarse["box"][axis] // fine["box"][axis])
    first, stop = ratio * first, np.minimum(ratio * (first + runs[2]), most)
    rows = in_row[row]
    (query, number), of_run, _ = _cross(in_query[runs[0]], rows)
    return np.stack([query, number * most + first[of_run], (stop - first)[of_run]])


def _inside(in_query: np.ndarray, in_key: np.ndarray, pairs: np.ndarray) -> int:
    """Return the number of fine pairs inside the coarse `pairs`."""
    q_count, k_count = ((children >= 0).sum(axis=1) for children in (in_query, in_key))
    return int((q_count[pairs[0]] * k_count[pairs[1]]).sum())


def _children(coarse: np.void, fine: np.void, axes: int) -> np.ndarray:
    """Return the fine boxes inside each coarse box along the first `axes` axes, one row each, padded with -1."""
    found, missing = np.zeros((1, 1), np.int64), np.zeros((1, 1), bool)
    for axis in range(axes):
        ratio, most = int(coarse["box"][axis] // fine["box"][axis]), int(fine["grid"][axis])
        child = ratio * np.arange(coarse["grid"][axis])[None, :, None, None] + np.arange(ratio)
        boxes = len(found) * child.shape[1]
        found = (found[:, None, :, None] * most + child).reshape(boxes, -1)
        missing = (missing[:, None, :, None] | (child >= most)).reshape(boxes, -1)
    found[missing] = -1
    return found
