"""Cached device plans of the backward, and kernels and parameters per shape and stride."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ...._util.cached import BoundedCache
from ...._util.ragged import offsets
from ....arrays.operand import Operand
from ....choose.specializations import ARCH, KEYS_TOGETHER
from ....planning.contract.cache import kept_with_plan
from ....planning.contract.types import Plan
from ....schedule.placement import Bytes, Partials, Placement
from ....schedule.reductions import SumReductions, find_sum_reductions, merges_of_rows, no_sum_reductions
from ....schedule.shard import Sharding, place_lists
from ....schedule.shard_gradients import GradientShare, GradientStage, KeyWork, gradient_stages
from ....schedule.subtiles import EMPTY, Pass, by_keys, by_queries
from ....schedule.tasks import merge_heads, order_tasks
from ....schedule.tensor_maps import MAPS, VIEW
from ....schedule.turns import take_turns
from ...driver.buffer import Buffer, upload
from ...driver.device import Device
from ...driver.launch import Kernel, Launch, Request, load_kernels, start
from ...host.backward_pass import BackwardPass
from ...host.sinks import sink_gradient
from ..maps import readable
from .params import (
    DELTA_AT,
    STATISTIC_FLOATS,
    TABLES,
    Addresses,
    PassParams,
    Template,
    maps_needed,
    pack_converted,
    pack_rows,
    pack_sum,
    structs,
)
from .specializations import Specialization, builds, variant
from .tables import SUBTILE, QuerySubtiles, Views, lay_out, lay_out_masks, lay_out_views, query_subtiles

__all__ = ["Ready", "fuses", "prepare", "requests", "stages"]

_COUNTERS = 1024  # at most this many launches of a plan run at once on different streams
_READY_KEPT = 32
_LAUNCHES_KEPT = 64  # most recent address tuples; allocators reuse addresses
_BLOCKS_PER_SM = 2  # long lists are split to give every SM this many work items
# In a fused backward, items add to the dQ of a head one after another. They hardly wait if concurrent items are at most
# _MOST_APART item lengths apart and if the pipeline fills within the share _MOST_FILLING of the run time. A fused
# product of sub-tiles takes up to _SLOWER times as long as one in separate kernels; a window of ±256 still takes 0.58
# instead of 0.60 ms.
_MOST_APART, _MOST_FILLING, _SLOWER = 1.0, 0.15, 1.22
_FEWEST_STEPS = 2  # iterations per SM; with fewer, a fused backward is not faster and needs one more launch
_HEADS_TOGETHER = 16  # heads that run concurrently; more exceed the L2 cache
_ROWS_PER_BLOCK = 32  # rows per CTA of sum.cu and statistics.cu
_ROWS = 2 * SUBTILE  # per work item
_PHASES = "tasks", "tasks_of_reductions"
_TOGETHER = 2  # key tiles per dK/dV item
_HALVES = 2  # halves of the dQ sums, each with a counter
_MOST_SUMS = 1 << 17  # query sub-tiles of all heads: 4 GiB at head_dim 128, too much for a gain of 8 %
_STATISTIC_BYTES, _FLAG_BYTES = 16, 4


def prepare(call: BackwardPass) -> Ready | None:
    """Return cached state per shapes and strides, or None if TMA cannot address the arrays; the context must be
    current."""
    return None if any(x.pointer % 16 for x in _arrays(call)) else _plan_of(call).ready(call)


def requests(call: BackwardPass) -> list[Request] | None:
    """Return the requests for the kernels that :func:`prepare` loads, or None if TMA cannot address the arrays."""
    plan = _plan_of(call)
    room = None if any(x.pointer % 16 for x in _arrays(call)) else plan.room(call)
    return None if room is None else choose(plan, call, room).requests


def _arrays(call: BackwardPass) -> tuple[Operand, ...]:
    """Return the arrays that TMA reads or writes."""
    return call.q, call.k, call.v, call.dout, call.out, call.dq, call.dk, call.dv


def _plan_of(call: BackwardPass) -> BackwardPlan:
    (batch, heads_q), heads_kv = call.q.shape[:2], call.k.shape[1]
    return plan_on_device(call.plan, call.device, batch, heads_q, heads_kv, call.stage, call.whole)


class DevicePlan(NamedTuple):
    """The dK/dV or dQ work on the device: (phase, parameters, grid) of each launch, `sums` with the addresses of all
    tables, and the CTAs of sum.cu per head."""

    launches: list[tuple[int, PassParams, int]]
    partial_rows: int
    sums: dict[str, int]
    sum_blocks: int


class Launched(NamedTuple):
    """A launch of backward.cu; in-kernel reductions have phase 1."""

    kernel: Kernel
    keyed: int
    phase: int
    params: PassParams
    blocks: int

    def beside(self, before: Launched) -> bool:
        """True if it may overlap the preceding launch: the dK/dV and dQ kernels are independent."""
        return self.keyed != before.keyed and self.phase == before.phase


class Sum(NamedTuple):
    """A launch of sum.cu; `target` indexes (dq, dk, dv), and `tail` has the fields of the struct ``SUM`` after gate."""

    target: int
    of: DevicePlan
    blocks: int
    tail: tuple[int, ...]


class OnePass(NamedTuple):
    """State of a fused backward: the query sub-tiles, and of each entry the number of earlier additions to the same
    sums."""

    subtiles: QuerySubtiles
    rank: np.ndarray


class BackwardPlan:
    """The dK/dV and dQ work of a plan, or of one stage of it, on one device, for fixed batch size and heads.

    The kernels of a stage are not fused, so that the dQ of a row depends on its keys alone. With `whole`, (batch,
    heads_q, heads_kv) of a larger call, lists are split and sums of dQ are ordered as in it; its heads are alike.
    """

    def __init__(
        self,
        plan: Plan,
        device: Device,
        batch: int,
        heads_q: int,
        heads_kv: int,
        stage: GradientStage | None = None,
        whole: tuple[int, int, int] | None = None,
    ):
        self.views = lay_out_views(plan)
        self.regular = _regular(self.views)
        queries = by_queries(plan, self.views.cut)
        if stage is None:
            keys, self.one_pass = self._by_keys(plan, queries, device, *(whole or (batch, heads_q, heads_kv)))
            if whole is not None:
                keys = replace(keys, variant=keys.variant[:batch, :heads_kv])
        else:
            keys, self.one_pass = separate_keys(plan, device.sm_count, batch, heads_q, heads_kv), None
        self._stage = stage
        together = min(batch * heads_kv, _HEADS_TOGETHER)
        shared = {"query_views": self.views.query_records, "key_views": self.views.key_records}
        shared["counters"] = np.zeros(_COUNTERS, np.int32)
        if self.one_pass is not None:
            shared["subtiles"] = self.one_pass.subtiles.coordinates
        buffer, self.at = upload(device, shared)
        self._buffers: list[Buffer] = [buffer]
        in_cache = KEYS_TOGETHER if self.one_pass is None else max(KEYS_TOGETHER, plan.kv_len * together)
        group = heads_q // heads_kv
        self.passes = (
            self._upload(plan, queries, device, (batch, heads_q, heads_kv), KEYS_TOGETHER, 0),
            self._upload(plan, keys, device, (batch, heads_kv, heads_kv), in_cache, group),
        )
        # Cycles through task counters, so that launches in flight have different ones.
        first = self.at["counters"]
        self.counter = itertools.cycle(range(first, first + 4 * _COUNTERS, 4)).__next__
        self._ready = BoundedCache(_READY_KEPT)

    def _by_keys(
        self, plan: Plan, queries: Pass, device: Device, batch: int, heads_q: int, heads_kv: int
    ) -> tuple[Pass, OnePass | None]:
        """Return the dK/dV work and, if dQ is fused into it, the state of the sums. Fused work is balanced over SMs, as
        no other kernel overlaps it."""
        side_by_side = -(-device.sm_count // min(batch * heads_kv, _HEADS_TOGETHER))
        keys = separate_keys(plan, device.sm_count, batch, heads_q, heads_kv)
        subtiles = query_subtiles(plan, self.views, keys)
        if subtiles is None or batch * heads_q * len(subtiles.coordinates) > _MOST_SUMS:
            return keys, None
        one, two = _products(keys, queries, heads_q // heads_kv)
        turns = take_turns(keys, subtiles.of_entry, side_by_side)
        if _SLOWER * one > two or not _hardly_wait(keys, turns.lag * side_by_side, batch * heads_kv, device):
            return keys, None
        workers = _workers(device.sm_count, batch, heads_kv)
        even = by_keys(plan, batch, heads_q, heads_kv, self.views.cut, _TOGETHER, workers, rounds=device.sm_count)
        return even, OnePass(subtiles, take_turns(even, subtiles.of_entry, side_by_side).rank)

    def _upload(
        self, plan: Plan, made: Pass, device: Device, heads: tuple[int, int, int], keys_together: int, group: int
    ) -> DevicePlan:
        """Upload the dQ work (`group` 0) or the dK/dV work (`group`: query heads per item) for (batch, heads, key
        heads)."""
        keyed = group > 0
        slot = made.work["slot"]
        if self.one_pass is None:
            found = _reductions(plan, made, keyed)
        else:  # fused dK/dV tasks wait for earlier ones, so all are in one launch; the dQ kernel rarely runs
            found = no_sum_reductions(slot, made.merges)
        reduces, merges = found.slots < -1, found.merges
        items = np.ones(len(slot), bool)
        if self._stage is not None:
            items, rows = (
                (self._stage.key_items, self._stage.key_rows) if keyed else (self._stage.items, self._stage.rows)
            )
            merges = merges_of_rows(merges, rows)
        phases = [order_tasks(made, chosen, *heads, keys_together) for chosen in (items & ~reduces, items & reduces)]
        arrays = lay_out(plan, self.views, made, found.slots, keyed) | {
            "masks": lay_out_masks(plan, self.views.cut, keyed),
            "rest_indptr": found.rest_indptr,
            "rest_sources": found.rest_sources,
            "rows": merges.rows,
            "indptr": merges.indptr,
            "sources": merges.sources,
            "heads": merge_heads(merges.variants, made.variant, *heads[:2]),
        }
        for name, tasks in zip(_PHASES, phases, strict=True):
            tasks["head_q"] *= max(group, 1)
            arrays[name] = tasks
        if keyed and self.one_pass is not None:
            arrays["entries"]["subtile"], arrays["entries"]["rank"] = (
                self.one_pass.subtiles.of_entry,
                self.one_pass.rank,
            )
        buffer, at = upload(device, arrays)
        self._buffers.append(buffer)
        names = ("key_views", "query_views") if keyed else ("query_views", "key_views")
        at |= {"row_views": self.at[names[0]], "column_views": self.at[names[1]]}
        partial_rows = made.slots * _ROWS
        launches = [
            (phase, PassParams(at | {"tasks": at[name]}, len(tasks), partial_rows), min(device.sm_count, len(tasks)))
            for phase, (name, tasks) in enumerate(zip(_PHASES, phases, strict=True))
            if len(tasks)
        ]
        sum_blocks = -(-int(np.diff(merges.variants).max(initial=0)) // _ROWS_PER_BLOCK)
        return DevicePlan(launches, partial_rows, at, sum_blocks)

    def ready(self, call: BackwardPass) -> Ready | None:
        """Return cached state for calls of these shapes and strides, or None if TMA cannot address the arrays."""
        key = (call.dtype, call.score.text, call.table_sums.text, *(part for x in _arrays(call) for part in x[1:]))
        found = self._ready.get(key, self)
        if found is self:
            room = self.room(call)
            found = self._ready.keep(key, None if room is None else Ready(self, call, room))
        return found

    def room(self, call: BackwardPass) -> int | None:
        """Return how many tensor maps the kernels' parameters hold, or None if TMA cannot address the arrays."""
        if not all(map(readable, _arrays(call))):
            return None
        return next((size for size in MAPS if maps_needed(self.views, call) <= size), None)


