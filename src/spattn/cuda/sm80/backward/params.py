"""Parameters of the portable backward kernels, and a plan's backward work on a device."""

from __future__ import annotations

import numpy as np

from ....arrays.operand import Operand
from ....planning.contract.cache import kept_with_plan
from ....planning.contract.types import VIEW, Plan
from ....schedule.subtiles import KEYS, SUBTILE_ENTRY, SUBTILE_WORK, Cut, Pass, by_keys, by_queries, subtile_masks
from ....schedule.tasks import TASK, merge_heads, order_tasks
from ...driver.buffer import upload
from ...driver.device import Device
from ...driver.structs import packer
from ...host.backward_pass import BackwardPass
from ..forward.params import ARRAY

__all__ = ["STRUCTS", "PassOnDevice", "pack", "pack_sum", "plan_on_device"]

_BLOCKS_PER_SM = 4  # for which long lists are split
_ROWS_PER_BLOCK = 8  # of sum.cu

_ARRAYS = ("views", "tasks", "work", "entries", "masks", "bits")
PASS = np.dtype(
    [
        *((name, "u8") for name in _ARRAYS),
        ("partial_rows", "i8"),
        *(
            (name, "i4")
            for name in ("subtiles", "subtile_rows", "subtile_columns", "row_parts", "column_parts", "unused")
        ),
    ],
    align=True,
)
PARAMS = np.dtype(
    [
        *((name, ARRAY) for name in ("q", "k", "v", "dout", "out", "lse", "dlse", "scores", "values")),
        *((name, "u8") for name in ("statistics", "partial_scores", "partial_values")),
        ("scale", "f8"),
        ("rows", "i8"),
        ("pass", PASS),
        *((name, "i4") for name in ("heads_q", "heads_kv", "q_len", "head_dim", "head_dim_v")),
    ],
    align=True,
)
ROWS = np.dtype(
    [
        *((name, "u8") for name in ("rows", "indptr", "sources", "heads", "partial")),
        ("target", ARRAY),
        ("partial_rows", "i8"),
        *((name, "i4") for name in ("heads_count", "features", "head_blocks", "unused")),
    ],
    align=True,
)
# The structs of params.cuh.
STRUCTS = {
    "View": VIEW,
    "Work": SUBTILE_WORK,
    "Entry": SUBTILE_ENTRY,
    "Task": TASK,
    "Array": ARRAY,
    "Pass": PASS,
    "Params": PARAMS,
    "Rows": ROWS,
}
_pack_params, _pack_rows = packer(PARAMS).pack, packer(ROWS).pack


class PassOnDevice:
    """The dK/dV or dQ work on one device for fixed batch and heads."""

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
        self.packed = *(self.at[name] for name in _ARRAYS), self.partial_rows, *sizes


def _words(bits: np.ndarray) -> np.ndarray:
    """(n, rows, columns) booleans as (n, rows) 64-bit words."""
    padded = np.zeros((*bits.shape[:2], 64), bool)
    padded[..., : bits.shape[2]] = bits
    return np.packbits(padded, axis=2, bitorder="little").view("<u8")[..., 0].astype(np.uint64)


@kept_with_plan
def plan_on_device(
    plan: Plan, device: Device, batch: int, heads_q: int, heads_kv: int
) -> tuple[PassOnDevice, PassOnDevice]:
    """Device copy of the dQ and dK/dV work, made at first use and cached with the plan; the context must be current."""
    cut, group = Cut.consecutive(plan, _side_of(plan.block_q)), heads_q // heads_kv
    workers = -(-_BLOCKS_PER_SM * device.sm_count // (batch * heads_kv))
    queries = by_queries(plan, cut)
    keys = by_keys(plan, batch, heads_q, heads_kv, cut, 1, workers)
    return (
        PassOnDevice(plan, queries, device, batch, heads_q, heads_kv, 0, cut),
        PassOnDevice(plan, keys, device, batch, heads_kv, heads_kv, group, cut),
    )


def _side_of(block_q: int) -> int:
    """Queries per sub-tile: the largest of 64, 32 and 16 that divides the tile."""
    return next(side for side in (64, 32, 16) if block_q % side == 0)


def pack(
    call: BackwardPass,
    own: PassOnDevice,
    statistics: int,
    scores: tuple[Operand, int],
    values: tuple[Operand, int] | None,
) -> bytes:
    """The bytes of ``Params`` for the dK/dV or dQ kernel; `scores` and `values` are results with their workspaces."""
    batch, heads_q, q_len, head_dim = call.q.shape
    nothing = Operand(0, (), (0, 0, 0, 0))
    to_values, partial = values or (nothing, 0)
    arrays = call.q, call.k, call.v, call.dout, call.out, call.lse, call.dlse or nothing, scores[0], to_values
    return _pack_params(
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
    )


def pack_sum(own: PassOnDevice, target: Operand, partial: int) -> bytes:
    """The bytes of ``Rows`` for one gradient."""
    arrays = (own.at[name] for name in ("rows", "indptr", "sources", "heads"))
    sizes = target.shape[1], target.shape[3], own.sum_blocks, 0
    return _pack_rows(*arrays, partial, target.pointer, *target.strides, own.partial_rows, *sizes)
