"""The parameters of attention.cu and merge.cu.

Tensor maps travel inside the parameters, so a launch needs no copy and can be captured in a graph. Shapes and strides
are encoded once; a call with other addresses only replaces those.
"""

from __future__ import annotations

import functools
import struct
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..._cached import Recent
from ...arrays._operand import Operand
from ...schedule.tasks import TASK
from ..driver.device import address
from ..driver.launch import Moving
from ..driver.structs import fields, packer
from ..forward_pass import ForwardPass, fold_scale
from .layout import ENTRY, WORK, Layout
from .maps import ALIGNMENT, ELEMENT_BYTES, MAP_BYTES, VIEW, encode_map, joint_heads, replace_address

MAPS = (16, 240)  # tensor maps that a kernel's parameters have room for; 240 is what 32 KiB of parameters hold
_PLAN_POINTERS = ("tasks", "work", "entries", "entry_masks", "masks", "query_views", "key_views", "priors")
_CALL_POINTERS = ("q", "k", "v", "out", "lse", "partial_out", "partial_lse", "counter")
_INTEGERS = ("task_count", "heads_q", "head_dim", "head_dim_v", "block_q", "q_batch", "kv_batch", "batch_maps")
_FLOATS = ("scale_log2", "sign")
_MOVED = struct.Struct("@q")
_ADDRESSES, _SCALES = struct.Struct(f"@{len(_CALL_POINTERS)}Q"), struct.Struct(f"@{len(_FLOATS)}f")
_HEADS_KEPT = 64

STRIDES = np.dtype([(name, "i8") for name in ("batch", "head", "token")])
MERGE = np.dtype(
    [
        *((name, "u8") for name in ("rows", "indptr", "sources", "heads", "partial_out", "partial_lse", "out", "lse")),
        ("partial_rows", "i8"),
        ("q_len", "i8"),
        ("out_stride", STRIDES),
        *((name, "i4") for name in ("heads_q", "head_dim_v", "head_blocks", "unused")),
    ]
)
pack_merge = packer(MERGE).pack


