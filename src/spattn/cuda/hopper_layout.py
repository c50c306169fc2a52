"""The plan in the form that ``kernels/attention_sm90.cu`` reads: NumPy only, no GPU.

The dtypes match the structs of ``kernels/sm90_params.cuh`` field for field.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .._ragged import ramp
from ..plan._types import AXES, Plan

_SHARED = -2
PANEL = 64  # elements of a 128-byte swizzled row
KEY_BYTES = 512  # a key and its value at head_dim 128
L2_SHARE = 24 << 20  # bytes of keys and values that heads running side by side may occupy of the 50-60 MB of L2

VIEW = np.dtype(
    [("map", "i4"), ("shift_y", "i4"), ("shift_z", "i4"), ("unused", "i4"), ("half", "i4", 4), ("offset", "i8"),
     ("stride", "i8", AXES), ("extent", "i4", AXES), ("box", "i4", AXES)]
)  # fmt: skip
ITEM = np.dtype([(name, "i4") for name in ("query_view", "x", "y", "z", "begin", "end", "key_view", "slot")])
UNIT = np.dtype([(name, "i4") for name in ("item", "batch", "head_q", "head_kv")])
STRIDES = np.dtype([(name, "i8") for name in ("batch", "head", "token")])


@dataclass(frozen=True)
class MapSpec:
    """A tensor map of one or several views, in tokens; axis 2 first, as TMA wants it."""

    offset: int
    extents: tuple[int, int, int]
    strides: tuple[int, int, int]
    box: tuple[int, int, int]


class Merges(NamedTuple):
    """The plan's merges that are left to the merge kernel."""

    rows: np.ndarray
    indptr: np.ndarray
    sources: np.ndarray
    variants: np.ndarray


@dataclass(frozen=True)
class Layout:
    """Device arrays of a plan and the tensor maps they refer to.

    Spec number ``s`` is maps ``2 s`` (q or k) and ``2 s + 1`` (out or v) of a batch entry; query specs come first.
    """

    query_specs: tuple[MapSpec, ...]
    key_specs: tuple[MapSpec, ...]
    query_views: np.ndarray
    key_views: np.ndarray
    items: np.ndarray
    entries: np.ndarray  # (entries, 4) int32: x, y, z, view relative to the item's key_view
    entry_masks: np.ndarray
    masks: np.ndarray  # accumulator order, see fragment_masks
    priors: np.ndarray  # (finishing items, block_q) int32, see find_finishers
    finishes: np.ndarray  # (items,) bool
    merges: Merges

    @property
    def maps(self) -> int:
        """Tensor maps of one batch entry."""
        return 2 * (len(self.query_specs) + len(self.key_specs))


