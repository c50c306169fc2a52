"""Dynamic masks: kernels select the tiles that the attention kernel then computes.

The host never synchronizes with the device: it only needs upper bounds of the numbers of tiles and bitmasks, which
follow from the plan and the form of the mask.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from ...._util.checks import show
from ...._util.ragged import offsets, ramp
from ....choose.specializations import ARCH, ROWS, build, variant
from ....patterns.dynamic import Form
from ....planning import Plan
from ....planning.contract.cache import kept_with_plan
from ....planning.contract.types import LARGEST
from ....schedule.roles import key_views_of, roles
from ....schedule.tensor_maps import MAPS
from ...driver.device import Device
from ...driver.launch import Kernel, Request, load_kernels
from ...driver.structs import packer
from ...host.family import MaskSource
from ...host.forward_pass import ForwardPass
from ..forward.heads import with_packed_heads
from ..forward.params import structs
from ..forward.prepared import HopperPlan
from ..forward.tables import ENTRY, WORK, Items
from ..maps import ELEMENT_BYTES

__all__ = ["JOB", "SELECT", "TABLE", "forward", "items_of", "room"]

_FORMS = ("blocks", "lengths", "documents", "lines")
_TOKENS = 1024  # tokens per CTA of table.cu
_MASK_BLOCKS = 8  # CTAs of masks.cu per SM
_MASK_BYTES = 512  # per bitmask and 64 queries
_WORD_BYTES = 4
_ALIGNMENT = 256  # of the tables, in bytes

TABLE = np.dtype(
    [
        ("source", "u8"),
        *((name, "i8") for name in ("batch_stride", "head_stride", "row_stride", "stride")),
        ("target", "u8"),
        ("target_stride", "i8"),
        *((name, "i4") for name in ("form", "wide", "heads", "rows", "count", "limit", "words", "left")),
        ("masks_taken", "u8"),
    ]
)
_PLAN_POINTERS = ("work", "entries", "entry_masks", "masks", "query_views", "key_views")
_OWN_POINTERS = ("items", "selections", "starts")
_NEW_POINTERS = ("work", "entries", "entry_masks", "masks")
JOB = np.dtype([(name, "i4") for name in ("item", "entry", "mask")])
SELECT = np.dtype(
    [
        *((name, "u8") for name in (*_PLAN_POINTERS, *_OWN_POINTERS)),
        *((f"new_{name}", "u8") for name in _NEW_POINTERS),
        ("jobs", "u8"),
        ("masks_taken", "u8"),
        ("table", "u8"),
        ("table_stride", "i8"),
        *((name, "i4") for name in ("form", "count", "warpgroups", "mask_room")),
        *((name, "i4") for name in ("words", "block_q", "block_kv", "unused", "q_len", "q_offset")),
    ]
)
_pack_table, _pack_select = packer(TABLE).pack, packer(SELECT).pack


def items_of(plan: Plan, form: Form, batch: int, heads: int, q_len: int) -> Items:
    """Return the new work items for `heads` heads of the plan; raise ValueError for 2³¹ tiles or more. `q_len` is that
    of the call: with packed heads, a head of the plan has the queries of several heads."""
    variant = np.broadcast_to(plan.variant, (batch, heads)).astype(np.int64)
    entry, head = np.arange(batch)[:, None] % form.batch, np.arange(heads)[None] // (heads // form.heads)
    selection = np.broadcast_to(entry * form.heads + head, (batch, heads))
    pairs, pair = np.unique(np.stack([variant, selection], axis=-1).reshape(-1, 2), axis=0, return_inverse=True)
    first, last = plan.work_indptr[pairs[:, 0]], plan.work_indptr[pairs[:, 0] + 1]
    items = (np.repeat(first, last - first) + ramp(last - first)).astype(np.int32)
    most = room(plan, form, q_len)
    tiles = most.tiles[items]
    starts = offsets(tiles)
    if starts[-1] > LARGEST:
        raise ValueError(
            f"pattern: expected a selection of at most {LARGEST} tiles, got one of up to {starts[-1]}; call with fewer "
            "heads at once"
        )
    work = np.zeros(len(items), [("begin", "i8"), ("end", "i8")])
    work["end"] = tiles
    indptr = offsets(last - first)
    masks = np.diff(offsets(most.masks[items])[indptr])  # per pair of variant and mask
    found = Items(
        work,
        indptr.astype(np.int32),
        pair.reshape(batch, heads).astype(np.int32),
        plan.kv_len,
        items,
        np.repeat(pairs[:, 1], last - first).astype(np.int32),
        starts,
        int(np.minimum(masks, most.all_masks).sum()),
    )
    show("selected items", plan=plan, items=found)
    return found


class Room(NamedTuple):
    """Upper bounds, for any mask of one form: tiles and bitmasks per work item, and in `all_masks` the bitmasks of all
    items of a variant together."""

    tiles: np.ndarray
    masks: np.ndarray
    all_masks: int


def room(plan: Plan, form: Form, q_len: int) -> Room:
    """Return the upper bounds for a plan and form: the plan's own tiles, or fewer if key tiles are contiguous."""
    tiles = (plan.work["end"] - plan.work["begin"]).astype(np.int64)
    views, query_ids, key_ids = plan.views, *roles(plan)[:2]
    several = _key_views(plan)
    if several is None:
        return Room(tiles, tiles, int(tiles.sum()))
    given, rows = _masked(plan), min(_span(views[query_ids]), q_len)
    in_step = not (views["offset"][key_ids] % plan.block_kv).any()
    more = 0 if in_step else several - 1  # tiles that a contiguous run of keys gains at boundaries of views
    if form.name == "lengths":  # one end of the allowed keys splits a tile
        return Room(tiles, np.minimum(tiles, given + 1), int(tiles.sum()))
    if form.name == "lines":
        each = (rows + plan.block_kv - 2) // plan.block_kv + 1 + more  # tiles that a diagonal intersects
        tiles = np.minimum(tiles, form.counts[0] + form.counts[1] * each)
        return Room(tiles, tiles, int(tiles.sum()))
    if form.name == "documents":
        if rows > plan.block_q or len(plan.components) > plan.variants:
            return Room(tiles, tiles, int(tiles.sum()))
        # A full tile of the plan becomes partial if its keys cross a document boundary, or if its queries do and some
        # of its keys are in one of their documents. Such a document begins or ends among the tile's queries: `cut`
        # counts the key tiles of each document twice, for its begin and its end. `own` counts the key tiles of
        # documents that lie within the tile's queries.
        cut = 2 * (-(-plan.kv_len // plan.block_kv) + (2 + more) * form.counts[0])
        own = len(tiles) * (rows // plan.block_kv + 4 + more)
        return Room(tiles, tiles, int(given.sum()) + cut + own)
    first = views["offset"][query_ids] + plan.kv_len - q_len
    in_rows = rows == plan.block_q and form.block_q % rows == 0 and not (first % rows).any()  # tiles in one block
    in_blocks = in_step and form.block_kv % plan.block_kv == 0
    met = 1 if in_rows else (rows - 1) // form.block_q + 2
    of_block = form.block_kv // plan.block_kv + (0 if in_blocks else 2 + more)
    tiles = np.minimum(tiles, max(1, met * form.counts[0] * of_block))
    return Room(tiles, np.minimum(tiles, given) if in_rows and in_blocks else tiles, int(tiles.sum()))


def _key_views(plan: Plan) -> int | None:
    """Return the maximum number of key views of a component, or None unless key tiles are contiguous and disjoint."""
    most = 0
    for component in plan.components:
        own = plan.views[key_views_of(plan, component)]
        extent, box = own["extent"], own["box"]
        if (extent[:, :2] > 1).any() or (own["stride"][:, 2] != 1).any() or (box[:, 2] != plan.block_kv).any():
            return None
        own = own[np.argsort(own["offset"])]
        if (own["offset"][1:] < (own["offset"] + own["extent"][:, 2])[:-1]).any():
            return None
        most = max(most, len(own))
    return most


def _span(views: np.ndarray) -> int:
    """Return the maximum number of positions that a tile spans."""
    return int(((views["box"] - 1) * np.abs(views["stride"])).sum(axis=1).max(initial=0)) + 1


def _masked(plan: Plan) -> np.ndarray:
    """Return an upper bound of the tiles with a bitmask in each work item: (items,) int64."""
    before = offsets(np.diff(plan.tile_indptr) * (plan.mask >= 0))
    first = np.searchsorted(plan.tile_indptr, plan.work["begin"], "right") - 1
    last = np.searchsorted(plan.tile_indptr, plan.work["end"], "left")
    return before[last] - before[first]


class MaskedPlan(HopperPlan):
    """A plan on one device, for a fixed batch size and number of heads, and for dynamic masks of one form."""

    def __init__(self, plan: Plan, device: Device, batch: int, heads_q: int, heads_kv: int, form: Form, q_len: int):
        self.items = items = items_of(plan, form, batch, heads_q, q_len)
        super().__init__(plan, device, batch, heads_q, heads_kv, False, items)
        self.form, self._places = form, (q_len, plan.kv_len - q_len)
        limit = -(-plan.kv_len // form.block_kv) if form.name == "blocks" else plan.kv_len
        words = {"lengths": 2, "documents": plan.kv_len}.get(form.name, -(-limit // 32))  # per table row
        rows = -(-plan.kv_len // _TOKENS) if form.name == "documents" else form.rows
        self._limit, self._words, self._stride = limit, words, words * form.rows * len(form.counts)
        self._fill_blocks = form.batch * form.heads * rows
        self._warpgroups = -(-plan.block_q // ROWS)
        sizes = (
            len(items.items) * WORK.itemsize,
            int(items.starts[-1]) * ENTRY.itemsize,
            int(items.starts[-1]) * _WORD_BYTES,
            items.masks * self._warpgroups * _MASK_BYTES,
            items.masks * JOB.itemsize,
            _WORD_BYTES,
            form.batch * form.heads * self._stride * _WORD_BYTES,
        )
        self._at = offsets(np.array([-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes])).tolist()

    def select(self, call: ForwardPass, sources: tuple[MaskSource, ...]) -> dict[str, int]:
        """Enqueue the selection kernels; return the addresses of the tables that they write."""
        first = call.allocate(self._at[-1])
        tables = _Tables(*(first + offset for offset in self._at[:-1]))
        fill, tiles, masks = _kernels(call.device, call.dtype, call.plan.block_q)
        form, number = self.form, _FORMS.index(self.form.name)
        for at, (operand, wide) in enumerate(sources):
            by_batch, by_head, by_row, step = operand.strides
            params = _pack_table(
                *(operand.pointer, by_batch if form.batch > 1 else 0, by_head if form.heads > 1 else 0, by_row, step),
                *(tables.table + at * self._words * _WORD_BYTES, self._stride, number, wide),
                *(form.heads, form.rows, form.counts[at], self._limit, self._words, form.left, tables.masks_taken),
            )
            fill.launch(self._fill_blocks, params, call.stream)
        params = _pack_select(
            *(self.tables.at[name] for name in (*_PLAN_POINTERS, *_OWN_POINTERS)),
            *(*tables, self._stride),
            *(number, len(self.items.items), self._warpgroups, self.items.masks),
            *(self._words, form.block_q, form.block_kv, 0, *self._places),
        )
        tiles.launch(len(self.items.items), params, call.stream)
        if self.items.masks:
            masks.launch(_MASK_BLOCKS * call.device.sm_count, params, call.stream)
        return {name: getattr(tables, name) for name in _NEW_POINTERS}


@kept_with_plan
def masked_plan(
    plan: Plan, device: Device, batch: int, heads_q: int, heads_kv: int, form: Form, q_len: int
) -> MaskedPlan:
    """Return the device copy of a plan, made at first use and cached with it; the device's context must be current."""
    return MaskedPlan(plan, device, batch, heads_q, heads_kv, form, q_len)


class _Tables(NamedTuple):
    """Addresses of the tables that the selection kernels write."""

    work: int
    entries: int
    entry_masks: int
    masks: int
    jobs: int
    masks_taken: int
    table: int


def forward(call: ForwardPass, form: Form, sources: tuple[MaskSource, ...]) -> None:
    """Enqueue a call with a dynamic mask; the context must be current. Raise ValueError if TMA cannot address the
    arrays, or for 2³¹ tiles or more."""
    q_len = call.q.shape[2]
    if call.k.shape[1] % form.heads == 0:
        call = with_packed_heads(call)
    heads = call.q.shape[1], call.k.shape[1]
    plan = masked_plan(call.plan, call.device, call.q.shape[0], *heads, form, q_len)
    launches = plan.launches(call) if call.aligned(ELEMENT_BYTES) else None
    if launches is None:
        raise ValueError("q, k, v: a selection needs contiguous, 16-byte aligned rows")
    launches.run(call, plan.select(call, sources) if launches.computes else None)


@functools.cache
def _kernels(device: Device, dtype: str, block_q: int) -> tuple[Kernel, ...]:
    """Return the selection kernels, which depend on no size; the context must be current."""
    defines = variant(build(block_q, (1, 1)), dtype, MAPS[0])
    own = {**structs(MAPS[0]), "Table": TABLE, "Job": JOB, "Select": SELECT}
    names = "table", "tiles", "masks"
    requests = [Request(f"sm90/dynamic_masks/{name}.cu", ARCH, defines, own, f"hopper_select_{name}") for name in names]
    return tuple(load_kernels(device, requests))
