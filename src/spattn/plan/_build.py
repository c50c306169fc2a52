"""From a pattern to a plan, variant by variant."""

from __future__ import annotations

import numpy as np

from .._frozen import frozen
from ..patterns import Full, Lattice, Part, Pattern
from ._budget import Budget
from ._parts import parts_of
from ._schedule import schedule
from ._tiling import Masks, find_tiles, make_view
from ._types import COMPONENT, LARGEST, VIEW, Plan

__all__ = ["build"]

_SHORTEST_PIECE = 16  # tiles: splitting a list further costs more in merging than it gains
_PIECES_PER_WORKER = 4
_INDEX_BYTES = 4  # of a (batch entry, head) in a plan's variant


def build(
    pattern: Pattern, q_len: int, kv_len: int, batch: int, heads: int, tile: tuple[int, int], workers: int,
    budget: Budget,
) -> Plan:
    """A new plan; ValueError where `budget` does not allow it."""
    own_batch, own_heads = pattern.sizes()
    budget.need(_INDEX_BYTES * (own_batch or batch) * (own_heads or heads))
    variants, index = pattern.variants(batch, heads)
    if not variants:  # no batch entry or no head: nobody asks, and the answer is nothing
        variants, index = [~Full()], np.zeros((1, 1), np.int32)
    builder = _Builder(q_len, kv_len, tile, budget)
    for variant in variants:
        builder.add_variant(variant.bind(q_len, kv_len))
    made = builder.finish(pattern, index, workers)
    budget.need(made.nbytes)
    return made


class _Builder:
    """Collects views, components and tiles variant by variant."""

    def __init__(self, q_len: int, kv_len: int, tile: tuple[int, int], budget: Budget):
        self.q_len, self.kv_len = q_len, kv_len
        self.block_q, self.block_kv = tile
        self.masks = Masks(*tile, budget)
        self.budget = budget
        self.views = [np.zeros(0, VIEW)]
        self.components = [np.zeros(0, COMPONENT)]
        self.counts: list[np.ndarray] = []  # tiles of each list
        self.entries: list[tuple[np.ndarray, ...]] = []  # (key tile, key view, mask)
        self.view_count = self.rows = self.nnz = 0
        self.variant_components = [0]

    def add_variant(self, pattern: Pattern) -> None:
        """Plans one pattern: pieces that share their query view become one component."""
        groups: dict[tuple, list[Part]] = {}
        for part in parts_of(pattern, self.q_len, self.kv_len) if self.q_len and self.kv_len else ():
            groups.setdefault((part.query, tuple(dq for dq, _ in part.shifts)), []).append(part)
        before = self.variant_components[-1]
        added = [self._add_group(query, parts) for (query, _), parts in groups.items()]
        self.variant_components.append(before + sum(added))

    def _add_group(self, query: Lattice, parts: list[Part]) -> int:
        """Finds the tiles of pieces with one query view; returns how many components they make."""
        first = self.kv_len - self.q_len
        shifts = np.array([part.shifts for part in parts])  # (parts, components, 2)
        query_view = make_view(query._replace(offset=query.offset - first), self.block_q)
        key_views = [make_view(part.key, self.block_kv) for part in parts]
        found = []
        for number, (part, key_view) in enumerate(zip(parts, key_views, strict=True)):
            tiles = find_tiles(part.pattern, query_view, key_view, first, self.masks, self.budget)
            self.budget.add_tiles(len(tiles.key_tile))
            self.nnz += tiles.nnz * len(part.shifts)
            found.append((tiles.query_tile, np.full(len(tiles.key_tile), number), tiles.key_tile, tiles.mask))
        query_tile, number, key_tile, mask = (np.concatenate(column) for column in zip(*found, strict=True))
        order = np.lexsort((key_tile, number, query_tile))
        self.counts.append(np.bincount(query_tile, minlength=int(query_view["tiles"])))
        self.entries.append((key_tile[order], number[order], mask[order]))
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

    def finish(self, pattern: Pattern, index: np.ndarray, workers: int) -> Plan:
        """Schedules every variant and assembles the plan, which takes over one array after the other."""
        views, components = np.concatenate(self.views), np.concatenate(self.components)
        indptr = _offsets(np.concatenate([np.zeros(0, np.int64), *self.counts]))
        none = (np.zeros(0, np.int32),) * 3
        key_tile, key_view, mask = (
            frozen(np.concatenate(column).astype(np.int32)) for column in zip(none, *self.entries, strict=True)
        )
        made = [self._schedule(views, components, indptr, v, workers) for v in range(len(self.variant_components) - 1)]
        slots = max(s.slots for s in made)
        if slots * self.block_q > LARGEST:
            rows = slots * self.block_q
            raise ValueError(f"pattern: expected at most {LARGEST} rows of workspace, got {rows}; use fewer workers")
        return Plan(
            pattern=pattern, q_len=self.q_len, kv_len=self.kv_len, block_q=self.block_q, block_kv=self.block_kv,
            views=views, components=components, indptr=indptr, indices=key_tile, key_view=key_view,
            mask=mask, masks=frozen(self.masks.array()), work=frozen(np.concatenate([s.work for s in made])),
            work_indptr=_offsets([len(s.work) for s in made]), slots=slots,
            merge_rows=frozen(np.concatenate([s.merge_rows for s in made]).astype(np.int32)),
            merge_indptr=_offsets(np.concatenate([s.merge_counts for s in made])),
            merge_sources=frozen(np.concatenate([s.merge_sources for s in made]).astype(np.int32)),
            merge_variants=_offsets([len(s.merge_rows) for s in made]), variant=index, nnz=self.nnz,
        )  # fmt: skip

    def _schedule(self, views, components, indptr, variant, workers):
        first, last = self.variant_components[variant : variant + 2]
        own = components[first:last]
        tiles = int((indptr[own["first_row"] + own["query_tiles"]] - indptr[own["first_row"]]).sum(dtype=np.int64))
        longest = max(_SHORTEST_PIECE, 1 << (tiles // (_PIECES_PER_WORKER * workers)).bit_length())
        return schedule(views, own, first, indptr, self.q_len, self.block_q, longest)


def _offsets(sizes) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