def with_maps(room: int, members: list[tuple[Any, ...]]) -> np.dtype:
    """A struct of parameters that begins with room for so many tensor maps, and is as long as these are aligned."""
    plain = np.dtype([("maps", "u1", (room, MAP_BYTES)), *members])
    inner, offsets = zip(*fields(plain).values(), strict=True)
    return np.dtype(
        {
            "names": list(fields(plain)),
            "formats": list(inner),
            "offsets": list(offsets),
            "itemsize": -(-plain.itemsize // ALIGNMENT) * ALIGNMENT,
        }
    )


@functools.cache
def params_dtype(room: int) -> np.dtype:
    """The struct Params with room for so many tensor maps."""
    members: list[tuple[Any, ...]] = [(name, "u8") for name in _PLAN_POINTERS + _CALL_POINTERS]
    members += [(f"{name}_stride", STRIDES) for name in ("q", "k", "v", "out")]
    members += [(name, "i8") for name in ("partial_rows", "q_len", "moved")]
    members += [*((name, "i4") for name in _INTEGERS)]
    members += [(name, "f4") for name in _FLOATS]
    return with_maps(room, members)


def structs(room: int) -> Mapping[str, np.dtype]:
    """The structs of params.cuh, with room for so many tensor maps."""
    return {
        "View": VIEW,
        "Work": WORK,
        "Entry": ENTRY,
        "Task": TASK,
        "Strides": STRIDES,
        "Params": params_dtype(room),
        "Merge": MERGE,
    }


class _Map(NamedTuple):
    operand: int  # number in (q, k, v, out)
    offset: int  # bytes from the operand's address to the map's
    step: int  # and so many more for each key by which its view moves


class Addresses(NamedTuple):
    """What differs between calls that agree in shapes, strides and dtype, but for the number of keys if the plan moves:
    `moved` is how many more there are than it says."""

    q: int
    k: int
    v: int
    out: int
    lse: int
    partial: int
    partial_lse: int
    scale: float
    moved: int = 0


class Template:
    """The parameters of all calls that agree in shapes, strides and dtype, but for the number of keys.

    Parameters
    ----------
    layout : Layout
    plan_at : dict
        Device addresses of the plan's arrays.
    launches : list of (int, int)
        First task and number of tasks of each launch.
    room : int
        Tensor maps that the kernel's parameters have room for.
    """

    def __init__(
        self, layout: Layout, plan_at: dict[str, int], launches: list[tuple[int, int]], call: ForwardPass, room: int
    ):
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
        sizes = (0, heads_q, call.q.shape[3], call.v.shape[3], call.plan.block_q)
        batches = (heads_q, heads_kv, 0) if joint else (0, 0, layout.maps)
        for name, value in zip(_INTEGERS, (*sizes, *batches), strict=True):
            params[name] = value
        self._pointers = *(operand.pointer for operand in operands), 0  # and `moved`, that the maps of _image have now
        self._lock = threading.Lock()
        self._head_bytes = room * MAP_BYTES
        self._tails = []
        for first, count in launches:
            params["tasks"], params["task_count"] = plan_at["tasks"] + first * TASK.itemsize, count
            self._tails.append(bytes(self._image[self._head_bytes :]))
        at = {name: offset for name, (_, offset) in fields(params_dtype(room)).items()}
        names = "q", "moved", "scale_log2"
        self._call_at, self._moved_at, self._scale_at = (at[name] - self._head_bytes for name in names)
        self.counter_at, self._moves = at["counter"], layout.moves
        self._heads = Recent(_HEADS_KEPT)

    def fill(self, launch: int, to: Addresses, counter: int) -> bytes:
        """The bytes of ``Params`` for a launch of a call."""
        tail = bytearray(self._tails[launch])
        _ADDRESSES.pack_into(tail, self._call_at, *to[:7], counter)
        _MOVED.pack_into(tail, self._moved_at, to.moved)
        _SCALES.pack_into(tail, self._scale_at, *fold_scale(to.scale))
        pointers = *to[:4], to.moved
        return (self._heads.get(pointers) or self._move(pointers)) + tail

    def moving(self, to: Addresses) -> Moving | None:
        """What of the bytes of ``Params`` follows the number of keys; None where the plan does not move."""
        if not self._moves:
            return None
        pointers = to[:4]
        maps = [
            (number * MAP_BYTES, pointers[operand] + offset, step)
            for number, (operand, offset, step) in enumerate(self._maps)
            if step
        ]
        return Moving(address("cuTensorMapReplaceAddress"), to.moved, self._head_bytes + self._moved_at, maps)

    def _move(self, pointers: tuple[int, ...]) -> bytes:
        """The tensor maps for other addresses, kept because allocators hand out the same ones again and again."""
        with self._lock:
            at, moved, before = self._image.ctypes.data, pointers[-1], self._pointers[-1]
            for number, (operand, offset, step) in enumerate(self._maps):
                if pointers[operand] != self._pointers[operand] or step * (moved - before):
                    replace_address(at + number * MAP_BYTES, pointers[operand] + offset + step * moved)
            self._pointers = pointers
            maps = self._image[: self._head_bytes].tobytes()
        return self._heads.keep(pointers, maps)

    def _encode(self, layout: Layout, operands: tuple[Operand, ...], dtype: str, joint: bool) -> None:
        """Per batch entry (or once, where batch and head are one axis): maps of q and out, then of k and v."""
        at = self._image.ctypes.data
        for batch in (None,) if joint else range(operands[0].shape[0]):
            for specs, numbers in ((layout.query_specs, (0, 3)), (layout.key_specs, (1, 2))):
                for spec in specs:
                    for number in numbers:
                        offset = encode_map(at + len(self._maps) * MAP_BYTES, operands[number], spec, dtype, batch)
                        moves = layout.moves and spec.offset > 0
                        self._maps.append(
                            _Map(number, offset, operands[number].strides[2] * ELEMENT_BYTES if moves else 0)
                        )


def maps_needed(layout: Layout, call: ForwardPass) -> int:
    """Tensor maps of a call."""
    joint = all(map(joint_heads, (call.q, call.k, call.v, call.out)))
    return layout.maps * (1 if joint else call.q.shape[0])


def aligned_bytes(count: int) -> np.ndarray:
    """`count` zero bytes at an address that suits tensor maps."""
    raw = np.zeros(count + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + count]
