"""The struct ``Params`` of ``kernels/params.cuh``, packed: the plan's part once per plan, the rest every call."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..plan._cache import derived
from ..plan._types import Plan
from .buffer import upload
from .device import Device
from .launch import Kernel

_CALL = struct.Struct("@" + "Q4q" * 4 + "3Q" + "qd" + "5i4x")
_PLAN = struct.Struct("@" + "10Q" + "4Qqi4x" * 2 + "3i4x")
_ARRAYS = ("views", "components", "indices", "key_view", "mask", "masks", "work", "merge_rows", "merge_indptr",
           "merge_sources")  # fmt: skip
_SMALLEST_SCALE = float(np.finfo(np.float32).tiny)


class Operand(NamedTuple):
    """An array in device memory: address, shape, and strides in elements, of (batch, heads, rows, columns)."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(slots=True)
class Call:
    """One forward pass whose arguments have been checked and whose outputs exist.

    Attributes
    ----------
    stream : int
        Raw handle; everything is ordered on it.
    lse : int
        Address of contiguous (batch, heads_q, q_len) float32, float64 for float64 inputs.
    allocate : callable
        Bytes to the address of memory that may be used on `stream` until the call's last kernel.
    precision : {None, "tf32"}
        Of the products; None is that of `dtype`.
    """

    device: Device
    stream: int
    plan: Plan
    q: Operand
    k: Operand
    v: Operand
    out: Operand
    lse: int
    dtype: str
    scale: float
    allocate: Callable[[int], int]
    precision: str | None = None

    def aligned(self, itemsize: int) -> bool:
        """Whether every row of every array can be read and written 16 bytes at a time."""
        return (
            _is_aligned(self.q, itemsize)
            and _is_aligned(self.k, itemsize)
            and _is_aligned(self.v, itemsize)
            and _is_aligned(self.out, itemsize)
        )


class PlanOnDevice:
    """A plan's arrays on one device, with the launch lists for one number of batch entries and heads."""

    def __init__(self, plan: Plan, device: Device, batch: int, heads_q: int):
        arrays = {name: getattr(plan, name) for name in _ARRAYS}
        shared = derived(plan, ("cuda", device.ordinal), lambda: upload(device, arrays))
        variant = np.broadcast_to(plan.variant, (batch, heads_q)).reshape(-1)
        heads = np.argsort(variant, kind="stable").astype(np.int32)
        counts = np.bincount(variant, minlength=plan.variants)
        lists = {"heads": heads, "head_indptr": _indptr(counts).astype(np.int32)}
        for name, indptr in (("items", plan.work_indptr), ("merges", plan.merge_variants)):
            lists[name] = indptr
            lists[name + "_first"] = _indptr(np.diff(indptr).astype(np.int64) * counts)
        self.items, self.merges = int(lists["items_first"][-1]), int(lists["merges_first"][-1])
        self._buffers = shared[0], upload(device, lists)
        at, plan_at = self._buffers[1][1], shared[1]
        self.kernels: dict[tuple, Kernel] = {}  # of the calls made so far, by what they depend on
        self.packed = _PLAN.pack(
            *(plan_at[name] for name in _ARRAYS),
            at["items"], at["head_indptr"], at["heads"], at["items_first"], self.items, plan.variants,
            at["merges"], at["head_indptr"], at["heads"], at["merges_first"], self.merges, plan.variants,
            plan.q_len, plan.slots, plan.block_q,
        )  # fmt: skip


def plan_on_device(plan: Plan, device: Device, batch: int, heads_q: int) -> PlanOnDevice:
    """The device copy of a plan, made at first use and kept with it; the device's context must be current."""
    key = "cuda", device.ordinal, batch, heads_q
    return derived(plan, key, lambda: PlanOnDevice(plan, device, batch, heads_q))


def pack(call: Call, plan: PlanOnDevice, partial: int, partial_lse: int, first_block: int = 0) -> bytes:
    """The bytes of ``Params``."""
    scale_log2, query_factor = fold_scale(call.scale)
    heads_q = call.q.shape[1]
    head = _CALL.pack(
        call.q.pointer, *call.q.strides, call.k.pointer, *call.k.strides,
        call.v.pointer, *call.v.strides, call.out.pointer, *call.out.strides,
        call.lse, partial, partial_lse, first_block, scale_log2,
        query_factor, heads_q, heads_q // call.k.shape[1], call.q.shape[3], call.v.shape[3],
    )  # fmt: skip
    return head + plan.packed


def fold_scale(scale: float) -> tuple[float, int]:
    """Positive factor in base 2, and sign. Kernels put the sign into Q: a masked −∞ times 0 or −1 would not stay −∞.

    A scale too small for float32 counts as zero: its logits differ by less than any rounding.
    """
    magnitude = abs(scale) * math.log2(math.e)
    if magnitude < _SMALLEST_SCALE:
        return 1.0, 0
    return magnitude, 1 if scale > 0 else -1


def _indptr(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def _is_aligned(x: Operand, itemsize: int) -> bool:
    batch, head, row, column = x.strides
    if column != 1 or (x.pointer | x.shape[3] * itemsize) % 16:
        return False
    if (batch | head | row) * itemsize % 16 == 0:
        return True
    return all(stride * itemsize % 16 == 0 for stride, size in zip(x.strides[:3], x.shape, strict=False) if size > 1)
