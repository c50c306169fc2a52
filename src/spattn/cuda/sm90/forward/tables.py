"""Device form of a plan for attention.cu (NumPy only)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...._util.ragged import offsets
from ....choose.specializations import ROWS
from ....planning.contract.types import Plan, first_coordinates, positions, tile_lists
from ....schedule.reductions import Merges, find_reductions
from ....schedule.roles import key_views_of, roles
from ....schedule.tensor_maps import MapSpec, halve, mapped

WORK = np.dtype([(name, "i4") for name in ("query_view", "x", "y", "z", "begin", "end", "key_view", "slot")])

_TILES_AT_ONCE = 1 << 14  # tiles resolved at once, at 17 bytes per cell

_MASKS_AT_ONCE = 256  # masks converted at once, to stay in cache
_LOW_PAIRS = np.uint64(0x0303030303030303)
# Shift-and-mask steps that compact the low nibble of each byte into eight adjacent nibbles.
_NARROWED = [
    (np.uint64(shift), np.uint64(kept))
    for shift, kept in ((4, 0x00FF00FF00FF00FF), (8, 0x0000FFFF0000FFFF), (16, 0x00000000FFFFFFFF))
]
ENTRY = np.dtype([(name, "i4") for name in ("x", "y", "z", "view")])


class Items(NamedTuple):
    """New work items: those of each variant of the plan, once per mask that its heads use.

    Attributes
    ----------
    work : (n,) array of begin and end
        Tile list of each item, [0, upper bound of its length).
    work_indptr : (pairs + 1,) int32 array
        First item of each (variant, mask) pair.
    variant : (batch, heads) int32 array
        Index of each head's (variant, mask) pair.
    kv_len : int
    items, selections : (n,) int32 arrays
        The plan's work item, and the mask, of each item.
    starts : (n + 1,) int64 array
        Start of the space reserved for each tile list.
    masks : int
        Upper bound of the number of bitmasks.
    """

    work: np.ndarray
    work_indptr: np.ndarray
    variant: np.ndarray
    kv_len: int
    items: np.ndarray
    selections: np.ndarray
    starts: np.ndarray
    masks: int


@dataclass(frozen=True)
class PlanLayout:
    """Device arrays of a plan, and the tensor maps that they refer to.

    Spec ``s`` is encoded in maps ``2 s`` (q or k) and ``2 s + 1`` (out or v) of a batch entry; query specs come first.

    Attributes
    ----------
    query_specs, key_specs : tuple of MapSpec
    query_views, key_views : arrays of VIEW
    work : (items,) array of WORK
    entries : (entries,) array of ENTRY
    entry_masks : (entries,) int32 array
    masks : (n, warpgroups, 128) uint32 array
        In accumulator order, see :func:`fragment_masks`.
    priors : (reductions, rows of a query tile) int32 array
        See :class:`~spattn.schedule.reductions.Reductions`; -1 for padding rows.
    reduces : (items,) bool array
    merges : Merges
    moves : bool
        True if the plan is length-polymorphic: the maps and views of the last keys (offset > 0) move.
    query_rows : (query tiles, block_q) int32 array
        Row of each query of every tile, -1 for padding; empty if TMA reads the queries.
    key_rows : (key tiles, block_kv) int32 array
        Position of each key of every tile likewise. Either all views of a side are gathered or none.
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
    reduces: np.ndarray
    merges: Merges
    moves: bool
    query_rows: np.ndarray
    key_rows: np.ndarray

    @property
    def gathers(self) -> bool:
        """True if the plan needs gathered KV."""
        return bool(len(self.key_rows))

    @property
    def maps(self) -> int:
        """Tensor maps per batch entry."""
        return 2 * (len(self.query_specs) + len(self.key_specs))


