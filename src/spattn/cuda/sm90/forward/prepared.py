"""Device plans, and the kernels and parameters of calls of given shapes and strides."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ...._util.cached import Recent
from ....choose.specializations import (
    ARCH,
    KEYS_COPIED_TOGETHER,
    KEYS_TOGETHER,
    TILE,
    Specialization,
    build,
    item_keys,
    variant,
)
from ....planning.contract.cache import kept_with_plan
from ....planning.contract.types import Plan
from ....planning.contract.validated import validated
from ....schedule.reductions import Merges
from ....schedule.tasks import merge_heads, order_tasks
from ....schedule.tensor_maps import MAPS
from ...driver.buffer import Buffer, upload
from ...driver.device import Device
from ...driver.launch import Kernel, kernel
from ...host.forward_pass import ForwardPass
from ..maps import gatherable, readable
from .heads import with_packed_heads
from .layout import Items, PlanLayout, make_layout
from .params import Addresses, Template, maps_needed, pack_merge, structs

COUNTERS = 1024  # concurrent calls of a plan on different streams
_READY_KEPT = 32
MERGE_TABLES = ("merge_rows", "merge_indptr", "merge_sources", "merge_heads")
_ROWS_PER_BLOCK = 32  # of merge.cu


def prepare(call: ForwardPass) -> Prepared | None:
    """The cached state for calls of these shapes and strides, or None if TMA cannot address them."""
    moves = validated(call.plan).slides
    call = with_packed_heads(call)
    plan = plan_on_device(call.plan, call.device, call.q.shape[0], call.q.shape[1], call.k.shape[1], moves)
    ready = plan.ready(call)
    return None if ready is None else Prepared(plan, ready, call)


class Merging(NamedTuple):
    """The combine launch of all calls of a plan with the same shapes, strides and dtype."""

    kernel: Kernel
    blocks: int
    head: tuple[int, ...]  # leading fields of Merge: arrays of the plan
    tail: tuple[int, ...]  # trailing fields: sizes

    def params(self, to: Addresses) -> bytes:
        """The bytes of ``Merge``."""
        return pack_merge(*self.head, to.partial, to.partial_lse, to.out, to.lse, *self.tail)


class Ready(NamedTuple):
    """Kernels and parameters of all calls of a plan with the same shapes, strides and dtype."""

    attention: Kernel | None
    blocks: tuple[int, ...]  # CTAs per launch
    template: Template
    merge: Merging | None


class Prepared(NamedTuple):
    """A call that these kernels can run, with packed heads if possible."""

    plan: HopperPlan
    ready: Ready
    call: ForwardPass


class HopperPlan:
    """A plan on one device for fixed batch and heads; `new` replaces its work items for a dynamic mask."""

    def __init__(
        self,
        plan: Plan,
        device: Device,
        batch: int,
        heads_q: int,
        heads_kv: int,
        moves: bool,
        new: Items | None = None,
    ):
        shared = _lay_out(plan, device, moves)
        self.layout, self._plan_buffer, plan_at = shared
        reduces = self.layout.reduces if new is None else self.layout.reduces[new.items]
        together = KEYS_COPIED_TOGETHER if plan.ordered else KEYS_TOGETHER
        listed = plan if new is None else new
        phases = [order_tasks(listed, chosen, batch, heads_q, heads_kv, together) for chosen in (~reduces, reduces)]
        own = {
            "tasks": np.concatenate(phases),
            "merge_heads": merge_heads(self.layout.merges.variants, plan.variant, batch, heads_q),
            "counters": np.zeros(COUNTERS, np.int32),
        }
        if new is not None:
            own |= {"items": new.items, "selections": new.selections, "starts": new.starts}
        self._own_buffer, own_at = upload(device, own)
        self.at = plan_at | own_at
        self.launches = launches_of(phases)
        self.merge_blocks = merge_blocks(self.layout.merges)
        self.item_keys = item_keys(plan, listed.work)
        self.counter = counters(self.at["counters"])
        self._ready = Recent(_READY_KEPT)

    def ready(self, call: ForwardPass) -> Ready | None:
        """The cached state for calls of these strides and shapes, for any kv_len, or None if TMA cannot address
        them."""
        arrays = call.q, call.k, call.v, call.out
        key = (call.dtype, *((x.strides, x.shape[:2], x.shape[3]) for x in arrays))
        found = self._ready.get(key, self)
        if found is self:
            found = self._ready.keep(key, self._prepare(call))
        return found

    def _prepare(self, call: ForwardPass) -> Ready | None:
        room = next((size for size in MAPS if maps_needed(self.layout, call) <= size), None)
        arrays = call.q, call.k, call.v, call.out
        if room is None or not all(map(readable, arrays)):
            return None
        if self.layout.gathers and not all(map(gatherable, arrays)):
            return None
        row = build_for(call, self.item_keys)
        return Ready(
            load("attention", row, call, room, self.layout.gathers, self.layout.most_cells) if self.launches else None,
            blocks_of(self.launches, row, call.device),
            Template([(self.layout, call)], self.at, self.launches, room),
            merging(call, [self.at[name] for name in MERGE_TABLES], self.merge_blocks) if self.merge_blocks else None,
        )

    def enqueue(self, ready: Ready, call: ForwardPass, tables: Mapping[str, int] | None = None) -> None:
        """Enqueue the kernels of a call; `tables` overrides addresses of the plan's tables. The context must be
        current."""
        addresses = call.q.pointer, call.k.pointer, call.v.pointer, call.out.pointer
        to = Addresses(*addresses, call.lse, *call.workspace(), call.scale)
        if ready.attention is not None:
            for launch, blocks in enumerate(ready.blocks):
                ready.attention.launch(blocks, ready.template.fill(launch, to, self.counter(), tables), call.stream)
        if ready.merge is not None:
            ready.merge.kernel.launch(ready.merge.blocks, ready.merge.params(to), call.stream)


def launches_of(phases: Sequence[np.ndarray]) -> list[tuple[int, int]]:
    """(first task, number of tasks) of each launch, for the concatenated tasks of the phases."""
    starts = itertools.accumulate(map(len, phases[:-1]), initial=0)
    return [(start, len(tasks)) for start, tasks in zip(starts, phases, strict=True) if len(tasks)]


def blocks_of(launches: Iterable[tuple[int, int]], row: Specialization, device: Device) -> tuple[int, ...]:
    """CTAs per launch: one per task, up to as many as are resident."""
    return tuple(min(row.ctas * device.sm_count, tasks) for _, tasks in launches)


def counters(at: int) -> Callable[[], int]:
    """Return a function that cycles through COUNTERS task counters at an address; none is reused by a call in
    flight."""
    return itertools.cycle(range(at, at + 4 * COUNTERS, 4)).__next__


def build_for(call: ForwardPass, keys: float) -> Specialization:
    """Kernel specialization for a call."""
    return build(call.plan.block_q, max(call.q.shape[3], call.v.shape[3]), keys)


def load(
    name: str, row: Specialization, call: ForwardPass, room: int, gathers: bool = False, cells: int = TILE[1]
) -> Kernel:
    """The kernel `name` for a call: room for `room` tensor maps, KV gathered or not, at most `cells` cells per key
    box."""
    defines = variant(row, call.dtype, room, gathers=gathers, cells=cells)
    return kernel(call.device, f"sm90/forward/{name}.cu", ARCH, defines, structs(room), f"hopper_{name}")


def merge_blocks(merges: Merges) -> int:
    """CTAs of merge.cu per head."""
    return -(-int(np.diff(merges.variants).max(initial=0)) // _ROWS_PER_BLOCK)


def merging(call: ForwardPass, at: Sequence[int], blocks: int) -> Merging:
    """The combine launch for such calls, with `blocks` CTAs per head and the plan's tables at addresses `at`."""
    batch, heads_q = call.q.shape[:2]
    rows, strides = call.plan.slots * call.plan.block_q, call.out.strides[:3]
    return Merging(
        load("merge", build(TILE[0], max(call.q.shape[3], call.v.shape[3])), call, MAPS[0]),
        batch * heads_q * blocks,
        tuple(at),
        (rows, call.plan.q_len, *strides, heads_q, call.v.shape[3], blocks, 0),
    )


@kept_with_plan
def plan_on_device(plan: Plan, device: Device, batch: int, heads_q: int, heads_kv: int, moves: bool) -> HopperPlan:
    """Device copy of a plan, made at first use and cached with it; the device's context must be current."""
    return HopperPlan(plan, device, batch, heads_q, heads_kv, moves)


@kept_with_plan
def _lay_out(plan: Plan, device: Device, moves: bool) -> tuple[PlanLayout, Buffer, dict[str, int]]:
    """(layout, buffer, addresses) of the tables that do not depend on batch and heads."""
    layout = make_layout(plan, moves)
    views = "query_views", "key_views"
    names = "work", "entries", "entry_masks", "masks", *views, "priors", "query_rows", "key_rows"
    arrays = {name: getattr(layout, name) for name in names}
    arrays |= {f"merge_{name}": getattr(layout.merges, name) for name in ("rows", "indptr", "sources")}
    return layout, *upload(device, arrays)
