"""Tiles of spans: if the keys of every query form a box of the key lattice, the axes are independent."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from ..._util.index_checks import check_runs, integer_array
from ..._util.ragged import offsets, ramp
from ...index_set import Runs
from ...patterns import Pattern
from ...patterns.hints.closed_forms import Lattice
from ..contract.budget import Budget
from ..contract.types import padding_kinds
from ..symbolic.cells import distinct
from ._along import TilesAlong
from ._lists import RunLists
from .masks import Masks, packed
from .parts import Piece
from .run_lists import add_runs, join_runs

__all__ = ["tiles_of_spans"]

_QUERIES_AT_ONCE = 1 << 13  # queries per call of runs()


def tiles_of_spans(
    piece: Piece, query: np.void, key: np.void, kv_len: int, masks: Masks, lists: RunLists, budget: Budget
) -> int | None:
    """Append all non-empty tiles of a piece to `lists` and return the number of pairs; or return None if the keys of
    some query are not known to form a box."""
    axes = len(piece.query.extents)
    sides = list(zip(query["box"].tolist()[-axes:], key["box"].tolist()[-axes:], strict=True))
    along = [TilesAlong(*side) for side in sides]
    if piece.spans is not None:
        for one, span in zip(along, piece.spans, strict=True):
            one.add(*np.array(span, np.int64))
    elif axes > 1 or len(piece.key.extents) > 1 or not _add_runs(along[0], piece, kv_len, sides[0][0], budget):
        return None
    bounds = [one.bounds_of_kinds() for one in along]
    kinds = tuple(map(len, bounds))
    query_tile, key_tile, length, kind = _on_all_axes(along, kinds, query, key, budget)
    partial = np.nonzero(kind)[0]
    padding, real = padding_kinds(query, query_tile[partial])
    first, which = distinct(kind[partial] * len(real) + padding)
    looks, below = _apart(kind[partial[first]], kinds), _below(tuple(side for _, side in sides))

    def cut(some: np.ndarray) -> np.ndarray:
        found = np.full((len(some), 1, masks.shape[1]), ~np.uint64(0))
        for own, look, words in zip(bounds, looks, below, strict=True):
            begin, end = own[look[some]].transpose(2, 0, 1)
            inside = words[begin] ^ words[end]
            found = (found[:, :, None] & inside[:, None]).reshape(len(some), -1, masks.shape[1])
        return found

    mask = np.full(len(kind), -1, np.int32)
    mask[partial] = masks.number(cut, padding[first], real)[which]
    add_runs(lists, budget, int(query["tiles"]), *join_runs(query_tile, key_tile, length, mask))
    return math.prod(one.pairs for one in along)


def _add_runs(along: TilesAlong, piece: Piece, kv_len: int, box: int, budget: Budget) -> bool:
    """Append the queries of a one-axis piece with their runs(); return False if any query's keys are not a span."""
    start, count = 0, box  # the first chunk is small: runs() of patterns that are not spans may be large
    while start < piece.query.extents[0]:
        stop = min(start + count, piece.query.extents[0])
        q = piece.query.offset + piece.query.strides[0] * np.arange(start, stop)
        spans = _spans(_checked(piece.pattern, q, kv_len), piece.key, kv_len)
        if spans is None:
            return False
        along.add(*spans)
        budget.need_runs(len(along))
        start, count = stop, max(_QUERIES_AT_ONCE // box, 1) * box
    return True


def _checked(pattern: Pattern, q: np.ndarray, kv_len: int) -> Runs | None:
    """Return the runs of a pattern as int64, or None; raise TypeError or ValueError if they are invalid."""
    runs = pattern.runs(q, kv_len)
    if runs is None:
        return None
    if not isinstance(runs, Runs):
        raise TypeError(f"runs(): expected Runs or None from {pattern!r}, got {runs!r}")
    found = [integer_array(f"runs(): {name}", getattr(runs, name)) for name in ("start", "step", "count")]
    if any(own.ndim != 2 or len(own) != len(q) or own.shape != found[0].shape for own in found):
        shapes = ", ".join(str(own.shape) for own in found)
        raise ValueError(f"runs(): expected three arrays of shape ({len(q)}, runs) from {pattern!r}, got {shapes}")
    return Runs(*found)


def _spans(runs: Runs | None, key: Lattice, kv_len: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the first and last coordinate of each query's keys in a one-axis key lattice; None unless they are spans.

    Raise ValueError if keys are outside the sequence.
    """
    if runs is None or runs.start.shape[1] != 1:
        return None
    stride, extent, step = key.strides[0] if key.extents[0] > 1 else 1, key.extents[0], int(runs.step[0, 0])
    if stride < 1 or step not in (1, stride) or (runs.step != step).any():
        return None
    start, count = runs.start[:, 0], runs.count[:, 0]
    end = start + step * (count - 1)
    # As uint64, negative values exceed kv_len. check_runs then raises, unless only empty runs start outside.
    if max(start.view(np.uint64).max(), count.view(np.uint64).max(), end.max() + 1) > kv_len:
        check_runs(runs.start, runs.step, runs.count, kv_len)
    first, last = start - key.offset, end - key.offset
    if stride > 1:
        first, last, behind = -(-first // stride), last // stride, first % stride
        last = last if step == 1 else np.where(behind == 0, last, -1)
    return np.maximum(first, 0), np.minimum(last, extent - 1)


def _on_all_axes(
    along: Sequence[TilesAlong], kinds: Sequence[int], query: np.void, key: np.void, budget: Budget
) -> np.ndarray:
    """Return (query tile, first key tile, length, kind) of the product of the runs along all axes; the kind is the
    row-major index of the kinds along the axes, 0 for full tiles."""
    q_grid, k_grid = query["grid"].tolist()[-len(along) :], key["grid"].tolist()[-len(along) :]
    runs = along[0].runs()
    for axis in range(1, len(along)):
        outer, inner = _one_by_one(runs), along[axis].runs()
        budget.need_runs(outer.shape[1] * inner.shape[1])
        per_outer = np.bincount(outer[0], minlength=math.prod(q_grid[:axis]))
        per_inner = np.bincount(inner[0], minlength=q_grid[axis])
        count = np.multiply.outer(per_outer, per_inner).ravel()
        query_tile = np.repeat(np.arange(len(count)), count)
        in_outer, in_inner = np.divmod(query_tile, q_grid[axis])
        of_outer, of_inner = np.divmod(ramp(count), per_inner[in_inner])
        _, outer_key, _, outer_kind = outer[:, offsets(per_outer)[in_outer] + of_outer]
        _, inner_key, length, inner_kind = inner[:, offsets(per_inner)[in_inner] + of_inner]
        runs = np.stack(
            [query_tile, outer_key * k_grid[axis] + inner_key, length, outer_kind * kinds[axis] + inner_kind]
        )
    return runs


def _one_by_one(runs: np.ndarray) -> np.ndarray:
    """Expand runs to single tiles."""
    query, key, length, kind = np.repeat(runs, runs[2], axis=1)
    return np.stack([query, key + ramp(runs[2]), np.ones_like(length), kind])


def _apart(numbers: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    """Split row-major indices into an index along each axis."""
    found = []
    for size in sizes[:0:-1]:
        numbers, own = np.divmod(numbers, size)
        found.append(own)
    return [numbers, *reversed(found)]


@functools.lru_cache(maxsize=16)
def _below(box: tuple[int, ...]) -> list[np.ndarray]:
    """Return for each axis the bitmasks, (side + 1, words) uint64, of the cells with coordinates below 0, 1, … side."""
    coordinates = np.indices(box).reshape(len(box), -1)
    return [packed(own < np.arange(side + 1)[:, None]) for own, side in zip(coordinates, box, strict=True)]
