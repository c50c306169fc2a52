"""Parameters of both passes' kernels, and device copies of a plan's arrays and work lists."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...arrays.operand import Operand
from ...planning.contract.cache import kept_with_plan
from ...planning.contract.types import COMPONENT, VIEW, Plan, tile_lists
from ...schedule.subtiles import KEYS, SUBTILE_ENTRY, SUBTILE_WORK, Cut, Pass, by_keys, by_queries, subtile_masks
from ...schedule.tasks import TASK, launch_lists, merge_heads, order_tasks
from ..driver.buffer import Buffer, upload
from ..driver.device import Device
from ..driver.launch import Kernel
from ..driver.structs import packer
from ..host.backward_pass import BackwardPass
from ..host.forward_pass import ForwardPass, fold_scale

__all__ = [
    "captured_dtype",
    "pack_accumulated",
    "PassOnDevice",
    "PlanOnDevice",
    "pack",
    "pack_backward",
    "pack_sum",
    "passes_on_device",
    "plan_on_device",
    "structs_of",
]

_BLOCKS_PER_SM = 4  # the backward splits long lists to give every SM this many work items
_ROWS_PER_BLOCK = 8  # rows per CTA of sum.cu

_ARRAYS = (
    "views",
    "components",
    "indices",
    "key_view",
    "mask",
    "masks",
    "work",
    "merge_rows",
    "merge_indptr",
    "merge_sources",
)

WORK = np.dtype([(name, "i4") for name in ("component", "query_tile", "begin", "end", "slot")])
ARRAY = np.dtype([("data", "u8"), *((name, "i8") for name in ("batch", "head", "row", "column"))])
LAUNCH_LIST = np.dtype(
    [
        *((name, "u8") for name in ("task_indptr", "head_indptr", "heads", "first_number")),
        ("numbers", "i8"),
        ("variants", "i4"),
    ],
    align=True,
)
SCORE = np.dtype([("args", "u8"), ("scale", "f8"), ("query_offset", "i4")], align=True)
_CALL = [
    *((name, ARRAY) for name in ("q", "k", "v", "out")),
    *((name, "u8") for name in ("lse", "partial", "partial_lse", "sinks")),
    ("first_block", "i8"),
    ("scale_log2", "f8"),
    *((name, "i4") for name in ("sign", "heads_q", "group", "head_dim", "head_dim_v")),
]
_PLAN = [
    *((name, "u8") for name in _ARRAYS),
    ("items", LAUNCH_LIST),
    ("merges", LAUNCH_LIST),
    *((name, "i4") for name in ("q_len", "slots", "block_q")),
]
PARAMS = np.dtype([*_CALL, *_PLAN, ("score", SCORE)], align=True)

_PASS_ARRAYS = ("views", "tasks", "work", "entries", "masks", "bits")
PASS = np.dtype(
    [
        *((name, "u8") for name in _PASS_ARRAYS),
        ("partial_rows", "i8"),
        *(
            (name, "i4")
            for name in ("subtiles", "subtile_rows", "subtile_columns", "row_parts", "column_parts", "unused")
        ),
    ],
    align=True,
)
BACKWARD_PARAMS = np.dtype(
    [
        *((name, ARRAY) for name in ("q", "k", "v", "dout", "out", "lse", "dlse", "scores", "values")),
        *((name, "u8") for name in ("statistics", "partial_scores", "partial_values")),
        ("scale", "f8"),
        ("rows", "i8"),
        ("pass", PASS),
        *((name, "i4") for name in ("heads_q", "heads_kv", "q_len", "head_dim", "head_dim_v")),
        ("score", SCORE),
        ("gate", "u8"),
    ],
    align=True,
)
SUM_ROWS = np.dtype(
    [
        *((name, "u8") for name in ("rows", "indptr", "sources", "heads", "partial")),
        ("target", ARRAY),
        ("partial_rows", "i8"),
        *((name, "i4") for name in ("heads_count", "features", "head_blocks", "unused")),
    ],
    align=True,
)
ACCUMULATED = np.dtype([("words", "u8"), ("exact", "u8"), ("gate", "u8"), ("target", "u8"), ("count", "i8")])
# Structs of params.cuh.
_STRUCTS = {
    "View": VIEW,
    "Component": COMPONENT,
    "Work": WORK,
    "Array": ARRAY,
    "ScoreParams": SCORE,
    "LaunchList": LAUNCH_LIST,
    "Params": PARAMS,
}
_BACKWARD_STRUCTS = {
    "View": VIEW,
    "Work": SUBTILE_WORK,
    "Entry": SUBTILE_ENTRY,
    "Task": TASK,
    "Array": ARRAY,
    "ScoreParams": SCORE,
    "Pass": PASS,
    "Params": BACKWARD_PARAMS,
    "Rows": SUM_ROWS,
    "Accumulated": ACCUMULATED,
}

_pack_call, _pack_plan = (packer(np.dtype(fields, align=True)).pack for fields in (_CALL, _PLAN))
_pack_score, _pack_backward, _pack_sum = (packer(dtype).pack for dtype in (SCORE, BACKWARD_PARAMS, SUM_ROWS))
pack_accumulated = packer(ACCUMULATED).pack
_IDENTITY = _pack_score(0, 0.0, 0)


def structs_of(source: str, tables: int = 0) -> Mapping[str, np.dtype]:
    """Return the dtypes of the structs that a kernel file shares with this module. `tables` is the number of captured
    arrays if the kernel accumulates their gradients, else 0."""
    if tables:
        own = captured_dtype(tables)
        params = [(name, kind) for name, (kind, *_) in (BACKWARD_PARAMS.fields or {}).items()]
        return _BACKWARD_STRUCTS | {"Captured": own, "Params": np.dtype([*params, ("captured", own)], align=True)}
    return _BACKWARD_STRUCTS if source.startswith("sm80/backward/") else _STRUCTS


def captured_dtype(tables: int) -> np.dtype:
    """Return the dtype of ``Captured``."""
    return np.dtype(
        [("words", "u8"), ("begin", "i8"), ("count", "i8"), ("first", "i8", tables), ("direct", "u8", tables)]
    )


class PlanOnDevice:
    """A plan's arrays on one device, with launch lists for a fixed batch size and number of heads."""

    def __init__(self, plan: Plan, device: Device, batch: int, heads_q: int):
        self.kernels: dict[tuple[Any, ...], tuple[Kernel, int]] = {}  # cached by forward.attention_kernel()
        shared = _upload_arrays(plan, device)
        lists = launch_lists(plan, batch, heads_q)
        self.items, self.merges = int(lists.items_first[-1]), int(lists.merges_first[-1])
        self._buffers = shared[0], upload(device, lists._asdict())
        at, plan_at = self._buffers[1][1], shared[1]
        self.packed = _pack_plan(
            *(plan_at[name] for name in _ARRAYS),
            at["items"],
            at["head_indptr"],
            at["heads"],
            at["items_first"],
            self.items,
            plan.variants,
            at["merges"],
            at["head_indptr"],
            at["heads"],
            at["merges_first"],
            self.merges,
            plan.variants,
            plan.q_len,
            plan.slots,
            plan.block_q,
        )


