"""Assign TMA tensor maps to the views of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..arrays.operand import Operand
from ..planning.contract.types import AXES, Plan
from .roles import roles

__all__ = ["MAPS", "VIEW", "MapSpec", "halve", "joint_heads", "map_views", "mapped", "maps_of"]

MAPS = (16, 240)  # maximum number of tensor maps of the two kernel variants; 240 fill 32 KiB of parameters

VIEW = np.dtype(
    [
        ("map", "i4"),
        ("shift_y", "i4"),
        ("shift_z", "i4"),
        ("problem", "i4"),
        ("half", "i4", AXES),
        ("unused", "i4"),
        ("offset", "i8"),
        ("stride", "i8", AXES),
        ("extent", "i4", AXES),
        ("box", "i4", AXES),
    ]
)


class MapSpec(NamedTuple):
    """A tensor map of one or several views; `offset` and `strides` count tokens. Axis 2 comes first, as in TMA."""

    offset: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


def map_views(
    views: np.ndarray, ids: np.ndarray, first: int, join: bool = True
) -> tuple[tuple[MapSpec, ...], np.ndarray]:
    """Return a minimal set of tensor maps for the views `ids`, and the device records of all views.

    Equal views share a map. Unless `join` is False, views that differ only in their offset also share one, if the
    offsets form an arithmetic progression and an axis of the map is free for it. The residue classes of a dilated or
    strided pattern thus need one map.
    """
    records = np.zeros(len(views), dtype=VIEW)
    for name in ("offset", "stride", "extent", "box"):
        records[name] = views[name]
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
    """Split views into arithmetic progressions of offsets; yield (start, step, [(offset, view), ...])."""
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


def can_halve(plan: Plan, parts: int) -> bool:
    """Return whether :func:`halve` can split the boxes of all query views of a plan."""
    boxes = np.unique(plan.views["box"][plan.components["query_view"]], axis=0)
    return all(_split_axis(box[::-1], parts) is not None for box in boxes.tolist())


def _split_axis(box: Sequence[int], parts: int) -> int | None:
    """Return the axis along which `parts` boxes of consecutive cells make up a box, (x, y, z), or None."""
    outermost = next((axis for axis in (2, 1, 0) if box[axis] > 1), 0)
    return outermost if box[outermost] % parts == 0 else None


def halve(specs: tuple[MapSpec, ...], views: np.ndarray, parts: int) -> tuple[tuple[MapSpec, ...], np.ndarray]:
    """Split the query box of each map into `parts` of consecutive cells: one box for each warpgroup."""
    halved, axes = [], []
    for spec in specs:
        axis = _split_axis(spec.box, parts)
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


Mapped = tuple[tuple[MapSpec, ...], np.ndarray]  # tensor maps, and the device records of all views


def maps_of(plan: Plan, moves: bool) -> int:
    """Return the number of tensor maps that a batch entry needs. `moves`: offsets of key views depend on kv_len."""
    (query_specs, _), (key_specs, _) = mapped(plan, moves)
    return 2 * (len(query_specs) + len(key_specs))


def mapped(plan: Plan, moves: bool) -> tuple[Mapped, Mapped]:
    """Return maps and records of the query views and of the key views; permuted and gathered views need no map."""
    query_ids, key_ids, _ = roles(plan)
    queries = map_views(plan.views, query_ids[: 0 if plan.q_order.size else None], 0)
    return queries, map_views(plan.views, key_ids[: 0 if plan.ordered else None], len(queries[0]), join=not moves)


def joint_heads(operand: Operand) -> bool:
    """Return whether batch and heads form one axis of constant stride."""
    return operand.shape[0] == 1 or operand.strides[0] == operand.shape[1] * operand.strides[1]
