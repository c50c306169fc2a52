"""Find the tiles of a pattern, variant by variant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..._util.frozen import frozen, frozen_whole
from ..._util.imports import whole_imports
from ..._util.index_checks import q_offset
from ..._util.ragged import offsets
from ...patterns import Full, Pattern
from ...patterns.base.check import integers
from ...patterns.hints.closed_forms import Ends, Lattice
from ..contract.budget import Budget
from ..contract.types import COMPONENT, NO_ORDER, VIEW
from ._lists import RunLists
from .masks import Masks
from .parts import Piece, parts_of
from .tiling import choose_tile, find_tiles, make_view

if TYPE_CHECKING:
    from ...patterns.base.pattern import Ordered

__all__ = ["Tiled", "tile_pattern"]

_INDEX_BYTES = 4  # each element of a plan's `variant` and of its permutations


@dataclass(frozen=True)
class Tiled:
    """The tiles of a pattern: the fields of :class:`~spattn.Plan` that define *what* is computed.

    `variant_components` is the start of each variant's components. `least` is the smallest kv_len that the tiles
    support, or None if kv_len is fixed. If kv_len grows, the first key view of each component in `growing` grows too;
    `rests` has the index of the last run in this view, for each of their lists (:mod:`spattn.schedule.growth`).
    """

    kv_len: int
    tile: tuple[int, int]
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
    growing: np.ndarray
    rests: np.ndarray
    q_order: np.ndarray
    kv_order: np.ndarray


def tile_pattern(
    pattern: Pattern,
    q_len: int,
    kv_len: int,
    batch: int,
    heads: int,
    tile: tuple[int, int] | None,
    box: tuple[int, ...] | None,
    ordered: bool,
    gathered: bool,
    budget: Budget,
) -> Tiled:
    """Find all non-empty tiles of a pattern; raise ValueError if they exceed `budget`.

    If the pattern is length-polymorphic and allows all keys between its ends, its tiles are those of the smallest
    kv_len with a full tile between the ends. If `box` is given, split parts with spans into query boxes
    (:mod:`.query_boxes`). If `ordered`, apply the pattern's permutation. If `gathered` and the pattern lists its pairs,
    gather the keys of each query tile. If `tile` is None, choose a tile for the pattern.
    """
    own_batch, own_heads = pattern.sizes()
    budget.need(_INDEX_BYTES * (own_batch or batch) * (own_heads or heads))
    variants, index = pattern.variants(batch, heads)
    if not variants:  # no batch entry or no head: plan an empty pattern
        variants, index = [~Full()], np.zeros((1, 1), np.int32)
    bound = [variant.bind(q_len, kv_len) for variant in variants]
    orders = NO_ORDER, NO_ORDER
    if ordered:
        budget.need(_INDEX_BYTES * len(variants) * (q_len + kv_len))
        found = [pattern._in_order() if pattern._has_order else None for pattern in bound]
        orders = _orders(found, q_len, kv_len)
        bound = [own if new is None else new.pattern for own, new in zip(bound, found, strict=True)]
    if tile is None:
        tile = choose_tile(bound, q_len, kv_len)
    own = [_ends_of(v, q_len, kv_len) if b is v else None for v, b in zip(variants, bound, strict=True)]
    ends, kv_len = _joint_ends(own, q_len, kv_len, tile[1])
    builder = _Builder(q_len, kv_len, tile, box, budget)
    places: dict[int, np.ndarray] = {}
    for number, (one, its) in enumerate(zip(bound, ends, strict=True)):
        if gathered and one._lists_pairs:
            places[number] = builder.add_gathered(one)
        else:
            builder.add_variant(one, its)
    if any(map(len, places.values())):
        orders = NO_ORDER, _joint_places(places, len(bound), kv_len, budget)
    return builder.finish(index, *orders)


def _orders(found: Sequence[Ordered | None], q_len: int, kv_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the permutations of queries and of keys, one row for each variant; empty if all are identities."""
    q_order, kv_order = np.arange(q_len), np.arange(kv_len)
    each = [(q_order, kv_order) if one is None else (one.q_order, one.kv_order) for one in found]
    if all(np.array_equal(q, q_order) and np.array_equal(k, kv_order) for q, k in each):
        return NO_ORDER, NO_ORDER
    of_q, of_kv = (frozen(np.array(side, np.int32)) for side in zip(*each, strict=True))
    return of_q, of_kv


