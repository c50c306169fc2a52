"""From a pattern to its tiles, variant by variant; what users' ``parts()`` say is checked in Python's integers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .._frozen import frozen
from .._index_checks import q_offset
from .._ragged import offsets
from ..patterns import Ends, Full, Lattice, Part, Pattern
from ..patterns._check import integer, integers
from ..patterns._lattice import Span, whole_lattices
from ._budget import Budget
from ._query_boxes import find_tiles_of_box, in_boxes, moved
from ._tiling import Masks, find_tiles, make_view
from ._types import AXES, COMPONENT, LARGEST, VIEW

__all__ = ["Tiled", "repeats", "tile_pattern"]

_INDEX_BYTES = 4  # of a (batch entry, head) in a plan's variant


@dataclass(frozen=True)
class Tiled:
    """What a pattern allows, as tiles over affine views: the fields of :class:`~spattn.plan.Plan` that say *what* is
    computed. `variant_components` says where the components of each variant start, and `least` from how many keys on
    the tiles are the same, but for where those of the last keys lie; None: at no other number."""

    views: np.ndarray
    components: np.ndarray
    indptr: np.ndarray
    tile_indptr: np.ndarray
    indices: np.ndarray
    key_view: np.ndarray
    mask: np.ndarray
    masks: np.ndarray
    variant: np.ndarray
    variant_components: tuple[int, ...]
    nnz: int
    least: int | None


class Piece(NamedTuple):
    """A part with both of its lattices, where its first shift puts them; `is_box`: one box of queries."""

    pattern: Pattern
    query: Lattice
    key: Lattice
    shifts: tuple[tuple[int, int], ...]
    is_box: bool


def tile_pattern(
    pattern: Pattern,
    q_len: int,
    kv_len: int,
    batch: int,
    heads: int,
    tile: tuple[int, int],
    box: tuple[int, ...] | None,
    budget: Budget,
) -> Tiled:
    """All tiles of a pattern that hold an allowed pair; ValueError where `budget` does not allow so many. With `box`
    parts with spans are cut into boxes of so many queries along each axis (:mod:`._query_boxes`)."""
    own_batch, own_heads = pattern.sizes()
    budget.need(_INDEX_BYTES * (own_batch or batch) * (own_heads or heads))
    variants, index = pattern.variants(batch, heads)
    if not variants:  # no batch entry or no head: nobody asks, and the answer is nothing
        variants, index = [~Full()], np.zeros((1, 1), np.int32)
    builder = _Builder(q_len, kv_len, tile, box, budget)
    for variant in variants:
        bound = variant.bind(q_len, kv_len)
        builder.add_variant(bound, _ends_of(variant, q_len, kv_len) if bound is variant else None)
    return builder.finish(index)


def _ends_of(pattern: Pattern, q_len: int, kv_len: int) -> Ends | None:
    """The ends of a sequence that hold all of the pattern's keys; None where it tells none, or they meet."""
    found = pattern.ends(q_len)
    if found is None:
        return None
    if not isinstance(found, Ends) or not isinstance(found.between, bool):
        raise TypeError(f"ends(): expected Ends or None from {pattern!r}, got {found!r}")
    first, last = integers("ends()", found[:2], 0)
    return None if found.between or not 0 < first + last < kv_len else Ends(first, last)