class Chosen(NamedTuple):
    """The kernels of a backward.

    Attributes
    ----------
    table : list of Specialization
        Specializations of backward.cu.
    fused : bool
        True if the first one computes dQ too.
    sums_tables : bool
        True if it also sums the gradients of captured arrays.
    requests : list of Request
        The kernels of `table`, statistics.cu, sum.cu and, if fused, convert.cu.
    """

    table: list[Specialization]
    fused: bool
    sums_tables: bool
    requests: list[Request]


def choose(plan: BackwardPlan, call: BackwardPass, room: int) -> Chosen:
    """Choose the kernels of a call, with `room` tensor maps in their parameters."""
    table = builds((call.q.shape[3], call.v.shape[3]), plan.one_pass is not None)
    fused = table[0].results == "dk dv dq"
    sums = call.table_sums
    sums_tables = bool(sums.text) and len(sums.first) <= TABLES and fused and plan.regular

    def request(name: str, row: Specialization, room: int, text: str = "") -> Request:
        defines = variant(row, call.dtype, room)
        return Request(f"sm90/backward/{name}.cu", ARCH, defines, structs(room), f"hopper_{name}", text)

    texts = [sums.text if sums_tables and row.results == "dk dv dq" else call.score.text for row in table]
    found = [request("backward", row, room, text) for row, text in zip(table, texts, strict=True)]
    names = ("statistics", "sum", "convert") if fused else ("statistics", "sum")
    return Chosen(table, fused, sums_tables, found + [request(name, table[0], MAPS[0]) for name in names])


