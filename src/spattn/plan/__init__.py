"""Plans: a pattern compiled once into tiles over affine views; every backend executes the same plan."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np

from ..patterns import Full, Lattice, Part, Pattern
from ..patterns._base import check_lengths
from ._schedule import schedule
from ._tiling import Masks, find_tiles, make_view
from ._types import COMPONENT, VIEW, Plan, positions
from ._validate import validate

__all__ = ["Plan", "plan", "positions", "validate"]

_SHORTEST_PIECE = 16  # tiles: splitting a list further costs more in merging than it gains
_PIECES_PER_WORKER = 4
_CACHED_PLANS = 64

_cache: OrderedDict[tuple, Plan] = OrderedDict()
_lock = threading.Lock()


def plan(
    pattern: Pattern,
    q_len: int,
    kv_len: int | None = None,
    *,
    batch: int = 1,
    heads: int | None = None,
    tile: tuple[int, int] = (128, 64),
    workers: int = 1,
) -> Plan:
    """Compile a pattern at given lengths into a plan that every backend can execute.

    Parameters
    ----------
    pattern : Pattern
        What is allowed.
    q_len, kv_len : int
        Lengths in tokens; `kv_len` defaults to `q_len`.
    batch, heads : int, optional
        Batch entries and query heads; they matter only to patterns that tell them apart. `heads` defaults to the
        pattern's own number.
    tile : (int, int), optional
        Queries and keys of a tile; the number of keys is a multiple of 64.
    workers : int, optional
        How many workers (processor cores, multiprocessors) share one head's work: long key lists are split so that each
        has about four pieces.

    Returns
    -------
    Plan
        Cached by all arguments; the last 64 plans are kept.

    Raises
    ------
    ValueError
        If the pattern does not fit the lengths, the batch or the heads, or `tile` is not two positive integers with
        ``tile[1] % 64 == 0``.

    Notes
    -----
    Costs O(q_len + kv_len + tiles), never q_len × kv_len, for patterns whose ``allows`` uses operators and ufuncs.

    Examples
    --------
    >>> import spattn
    >>> p = spattn.plan(spattn.patterns.SlidingWindow(256), 16384)
    >>> p.nnz, round(p.efficiency, 2)
    (8339200, 0.8)
    """
    kv_len = q_len if kv_len is None else kv_len
    if not isinstance(pattern, Pattern):
        raise TypeError(f"pattern: expected a Pattern, got {type(pattern).__name__}")
    check_lengths(q_len, kv_len)
    block_q, block_kv = tile
    if block_q < 1 or block_kv < 64 or block_kv % 64:
        raise ValueError(f"tile: expected (block_q >= 1, a multiple of 64), got {tile}")
    heads = max(1, pattern.sizes()[1]) if heads is None else heads
    key = (pattern, int(q_len), int(kv_len), batch, heads, tuple(tile), workers)
    with _lock:
        if key in _cache:
            _cache.move_to_end(key)
            return _cache[key]
    made = _make(*key)
    made.cache["valid"] = True
    for array in vars(made).values():
        if isinstance(array, np.ndarray):
            array.flags.writeable = False  # shared by everybody, and checked only here
    with _lock:
        made = _cache.setdefault(key, made)
        while len(_cache) > _CACHED_PLANS:
            _cache.popitem(last=False)
    return made


def _make(pattern, q_len, kv_len, batch, heads, tile, workers) -> Plan:
    builder = _Builder(q_len, kv_len, tile)
    variants, index = pattern.variants(batch, heads)
    if not variants:  # no batch entry or no head: nobody asks, and the answer is nothing
        variants, index = [~Full()], np.zeros((1, 1), np.int32)
    for variant in variants:
        builder.add_variant(variant.bind(q_len, kv_len))
    return builder.finish(pattern, index, workers)


class _Builder:
    """Collects views, components and tiles variant by variant."""

    def __init__(self, q_len, kv_len, tile):
        self.q_len, self.kv_len = q_len, kv_len
        self.block_q, self.block_kv = tile
        self.masks = Masks(*tile)
        self.views: list[np.void] = []
        self.components: list[tuple] = []
        self.counts: list[np.ndarray] = []  # tiles of each list
        self.entries: list[tuple[np.ndarray, ...]] = []  # (key tile, key view, mask)
        self.rows = 0
        self.variant_components = [0]
        self.nnz = 0

    def add_variant(self, pattern: Pattern) -> None:
        """Plans one pattern: pieces that share their query view become one component."""
        groups: dict[tuple, list[Part]] = {}
        for part in pattern.parts(self.q_len, self.kv_len) if self.q_len and self.kv_len else ():
            lattices = [part.query or self._all_queries(), part.key or self._all_keys()]
            if all(n > 0 for lattice in lattices for n in lattice.extents):
                groups.setdefault((lattices[0], tuple(q for q, _ in part.shifts)), []).append(part)
        for (query, _), parts in groups.items():
            self._add_group(query, parts)
        self.variant_components.append(len(self.components))

    def _all_queries(self) -> Lattice:
        return Lattice(self.kv_len - self.q_len, (1,), (self.q_len,))

    def _all_keys(self) -> Lattice:
        return Lattice(0, (1,), (self.kv_len,))

    def _add_group(self, query: Lattice, parts: list[Part]) -> None:
        first = self.kv_len - self.q_len
        shifts = parts[0].shifts
        query_view = make_view(query._replace(offset=query.offset - first), self.block_q)
        key_views = [make_view(part.key or self._all_keys(), self.block_kv) for part in parts]
        found = []
        for number, (part, key_view) in enumerate(zip(parts, key_views, strict=True)):
            moved_q, moved_k = query_view.copy(), key_view.copy()
            moved_q["offset"] += part.shifts[0][0]
            moved_k["offset"] += part.shifts[0][1]
            tiles = find_tiles(part.pattern, moved_q, moved_k, first, self.masks)
            self.nnz += tiles.nnz * len(shifts)
            found.append((tiles.query_tile, np.full(len(tiles.key_tile), number), tiles.key_tile, tiles.mask))
        query_tile, number, key_tile, mask = (np.concatenate(column) for column in zip(*found, strict=True))
        order = np.lexsort((key_tile, number, query_tile))
        self.counts.append(np.bincount(query_tile, minlength=int(query_view["tiles"])))
        self.entries.append((key_tile[order], number[order], mask[order]))
        for at, (dq, _) in enumerate(shifts):
            self._add_component(query_view, dq, key_views, [part.shifts[at][1] for part in parts])
        self.rows += int(query_view["tiles"])

    def _add_component(self, query_view, dq, key_views, key_shifts) -> None:
        moved = [view.copy() for view in (query_view, *key_views)]
        for view, by in zip(moved, (dq, *key_shifts), strict=True):
            view["offset"] += by
        for view, length in zip(moved, (self.q_len, *(self.kv_len,) * len(key_views)), strict=True):
            last = view["offset"] + ((view["extent"] - 1) * view["stride"]).sum()
            if view["offset"] < 0 or last >= length:
                raise ValueError(f"parts(): a lattice reaches positions {view['offset']} … {last} of {length}")
        number, variant = len(self.views), len(self.variant_components) - 1
        self.components.append((number, number + 1, self.rows, int(query_view["tiles"]), variant))
        self.views.extend(moved)

    def finish(self, pattern: Pattern, index: np.ndarray, workers: int) -> Plan:
        """Schedules every variant and assembles the plan."""
        views = np.array(self.views, dtype=VIEW)
        components = np.array(self.components, dtype=COMPONENT)
        indptr = np.concatenate([[0], np.cumsum(np.concatenate(self.counts or [[]]))]).astype(np.int64)
        if indptr[-1] >= 2**31:
            raise ValueError(f"pattern: needs {indptr[-1]} tiles, more than a plan can hold; use a larger tile")
        entries = [np.concatenate(column).astype(np.int32) for column in zip(*self.entries, strict=True)]
        key_tile, key_view, mask = entries or [np.zeros(0, np.int32)] * 3
        made = [self._schedule(views, components, indptr, v, workers) for v in range(len(self.variant_components) - 1)]
        counts = np.concatenate([s.merge_counts for s in made])

        def offsets(sizes):
            return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)

        return Plan(
            pattern=pattern, q_len=self.q_len, kv_len=self.kv_len, block_q=self.block_q, block_kv=self.block_kv,
            views=views, components=components, indptr=indptr.astype(np.int32), indices=key_tile, key_view=key_view,
            mask=mask, masks=self.masks.array(), work=np.concatenate([s.work for s in made]),
            work_indptr=offsets([len(s.work) for s in made]), slots=max(s.slots for s in made),
            merge_rows=np.concatenate([s.merge_rows for s in made]).astype(np.int32), merge_indptr=offsets(counts),
            merge_sources=np.concatenate([s.merge_sources for s in made]).astype(np.int32),
            merge_variants=offsets([len(s.merge_rows) for s in made]), variant=index, nnz=self.nnz,
        )  # fmt: skip

    def _schedule(self, views, components, indptr, variant, workers):
        first, last = self.variant_components[variant : variant + 2]
        own = components[first:last]
        tiles = sum(int(indptr[c["first_row"] + c["query_tiles"]] - indptr[c["first_row"]]) for c in own)
        longest = max(_SHORTEST_PIECE, 1 << (tiles // (_PIECES_PER_WORKER * workers)).bit_length())
        return schedule(views, own, first, indptr, self.q_len, self.block_q, longest)