class _Builder:
    """Collects views, components and tiles variant by variant."""

    def __init__(self, q_len: int, kv_len: int, tile: tuple[int, int], box: tuple[int, ...] | None, budget: Budget):
        self.q_len, self.kv_len = q_len, kv_len
        self.block_q, self.block_kv = tile
        self.box = box
        self.masks = Masks(*tile, budget)
        self.budget = budget
        self.views = [np.zeros(0, VIEW)]
        self.components = [np.zeros(0, COMPONENT)]
        self.counts: list[np.ndarray] = []  # runs of each list
        self.runs: list[tuple[np.ndarray, ...]] = []  # (tiles, first key tile, key view, mask)
        self.view_count = self.rows = self.nnz = 0
        self.variant_components = [0]
        self.least: int | None = 1

    def add_variant(self, pattern: Pattern, ends: Ends | None) -> None:
        """Plans one pattern: pieces that share their query view become one component."""
        least = None if ends is None else ends.first + ends.last + 1
        self.least = None if least is None or self.least is None else max(self.least, least)
        groups: dict[tuple[Lattice, tuple[int, ...]], list[Piece]] = {}
        parts = parts_of(pattern, self.q_len, self.kv_len, ends, self.box) if self.q_len and self.kv_len else ()
        for part in parts:
            groups.setdefault((part.query, tuple(dq for dq, _ in part.shifts)), []).append(part)
        before = self.variant_components[-1]
        added = [self._add_group(query, parts) for (query, _), parts in groups.items()]
        self.variant_components.append(before + sum(added))

    def _add_group(self, query: Lattice, parts: list[Piece]) -> int:
        """Finds the tiles of pieces with one query view; returns how many components they make."""
        first = q_offset(self.q_len, self.kv_len)
        shifts = np.array([part.shifts for part in parts])  # (parts, components, 2)
        query_view = make_view(query._replace(offset=query.offset - first), self.block_q)
        key_views = [make_view(part.key, self.block_kv) for part in parts]
        found = []
        for index, (part, key_view) in enumerate(zip(parts, key_views, strict=True)):
            find = find_tiles_of_box if part.is_box else find_tiles
            tiles = find(part.pattern, query_view, key_view, first, self.masks, self.budget)
            self.budget.add_runs(len(tiles.key_tile))
            self.nnz += tiles.nnz * len(part.shifts)
            number = np.broadcast_to(np.int32(index), len(tiles.key_tile))
            found.append((tiles.query_tile, tiles.length, tiles.key_tile, number, tiles.mask))
        query_tile, *runs = found[0] if len(found) == 1 else _joined(found)
        self.counts.append(np.diff(np.searchsorted(query_tile, np.arange(int(query_view["tiles"]) + 1))))
        self.runs.append(tuple(runs))
        moves = np.concatenate([shifts[:1, :, 0], shifts[:, :, 1]])
        self._add_components(np.array([query_view, *key_views], VIEW), moves)
        return shifts.shape[1]

    def _add_components(self, views: np.ndarray, shifts: np.ndarray) -> None:
        """One component for each column of `shifts`, by which its query view and its key views are moved."""
        count = shifts.shape[1]
        moved = np.tile(views, (count, 1))
        moved["offset"] += shifts.T
        components = np.zeros(count, COMPONENT)
        components["query_view"] = self.view_count + len(views) * np.arange(count)
        components["key_view"] = components["query_view"] + 1
        components["first_row"], components["query_tiles"] = self.rows, views[0]["tiles"]
        components["variant"] = len(self.variant_components) - 1
        self.views.append(moved.ravel())
        self.components.append(components)
        self.view_count += moved.size
        self.rows += int(views[0]["tiles"])

    def finish(self, index: np.ndarray) -> Tiled:
        """The tables, which take over one array after the other."""
        none = (np.zeros(0, np.int32),) * 4
        count, *columns = (np.concatenate(column) for column in zip(none, *self.runs, strict=True))
        indices, key_view, mask = (frozen(column.astype(np.int32)) for column in columns)
        return Tiled(
            np.concatenate(self.views),
            np.concatenate(self.components),
            offsets(np.concatenate([np.zeros(0, np.int64), *self.counts])).astype(np.int32),
            offsets(count),
            indices,
            key_view,
            mask,
            frozen(self.masks.array()),
            index,
            tuple(self.variant_components),
            self.nnz,
            self.least,
        )


def _joined(found: Sequence[tuple[np.ndarray, ...]]) -> list[np.ndarray]:
    """The runs of several pieces, each of which has them in order, by query tile, piece and key tile."""
    columns = [np.concatenate(column) for column in zip(*found, strict=True)]
    order = np.argsort(columns[0], kind="stable")
    return [column[order] for column in columns]


def parts_of(
    pattern: Pattern, q_len: int, kv_len: int, ends: Ends | None = None, box: tuple[int, ...] | None = None
) -> list[Piece]:
    """The parts of a pattern that hold a pair; those at both ends of the sequence if all of its keys lie there; cut
    into boxes of queries where they have spans and `box` is given.

    Raises
    ------
    TypeError
        If ``parts()`` returns anything but Parts of patterns, lattices and integers.
    ValueError
        If a lattice, moved by any of the shifts, leaves the sequence or visits a position twice, or spans are not of
        the lattices' coordinates.
    """
    found = pattern.parts(q_len, kv_len) if ends is None else _parts_at(ends, pattern, kv_len)
    if not isinstance(found, Iterable):
        raise TypeError(f"parts(): expected a tuple of Part from {pattern!r}, got {found!r}")
    whole_q, whole_k = whole_lattices(q_len, kv_len)
    parts = []
    for part in found:
        if not isinstance(part, Part) or not isinstance(part.pattern, Pattern):
            raise TypeError(f"parts(): expected a tuple of Part from {pattern!r}, got one with {part!r}")
        given = [integers("parts(): shifts", shift) for shift in part.shifts]
        if not given or any(len(shift) != 2 for shift in given) or len(set(given)) < len(given):
            raise ValueError(f"parts(): expected shifts (query, key) that differ, got {part.shifts!r}")
        shifts = [(dq, dk) for dq, dk in given]
        query = _checked(whole_q if part.query is None else part.query)
        key = _checked(whole_k if part.key is None else part.key)
        if 0 not in query.extents + key.extents:
            _check_reach(query, [dq for dq, _ in shifts], q_offset(q_len, kv_len), kv_len)
            _check_reach(key, [dk for _, dk in shifts], 0, kv_len)
            _check_spans(part.spans, query, key)
            if box is None or part.spans is None or len(part.spans) != len(box):
                parts.append(_from_first(part.pattern, query, key, shifts))
            else:
                for boxes in in_boxes(query, key, part.spans, box):
                    at = moved(shifts, boxes.moves)
                    parts.append(_from_first(part.pattern, boxes.query, boxes.key, at, is_box=True))
    return parts


