"""The kernels for compute capability 9.0: TMA, WGMMA and persistent blocks, for 16-bit types.

They execute plans with tiles of 128 queries and 64 keys; two key tiles make one product of 128 keys where the head
dimension leaves room for it. Arrays that TMA cannot address (rows not 16-byte aligned, negative or zero strides) and
plans of more than 240 tensor maps go to the portable kernels, which execute the same plan.
"""

from __future__ import annotations

import itertools
import logging
import struct
from typing import NamedTuple

import numpy as np

from ..plan._cache import derived
from ..plan._types import Plan
from . import portable
from .buffer import upload
from .device import Device
from .hopper_builds import TILE, build, has_short_items
from .hopper_layout import make_layout, make_merge_heads, make_units
from .hopper_pack import pack
from .hopper_params import Addresses, Template, maps_needed, readable
from .launch import Kernel, kernel
from .params import Call

ARCH = "sm_90a"
LARGEST_HEAD_DIM = 256
_MAPS = (16, 240)  # tensor maps that a kernel's parameters have room for; 240 is what 32 KiB of parameters hold
_COUNTERS = 1024  # calls on different streams that may run a plan at the same time
_READY_KEPT = 32
_TYPES = {"float16": ("__half", '"f16"'), "bfloat16": ("__nv_bfloat16", '"bf16"')}
_MERGE = struct.Struct("@8Q2q3q4i")
_ROWS_PER_BLOCK = 32  # of merge_sm90.cu
_log = logging.getLogger("spattn.cuda")


def supports(device: Device, dtype: str, head_dim: int, head_dim_v: int) -> bool:
    """Whether these kernels can run a problem. Which arrays they can read is known only at the call."""
    return (
        device.capability == (9, 0)
        and dtype in _TYPES
        and all(dim % 8 == 0 and 0 < dim <= LARGEST_HEAD_DIM for dim in (head_dim, head_dim_v))
    )


def tile(device: Device, dtype: str, head_dim: int) -> tuple[int, int]:
    """(block_q, block_kv) of every plan."""
    return TILE


def accepts(block_q: int, block_kv: int) -> bool:
    """Whether the kernels can execute plans with tiles of this shape."""
    return (block_q, block_kv) == TILE


def forward(call: Call) -> None:
    """Enqueue the attention kernel, and the merge kernel where the plan has merges; the context must be current."""
    prepared = prepare(call)
    addresses = call.q.pointer, call.k.pointer, call.v.pointer, call.out.pointer
    if prepared is None or not aligned(addresses):
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("portable kernels instead: %s", why_not(call))
        portable.forward(call)
        return
    plan, ready, call = prepared
    to = Addresses(*addresses, call.lse, *portable.workspace(call), call.scale)
    for launch in range(len(plan.launches)):
        ready.attention.launch(plan.blocks[launch], ready.template.fill(launch, to, plan.counter()), call.stream)
    if ready.merge_blocks:
        ready.merge.launch(ready.merge_blocks, ready.merge_params(to), call.stream)


def aligned(addresses: tuple[int, ...]) -> bool:
    """Whether TMA can address arrays that start here."""
    q, k, v, out = addresses
    return (q | k | v | out) % 16 == 0


def why_not(call: Call) -> str:
    """What of a call that these kernels leave to the portable ones TMA cannot address."""
    for name in ("q", "k", "v", "out"):
        operand = getattr(call, name)
        if operand.pointer % 16:
            return f"{name} starts at {operand.pointer:#x}, which is not on 16 bytes"
        if not readable(operand):
            return (
                f"{name} has the shape {operand.shape} and the strides {operand.strides}: rows must start on 16 bytes, "
                "their elements lie side by side, and strides be positive"
            )
    return f"the plan needs more than {_MAPS[-1]} tensor maps"


def prepare(call: Call) -> Prepared | None:
    """What calls of these shapes and strides share; None when TMA cannot address them."""
    call = pack(call)
    plan = plan_on_device(call.plan, call.device, call.q.shape[0], call.q.shape[1], call.k.shape[1])
    ready = plan.ready(call)
    return None if ready is None else Prepared(plan, ready, call)


def variant(dtype: str, head_dim: int, room: int, short_items: bool) -> dict[str, object]:
    """Macros for a problem."""
    name, element = _TYPES[dtype]
    row = build(head_dim, short_items)
    return {
        "SPATTN_TYPE": name, "SPATTN_ELEMENT": element, "SPATTN_HEAD_DIM": row.head_dim, "SPATTN_BLOCK_Q": TILE[0],
        "SPATTN_TILE_KV": TILE[1], "SPATTN_STEP_KV": row.step_kv, "SPATTN_MAPS": room, "SPATTN_QUERIES": row.queries,
        "SPATTN_SLOTS": row.slots, "SPATTN_CONSUMER_REGISTERS": row.consumer_registers,
        "SPATTN_PRODUCER_REGISTERS": row.producer_registers,
    }  # fmt: skip


