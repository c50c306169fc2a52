"""Device form of a backward's work for backward.cu (NumPy only)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ....planning.contract.types import AXES, Plan, first_coordinates
from ....schedule.roles import roles
from ....schedule.subtiles import Cut, Pass, subtile_masks
from ....schedule.tensor_maps import MapSpec, map_views
from ..forward.tables import fragment_masks

__all__ = [
    "ENTRY",
    "SUBTILE",
    "WORK",
    "QuerySubtiles",
    "Views",
    "lay_out",
    "lay_out_masks",
    "lay_out_views",
    "query_subtiles",
]

SUBTILE = 64  # queries, and keys, of a sub-tile
MAPS_OF_VIEW = 4  # q, dout, dq and statistics; or k, v, dk and dv
WORK = np.dtype(
    [(name, "i4") for name in ("view", "begin", "end", "columns", "slot", "heads")] + [("subtile", "i4", (2, AXES))]
)
ENTRY = np.dtype(
    [(name, "i4") for name in ("x", "y", "z", "view", "head")] + [("masks", "i4", 2), ("subtile", "i4"), ("rank", "i4")]
)


@dataclass(frozen=True)
class Views:
    """Tensor maps and device records of a plan's sub-tiles.

    Attributes
    ----------
    query_specs, key_specs : tuple of MapSpec
        Spec ``s`` is encoded in maps ``4 s`` to ``4 s + 3`` of a batch entry; query specs come first.
    query_records, key_records : arrays of VIEW
    parts : (views, 2, AXES) int64 array
        Offsets of the two sub-tiles in a query tile, in lattice coordinates.
    cut : Cut
        The same sub-tiles as cells of the tile.
    """

    query_specs: tuple[MapSpec, ...]
    key_specs: tuple[MapSpec, ...]
    query_records: np.ndarray
    key_records: np.ndarray
    parts: np.ndarray
    cut: Cut

    @property
    def maps(self) -> int:
        """Tensor maps per batch entry."""
        return MAPS_OF_VIEW * (len(self.query_specs) + len(self.key_specs))


def lay_out_views(plan: Plan) -> Views:
    """Lay out the views of a plan with two query sub-tiles and one key sub-tile per tile."""
    query_ids, key_ids, _ = roles(plan)
    subtiles, parts = plan.views.copy(), np.zeros((len(plan.views), 2, AXES), np.int64)
    orders: dict[tuple[int, ...], int] = {}  # index of each distinct box
    of_view = np.zeros(len(plan.views), np.int64)
    for number in query_ids:
        box = tuple(plan.views["box"][number].tolist())
        axis = _longest_even(box)
        subtiles["box"][number, axis] //= 2
        parts[number, 1, axis] = subtiles["box"][number, axis]
        of_view[number] = orders.setdefault(box, len(orders))
    query_specs, query_records = map_views(subtiles, query_ids, 0)
    key_specs, key_records = map_views(plan.views, key_ids, len(query_specs))
    for records in (query_records, key_records):
        records["map"] *= MAPS_OF_VIEW // 2
    cut = Cut(SUBTILE, np.stack([_halves(box) for box in orders or [(1, 1, plan.block_q)]]), of_view)
    return Views(query_specs, key_specs, query_records, key_records, parts, cut)


def _longest_even(box: tuple[int, ...]) -> int:
    """Return the axis along which to halve a box: compact sub-tiles intersect fewer others."""
    even = [axis for axis in range(AXES) if box[axis] % 2 == 0]
    if not even:
        raise ValueError(f"plan: cannot split a query box {list(box)} in two")
    return max(even, key=box.__getitem__)


def _halves(box: tuple[int, ...]) -> np.ndarray:
    """Return the cells of a box, one half after the other."""
    cells = np.arange(int(np.prod(box))).reshape(box)
    return np.concatenate([half.ravel() for half in np.split(cells, 2, _longest_even(box))])


def lay_out_masks(plan: Plan, cut: Cut, by_keys: bool) -> np.ndarray:
    """Return (n, 128) uint32 bitmasks of sub-tile pairs in accumulator order; rows are queries, or keys if
    `by_keys`."""
    bits = subtile_masks(plan, cut).bits
    bits = bits.swapaxes(1, 2) if by_keys else bits
    words = np.packbits(np.ascontiguousarray(bits), axis=2, bitorder="little").view("<u8").astype(np.uint64)
    return fragment_masks(words).reshape(-1, 128)


def lay_out(plan: Plan, views: Views, made: Pass, slots: np.ndarray, by_keys: bool) -> dict[str, np.ndarray]:
    """Lay out work items and entries of the dK/dV or dQ kernel; `slots` mark in-kernel reductions."""
    work = np.zeros(len(made.work), WORK)
    for name in ("view", "begin", "end", "columns", "heads"):
        work[name] = made.work[name]
    work["slot"] = slots
    own = plan.views[made.work["view"]]
    first = first_coordinates(own, made.work["tile"])
    for subtile in range(2):
        if by_keys:
            tile = made.work["tile"] + subtile
            there = tile < own["tiles"]
            at = np.where(there[:, None], first_coordinates(own, np.where(there, tile, 0)), own["extent"])
        else:
            at = first + views.parts[made.work["view"], subtile]
        work["subtile"][:, subtile] = at[:, ::-1]
    entries = np.zeros(len(made.entries), ENTRY)
    for name in ("view", "head"):
        entries[name] = made.entries[name]
    # Entries of the dQ kernel count views from their item's first.
    view = made.entries["view"] + _first_views(plan, made)
    at = first_coordinates(plan.views[view], made.entries["tile"])
    if by_keys:
        at = at + views.parts[view, made.entries["part"]]
    if (at >= plan.views["extent"][view]).any():  # TMA must not load such a box: see is_outside() in positions.cuh
        raise RuntimeError("plan: a list has a sub-tile without cells; this is a bug in spattn, please report it")
    entries["x"], entries["y"], entries["z"] = at[:, 2], at[:, 1], at[:, 0]
    entries["masks"] = made.masks
    return {"work": work, "entries": entries}


class QuerySubtiles(NamedTuple):
    """Query sub-tiles of a plan with one query view, for the dQ sums of a fused backward.

    Attributes
    ----------
    view : int
    coordinates : (subtiles, AXES) int32 array
        Lattice coordinates of the origin: axis 2, 1, 0.
    of_entry : (entries,) int32 array
        Sub-tile of each entry.
    """

    view: int
    coordinates: np.ndarray
    of_entry: np.ndarray


def query_subtiles(plan: Plan, views: Views, keys: Pass) -> QuerySubtiles | None:
    """Return the query sub-tiles, or None if heads have different patterns or queries have several views."""
    used = np.unique(keys.entries["view"])
    if len(used) != 1 or len(keys.work_indptr) != 2:
        return None
    view = int(used[0])
    parts = views.parts.shape[1]
    tile, part = np.divmod(np.arange(int(plan.views["tiles"][view]) * parts), parts)
    at = first_coordinates(np.repeat(plan.views[view : view + 1], len(tile)), tile) + views.parts[view, part]
    of_entry = keys.entries["tile"] * parts + keys.entries["part"]
    return QuerySubtiles(view, at[:, ::-1].astype(np.int32), of_entry.astype(np.int32))


def _first_views(plan: Plan, made: Pass) -> np.ndarray:
    """Return for each entry the `columns` of one item that contains it; the views of its other items give the same
    coordinates."""
    length = made.work["end"] - made.work["begin"]
    entry = np.repeat(made.work["begin"] - (np.cumsum(length) - length), length) + np.arange(length.sum())
    first = np.zeros(len(made.entries), np.int64)
    first[entry] = np.repeat(made.work["columns"], length)
    return first