def _parts_at(ends: Ends, pattern: Pattern, kv_len: int) -> tuple[Part, ...]:
    """The pattern at either end. Of all lattices of keys only that of the last ones has an offset, by which
    :func:`spattn.plan._sealed.moved` knows it."""
    lattices = Lattice(0, (1,), (ends.first,)), Lattice(kv_len - ends.last, (1,), (ends.last,))
    return tuple(Part(pattern, None, lattice) for lattice in lattices)


def _check_spans(spans: tuple[Span, ...] | None, query: Lattice, key: Lattice) -> None:
    """ValueError where spans are not of these coordinates, or a query has no key in them."""
    axes = [] if spans is None else itertools.zip_longest(spans, query.extents, key.extents)
    for span, queries, keys in axes:
        along = isinstance(span, Span) and len(span.first) == len(span.last) == queries
        if not along or not all(0 <= a <= b < keys for a, b in zip(span.first, span.last, strict=True)):
            raise ValueError(f"parts(): expected spans of {query} in {key}, got {spans}")


def _from_first(
    pattern: Pattern, query: Lattice, key: Lattice, shifts: list[tuple[int, int]], is_box: bool = False
) -> Piece:
    """The piece with shifts from (0, 0) on, so that all of its numbers are differences of positions."""
    dq, dk = shifts[0]
    moves = tuple((q - dq, k - dk) for q, k in shifts)
    return Piece(pattern, query._replace(offset=query.offset + dq), key._replace(offset=key.offset + dk), moves, is_box)


def _checked(lattice: Lattice) -> Lattice:
    """The lattice in Python's integers; a stride that leads nowhere may be any integer and becomes one of int64."""
    if not isinstance(lattice, Lattice):
        raise TypeError(f"parts(): expected a Lattice or None, got {lattice!r}")
    offset = integer("parts(): offset", lattice.offset)
    strides, extents = integers("parts(): strides", lattice.strides), integers("parts(): extents", lattice.extents, 0)
    if len(strides) != len(extents) or not 1 <= len(extents) <= AXES:
        raise ValueError(f"parts(): expected one stride and one extent for each of 1 to {AXES} axes, got {lattice}")
    kept = (s if n > 1 or abs(s) <= LARGEST else 0 for s, n in zip(strides, extents, strict=True))
    return Lattice(offset, tuple(kept), extents)


def _check_reach(lattice: Lattice, shifts: list[int], first: int, end: int) -> None:
    low, high = _corners(*lattice)
    low, high = low + min(shifts), high + max(shifts)
    if low < first or high >= end:
        raise ValueError(f"parts(): expected positions in [{first}, {end}), got {low} to {high} from {lattice}")
    if repeats(lattice.strides, lattice.extents):
        raise ValueError(f"parts(): expected lattices that visit no position twice, got {lattice}")


def _corners(offset: int, strides: Sequence[int], extents: Sequence[int]) -> tuple[int, int]:
    """The least and the greatest position of a lattice whose extents are at least 1."""
    reach = [stride * (extent - 1) for stride, extent in zip(strides, extents, strict=True)]
    return offset + sum(r for r in reach if r < 0), offset + sum(r for r in reach if r > 0)


def repeats(strides: Sequence[int], extents: Sequence[int]) -> bool:
    """Whether two points of a lattice are one position.

    None are where every stride exceeds the reach of the smaller ones, as in a grid; otherwise the points are counted,
    which takes O(points) memory, but no more points than there are positions.
    """
    axes = sorted((abs(stride), extent) for stride, extent in zip(strides, extents, strict=True) if extent > 1)
    reach = 0
    for stride, extent in axes:
        if stride <= reach:
            break
        reach += stride * (extent - 1)
    else:
        return False
    low, high = _corners(0, strides, extents)
    points = math.prod(extents)
    if points > high - low + 1:
        return True
    positions = np.zeros(1, np.int64)
    for stride, extent in axes:
        positions = (positions[:, None] + stride * np.arange(extent)).ravel()
    return len(np.unique(positions)) < points