def make_layout(plan: Plan) -> Layout:
    """Lays a plan out for the Hopper kernel."""
    query_ids, key_ids, row_component = roles(plan)
    query_specs, query_views = _map_views(plan.views, query_ids, 0)
    query_specs, query_views = _halve(query_specs, query_views, plan.block_q // PANEL)
    key_specs, key_views = _map_views(plan.views, key_ids, len(query_specs))
    work, components = plan.work, plan.components[plan.work["component"]]
    if (work["begin"] >= work["end"]).any():
        raise ValueError("plan: expected work items of at least one tile")
    items = np.zeros(len(work), dtype=ITEM)
    items["query_view"], items["key_view"] = components["query_view"], components["key_view"]
    items["begin"], items["end"] = work["begin"], work["end"]
    items["slot"], priors, merges = find_finishers(plan)
    corner = first_coordinates(plan.views[components["query_view"]], work["query_tile"])
    items["x"], items["y"], items["z"] = corner.T
    entries = np.zeros((len(plan.indices), 4), dtype=np.int32)
    lengths = np.diff(plan.indptr)
    owner = plan.components[np.repeat(row_component, lengths)]
    entries[:, :3] = first_coordinates(plan.views[owner["key_view"] + plan.key_view], plan.indices)
    entries[:, 3] = plan.key_view
    return Layout(
        query_specs, key_specs, query_views, key_views, items, entries, plan.mask.astype(np.int32),
        fragment_masks(plan.masks), priors, items["slot"] <= -2, merges,
    )  # fmt: skip


def find_finishers(plan: Plan) -> tuple[np.ndarray, np.ndarray, Merges]:
    """Items that can write the output of shared rows themselves, which saves the merge a trip through memory.

    An item finishes when each of its rows has exactly one other source, an earlier one. It runs in a second launch.

    Returns
    -------
    slots : (items,) int32
        The plan's, but -2 - i for finishing item number i.
    priors : (finishing items, block_q) int32
        The workspace row with the rest of each row; -1 for padding.
    merges : Merges
        Without the rows of finishing items.
    """
    slots, block_q = plan.work["slot"].astype(np.int32), plan.block_q
    priors, kept = [], np.ones(len(plan.merge_rows), dtype=bool)
    counts = np.diff(plan.merge_indptr)
    for variant in range(plan.variants):
        merges = np.arange(*plan.merge_variants[variant : variant + 2])
        prior = np.full((plan.slots, block_q), -1, dtype=np.int64)  # by slot and cell; _SHARED where it may not finish
        flat = prior.reshape(-1)
        bounds = plan.merge_indptr[plan.merge_variants[variant : variant + 2]]
        flat[plan.merge_sources[bounds[0] : bounds[1]]] = _SHARED
        pairs = merges[counts[merges] == 2]
        flat[plan.merge_sources[plan.merge_indptr[pairs] + 1]] = plan.merge_sources[plan.merge_indptr[pairs]]
        finishes = (prior != _SHARED).all(axis=1)
        first, last = plan.work_indptr[variant : variant + 2]
        own = first + np.nonzero(slots[first:last] >= 0)[0]
        own = own[finishes[slots[own]]]
        kept[pairs[finishes[plan.merge_sources[plan.merge_indptr[pairs] + 1] // block_q]]] = False
        new = -2 - sum(map(len, priors)) - np.arange(len(own), dtype=np.int32)
        priors.append(prior[slots[own]].astype(np.int32))
        slots[own] = new
    chosen = np.repeat(kept, counts)
    merges = Merges(
        plan.merge_rows[kept], np.r_[0, np.cumsum(counts[kept])].astype(np.int32), plan.merge_sources[chosen],
        np.r_[0, np.cumsum(kept)].astype(np.int32)[plan.merge_variants],
    )  # fmt: skip
    return slots, np.concatenate(priors), merges


def first_coordinates(views: np.ndarray, tiles: np.ndarray) -> np.ndarray:
    """(n, 3) int32: the first lattice coordinates of tiles (tile i of view i), axis 2 first."""
    grid, box = views["grid"].astype(np.int64), views["box"]
    tiles = tiles.astype(np.int64)
    numbers = (tiles % grid[:, 2], tiles // grid[:, 2] % grid[:, 1], tiles // (grid[:, 2] * grid[:, 1]))
    return np.stack([number * box[:, 2 - i] for i, number in enumerate(numbers)], axis=1).astype(np.int32)


def fragment_masks(masks: np.ndarray) -> np.ndarray:
    """Bitmasks in the order of WGMMA accumulators: (n, warpgroups, 128 threads) of uint64 (128 keys) or uint32 (64).

    Bit ``4 i + 2 h + b`` of lane ``4 g + t`` in warp ``w`` is row ``16 w + 8 h + g``, column ``8 i + 2 t + b``.
    """
    count, block_q, words = masks.shape
    columns = words * 64
    little = np.ascontiguousarray(masks).astype("<u8").view(np.uint8)
    bits = np.unpackbits(little, bitorder="little").reshape(count, block_q // 64, 4, 2, 8, columns // 8, 4, 2)
    bits = bits.transpose(0, 1, 2, 4, 6, 5, 3, 7)  # n, warpgroup, w, g, t, i, h, b
    packed = np.packbits(np.ascontiguousarray(bits).reshape(count, block_q // 64, 128, columns // 2), -1, "little")
    return packed.view({64: np.uint32, 128: np.uint64}[columns]).reshape(count, block_q // 64, 128)


def roles(plan: Plan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Views used for queries, views used for keys, and a component that owns each CSR row."""
    row_component = np.zeros(len(plan.indptr) - 1, dtype=np.int64)
    keys = []
    for number, component in enumerate(plan.components):
        rows = slice(component["first_row"], component["first_row"] + component["query_tiles"])
        row_component[rows] = number
        used = plan.key_view[plan.indptr[rows.start] : plan.indptr[rows.stop]]
        keys.append(component["key_view"] + np.arange(used.max(initial=-1) + 1))
    key_ids = np.unique(np.concatenate(keys)) if keys else np.zeros(0, np.int64)
    return np.unique(plan.components["query_view"]), key_ids, row_component


def _map_views(views: np.ndarray, ids: np.ndarray, first: int) -> tuple[tuple[MapSpec, ...], np.ndarray]:
    """Tensor maps for the views `ids`, as few as there can be, and the device records of all views.

    Views that differ by their offset alone share a map when the offsets are an arithmetic progression and an axis is
    free to hold its number: the residue classes of a dilated or strided pattern are one map.
    """
    records = np.zeros(len(views), dtype=VIEW)
    for name in ("offset", "stride", "extent", "box"):
        records[name] = views[name]
    classes: dict[tuple, list[int]] = {}
    for number in ids:
        view = views[number]
        key = tuple(tuple(int(n) for n in view[name]) for name in ("stride", "extent", "box"))
        classes.setdefault(key, []).append(int(number))
    specs: list[MapSpec] = []
    for (stride, extent, box), members in classes.items():
        free = next((axis for axis in (1, 0) if extent[axis] == 1 and box[axis] == 1), None)
        for start, step, numbers in _progressions(views["offset"][members], members, free is not None):
            extents, strides = list(extent), list(stride)
            if len(numbers) > 1:
                extents[free], strides[free] = (numbers[-1][0] - start) // step + 1, step
            for offset, number in numbers:
                shift = (offset - start) // step
                records["map"][number] = 2 * (first + len(specs))
                records["shift_y"][number] = shift if free == 1 else 0
                records["shift_z"][number] = shift if free == 0 else 0
            specs.append(MapSpec(start, tuple(extents[::-1]), tuple(strides[::-1]), tuple(box[::-1])))
    return tuple(specs), records


def _progressions(offsets: np.ndarray, members: list[int], join: bool):
    """Cuts views into arithmetic progressions of offsets: (start, step, [(offset, view), ...])."""
    order = np.argsort(offsets, kind="stable")
    pending = [(int(offsets[i]), members[i]) for i in order]
    while pending:
        later = [o for o, _ in pending if o > pending[0][0]]
        step = later[0] - pending[0][0] if later and join else 0
        taken, expected = [], pending[0][0]
        for offset, number in pending:
            if step and offset == expected + step:
                expected += step
            if offset == expected:
                taken.append((offset, number))
        chosen = {number for _, number in taken}
        yield pending[0][0], max(step, 1), taken
        pending = [pair for pair in pending if pair[1] not in chosen]


def _halve(specs, views, parts):
    """Gives each warpgroup its own box: the query box cut in `parts` along its first axis that can be."""
    halved = []
    axes = []
    for spec in specs:
        axis = next((a for a in (2, 1, 0) if spec.box[a] % parts == 0), None)  # axis 0 of the lattice is last here
        if axis is None:
            raise ValueError(f"plan: cannot cut a query box {spec.box[::-1]} in {parts} parts")
        box = list(spec.box)
        box[axis] //= parts
        axes.append((axis, box[axis]))
        halved.append(MapSpec(spec.offset, spec.extents, spec.strides, tuple(box)))
    views = views.copy()
    for number in range(len(views)):
        if specs:
            axis, size = axes[views["map"][number] // 2]
            views["half"][number, 2 - axis] = size
    return tuple(halved), views


def make_units(plan: Plan, chosen: np.ndarray, batch: int, heads_q: int, heads_kv: int) -> np.ndarray:
    """The order of (item, batch, head) of the `chosen` items (a mask): few heads at a time, so that their keys and
    values stay in L2, and the longest items of those heads first, so that no multiprocessor is left with a long one."""
    group = heads_q // heads_kv
    together = max(1, L2_SHARE // (plan.kv_len * KEY_BYTES)) * group
    variant = np.broadcast_to(plan.variant, (batch, heads_q)).ravel()
    length = (plan.work["end"] - plan.work["begin"]).astype(np.int64)
    pieces = []
    for start in range(0, len(variant), together):
        places = np.arange(start, min(start + together, len(variant)))
        first, last = plan.work_indptr[variant[places]], plan.work_indptr[variant[places] + 1]
        place = np.repeat(places, last - first)
        rank = ramp(last - first)
        unit = np.zeros(len(place), dtype=UNIT)
        unit["item"] = np.repeat(first, last - first) + rank
        unit["batch"], unit["head_q"] = place // heads_q, place % heads_q
        unit["head_kv"] = unit["head_q"] // group
        # Heads take turns item by item, so that equal items of neighbouring tiles run side by side.
        unit = unit[np.lexsort((place, rank, -length[unit["item"]]))]
        pieces.append(unit[chosen[unit["item"]]])
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype=UNIT)


def make_merge_heads(plan: Plan, merges: Merges, batch: int, heads_q: int) -> np.ndarray:
    """(batch · heads_q, 4) int32: first and last merge of each head's variant, batch entry, head."""
    variant = np.broadcast_to(plan.variant, (batch, heads_q)).ravel()
    place = np.arange(batch * heads_q)
    columns = (merges.variants[variant], merges.variants[variant + 1], place // heads_q, place % heads_q)
    return np.stack(columns, axis=1).astype(np.int32)
