"""Tensor maps: which arrays they can address, and how they are encoded."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from ..._util.cached import BoundedCache
from ...arrays import FLOAT8
from ...arrays.operand import Operand
from ...schedule.tensor_maps import MapSpec
from ..driver.device import address
from ..driver.launch import encode_map, replace_address

MAP_BYTES = 128
ADDRESS_ALIGNMENT = 16  # bytes; also of rows and strides
ALIGNMENT = 64
ELEMENT_BYTES = 2
PANEL = 64  # elements per 128-byte swizzled row
_SWIZZLE_NONE, _SWIZZLE_128B = 0, 3
# CUtensorMapDataType, element size, elements per box row, swizzle. float32 has boxes of four elements per row, or of
# whole panels.
FORMATS = {
    "float16": (6, ELEMENT_BYTES, PANEL, _SWIZZLE_128B),
    "bfloat16": (9, ELEMENT_BYTES, PANEL, _SWIZZLE_128B),
    FLOAT8: (0, 1, 2 * PANEL, _SWIZZLE_128B),  # as bytes
    "float32": (7, 4, 4, _SWIZZLE_NONE),
    "float32 panels": (7, 4, 32, _SWIZZLE_128B),
}
_LARGEST_STRIDE = 1 << 40  # bytes (cuTensorMapEncodeTiled)
_HEADS_KEPT = 64  # most recent address tuples; allocators reuse addresses


def readable(operand: Operand, itemsize: int = ELEMENT_BYTES) -> bool:
    """True if TMA can address a 16-byte aligned array: aligned, contiguous rows and positive strides."""
    *steps, feature = operand.strides
    steps = [step * itemsize for step, size in zip(steps, operand.shape, strict=False) if size > 1]
    return (
        (feature == 1 or operand.shape[3] == 1)
        and operand.shape[3] * itemsize % ADDRESS_ALIGNMENT == 0
        and all(0 < step < _LARGEST_STRIDE and step % ADDRESS_ALIGNMENT == 0 for step in steps)
    )


def gatherable(operand: Operand) -> bool:
    """True if an array that TMA can address can also be gathered: its row stride must be an int32."""
    return operand.strides[2] * ELEMENT_BYTES < 1 << 31


class Map(NamedTuple):
    """A tensor map in parameters."""

    operand: int  # index of the operand's address in the pointers
    moved: int  # index of the problem's `moved` in the pointers
    offset: int  # bytes from the operand's address to the map's origin
    step: int  # bytes per key of `moved`


class Maps:
    """Tensor maps at the head of a kernel's parameters, for any array addresses and any kv_len.

    They are encoded once; a call at other addresses only replaces the addresses.
    """

    def __init__(self, room: int):
        self.bytes = room * MAP_BYTES
        self.image = bytearray(self.bytes)
        self.maps: list[Map] = []
        self._pointers: tuple[int, ...] = ()  # addresses encoded in _image
        self._lock = threading.Lock()
        self._heads = BoundedCache(_HEADS_KEPT)

    def encode(
        self,
        operands: Sequence[Operand],
        specs: Sequence[tuple[Sequence[MapSpec], Sequence[int]]],
        dtypes: Sequence[str],
        joint: bool,
        moves: bool = False,
    ) -> None:
        """Append a problem's maps: one per batch entry, spec and operand of that spec. If `joint`, batch and head form
        one axis, and one map serves all batch entries. The problem's pointers are the addresses of its operands, then
        `moved`, a number of keys; with `moves`, it shifts the maps whose spec has an offset."""
        encode, first = address("cuTensorMapEncodeTiled"), len(self._pointers)
        for batch in (None,) if joint else range(operands[0].shape[0]):
            for own, numbers in specs:
                for spec in own:
                    for number in numbers:
                        at, form = len(self.maps) * MAP_BYTES, FORMATS[dtypes[number]]
                        offset = encode_map(encode, self.image, at, form, operands[number], spec, batch)
                        step = operands[number].strides[2] * ELEMENT_BYTES if moves and spec.offset > 0 else 0
                        self.maps.append(Map(first + number, first + len(operands), offset, step))
        self._pointers += *(operand.pointer for operand in operands), 0

    def at(self, pointers: tuple[int, ...]) -> bytes:
        """Return the maps of arrays at these addresses, cached."""
        return self._heads.get(pointers) or self._move(pointers)

    def _move(self, pointers: tuple[int, ...]) -> bytes:
        with self._lock:
            replace, before = address("cuTensorMapReplaceAddress"), self._pointers
            for number, (operand, moved, offset, step) in enumerate(self.maps):
                if pointers[operand] != before[operand] or step * (pointers[moved] - before[moved]):
                    to = pointers[operand] + offset + step * pointers[moved]
                    replace_address(replace, self.image, number * MAP_BYTES, to)
            self._pointers = pointers
            return self._heads.keep(pointers, bytes(self.image))
