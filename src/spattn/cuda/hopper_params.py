"""Kernel arguments of ``kernels/attention_sm90.cu``: tensor maps and the parameter block.

Tensor maps travel inside the parameters, so a launch needs no copy and can be captured in a graph. Shapes and strides
are encoded once; a call with other addresses only replaces those.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from typing import NamedTuple

import numpy as np

from .device import library
from .errors import CudaError
from .hopper_layout import PANEL, STRIDES, UNIT, Layout, MapSpec
from .params import Call, Operand, fold_scale

MAP_BYTES = 128
ALIGNMENT = 64
ELEMENT_BYTES = 2
_MAP_TYPES = {"float16": 6, "bfloat16": 9}  # CUtensorMapDataType
_SWIZZLE_128B, _L2_256B = 3, 3
_RANK = 5
_LARGEST_STRIDE = 1 << 40  # bytes (cuTensorMapEncodeTiled)

_PLAN_POINTERS = ("units", "items", "entries", "entry_masks", "masks", "query_views", "key_views", "priors")
_CALL_POINTERS = ("q", "k", "v", "out", "lse", "partial_out", "partial_lse", "counter")
_INTEGERS = ("unit_count", "heads_q", "head_dim", "head_dim_v", "q_batch", "kv_batch", "batch_maps")
_FLOATS = ("scale", "scale_log2", "sign")
_ADDRESSES, _SCALES = struct.Struct("@8Q"), struct.Struct("@3f")
_HEADS_KEPT = 64


@functools.cache
def params_dtype(room: int) -> np.dtype:
    """The struct Params of ``sm90_params.cuh`` with room for so many tensor maps."""
    fields = [("maps", "u1", (room, MAP_BYTES)), *((name, "u8") for name in _PLAN_POINTERS + _CALL_POINTERS)]
    fields += [(f"{name}_stride", STRIDES) for name in ("q", "k", "v", "out")]
    fields += [("partial_rows", "i8"), ("q_len", "i8"), *((name, "i4") for name in _INTEGERS)]
    fields += [(name, "f4") for name in _FLOATS]
    plain = np.dtype(fields)
    return np.dtype({
        "names": plain.names, "formats": [plain.fields[name][0] for name in plain.names],
        "offsets": [plain.fields[name][1] for name in plain.names],
        "itemsize": -(-plain.itemsize // ALIGNMENT) * ALIGNMENT,
    })  # fmt: skip


def readable(operand: Operand) -> bool:
    """Whether TMA can address an array that starts on 16 bytes: so must its rows, and strides be positive."""
    *steps, feature = operand.strides
    steps = [step * ELEMENT_BYTES for step, size in zip(steps, operand.shape, strict=False) if size > 1]
    return (
        (feature == 1 or operand.shape[3] == 1)
        and operand.shape[3] * ELEMENT_BYTES % 16 == 0
        and all(0 < step < _LARGEST_STRIDE and step % 16 == 0 for step in steps)
    )


def joint_heads(operand: Operand) -> bool:
    """Whether batch and head are one axis of constant stride."""
    return operand.shape[0] == 1 or operand.strides[0] == operand.shape[1] * operand.strides[1]


class _Map(NamedTuple):
    operand: int  # number in (q, k, v, out)
    offset: int  # bytes from the operand's address to the map's


class Addresses(NamedTuple):
    """What differs between calls that agree in shapes, strides and dtype."""

    q: int
    k: int
    v: int
    out: int
    lse: int
    partial: int
    partial_lse: int
    scale: float


class Template:
    """The parameters of all calls that agree in shapes, strides and dtype.

    Parameters
    ----------
    layout : Layout
    plan_at : dict
        Device addresses of the plan's arrays.
    launches : list of (int, int)
        First unit and number of units of each launch.
    room : int
        Tensor maps that the kernel's parameters have room for.
    """

    def __init__(self, layout: Layout, plan_at: dict[str, int], launches: list[tuple[int, int]], call: Call, room: int):
        operands = call.q, call.k, call.v, call.out
        joint = all(map(joint_heads, operands))
        self._image = aligned_bytes(params_dtype(room).itemsize)
        params = self._image.view(params_dtype(room))[0]
        self._maps: list[_Map] = []
        self._encode(layout, operands, call.dtype, joint)
        for name in _PLAN_POINTERS:
            params[name] = plan_at[name]
        for name, operand in zip(("q", "k", "v", "out"), operands, strict=True):
            params[f"{name}_stride"] = operand.strides[:3]
        params["partial_rows"], params["q_len"] = call.plan.slots * call.plan.block_q, call.plan.q_len
        heads_q, heads_kv = call.q.shape[1], call.k.shape[1]
        sizes = (0, heads_q, call.q.shape[3], call.v.shape[3])
        batches = (heads_q, heads_kv, 0) if joint else (0, 0, layout.maps)
        for name, value in zip(_INTEGERS, (*sizes, *batches), strict=True):
            params[name] = value
        self._pointers = tuple(operand.pointer for operand in operands)  # that the maps of _image have now
        self._lock = threading.Lock()
        self._head_bytes = room * MAP_BYTES
        self._tails = []
        for first, count in launches:
            params["units"], params["unit_count"] = plan_at["units"] + first * UNIT.itemsize, count
            self._tails.append(bytes(self._image[self._head_bytes :]))
        fields = params_dtype(room).fields
        self._call_at, self._scale_at = (fields[name][1] - self._head_bytes for name in ("q", "scale"))
        self.counter_at = fields["counter"][1]
        self._heads: dict[tuple, bytes] = {}

    def fill(self, launch: int, to: Addresses, counter: int) -> bytes:
        """The bytes of ``Params`` for a launch of a call."""
        tail = bytearray(self._tails[launch])
        _ADDRESSES.pack_into(tail, self._call_at, *to[:7], counter)
        _SCALES.pack_into(tail, self._scale_at, to.scale, *fold_scale(to.scale))
        return (self._heads.get(to[:4]) or self._move(to[:4])) + tail

    def _move(self, pointers: tuple[int, ...]) -> bytes:
        """The tensor maps for other addresses, kept because allocators hand out the same ones again and again."""
        with self._lock:
            at = self._image.ctypes.data
            for number, (operand, offset) in enumerate(self._maps):
                if pointers[operand] != self._pointers[operand]:
                    replace_address(at + number * MAP_BYTES, pointers[operand] + offset)
            self._pointers = pointers
            maps = self._image[: self._head_bytes].tobytes()
        if len(self._heads) >= _HEADS_KEPT:
            self._heads.clear()
        return self._heads.setdefault(pointers, maps)

    def _encode(self, layout: Layout, operands, dtype: str, joint: bool) -> None:
        """Per batch entry (or once, where batch and head are one axis): maps of q and out, then of k and v."""
        at = self._image.ctypes.data
        for batch in (None,) if joint else range(operands[0].shape[0]):
            for specs, numbers in ((layout.query_specs, (0, 3)), (layout.key_specs, (1, 2))):
                for spec in specs:
                    for number in numbers:
                        offset = encode_map(at + len(self._maps) * MAP_BYTES, operands[number], spec, dtype, batch)
                        self._maps.append(_Map(number, offset))


def maps_needed(layout: Layout, call: Call) -> int:
    """Tensor maps of a call."""
    joint = all(map(joint_heads, (call.q, call.k, call.v, call.out)))
    return layout.maps * (1 if joint else call.q.shape[0])


def encode_map(target: int, operand: Operand, spec: MapSpec, dtype: str, batch: int | None) -> int:
    """Writes the tensor map of `spec` over an array to address `target`; returns the map's offset in bytes.

    Parameters
    ----------
    batch : int or None
        The batch entry the map reads, or None when batch and head are one axis.
    """
    entries, heads, _, features = operand.shape
    token = operand.strides[2] * ELEMENT_BYTES
    offset = spec.offset * token + (0 if batch is None else batch * operand.strides[0] * ELEMENT_BYTES)
    extents = (features, *spec.extents, entries * heads if batch is None else heads)
    # An axis of one cell has no stride, but the encoder wants one.
    steps = [step * token for step in spec.strides] + [operand.strides[1] * ELEMENT_BYTES]
    strides = [step if step > 0 and size > 1 else 16 for step, size in zip(steps, extents[1:], strict=True)]
    status = library().cuTensorMapEncodeTiled(
        ctypes.c_void_p(target), _MAP_TYPES[dtype], _RANK, ctypes.c_void_p(operand.pointer + offset),
        (ctypes.c_uint64 * _RANK)(*extents), (ctypes.c_uint64 * (_RANK - 1))(*strides),
        (ctypes.c_uint32 * _RANK)(PANEL, *spec.box, 1), (ctypes.c_uint32 * _RANK)(1, 1, 1, 1, 1),
        0, _SWIZZLE_128B, _L2_256B, 0,
    )  # fmt: skip
    if status:
        raise CudaError("cuTensorMapEncodeTiled", status, f"for {spec} over {operand}")
    return offset


def replace_address(target: int, address: int) -> None:
    """Points the tensor map at `target` to another array of the same shape and strides."""
    status = library().cuTensorMapReplaceAddress(target, address)
    if status:
        raise CudaError("cuTensorMapReplaceAddress", status, f"for address {address:#x}")


def aligned_bytes(count: int) -> np.ndarray:
    """`count` zero bytes at an address that suits tensor maps."""
    raw = np.zeros(count + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + count]
