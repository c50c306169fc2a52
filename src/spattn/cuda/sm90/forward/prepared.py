"""Cached device plans, and kernels and parameters per shape and stride."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ...._util.cached import BoundedCache
from ....arrays import FLOAT8
from ....choose.specializations import (
    DTYPES,
    KEYS_COPIED_TOGETHER,
    KEYS_TOGETHER,
    has_build,
    item_keys,
    terms_of,
)
from ....planning.contract.cache import kept_with_plan
from ....planning.contract.types import Plan
from ....planning.contract.validated import validated
from ....schedule.placement import Bytes, Partials, Placement
from ....schedule.reductions import Merges, find_reductions, merges_of_rows
from ....schedule.shard import Sharding, Stage, place_lists
from ....schedule.tasks import merge_heads, order_tasks
from ....schedule.tensor_maps import MAPS
from ...driver.buffer import Buffer, upload
from ...driver.device import Device
from ...host.forward_pass import ForwardPass
from ..maps import gatherable, readable
from .heads import with_packed_heads
from .launches import COUNTERS, MERGE_TABLES, Launches, Part, Tables, counters, launch_ranges
from .tables import Items, PlanLayout, make_layout
from .terms import itemsizes_of, operands_of

__all__ = ["HopperPlan", "placement", "prepare"]

_READY_KEPT = 32


def prepare(call: ForwardPass) -> Launches | None:
    """Return cached launches for calls of these shapes and strides, or None if the kernels cannot compute them
    (see :class:`~spattn.cuda.sm90.family.Hopper`)."""
    # The arrays of terms have strides that depend on kv_len. (Calls of float8 are prepared for one kv_len.)
    moves = validated(call.plan).slides and call.dtype in DTYPES
    if call.stage is None:
        call = with_packed_heads(call)
    sizes = call.q.shape[0], call.q.shape[1], call.k.shape[1]
    return plan_on_device(call.plan, call.device, *sizes, moves, call.staging, call.stage).launches(call)


class HopperPlan:
    """A plan on one device, for fixed batch and heads: one stage of it, or with items `new` for a dynamic mask.

    With `staging`, all tables are copied at once: see :func:`~spattn.cuda.driver.buffer.upload`.
    """

    def __init__(
        self,
        plan: Plan,
        device: Device,
        batch: int,
        heads_q: int,
        heads_kv: int,
        moves: bool,
        new: Items | None = None,
        staging: Any = None,
        stage: Stage | None = None,
    ):
        buffers: tuple[Any, ...]
        if staging is None:
            self.layout, plan_buffer, plan_at = _lay_out(plan, device, moves)
        else:
            self.layout = make_layout(plan, moves)
        if stage is not None:
            self.layout = replace(self.layout, merges=merges_of_rows(self.layout.merges, stage.rows))
        reduces = self.layout.reduces if new is None else self.layout.reduces[new.items]
        items = np.ones(len(reduces), bool) if stage is None else stage.items
        together = KEYS_COPIED_TOGETHER if plan.ordered else KEYS_TOGETHER
        listed = plan if new is None else new
        phases = [
            order_tasks(listed, chosen, batch, heads_q, heads_kv, together)
            for chosen in (~reduces & items, reduces & items)
        ]
        own = {
            "tasks": np.concatenate(phases),
            "merge_heads": merge_heads(self.layout.merges.variants, plan.variant, batch, heads_q),
            "counters": np.zeros(COUNTERS, np.int32),
        }
        if stage is not None:
            own |= _of_merges(self.layout.merges)
        if new is not None:
            own |= {"items": new.items, "selections": new.selections, "starts": new.starts}
        if staging is None:
            own_buffer, own_at = upload(device, own)
            buffers, at = (plan_buffer, own_buffer), plan_at | own_at
        else:
            buffer, at = upload(device, _arrays_of(self.layout) | own, staging)
            buffers = (buffer,)
        merges = tuple(at[name] for name in MERGE_TABLES)
        keys, counter = item_keys(plan, listed.work), counters(at["counters"])
        self.tables = Tables(at, [merges], launch_ranges(phases), keys, counter, buffers)
        self._launches = BoundedCache(_READY_KEPT)

    def launches(self, call: ForwardPass) -> Launches | None:
        """Return cached launches for these shapes and strides and any kv_len, or None if TMA cannot address them."""
        arrays = call.q, call.k, call.v, call.out
        kind = call.dtype, call.precision, call.score.text, bool(call.sinks)
        key = (*kind, *((x.strides, x.shape[:2], x.shape[3]) for x in arrays))
        found = self._launches.get(key, self)
        if found is self:
            found = self._launches.keep(key, self._prepare(Part(self.layout, call)))
        return found

    def _prepare(self, part: Part) -> Launches | None:
        *inputs, out = operands_of(part.call)
        room = next((size for size in MAPS if part.maps <= size), None)
        of, dims = part.call, (part.call.q.shape[3], part.call.v.shape[3])
        if room is None or not has_build(of.plan.block_q, dims, terms_of(of.dtype, of.precision), of.dtype == FLOAT8):
            return None
        itemsize, itemsize_out = itemsizes_of(of)
        if not all(readable(x, itemsize) for x in inputs) or not readable(out, itemsize_out):
            return None
        if self.layout.gathers and not all(map(gatherable, (*inputs, out))):
            return None
        return Launches([part], self.tables, room)


@kept_with_plan
def placement(plan: Plan, sizes: tuple[int, int, int, int, int], sharding: Sharding) -> Placement:
    """Return the placement of a plan's items on ranks; `sizes` are batch, heads_q, heads_kv, head_dim, head_dim_v."""
    batch, heads_q, heads_kv, head_dim, head_dim_v = sizes
    group, of_merges = (
        heads_q // heads_kv,
        (plan.merge_rows, plan.merge_indptr, plan.merge_sources, plan.merge_variants),
    )
    left = find_reductions(plan).merges
    partials = Partials(plan.work["slot"], plan.work_indptr, Merges(*of_merges), left, plan.slots, plan.block_q)
    cost = Bytes(group * 2 * head_dim, group * 4 * (head_dim_v + 1), 2 * (head_dim + head_dim_v))
    return place_lists(plan, partials, sharding, batch, heads_q, cost)


@kept_with_plan
def plan_on_device(
    plan: Plan,
    device: Device,
    batch: int,
    heads_q: int,
    heads_kv: int,
    moves: bool,
    staging: Any = None,
    stage: Stage | None = None,
) -> HopperPlan:
    """Return the device copy of a plan, made at first use and cached with it; the device's context must be current."""
    return HopperPlan(plan, device, batch, heads_q, heads_kv, moves, staging=staging, stage=stage)


@kept_with_plan
def _lay_out(plan: Plan, device: Device, moves: bool) -> tuple[PlanLayout, Buffer, dict[str, int]]:
    """Lay out and upload the tables that do not depend on batch and heads; return (layout, buffer, addresses)."""
    layout = make_layout(plan, moves)
    return layout, *upload(device, _arrays_of(layout))


def _arrays_of(layout: PlanLayout) -> dict[str, np.ndarray]:
    """Return the tables that do not depend on batch and heads, by name."""
    views = "query_views", "key_views"
    names = "work", "entries", "entry_masks", "masks", *views, "priors", "query_rows", "key_rows"
    arrays = {name: getattr(layout, name) for name in names}
    return arrays | _of_merges(layout.merges)


def _of_merges(merges: Merges) -> dict[str, np.ndarray]:
    return {f"merge_{name}": getattr(merges, name) for name in ("rows", "indptr", "sources")}
