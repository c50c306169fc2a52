"""Tensor maps: those that a plan needs, the arrays they can address, their encoding."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...arrays._operand import Operand
from ...plan._types import AXES
from ..driver.device import library
from ..driver.errors import CudaError

MAP_BYTES = 128
ALIGNMENT = 64
ELEMENT_BYTES = 2
PANEL = 64  # elements per 128-byte swizzled row
_SWIZZLE_NONE, _SWIZZLE_128B, _L2_256B = 0, 3, 3
# CUtensorMapDataType, element size, elements per box row, swizzle. float32 is for rows of four.
_FORMATS = {
    "float16": (6, ELEMENT_BYTES, PANEL, _SWIZZLE_128B),
    "bfloat16": (9, ELEMENT_BYTES, PANEL, _SWIZZLE_128B),
    "float32": (7, 4, 4, _SWIZZLE_NONE),
}
_RANK = 5
_LARGEST_STRIDE = 1 << 40  # bytes (cuTensorMapEncodeTiled)

VIEW = np.dtype(
    [
        ("map", "i4"),
        ("shift_y", "i4"),
        ("shift_z", "i4"),
        ("problem", "i4"),
        ("half", "i4", AXES),
        ("cells", "i4"),
        ("offset", "i8"),
        ("stride", "i8", AXES),
        ("extent", "i4", AXES),
        ("box", "i4", AXES),
    ]
)


@dataclass(frozen=True)
class MapSpec:
    """A tensor map of one or several views, in tokens; innermost axis (2) first, as in TMA."""

    offset: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


def map_views(
    views: np.ndarray, ids: np.ndarray, first: int, join: bool = True
) -> tuple[tuple[MapSpec, ...], np.ndarray]:
    """A minimal set of tensor maps for the views `ids`, and the device records of all views.

    Views that differ in offset only share a map if the offsets form an arithmetic progression and an axis is free for
    it, unless `join` is False: the residue classes of a dilated or strided pattern are one map. Equal views always
    share.
    """
    records = np.zeros(len(views), dtype=VIEW)
    for name in ("offset", "stride", "extent", "box"):
        records[name] = views[name]
    records["cells"] = views["box"].prod(axis=1)
    classes: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for number in ids:
        view = views[number]
        key = tuple(tuple(int(n) for n in view[name]) for name in ("stride", "extent", "box"))
        classes.setdefault(key, []).append(int(number))
    specs: list[MapSpec] = []
    for (stride, extent, box), members in classes.items():
        free = next((axis for axis in (1, 0) if join and extent[axis] == 1 and box[axis] == 1), None)
        for start, step, numbers in _progressions(views["offset"][members], members, free is not None):
            extents, strides = list(extent), list(stride)
            if free is not None and len(numbers) > 1:
                extents[free], strides[free] = (numbers[-1][0] - start) // step + 1, step
            for offset, number in numbers:
                shift = (offset - start) // step
                records["map"][number] = 2 * (first + len(specs))
                records["shift_y"][number] = shift if free == 1 else 0
                records["shift_z"][number] = shift if free == 0 else 0
            specs.append(MapSpec(start, tuple(extents[::-1]), tuple(strides[::-1]), tuple(box[::-1])))
    return tuple(specs), records


def _progressions(
    offsets: np.ndarray, members: list[int], join: bool
) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """Split views into arithmetic progressions of offsets: (start, step, [(offset, view), ...])."""
    order = np.argsort(offsets, kind="stable")
    pending = [(int(offsets[i]), members[i]) for i in order]
    while pending:
        later = [o for o, _ in pending if o > pending[0][0]]
        step = later[0] - pending[0][0] if later and join else 0
        taken, expected = [], pending[0][0]
        for offset, number in pending:
            if step and offset == expected + step:
                expected += step
            if offset == expected:
                taken.append((offset, number))
        chosen = {number for _, number in taken}
        yield pending[0][0], max(step, 1), taken
        pending = [pair for pair in pending if pair[1] not in chosen]


def halve(specs: tuple[MapSpec, ...], views: np.ndarray, parts: int) -> tuple[tuple[MapSpec, ...], np.ndarray]:
    """Give each warpgroup its own TMA box: cut the query box in `parts` along the first divisible axis."""
    halved, axes = [], []
    for spec in specs:
        axis = next((a for a in (2, 1, 0) if spec.box[a] % parts == 0), None)  # innermost axis first
        if axis is None:
            raise ValueError(f"plan: cannot split a query box {spec.box[::-1]} into {parts} parts")
        box = list(spec.box)
        box[axis] //= parts
        axes.append((axis, box[axis]))
        halved.append(MapSpec(spec.offset, spec.extents, spec.strides, tuple(box)))
    views = views.copy()
    for number in range(len(views)):
        if specs:
            axis, size = axes[views["map"][number] // 2]
            views["half"][number, 2 - axis] = size
    return tuple(halved), views


def readable(operand: Operand) -> bool:
    """Whether TMA can address a 16-byte aligned array: aligned, contiguous rows and positive strides."""
    *steps, feature = operand.strides
    steps = [step * ELEMENT_BYTES for step, size in zip(steps, operand.shape, strict=False) if size > 1]
    return (
        (feature == 1 or operand.shape[3] == 1)
        and operand.shape[3] * ELEMENT_BYTES % 16 == 0
        and all(0 < step < _LARGEST_STRIDE and step % 16 == 0 for step in steps)
    )


def gatherable(operand: Operand) -> bool:
    """Whether an array that TMA can address can also be gathered: its row stride must be an int32."""
    return operand.strides[2] * ELEMENT_BYTES < 1 << 31


def joint_heads(operand: Operand) -> bool:
    """Whether batch and head are one axis of constant stride."""
    return operand.shape[0] == 1 or operand.strides[0] == operand.shape[1] * operand.strides[1]


def encode_map(target: int, operand: Operand, spec: MapSpec, dtype: str, batch: int | None) -> int:
    """Write the tensor map of `spec` over an array to address `target`; return the map's offset in bytes. `batch` is
    the batch entry that it reads, None if batch and head are one axis."""
    map_type, itemsize, columns, swizzle = _FORMATS[dtype]
    entries, heads, _, features = operand.shape
    token = operand.strides[2] * itemsize
    offset = spec.offset * token + (0 if batch is None else batch * operand.strides[0] * itemsize)
    extents = (features, *spec.extents, entries * heads if batch is None else heads)
    # The encoder requires a stride even for an axis of one cell.
    steps = [step * token for step in spec.strides] + [operand.strides[1] * itemsize]
    strides = [step if step > 0 and size > 1 else 16 for step, size in zip(steps, extents[1:], strict=True)]
    status = library().cuTensorMapEncodeTiled(
        ctypes.c_void_p(target),
        map_type,
        _RANK,
        ctypes.c_void_p((operand.pointer + offset) // 16 * 16),  # calls with unaligned addresses read no map
        (ctypes.c_uint64 * _RANK)(*extents),
        (ctypes.c_uint64 * (_RANK - 1))(*strides),
        (ctypes.c_uint32 * _RANK)(columns, *spec.box, 1),
        (ctypes.c_uint32 * _RANK)(1, 1, 1, 1, 1),
        0,
        swizzle,
        _L2_256B,
        0,
    )
    if status:
        raise CudaError("cuTensorMapEncodeTiled", status, f"for {spec} over {operand}")
    return offset


def replace_address(target: int, address: int) -> None:
    """Point the tensor map at `target` to another array of the same shape and strides."""
    status = library().cuTensorMapReplaceAddress(target, address)
    if status:
        raise CudaError("cuTensorMapReplaceAddress", status, f"for address {address:#x}")