def make_layout(plan: Plan, moves: bool = False) -> PlanLayout:
    """Build the device form of a plan. If it is length-polymorphic, views that move share no map with others."""
    query_ids, key_ids, row_component = roles(plan)
    (query_specs, query_views), (key_specs, key_views) = mapped(plan, moves)
    query_specs, query_views = halve(query_specs, query_views, 1 if plan.block_q <= ROWS else plan.block_q // ROWS)
    components = plan.components[plan.work["component"]]
    if (plan.work["begin"] >= plan.work["end"]).any():
        raise ValueError("plan: expected work items of at least one tile")
    reductions = find_reductions(plan)
    work = np.zeros(len(plan.work), dtype=WORK)
    work["query_view"], work["key_view"] = components["query_view"], components["key_view"]
    work["begin"], work["end"], work["slot"] = plan.work["begin"], plan.work["end"], reductions.slots
    work["z"], work["y"], work["x"] = first_coordinates(plan.views[components["query_view"]], plan.work["query_tile"]).T
    lists = tile_lists(plan)
    owner = plan.components[np.repeat(row_component, np.diff(lists.indptr))]
    entries = np.zeros(len(lists.indices), dtype=ENTRY)
    key_views_of = plan.views[owner["key_view"] + lists.key_view]
    entries["z"], entries["y"], entries["x"] = first_coordinates(key_views_of, lists.indices).T
    entries["view"] = lists.key_view
    query_rows = key_rows = np.zeros((0, 0), np.int32)
    if plan.ordered:
        variants = _variants(plan)
        key_rows, key_views["map"] = _rows(plan, key_ids, variants, plan.kv_order, plan.block_kv)
        entries["x"] = lists.indices
        if plan.q_order.size:
            query_rows, query_views["map"] = _rows(plan, query_ids, variants, plan.q_order, plan.block_q)
            work["x"] = query_views["map"][work["query_view"]] + plan.work["query_tile"]
    return PlanLayout(
        query_specs,
        key_specs,
        query_views,
        key_views,
        work,
        entries,
        lists.mask,
        fragment_masks(plan.masks),
        np.pad(reductions.priors, ((0, 0), (0, -plan.block_q % ROWS)), constant_values=-1),
        reductions.reduces,
        reductions.merges,
        moves,
        query_rows,
        key_rows,
    )


def _rows(
    plan: Plan, ids: np.ndarray, variants: np.ndarray, order: np.ndarray, block: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the row or key index of each cell of all tiles of the views `ids`, -1 for padding; and each view's first
    tile."""
    views = plan.views[ids]
    first = offsets(views["tiles"])
    found = np.empty((int(first[-1]), block), np.int32)
    for view, own, start in zip(views, variants[ids], first, strict=False):
        for tile in range(0, int(view["tiles"]), _TILES_AT_ONCE):
            tiles = np.arange(tile, min(tile + _TILES_AT_ONCE, int(view["tiles"])))
            place, real = positions(view, tiles)
            found[start + tiles] = np.where(real, order[own][place] if order.size else place, -1)
    starts = np.zeros(len(plan.views), np.int32)
    starts[ids] = first[:-1]
    return found, starts


def _variants(plan: Plan) -> np.ndarray:
    """Return the variant of each view, -1 for unused ones."""
    found = np.full(len(plan.views), -1)
    for component in plan.components:
        own = np.append(key_views_of(plan, component), component["query_view"])
        if not np.isin(found[own], (-1, component["variant"])).all():
            raise ValueError("plan: an ordered or gathered plan must not share views between variants")
        found[own] = component["variant"]
    return found


def fragment_masks(masks: np.ndarray) -> np.ndarray:
    """Convert bitmasks of tiles of 64 keys to WGMMA accumulator order: (n, warpgroups, 128 threads) uint32.

    Bit ``4 i + 2 h + b`` of lane ``4 g + t`` in warp ``w`` is row ``16 w + 8 h + g``, column ``8 i + 2 t + b``.
    """
    count, block_q, _ = masks.shape
    warpgroups = -(-block_q // ROWS)
    found = np.empty((count, warpgroups, 4, 8, 4), np.uint32)  # mask, warpgroup, w, g, t
    for first in range(0, count, _MASKS_AT_ONCE):
        some = masks[first : first + _MASKS_AT_ONCE, :, 0]
        some = np.pad(some, ((0, 0), (0, warpgroups * ROWS - block_q)))  # padding rows attend to no key
        rows = some.reshape(-1, warpgroups, 4, 2, 8)  # mask, warpgroup, w, h, g
        for t in range(4):
            columns = rows >> np.uint64(2 * t) & _LOW_PAIRS
            bits = columns[:, :, :, 0] | columns[:, :, :, 1] << np.uint64(2)
            for shift, kept in _NARROWED:
                bits = (bits | bits >> shift) & kept
            found[first : first + len(some), ..., t] = bits
    return found.reshape(count, warpgroups, 128)