class Ready(NamedTuple):
    """Kernels and parameters of all calls of a plan that agree in shapes, strides and dtype."""

    attention: Kernel | None
    template: Template
    merge: Kernel | None
    merge_blocks: int
    merge_head: tuple[int, ...]  # the fields of Merge that are the same in all of these calls: arrays of the plan
    merge_tail: tuple[int, ...]  # and sizes

    def merge_params(self, to: Addresses) -> bytes:
        """The bytes of ``Merge`` of merge_sm90.cu."""
        return _MERGE.pack(*self.merge_head, to.partial, to.partial_lse, to.out, to.lse, *self.merge_tail)


class Prepared(NamedTuple):
    """A call that these kernels can run: `call` is the one to run, with heads packed where that helps."""

    plan: HopperPlan
    ready: Ready
    call: Call


class HopperPlan:
    """A plan on one device for one number of batch entries and heads."""

    def __init__(self, plan: Plan, device: Device, batch: int, heads_q: int, heads_kv: int):
        shared = derived(plan, ("hopper", device.ordinal), lambda: _lay_out(plan, device))
        self.layout, self._plan_buffer, plan_at = shared
        finishes = self.layout.finishes
        phases = [make_units(plan, chosen, batch, heads_q, heads_kv) for chosen in (~finishes, finishes)]
        own = {
            "units": np.concatenate(phases),
            "merge_heads": make_merge_heads(plan, self.layout.merges, batch, heads_q),
            "counters": np.zeros(_COUNTERS, np.int32),
        }
        self._own_buffer, own_at = upload(device, own)
        self.at = plan_at | own_at
        starts = (0, len(phases[0]))
        self.launches = [(start, len(units)) for start, units in zip(starts, phases, strict=True) if len(units)]
        self.blocks = [min(device.units, units) for _, units in self.launches]
        self.merge_blocks = -(-int(np.diff(self.layout.merges.variants).max(initial=0)) // _ROWS_PER_BLOCK)
        self.short_items = has_short_items(plan)
        # Addresses of work counters that no call still in flight uses.
        self.counter = itertools.cycle(range(self.at["counters"], self.at["counters"] + 4 * _COUNTERS, 4)).__next__
        self._ready: dict[tuple, Ready | None] = {}

    def ready(self, call: Call) -> Ready | None:
        """What calls of these shapes and strides share; None when TMA cannot address them."""
        arrays = call.q, call.k, call.v, call.out
        key = (call.dtype, *(part for x in arrays for part in x[1:]))
        found = self._ready.get(key, self)
        if found is self:
            if len(self._ready) >= _READY_KEPT:
                self._ready.clear()
            found = self._ready.setdefault(key, self._prepare(call))
        return found

    def _prepare(self, call: Call) -> Ready | None:
        room = next((size for size in _MAPS if maps_needed(self.layout, call) <= size), None)
        if room is None or not all(map(readable, (call.q, call.k, call.v, call.out))):
            return None
        dim = max(call.q.shape[3], call.v.shape[3])

        def load(name: str, *sizes):
            return kernel(call.device, f"{name}.cu", ARCH, variant(call.dtype, dim, *sizes), name)

        names = ("merge_rows", "merge_indptr", "merge_sources", "merge_heads")
        return Ready(
            load("attention_sm90", room, self.short_items) if self.launches else None,
            Template(self.layout, self.at, self.launches, call, room),
            load("merge_sm90", _MAPS[0], False) if self.merge_blocks else None,
            call.q.shape[0] * call.q.shape[1] * self.merge_blocks,
            tuple(self.at[name] for name in names),
            (call.plan.slots * call.plan.block_q, call.plan.q_len, *call.out.strides[:3], call.q.shape[1],
             call.v.shape[3], self.merge_blocks, 0),
        )  # fmt: skip


def plan_on_device(plan: Plan, device: Device, batch: int, heads_q: int, heads_kv: int) -> HopperPlan:
    """The device copy of a plan, made at first use and kept with it; the device's context must be current."""
    key = "hopper", device.ordinal, batch, heads_q, heads_kv
    return derived(plan, key, lambda: HopperPlan(plan, device, batch, heads_q, heads_kv))


def _lay_out(plan: Plan, device: Device) -> tuple:
    """(layout, buffer, addresses) of what does not depend on the numbers of batch entries and heads."""
    layout = make_layout(plan)
    names = ("items", "entries", "entry_masks", "masks", "query_views", "key_views", "priors")
    arrays = {name: getattr(layout, name) for name in names}
    arrays |= {f"merge_{name}": getattr(layout.merges, name) for name in ("rows", "indptr", "sources")}
    return layout, *upload(device, arrays)
