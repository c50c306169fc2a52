"""The plan in the form that attention.cu reads: NumPy only, no GPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...plan._types import Plan, first_coordinates, tile_lists
from ...schedule.finishers import Merges, find_finishers
from ...schedule.roles import roles
from .builds import ROWS
from .maps import MapSpec, halve, map_views

WORK = np.dtype([(name, "i4") for name in ("query_view", "x", "y", "z", "begin", "end", "key_view", "slot")])
Mapped = tuple[tuple[MapSpec, ...], np.ndarray]  # maps, and the records of all views

ENTRY = np.dtype([(name, "i4") for name in ("x", "y", "z", "view")])


@dataclass(frozen=True)
class Layout:
    """Device arrays of a plan and the tensor maps they refer to.

    Spec number ``s`` is maps ``2 s`` (q or k) and ``2 s + 1`` (out or v) of a batch entry; query specs come first.

    Attributes
    ----------
    query_specs, key_specs : tuple of MapSpec
    query_views, key_views : arrays of VIEW
    work : (items,) array of WORK
    entries : (entries,) array of ENTRY
    entry_masks : (entries,) int32 array
    masks : (n, warpgroups, 128) uint32 array
        In the order of accumulators, see :func:`fragment_masks`.
    priors : (finishers, block_q) int32 array
        See :class:`~spattn.schedule.finishers.Finishers`.
    finishes : (items,) bool array
    merges : Merges
    moves : bool
        Whether the maps and views of the last keys, those with an offset, move.
    q_order, kv_order : (variants, places) or (0, 0) int32 arrays
        The plan's. No tensor map reads what is looked up.
    variants : (items,) int32 array
        Whose each work item is, for plans whose places are looked up.
    """

    query_specs: tuple[MapSpec, ...]
    key_specs: tuple[MapSpec, ...]
    query_views: np.ndarray
    key_views: np.ndarray
    work: np.ndarray
    entries: np.ndarray
    entry_masks: np.ndarray
    masks: np.ndarray
    priors: np.ndarray
    finishes: np.ndarray
    merges: Merges
    moves: bool
    q_order: np.ndarray
    kv_order: np.ndarray
    variants: np.ndarray

    @property
    def gathers(self) -> bool:
        """Whether places are looked up."""
        return bool(self.q_order.size or self.kv_order.size)

    @property
    def maps(self) -> int:
        """Tensor maps of one batch entry."""
        return 2 * (len(self.query_specs) + len(self.key_specs))


def make_layout(plan: Plan, moves: bool = False) -> Layout:
    """Lays a plan out for the Hopper kernel; where it moves, views that do and views that do not share no map."""
    *_, row_component = roles(plan)
    (query_specs, query_views), (key_specs, key_views) = _mapped(plan, moves)
    query_specs, query_views = halve(query_specs, query_views, 1 if plan.block_q <= ROWS else plan.block_q // ROWS)
    components = plan.components[plan.work["component"]]
    if (plan.work["begin"] >= plan.work["end"]).any():
        raise ValueError("plan: expected work items of at least one tile")
    finishers = find_finishers(plan)
    work = np.zeros(len(plan.work), dtype=WORK)
    work["query_view"], work["key_view"] = components["query_view"], components["key_view"]
    work["begin"], work["end"], work["slot"] = plan.work["begin"], plan.work["end"], finishers.slots
    work["z"], work["y"], work["x"] = first_coordinates(plan.views[components["query_view"]], plan.work["query_tile"]).T
    lists = tile_lists(plan)
    owner = plan.components[np.repeat(row_component, np.diff(lists.indptr))]
    entries = np.zeros(len(lists.indices), dtype=ENTRY)
    key_views_of = plan.views[owner["key_view"] + lists.key_view]
    entries["z"], entries["y"], entries["x"] = first_coordinates(key_views_of, lists.indices).T
    entries["view"] = lists.key_view
    return Layout(
        query_specs,
        key_specs,
        query_views,
        key_views,
        work,
        entries,
        lists.mask,
        fragment_masks(plan.masks),
        finishers.priors,
        finishers.finishes,
        finishers.merges,
        moves,
        plan.q_order,
        plan.kv_order,
        np.repeat(np.arange(plan.variants, dtype=np.int32), np.diff(plan.work_indptr) * plan.ordered),
    )


def maps_of(plan: Plan, moves: bool) -> int:
    """Tensor maps of one batch entry, as :func:`make_layout` makes them."""
    (query_specs, _), (key_specs, _) = _mapped(plan, moves)
    return 2 * (len(query_specs) + len(key_specs))


def _mapped(plan: Plan, moves: bool) -> tuple[Mapped, Mapped]:
    """The maps and views of queries, and of keys; those that are looked up need no map."""
    query_ids, key_ids, _ = roles(plan)
    queries = map_views(plan.views, query_ids[: 0 if plan.q_order.size else None], 0)
    return queries, map_views(plan.views, key_ids[: 0 if plan.ordered else None], len(queries[0]), join=not moves)


def fragment_masks(masks: np.ndarray) -> np.ndarray:
    """Bitmasks of tiles of 64 keys in the order of WGMMA accumulators: (n, warpgroups, 128 threads) of uint32.

    Bit ``4 i + 2 h + b`` of lane ``4 g + t`` in warp ``w`` is row ``16 w + 8 h + g``, column ``8 i + 2 t + b``.
    """
    count, block_q, _ = masks.shape
    warpgroups = -(-block_q // ROWS)
    little = np.ascontiguousarray(masks).astype("<u8").view(np.uint8)
    bits = np.unpackbits(little, bitorder="little").reshape(count, block_q, 64)
    if block_q < warpgroups * ROWS:  # rows that no query fills see no key
        bits = np.pad(bits, ((0, 0), (0, warpgroups * ROWS - block_q), (0, 0)))
    bits = bits.reshape(count, warpgroups, 4, 2, 8, 8, 4, 2)
    bits = bits.transpose(0, 1, 2, 4, 6, 5, 3, 7)  # n, warpgroup, w, g, t, i, h, b
    packed = np.packbits(np.ascontiguousarray(bits).reshape(count, warpgroups, 128, 32), -1, "little")
    return packed.view(np.uint32).reshape(count, warpgroups, 128)