@kept_with_plan
def plan_on_device(plan: Plan, device: Device, batch: int, heads_q: int) -> PlanOnDevice:
    """Return the device copy of a plan, made at first use and cached with it; the device's context must be current."""
    return PlanOnDevice(plan, device, batch, heads_q)


@kept_with_plan
def _upload_arrays(plan: Plan, device: Device) -> tuple[Buffer, dict[str, int]]:
    """Upload the arrays that do not depend on batch and heads; return (buffer, addresses)."""
    listed = tile_lists(plan)._asdict() | {"work": plan.work.astype(WORK)}
    return upload(device, {name: listed.get(name, getattr(plan, name)) for name in _ARRAYS})


def pack(call: ForwardPass, plan: PlanOnDevice, partial: int, partial_lse: int, first_block: int = 0) -> bytes:
    """Pack ``Params`` of the forward."""
    (scale_log2, sign), score = fold_scale(call.scale), _IDENTITY
    if call.score.text:
        score, scale_log2, sign = _pack_score(*_score_of(call)), math.log2(math.e), 1
    heads_q = call.q.shape[1]
    head = _pack_call(
        call.q.pointer,
        *call.q.strides,
        call.k.pointer,
        *call.k.strides,
        call.v.pointer,
        *call.v.strides,
        call.out.pointer,
        *call.out.strides,
        call.lse,
        partial,
        partial_lse,
        call.sinks,
        first_block,
        scale_log2,
        sign,
        heads_q,
        heads_q // call.k.shape[1],
        call.q.shape[3],
        call.v.shape[3],
    )
    return head + plan.packed + score


def _score_of(call: ForwardPass | BackwardPass) -> tuple[int, float, int]:
    """Return the fields of ``ScoreParams``; for the identity no kernel reads them."""
    if not call.score.text:
        return 0, 0.0, 0
    return call.score.address, call.scale, call.k.shape[2] - call.q.shape[2]


