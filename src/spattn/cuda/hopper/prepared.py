"""What calls share: a plan on a device, and the kernels and parameters of all calls of some shapes and strides."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from ..._cached import Recent
from ...plan._cache import kept_with_plan
from ...plan._sealed import sealed
from ...plan._types import Plan
from ...schedule.tasks import merge_heads, order_tasks
from ..driver.buffer import Buffer, upload
from ..driver.device import Device
from ..driver.launch import Kernel, kernel
from ..forward_pass import ForwardPass
from .builds import ARCH, KEYS_TOGETHER, TILE, Build, build, has_short_items, variant
from .heads import with_packed_heads
from .layout import Layout, make_layout
from .maps import readable
from .params import MAPS, Addresses, Template, maps_needed, pack_merge, structs

_COUNTERS = 1024  # calls on different streams that may run a plan at the same time
_READY_KEPT = 32
_ROWS_PER_BLOCK = 32  # of merge.cu


def prepare(call: ForwardPass) -> Prepared | None:
    """What calls of these shapes and strides share; None when TMA cannot address them."""
    own = sealed(call.plan)
    moves = own.least is not None and own.growth is None
    call = with_packed_heads(call)
    plan = plan_on_device(call.plan, call.device, call.q.shape[0], call.q.shape[1], call.k.shape[1], moves)
    ready = plan.ready(call)
    return None if ready is None else Prepared(plan, ready, call)


class Ready(NamedTuple):
    """Kernels and parameters of all calls of a plan that agree in shapes, strides and dtype."""

    attention: Kernel | None
    blocks: tuple[int, ...]  # of each launch of it
    template: Template
    merge: Kernel | None
    merge_blocks: int
    merge_head: tuple[int, ...]  # the fields of Merge that are the same in all of these calls: arrays of the plan
    merge_tail: tuple[int, ...]  # and sizes

    def merge_params(self, to: Addresses) -> bytes:
        """The bytes of ``Merge``."""
        return pack_merge(*self.merge_head, to.partial, to.partial_lse, to.out, to.lse, *self.merge_tail)


class Prepared(NamedTuple):
    """A call that these kernels can run: `call` is the one to run, with heads packed where that helps."""

    plan: HopperPlan
    ready: Ready
    call: ForwardPass


class HopperPlan:
    """A plan on one device for one number of batch entries and heads."""

    def __init__(self, plan: Plan, device: Device, batch: int, heads_q: int, heads_kv: int, moves: bool):
        shared = _lay_out(plan, device, moves)
        self.layout, self._plan_buffer, plan_at = shared
        finishes = self.layout.finishes
        phases = [
            order_tasks(plan, chosen, batch, heads_q, heads_kv, KEYS_TOGETHER) for chosen in (~finishes, finishes)
        ]
        own = {
            "tasks": np.concatenate(phases),
            "merge_heads": merge_heads(self.layout.merges.variants, plan.variant, batch, heads_q),
            "counters": np.zeros(_COUNTERS, np.int32),
        }
        self._own_buffer, own_at = upload(device, own)
        self.at = plan_at | own_at
        starts = (0, len(phases[0]))
        self.launches = [(start, len(tasks)) for start, tasks in zip(starts, phases, strict=True) if len(tasks)]
        self.merge_blocks = -(-int(np.diff(self.layout.merges.variants).max(initial=0)) // _ROWS_PER_BLOCK)
        self.short_items = has_short_items(plan)
        # Addresses of work counters that no call still in flight uses.
        self.counter = itertools.cycle(range(self.at["counters"], self.at["counters"] + 4 * _COUNTERS, 4)).__next__
        self._ready = Recent(_READY_KEPT)

    def ready(self, call: ForwardPass) -> Ready | None:
        """What calls of these strides and shapes share, whatever the number of keys; None when TMA cannot address
        them."""
        arrays = call.q, call.k, call.v, call.out
        key = (call.dtype, *((x.strides, x.shape[:2], x.shape[3]) for x in arrays))
        found = self._ready.get(key, self)
        if found is self:
            found = self._ready.keep(key, self._prepare(call))
        return found

    def _prepare(self, call: ForwardPass) -> Ready | None:
        room = next((size for size in MAPS if maps_needed(self.layout, call) <= size), None)
        if room is None or not all(map(readable, (call.q, call.k, call.v, call.out))):
            return None
        dim = max(call.q.shape[3], call.v.shape[3])

        row = build(call.plan.block_q, dim, self.short_items)
        most = row.ctas * call.device.sm_count

        def load(name: str, row: Build, room: int) -> Kernel:
            defines = variant(row, call.dtype, room)
            return kernel(call.device, f"hopper/{name}.cu", ARCH, defines, structs(room), f"hopper_{name}")

        names = ("merge_rows", "merge_indptr", "merge_sources", "merge_heads")
        return Ready(
            load("attention", row, room) if self.launches else None,
            tuple(min(most, tasks) for _, tasks in self.launches),
            Template(self.layout, self.at, self.launches, call, room),
            load("merge", build(TILE[0], dim, False), MAPS[0]) if self.merge_blocks else None,
            call.q.shape[0] * call.q.shape[1] * self.merge_blocks,
            tuple(self.at[name] for name in names),
            (
                call.plan.slots * call.plan.block_q,
                call.plan.q_len,
                *call.out.strides[:3],
                call.q.shape[1],
                call.v.shape[3],
                self.merge_blocks,
                0,
            ),
        )


@kept_with_plan
def plan_on_device(plan: Plan, device: Device, batch: int, heads_q: int, heads_kv: int, moves: bool) -> HopperPlan:
    """The device copy of a plan, made at first use and kept with it; the device's context must be current."""
    return HopperPlan(plan, device, batch, heads_q, heads_kv, moves)


@kept_with_plan
def _lay_out(plan: Plan, device: Device, moves: bool) -> tuple[Layout, Buffer, dict[str, int]]:
    """(layout, buffer, addresses) of what does not depend on the numbers of batch entries and heads."""
    layout = make_layout(plan, moves)
    names = ("work", "entries", "entry_masks", "masks", "query_views", "key_views", "priors")
    arrays = {name: getattr(layout, name) for name in names}
    arrays |= {f"merge_{name}": getattr(layout.merges, name) for name in ("rows", "indptr", "sources")}
    return layout, *upload(device, arrays)