class Ready:
    """Kernels and parameters of all calls of a plan with the same shapes, strides and dtype."""

    def __init__(self, plan: BackwardPlan, call: BackwardPass, room: int):
        self._plan, self.counter = plan, plan.counter
        batch, heads_q, q_len, head_dim = call.q.shape
        heads_kv, head_dim_v = call.k.shape[1], call.v.shape[3]
        queries, keys = plan.passes
        subtiles = None if plan.one_pass is None else plan.one_pass.subtiles
        table, fused, self.sums_tables, needed = choose(plan, call, room)
        loaded = load_kernels(call.device, needed)
        self._statistics, self._sum, *rest = loaded[len(table) :]
        self._convert = rest[0] if fused else None
        passes = [(kernel, int(row.results != "dq")) for kernel, row in zip(loaded, table, strict=False)]
        self._launched = sorted(
            (Launched(kernel, keyed, *launch) for kernel, keyed in passes for launch in plan.passes[keyed].launches),
            key=lambda launched: launched.phase,
        )
        self._subtiles, self._view = 0, 0
        if subtiles is not None and fused:
            self._subtiles = len(subtiles.coordinates)
            self._view = plan.at["query_views"] + subtiles.view * VIEW.itemsize
        # In fused mode convert.cu sets a flag that tells the dQ kernel whether to run: launches must not overlap.
        beside = [subtiles is None and own.beside(before) for before, own in itertools.pairwise(self._launched)]
        waits = [not runs for runs in (False, *beside)]
        launches = [own.params._replace(waits=wait) for own, wait in zip(self._launched, waits, strict=False)]
        self._template = Template(plan.views, launches, call, room, self._subtiles)
        self._rows, self._added = batch * heads_q * q_len, batch * heads_q * self._subtiles * _HALVES
        first, stop = (0, q_len) if call.stage is None else call.stage.queries[1:]
        self._read = batch * heads_q * (stop - first)
        self._rows_tail = self._read, heads_q, q_len, head_dim_v, self._added + 1, first, max(1, stop - first)
        results = (queries, call.dq, heads_q), (keys, call.dk, heads_kv), (keys, call.dv, heads_kv)
        self._sums = [
            Sum(
                number,
                of,
                batch * heads * of.sum_blocks,
                (*x.strides[:3], of.partial_rows, heads, x.shape[3], of.sum_blocks, 0),
            )
            for number, (of, x, heads) in enumerate(results)
            if of.sum_blocks
        ]
        sizes = _partial_sizes(self._rows, [(batch, heads, of.partial_rows, x.shape[3]) for of, x, heads in results])
        sizes += [self._added // _HALVES * SUBTILE * table[0].head_dim * 4, (self._added + 1) * _FLAG_BYTES]
        *self._offsets, self.workspace_bytes = itertools.accumulate(sizes)
        self._launches = BoundedCache(_LAUNCHES_KEPT)

    def run(self, call: BackwardPass) -> int:
        """Enqueue all kernels; the context must be current.

        Returns
        -------
        int
            0 if the call does not sum gradients of captured arrays, else the address of a device flag that is 0 if
            these gradients are finite.
        """
        workspace = call.allocate(self.workspace_bytes)
        rows = (call.lse, call.dlse) if call.dlse is not None else (call.lse,)
        arrays = call.dout, call.q, call.k, call.v, call.out, call.dq, call.dk, call.dv
        key = (
            *(x.pointer for x in arrays),
            *((x.pointer, x.strides) for x in rows),
            workspace,
            call.scale,
            call.score.address,
            call.stream,
            call.sinks,
            call.dsinks,
            call.table_sums[1:],
        )
        start(self._launches.get(key) or self._launches.keep(key, self.write(call, workspace)), self.counter)
        return self._nonfinite(workspace) if self.sums_tables else 0

    def _nonfinite(self, workspace: int) -> int:
        """Return the address of the flag that convert.cu sets if a sum of dQ, and hence maybe of dS, is not finite."""
        return workspace + self._offsets[-1] + 4 * self._added

    def write(self, call: BackwardPass, workspace: int) -> list[Launch]:
        """Return a call's launches. No other launches may write to the same addresses while the results are alive."""
        *partial, query_sums, added = [workspace + offset for offset in self._offsets]
        to = Addresses(
            call.q.pointer,
            call.k.pointer,
            call.v.pointer,
            call.dout.pointer,
            call.dq.pointer,
            call.dk.pointer,
            call.dv.pointer,
            workspace,
            call.scale,
            call.score.address,
            *((call.table_sums.words, call.table_sums.first) if self.sums_tables else ()),
        )
        dlse, by_dlse = (0, (0, 0, 0)) if call.dlse is None else (call.dlse.pointer, call.dlse.strides)
        strides = *call.dout.strides[:3], *call.out.strides[:3], *call.lse.strides, *by_dlse
        arrays = call.dout.pointer, call.out.pointer, call.lse.pointer, dlse, workspace, added
        written: list[Launch] = []

        def write(kernel: Kernel, blocks: int, params: bytes, counter_at: int | None = None) -> None:
            written.append(Launch(kernel, blocks, params, call.stream, counter_at, early=bool(written)))

        write(
            self._statistics, max(1, -(-self._read // _ROWS_PER_BLOCK)), pack_rows(*arrays, *strides, *self._rows_tail)
        )
        # In fused mode the dQ kernel recomputes dQ if a sum is not finite; otherwise it only reads the flag.
        nonfinite = self._nonfinite(workspace)
        gate = 0 if self._convert is None else nonfinite
        for number, (ready, keyed, _, _, blocks) in enumerate(self._launched):
            results = (partial[1], partial[2]) if keyed else (partial[0], 0)
            workspaces = *results, query_sums, added, 0 if keyed else gate
            params = self._template.fill(number, to, workspaces, 0)
            write(ready, blocks, params, self._template.counter_at)
            if keyed and self._convert is not None:
                params = pack_converted(
                    query_sums,
                    added,
                    nonfinite,
                    self._view,
                    self._plan.at["subtiles"],
                    to.dq,
                    *call.dq.strides[:3],
                    self._subtiles,
                    call.q.shape[1],
                    call.q.shape[3],
                    call.scale,
                )
                write(self._convert, self._added // _HALVES, params)
        for number, of, blocks, tail in self._sums:
            target = (call.dq, call.dk, call.dv)[number].pointer
            lists = (of.sums[name] for name in ("rows", "indptr", "sources", "heads"))
            params = pack_sum(*lists, partial[number], target, 0 if number else gate, *tail)
            write(self._sum, blocks, params)
        if call.sinks:  # last, since it does not start early but waits for all earlier launches
            written.append(sink_gradient(call, workspace + DELTA_AT, STATISTIC_FLOATS))
        return written


def _regular(views: Views) -> bool:
    """True if every sub-tile is one row of tokens and all rows have the same stride, so that all pairs of a diagonal
    have the same distance."""
    records = np.concatenate([views.query_records, views.key_records])
    return bool((records["box"][:, 2] >= SUBTILE).all() and np.unique(records["stride"][:, 2]).size == 1)


def _hardly_wait(keys: Pass, apart: float, heads: int, device: Device) -> bool:
    """True if a fused backward pays: items `apart` iterations from each other hardly wait, and there is enough work."""
    steps = (keys.work["end"] - keys.work["begin"]).astype(np.int64) * keys.work["heads"]
    of_each_sm = float(steps.sum()) * heads / device.sm_count
    if of_each_sm < _FEWEST_STEPS:
        return False
    return apart <= _MOST_APART * float(steps.mean()) and apart <= _MOST_FILLING * of_each_sm


def _products(keys: Pass, queries: Pass, group: int) -> tuple[int, int]:
    """Count the products of sub-tiles per key head: fused, where both warpgroups take part in every iteration, and in
    separate kernels, where a warpgroup skips sub-tiles without an allowed pair."""
    every = _entries(keys, np.ones_like(keys.masks, bool))
    seen_by_keys, seen_by_queries = (_entries(made, made.masks != EMPTY) for made in (keys, queries))
    return 5 * every, 4 * seen_by_keys + 3 * group * seen_by_queries


def _entries(made: Pass, chosen: np.ndarray) -> int:
    """Count the `chosen` (row sub-tile, entry) pairs over all items."""
    before = offsets(chosen.sum(axis=1))
    return int(((before[made.work["end"]] - before[made.work["begin"]]) * made.work["heads"]).sum())


def _workers(sm_count: int, batch: int, heads_kv: int) -> int:
    """Return the number of workers that share a key-value head."""
    return -(-_BLOCKS_PER_SM * sm_count // (batch * heads_kv))


@kept_with_plan
def separate_keys(plan: Plan, sm_count: int, batch: int, heads_q: int, heads_kv: int) -> Pass:
    """Return the work of a dK/dV kernel that computes no dQ."""
    cut, workers = lay_out_views(plan).cut, _workers(sm_count, batch, heads_kv)
    return by_keys(plan, batch, heads_q, heads_kv, cut, _TOGETHER, workers)


def _reductions(plan: Plan, made: Pass, keyed: bool) -> SumReductions:
    """Return the in-kernel reductions of the dQ work or of separate dK/dV work."""
    length = plan.kv_len if keyed else plan.q_len
    return find_sum_reductions(made.work["slot"], made.work_indptr, made.merges, _ROWS, length)


def _partial_sizes(rows: int, shapes: Sequence[tuple[int, int, int, int]]) -> list[int]:
    """Return the bytes of the statistics and of the partials of dq, dk and dv at the start of a workspace."""
    return [rows * _STATISTIC_BYTES, *(4 * math.prod(shape) for shape in shapes)]


@kept_with_plan
def _placed(
    plan: Plan, sm_count: int, sizes: tuple[int, int, int, int, int], sharding: Sharding
) -> tuple[KeyWork, Placement, Placement]:
    """Return the dK/dV work, and the placements of the dQ items and of its items."""
    batch, heads_q, heads_kv, head_dim, head_dim_v = sizes
    keys = separate_keys(plan, sm_count, batch, heads_q, heads_kv)
    queries, work = by_queries(plan, lay_out_views(plan).cut), KeyWork.of(plan, keys, _TOGETHER)
    partials = [
        Partials(
            made.work["slot"], made.work_indptr, made.merges, _reductions(plan, made, keyed).merges, made.slots, _ROWS
        )
        for keyed, made in ((False, queries), (True, keys))
    ]
    # Of a key-value head, and its query heads: q, dout, out and lse; k and v.
    group, of_query, of_key = heads_q // heads_kv, 2 * (head_dim + 2 * head_dim_v) + 4, 2 * (head_dim + head_dim_v)
    of_queries = Bytes(group * of_query, group * 4 * head_dim, of_key)
    of_keys = Bytes(of_key, 2 * of_key, group * of_query)
    return (
        work,
        place_lists(plan, partials[0], sharding, batch, heads_q, of_queries),
        work.place(partials[1], sharding, of_keys),
    )


@kept_with_plan
def stages(
    plan: Plan, sm_count: int, sizes: tuple[int, int, int, int, int], sharding: Sharding, rank: int
) -> GradientShare:
    """Return a rank's part of the backward; each stage is the same object in all calls."""
    work, of_queries, of_keys = _placed(plan, sm_count, sizes, sharding)
    batch, heads_q, heads_kv, head_dim, head_dim_v = sizes
    slots = of_queries.partials.slots, of_keys.partials.slots
    shapes = (heads_q, slots[0], head_dim), (heads_kv, slots[1], head_dim), (heads_kv, slots[1], head_dim_v)
    of_arrays = [(batch, heads, number * _ROWS, width) for heads, number, width in shapes]
    *offset, total = itertools.accumulate(_partial_sizes(batch * heads_q * plan.q_len, of_arrays))
    found = gradient_stages(work, sharding, rank, of_queries, of_keys)
    partials = tuple(zip(offset, of_arrays, strict=True))
    return GradientShare(found, work, of_queries, of_keys, partials, total + _FLAG_BYTES)


@kept_with_plan
def plan_on_device(
    plan: Plan,
    device: Device,
    batch: int,
    heads_q: int,
    heads_kv: int,
    stage: GradientStage | None,
    whole: tuple[int, int, int] | None = None,
) -> BackwardPlan:
    """Return the device copy of a plan's backward work, cached with the plan; the context must be current."""
    return BackwardPlan(plan, device, batch, heads_q, heads_kv, stage, whole)


def fuses(plan: Plan, device: Device, sizes: tuple[int, int, int], whole: tuple[int, int, int]) -> bool:
    """Return whether the backward of some heads, (batch, heads_q, heads_kv), of a call computes dQ, dK and dV together;
    the context must be current."""
    return plan_on_device(plan, device, *sizes, None, whole).one_pass is not None
