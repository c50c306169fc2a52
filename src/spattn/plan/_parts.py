"""What a pattern's ``parts()`` says, checked in Python's integers, which do not overflow: users write them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from ..patterns import Lattice, Part, Pattern
from ..patterns._check import integer, integers
from ._types import AXES, LARGEST

__all__ = ["parts_of", "repeats"]


def parts_of(pattern: Pattern, q_len: int, kv_len: int) -> list[Part]:
    """The parts of a pattern that hold a pair, with both lattices, where the first shift puts them.

    Raises
    ------
    TypeError
        If ``parts()`` returns anything but Parts of patterns, lattices and integers.
    ValueError
        If a lattice, moved by any of the shifts, leaves the sequence or visits a position twice.
    """
    found = pattern.parts(q_len, kv_len)
    if not isinstance(found, Iterable):
        raise TypeError(f"parts(): expected a tuple of Part from {pattern!r}, got {found!r}")
    whole_q, whole_k = Lattice(kv_len - q_len, (1,), (q_len,)), Lattice(0, (1,), (kv_len,))
    parts = []
    for part in found:
        if not isinstance(part, Part) or not isinstance(part.pattern, Pattern):
            raise TypeError(f"parts(): expected a tuple of Part from {pattern!r}, got one with {part!r}")
        shifts = tuple(integers("parts(): shifts", shift) for shift in part.shifts)
        if not shifts or any(len(shift) != 2 for shift in shifts) or len(set(shifts)) < len(shifts):
            raise ValueError(f"parts(): expected shifts (query, key) that differ, got {part.shifts!r}")
        query = _checked(whole_q if part.query is None else part.query)
        key = _checked(whole_k if part.key is None else part.key)
        if 0 not in query.extents + key.extents:
            _check_reach(query, [dq for dq, _ in shifts], kv_len - q_len, kv_len)
            _check_reach(key, [dk for _, dk in shifts], 0, kv_len)
            parts.append(_from_first(Part(part.pattern, query, key, shifts)))
    return parts


def _from_first(part: Part) -> Part:
    """The same part with shifts from (0, 0) on, so that all of its numbers are differences of positions."""
    (dq, dk), (query, key) = part.shifts[0], part[1:3]
    shifts = tuple((q - dq, k - dk) for q, k in part.shifts)
    return Part(part.pattern, query._replace(offset=query.offset + dq), key._replace(offset=key.offset + dk), shifts)


def _checked(lattice: Lattice) -> Lattice:
    """The lattice in Python's integers; a stride that leads nowhere may be any integer and becomes one of int64."""
    if not isinstance(lattice, Lattice):
        raise TypeError(f"parts(): expected a Lattice or None, got {lattice!r}")
    offset = integer("parts(): offset", lattice.offset)
    strides, extents = integers("parts(): strides", lattice.strides), integers("parts(): extents", lattice.extents, 0)
    if len(strides) != len(extents) or not 1 <= len(extents) <= AXES:
        raise ValueError(f"parts(): expected one stride and one extent for each of 1 to {AXES} axes, got {lattice}")
    kept = (s if n > 1 or abs(s) <= LARGEST else 0 for s, n in zip(strides, extents, strict=True))
    return Lattice(offset, tuple(kept), extents)


def _check_reach(lattice: Lattice, shifts: list[int], first: int, end: int) -> None:
    low, high = _corners(*lattice)
    low, high = low + min(shifts), high + max(shifts)
    if low < first or high >= end:
        raise ValueError(f"parts(): expected positions in [{first}, {end}), got {low} to {high} from {lattice}")
    if repeats(lattice.strides, lattice.extents):
        raise ValueError(f"parts(): expected lattices that visit no position twice, got {lattice}")


def _corners(offset: int, strides: Sequence[int], extents: Sequence[int]) -> tuple[int, int]:
    """The least and the greatest position of a lattice whose extents are at least 1."""
    reach = [stride * (extent - 1) for stride, extent in zip(strides, extents, strict=True)]
    return offset + sum(r for r in reach if r < 0), offset + sum(r for r in reach if r > 0)


def repeats(strides: Sequence[int], extents: Sequence[int]) -> bool:
    """Whether two points of a lattice are one position.

    None are where every stride exceeds the reach of the smaller ones, as in a grid; otherwise the points are counted,
    which takes O(points) memory, but no more points than there are positions.
    """
    axes = sorted((abs(stride), extent) for stride, extent in zip(strides, extents, strict=True) if extent > 1)
    reach = 0
    for stride, extent in axes:
        if stride <= reach:
            break
        reach += stride * (extent - 1)
    else:
        return False
    low, high = _corners(0, strides, extents)
    points = math.prod(extents)
    if points > high - low + 1:
        return True
    positions = np.zeros(1, np.int64)
    for stride, extent in axes:
        positions = (positions[:, None] + stride * np.arange(extent)).ravel()
    return len(np.unique(positions)) < points
