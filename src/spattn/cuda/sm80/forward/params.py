"""Parameters of the portable kernels: the plan's part is packed once, the rest per call."""

from __future__ import annotations

import numpy as np

from ....planning.contract.cache import kept_with_plan
from ....planning.contract.types import COMPONENT, VIEW, Plan, tile_lists
from ....schedule.tasks import launch_lists
from ...driver.buffer import Buffer, upload
from ...driver.device import Device
from ...driver.launch import Kernel
from ...driver.structs import packer
from ...host.forward_pass import ForwardPass, fold_scale

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
_CALL = [
    *((name, ARRAY) for name in ("q", "k", "v", "out")),
    *((name, "u8") for name in ("lse", "partial", "partial_lse")),
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
PARAMS = np.dtype(_CALL + _PLAN, align=True)

# The structs of params.cuh.
STRUCTS = {
    "View": VIEW,
    "Component": COMPONENT,
    "Work": WORK,
    "Array": ARRAY,
    "LaunchList": LAUNCH_LIST,
    "Params": PARAMS,
}

_pack_call, _pack_plan = (packer(np.dtype(fields, align=True)).pack for fields in (_CALL, _PLAN))


class PlanOnDevice:
    """A plan's arrays on one device, with launch lists for fixed numbers of batch entries and heads."""

    def __init__(self, plan: Plan, device: Device, batch: int, heads_q: int):
        shared = _upload_arrays(plan, device)
        lists = launch_lists(plan, batch, heads_q)
        self.items, self.merges = int(lists.items_first[-1]), int(lists.merges_first[-1])
        self._buffers = shared[0], upload(device, lists._asdict())
        at, plan_at = self._buffers[1][1], shared[1]
        self.kernels: dict[tuple[object, ...], Kernel] = {}  # of past calls, by dtype, sizes and alignment
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
    """Device copy of a plan, made at first use and cached with it; the device's context must be current."""
    return PlanOnDevice(plan, device, batch, heads_q)


@kept_with_plan
def _upload_arrays(plan: Plan, device: Device) -> tuple[Buffer, dict[str, int]]:
    """(buffer, addresses) of the arrays that do not depend on batch and heads."""
    listed = tile_lists(plan)._asdict() | {"work": plan.work.astype(WORK)}
    return upload(device, {name: listed.get(name, getattr(plan, name)) for name in _ARRAYS})


def pack(call: ForwardPass, plan: PlanOnDevice, partial: int, partial_lse: int, first_block: int = 0) -> bytes:
    """The bytes of ``Params``."""
    scale_log2, sign = fold_scale(call.scale)
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
        first_block,
        scale_log2,
        sign,
        heads_q,
        heads_q // call.k.shape[1],
        call.q.shape[3],
        call.v.shape[3],
    )
    return head + plan.packed
