"""Kernel arguments of ``kernels/attention_sm90.cu``: tensor maps and the parameter block.

PyCUDA binds no tensor map encoding, so ``cuTensorMapEncodeTiled`` is called through ctypes.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass

import numpy as np

from .hopper_layout import PANEL, STRIDES, Layout, MapSpec

MAP_BYTES = 128
ELEMENT_BYTES = 2
_MAP_TYPES = {"float16": 6, "bfloat16": 9}  # CUtensorMapDataType
_SWIZZLE_128B, _L2_256B = 3, 3
_RANK = 5

_POINTERS = (
    "units", "items", "entries", "entry_masks", "masks", "query_views", "key_views", "q", "k", "v", "out", "lse",
    "partial_out", "partial_lse", "counter",
)  # fmt: skip
_INTEGERS = ("unit_count", "heads_q", "head_dim", "head_dim_v", "q_batch", "kv_batch", "batch_maps")


@dataclass(frozen=True)
class Tensor:
    """A device array (batch, heads, tokens, features) as the kernel needs it; strides in elements."""

    pointer: int
    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int]

    @property
    def joint_heads(self) -> bool:
        """Whether batch and head are one axis of constant stride."""
        return self.shape[0] == 1 or self.strides[0] == self.shape[1] * self.strides[1]


@functools.cache
def params_dtype(maps: int) -> np.dtype:
    """The struct Params of ``sm90_params.cuh`` with room for `maps` tensor maps."""
    fields = [("maps", "u1", (maps, MAP_BYTES)), *((name, "u8") for name in _POINTERS)]
    fields += [(f"{name}_stride", STRIDES) for name in ("q", "k", "v", "out")]
    fields += [("partial_rows", "i8"), ("q_len", "i8"), *((name, "i4") for name in _INTEGERS)]
    fields += [(name, "f4") for name in ("scale", "scale_log2", "sign")]
    plain = np.dtype(fields)
    return np.dtype({
        "names": plain.names, "formats": [plain.fields[name][0] for name in plain.names],
        "offsets": [plain.fields[name][1] for name in plain.names], "itemsize": -(-plain.itemsize // 64) * 64,
    })  # fmt: skip


@functools.cache
def _encoder():
    encode = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    encode.restype = ctypes.c_int
    return encode


def encode_map(target: int, tensor: Tensor, spec: MapSpec, dtype: str, batch: int | None) -> None:
    """Writes the tensor map of `spec` over `tensor` to address `target` (64-byte aligned).

    Parameters
    ----------
    batch : int or None
        The batch entry the map reads, or None when batch and head are one axis.
    """
    entries, heads, _, features = tensor.shape
    token = tensor.strides[2] * ELEMENT_BYTES
    start = tensor.pointer + spec.offset * token
    if batch is not None:
        start += batch * tensor.strides[0] * ELEMENT_BYTES
    extents = (features, *spec.extents, heads if batch is not None else entries * heads)
    strides = [s * token or 16 for s in spec.strides]  # an axis of one cell has no stride, but the encoder wants one
    strides.append(tensor.strides[1] * ELEMENT_BYTES or 16)
    error = _encoder()(
        ctypes.c_void_p(target), _MAP_TYPES[dtype], _RANK, ctypes.c_void_p(start),
        (ctypes.c_uint64 * _RANK)(*extents), (ctypes.c_uint64 * (_RANK - 1))(*strides),
        (ctypes.c_uint32 * _RANK)(PANEL, *spec.box, 1), (ctypes.c_uint32 * _RANK)(1, 1, 1, 1, 1),
        0, _SWIZZLE_128B, _L2_256B, 0,
    )  # fmt: skip
    if error:
        raise RuntimeError(f"cuTensorMapEncodeTiled failed with error {error} for {spec} over {tensor}")


def encode_maps(layout: Layout, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dtype: str, room: int) -> np.ndarray:
    """(room, 128) uint8: all maps of a call, per batch entry where batch and head are not one axis."""
    joint = all(t.joint_heads for t in (q, k, v, out))
    maps = np.zeros(room * MAP_BYTES + 64, dtype=np.uint8)
    maps = maps[-maps.ctypes.data % 64 :][: room * MAP_BYTES]
    at = maps.ctypes.data
    for batch in (None,) if joint else range(q.shape[0]):
        for specs, tensors in ((layout.query_specs, (q, out)), (layout.key_specs, (k, v))):
            for spec in specs:
                for tensor in tensors:
                    encode_map(at, tensor, spec, dtype, batch)
                    at += MAP_BYTES
    return maps.reshape(room, MAP_BYTES)


def set_scale(params: np.ndarray, scale: float) -> None:
    """The kernel wants |scale| in base 2 and a sign; scale 0 multiplies the logits by 0 and keeps -inf at masked keys."""
    params["scale"] = scale
    params["sign"] = np.sign(scale)
    params["scale_log2"] = abs(scale) * math.log2(math.e) if scale else 1.0


def readable(tensor: Tensor) -> bool:
    """Whether TMA can read (or write) the array: 16-byte aligned start and strides, no stride of zero or below."""
    steps = [s for s, n in zip(tensor.strides, tensor.shape[:3], strict=True) if n > 1]
    return tensor.pointer % 16 == 0 and all(s > 0 and s * ELEMENT_BYTES % 16 == 0 for s in steps)