class PassOnDevice:
    """Work of the dK/dV or dQ kernel on one device, for a fixed batch size and number of heads."""

    def __init__(
        self, plan: Plan, made: Pass, device: Device, batch: int, heads: int, heads_kv: int, group: int, cut: Cut
    ):
        keyed, side = group > 0, cut.side
        bits = subtile_masks(plan, cut).bits
        if keyed:
            bits = bits.swapaxes(1, 2)
        tasks = order_tasks(made, np.ones(len(made.work), bool), batch, heads, heads_kv, plan.kv_len)
        tasks["head_q"] *= max(group, 1)
        merges = made.merges
        self._buffer, self.at = upload(
            device,
            {
                "views": plan.views,
                "tasks": tasks,
                "work": made.work,
                "entries": made.entries,
                "masks": made.masks,
                "bits": _words(bits),
                "rows": merges.rows,
                "indptr": merges.indptr,
                "sources": merges.sources,
                "heads": merge_heads(merges.variants, made.variant, batch, heads),
            },
        )
        self.tasks, self.subtiles = len(tasks), made.masks.shape[1]
        parts = plan.block_q // side, plan.block_kv // KEYS
        sides = side, KEYS
        self.subtile_rows = sides[keyed]
        self.partial_rows = made.slots * self.subtiles * self.subtile_rows
        self.sum_blocks = -(-int(np.diff(merges.variants).max(initial=0)) // _ROWS_PER_BLOCK)
        sizes = self.subtiles, self.subtile_rows, sides[not keyed], parts[keyed], parts[not keyed], 0
        self.packed = *(self.at[name] for name in _PASS_ARRAYS), self.partial_rows, *sizes


def _words(bits: np.ndarray) -> np.ndarray:
    """Pack (n, rows, columns) booleans into (n, rows) 64-bit words."""
    padded = np.zeros((*bits.shape[:2], 64), bool)
    padded[..., : bits.shape[2]] = bits
    return np.packbits(padded, axis=2, bitorder="little").view("<u8")[..., 0].astype(np.uint64)


@kept_with_plan
def passes_on_device(
    plan: Plan, device: Device, batch: int, heads_q: int, heads_kv: int
) -> tuple[PassOnDevice, PassOnDevice]:
    """Return device copies of the dQ and dK/dV work, cached with the plan; the context must be current."""
    cut, group = Cut.consecutive(plan, _side_of(plan.block_q)), heads_q // heads_kv
    workers = -(-_BLOCKS_PER_SM * device.sm_count // (batch * heads_kv))
    queries = by_queries(plan, cut)
    keys = by_keys(plan, batch, heads_q, heads_kv, cut, 1, workers)
    return (
        PassOnDevice(plan, queries, device, batch, heads_q, heads_kv, 0, cut),
        PassOnDevice(plan, keys, device, batch, heads_kv, heads_kv, group, cut),
    )


def _side_of(block_q: int) -> int:
    """Return the queries per sub-tile: the largest of 64, 32 and 16 that divides the tile."""
    return next(side for side in (64, 32, 16) if block_q % side == 0)


def pack_backward(
    call: BackwardPass,
    own: PassOnDevice,
    statistics: int,
    scores: tuple[Operand, int],
    values: tuple[Operand, int] | None,
    gate: int = 0,
) -> bytes:
    """Pack ``Params`` for the dK/dV or dQ kernel. `scores` and `values` are results, each with its workspace. `gate` is
    0 or the address of a device flag; the kernel does nothing if the flag is 0."""
    batch, heads_q, q_len, head_dim = call.q.shape
    nothing = Operand(0, (), (0, 0, 0, 0))
    to_values, partial = values or (nothing, 0)
    arrays = call.q, call.k, call.v, call.dout, call.out, call.lse, call.dlse or nothing, scores[0], to_values
    return _pack_backward(
        *(number for x in arrays for number in (x.pointer, *(*x.strides, 0)[:4])),
        statistics,
        scores[1],
        partial,
        call.scale,
        batch * heads_q * q_len,
        *own.packed,
        heads_q,
        call.k.shape[1],
        q_len,
        head_dim,
        call.v.shape[3],
        *_score_of(call),
        gate,
    )


def pack_sum(own: PassOnDevice, target: Operand, partial: int) -> bytes:
    """Pack ``Rows`` for one gradient."""
    arrays = (own.at[name] for name in ("rows", "indptr", "sources", "heads"))
    sizes = target.shape[1], target.shape[3], own.sum_blocks, 0
    return _pack_sum(*arrays, partial, target.pointer, *target.strides, own.partial_rows, *sizes)