def _joint_places(places: dict[int, np.ndarray], variants: int, kv_len: int, budget: Budget) -> np.ndarray:
    """Return the key at each index for each variant (without `places`, the identity); rows are padded with key 0 at
    indices that no view contains."""
    each = [places.get(number, np.arange(kv_len)) for number in range(variants)]
    most = max(map(len, each))
    budget.need(_INDEX_BYTES * variants * most)
    joint = np.zeros((variants, most), np.int32)
    for row, own in zip(joint, each, strict=True):
        row[: len(own)] = own
    return frozen(joint)


def _ends_of(pattern: Pattern, q_len: int, kv_len: int) -> Ends | None:
    """Return the ends between which the pattern allows all keys or none; None if unknown or useless.

    Ends are useless if the pattern allows no key between them and they are empty or cover the sequence.
    """
    found = pattern.ends(q_len)
    if found is None:
        return None
    if not isinstance(found, Ends) or not isinstance(found.between, bool):
        raise TypeError(f"ends(): expected Ends or None from {pattern!r}, got {found!r}")
    first, last = integers("ends()", found[:2], 0)
    return Ends(first, last, found.between) if found.between or 0 < first + last < kv_len else None


def _joint_ends(ends: Sequence[Ends | None], q_len: int, kv_len: int, block_kv: int) -> tuple[list[Ends | None], int]:
    """Return the ends of all variants, and the kv_len to plan.

    Variants that allow all keys between their ends get common ends, because kv_len grows between them. The planned
    kv_len is the smallest with a full tile and one more key between the ends.
    """
    known = [one for one in ends if one is not None]
    between = [one for one in known if one.between]
    if q_len and between and len(known) == len(ends):
        first, last = max(one.first for one in between), max(q_len, *(one.last for one in between))
        before = max(first + block_kv, *(one.first + one.last - last for one in known))
        fewest = last + -(-before // block_kv) * block_kv + 1
        if fewest <= kv_len:
            joint = Ends(first, last, between=True)
            return [joint if one is not None and one.between else one for one in ends], fewest
    return [None if one is not None and one.between else one for one in ends], kv_len


class _Builder:
    """Views, components and tile lists, accumulated variant by variant."""

    def __init__(self, q_len: int, kv_len: int, tile: tuple[int, int], box: tuple[int, ...] | None, budget: Budget):
        self.q_len, self.kv_len = q_len, kv_len
        self.block_q, self.block_kv = tile
        self.box = box
        self.masks = Masks(*tile, budget)
        self.budget = budget
        self.views = [np.zeros(0, VIEW)]
        self.components = [np.zeros(0, COMPONENT)]
        self.lists = RunLists()
        self.key_views: list[bytes] = []  # int32 key view of each run
        self.view_count = self.rows = self.nnz = 0
        self.variant_components = [0]
        self.least: int | None = 1
        self.growing: list[int] = []  # component indices

    def add_variant(self, pattern: Pattern, ends: Ends | None) -> None:
        """Add the tiles of a pattern; pieces with equal query views become one component."""
        least = None if ends is None else self.kv_len if ends.between else ends.first + ends.last + 1
        self.least = None if least is None or self.least is None else max(self.least, least)
        groups: dict[tuple[Lattice, tuple[int, ...]], list[Piece]] = {}
        parts = parts_of(pattern, self.q_len, self.kv_len, ends, self.box) if self.q_len and self.kv_len else ()
        for part in parts:
            groups.setdefault((part.query, tuple(dq for dq, _ in part.shifts)), []).append(part)
        before = self.variant_components[-1]
        if groups and ends is not None and ends.between:
            self.growing.append(before)
        added = [self._add_group(query, parts) for (query, _), parts in groups.items()]
        self.variant_components.append(before + sum(added))

    def add_gathered(self, pattern: Pattern) -> np.ndarray:
        """Add the tiles of a pattern that lists its pairs, with gathered keys; return the key at each index."""
        self.least = None
        with whole_imports:  # imported late: few patterns need it
            from .listed import gathered_tiles

        first, query_view = q_offset(self.q_len, self.kv_len), make_view(Lattice(0, (1,), (self.q_len,)), self.block_q)
        before = self.lists.runs
        nnz, keys = gathered_tiles(pattern, query_view, first, self.kv_len, self.masks, self.lists, self.budget)
        if len(keys):
            key_view = make_view(Lattice(0, (1,), (len(keys),)), self.block_kv)
            self.nnz += nnz
            self._of_first_view(before)
            self._add_components(np.array([query_view, key_view], VIEW), None)
        else:
            self.lists.drop_empty(int(query_view["tiles"]))
        self.variant_components.append(self.variant_components[-1] + bool(len(keys)))
        return keys

    def _add_group(self, query: Lattice, parts: list[Piece]) -> int:
        """Add the tiles of pieces that share a query view, with a component for each shift; return their number."""
        first = q_offset(self.q_len, self.kv_len)
        count = len(parts[0].shifts)
        query_view = make_view(query._replace(offset=query.offset - first), self.block_q)
        key_views = [make_view(part.key, self.block_kv) for part in parts]

        def find(part: Piece, key_view: np.void, lists: RunLists) -> RunLists:
            nnz = find_tiles(part, query_view, key_view, first, self.kv_len, self.masks, lists, self.budget)
            self.nnz += nnz * count
            return lists

        if len(parts) == 1:
            before = self.lists.runs
            find(parts[0], key_views[0], self.lists)
            self._of_first_view(before)
        else:
            found = [find(part, view, RunLists()) for part, view in zip(parts, key_views, strict=True)]
            self.key_views.append(_add_joined(self.lists, found))
        moves = None
        if count > 1:
            shifts = np.array([part.shifts for part in parts])  # (parts, components, 2)
            moves = np.concatenate([shifts[:1, :, 0], shifts[:, :, 1]])
        self._add_components(np.array([query_view, *key_views], VIEW), moves)
        return count

    def _of_first_view(self, before: int) -> None:
        """Assign the runs after `before` to the first key view of their components."""
        self.key_views.append(bytes(_INDEX_BYTES * (self.lists.runs - before)))

    def _add_components(self, views: np.ndarray, moves: np.ndarray | None) -> None:
        """Add a component for each column of `moves`, which shifts its query and key views; None means no shift."""
        tiles = int(views[0]["tiles"])
        first = self.view_count, self.view_count + 1, self.rows, tiles, len(self.variant_components) - 1
        components = np.array([first], COMPONENT)
        if moves is not None:
            count = moves.shape[1]
            components, moved = np.repeat(components, count), np.tile(views, (count, 1))
            for side in ("query_view", "key_view"):
                components[side] += (len(views) * np.arange(count)).astype(np.int32)
            moved["offset"] += moves.T
            views = moved.ravel()
        self.views.append(views)
        self.components.append(components)
        self.view_count += views.size
        self.rows += tiles

    def finish(self, index: np.ndarray, q_order: np.ndarray, kv_order: np.ndarray) -> Tiled:
        """Return the arrays, which take over the memory of the lists."""
        indptr, tile_indptr, indices, mask = self.lists.arrays()
        of_runs = self.key_views[0] if len(self.key_views) == 1 else b"".join(self.key_views)
        key_view = np.ndarray(len(mask), np.int32, of_runs)
        components, growing = frozen_whole(self.components), np.array(self.growing, np.int64)
        return Tiled(
            self.kv_len,
            (self.block_q, self.block_kv),
            frozen_whole(self.views),
            components,
            indptr,
            tile_indptr,
            indices,
            key_view,
            mask,
            frozen(self.masks.array()),
            index,
            tuple(self.variant_components),
            self.nnz,
            self.least,
            growing,
            _last_runs(components, growing, indptr, key_view),
            q_order,
            kv_order,
        )


def _last_runs(components: np.ndarray, growing: np.ndarray, indptr: np.ndarray, key_view: np.ndarray) -> np.ndarray:
    """For each run list of the `growing` components, return the index of the last run with key view 0."""
    if not len(growing):
        return growing
    own, before = [], offsets(key_view == 0)
    for component in components[growing]:
        rows = component["first_row"] + np.arange(component["query_tiles"])
        own.append(indptr[rows] + before[indptr[rows + 1]] - before[indptr[rows]] - 1)
    return np.concatenate(own)


def _add_joined(lists: RunLists, found: Sequence[RunLists]) -> bytes:
    """Append the joint lists of several pieces, sorted by query tile, piece and key tile; return each run's piece."""
    each = [own.arrays() for own in found]
    query_tiles = len(each[0][0]) - 1
    query_tile = np.concatenate([np.repeat(np.arange(query_tiles, dtype=np.int32), np.diff(own[0])) for own in each])
    length = np.concatenate([np.diff(own[1]).astype(np.int32) for own in each])
    key_tile, mask = (np.concatenate([own[column] for own in each]) for column in (2, 3))
    order = np.argsort(query_tile, kind="stable")
    lists.add(query_tiles, *(column[order] for column in (query_tile, key_tile, length, mask)))
    return np.repeat(np.arange(len(each), dtype=np.int32), [len(own[3]) for own in each])[order].tobytes()
