"""Validate the parts() of a pattern, with Python integers, which cannot overflow, and split them into query boxes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ..._util.index_checks import q_offset
from ...patterns import Pattern
from ...patterns.base.check import integer, integers
from ...patterns.base.pattern import Part
from ...patterns.hints.closed_forms import Ends, Lattice, Span, whole_lattices
from ..contract.types import AXES, LARGEST
from .query_boxes import in_boxes, moved

__all__ = ["Piece", "parts_of", "repeats"]


_EVERYTHING = (None, None, ((0, 0),), None)  # query, key, shifts and spans of a Part with all positions


class Piece(NamedTuple):
    """A part with explicit lattices; `shifts` are relative to the first shift, which the lattices include."""

    pattern: Pattern
    query: Lattice
    key: Lattice
    shifts: tuple[tuple[int, int], ...]
    spans: tuple[Span, ...] | None


def parts_of(
    pattern: Pattern, q_len: int, kv_len: int, ends: Ends | None = None, box: tuple[int, ...] | None = None
) -> list[Piece]:
    """Return the non-empty parts of a pattern.

    If `ends` is given, return only the parts at both ends of the sequence; if `box` is given, split parts with spans
    into query boxes.

    Raises
    ------
    TypeError
        If ``parts()`` does not return Parts of patterns, lattices and integers.
    ValueError
        If a shifted lattice leaves the sequence or has duplicate positions, or spans do not match the lattices.
    """
    found = pattern.parts(q_len, kv_len) if ends is None else _parts_at(ends, pattern, kv_len)
    if not isinstance(found, Iterable):
        raise TypeError(f"parts(): expected a tuple of Part from {pattern!r}, got {found!r}")
    whole_q, whole_k = whole_lattices(q_len, kv_len)
    parts = []
    for part in found:
        if not isinstance(part, Part) or not isinstance(part.pattern, Pattern):
            raise TypeError(f"parts(): expected a tuple of Part from {pattern!r}, got one with {part!r}")
        if part[1:] == _EVERYTHING:
            parts.append(Piece(part.pattern, whole_q, whole_k, part.shifts, None))
            continue
        given = [integers("parts(): shifts", shift) for shift in part.shifts]
        if not given or any(len(shift) != 2 for shift in given) or len(set(given)) < len(given):
            raise ValueError(f"parts(): expected distinct shifts (query, key), got {part.shifts!r}")
        shifts = [(dq, dk) for dq, dk in given]
        query = _checked(whole_q if part.query is None else part.query)
        key = _checked(whole_k if part.key is None else part.key)
        if 0 not in query.extents + key.extents:
            _check_reach(query, [dq for dq, _ in shifts], q_offset(q_len, kv_len), kv_len)
            _check_reach(key, [dk for _, dk in shifts], 0, kv_len)
            _check_spans(part.spans, query, key)
            if box is None or part.spans is None or len(part.spans) != len(box):
                parts.append(_from_first(part.pattern, query, key, shifts, part.spans))
            else:
                for boxes in in_boxes(query, key, part.spans, box):
                    at = moved(shifts, boxes.moves)
                    parts.append(_from_first(part.pattern, boxes.query, boxes.key, at, boxes.spans))
    return parts


def _parts_at(ends: Ends, pattern: Pattern, kv_len: int) -> tuple[Part, ...]:
    """Return the pattern at both ends of the sequence."""
    # planning.contract.validated.moved requires that only the lattice of the last keys has an offset.
    first = kv_len - ends.last if ends.between else ends.first
    lattices = Lattice(0, (1,), (first,)), Lattice(kv_len - ends.last, (1,), (ends.last,))
    return tuple(Part(pattern, None, lattice) for lattice in lattices)


def _check_spans(spans: tuple[Span, ...] | None, query: Lattice, key: Lattice) -> None:
    """Raise ValueError unless spans match the lattices and give each query at least one key."""
    axes = [] if spans is None else itertools.zip_longest(spans, query.extents, key.extents)
    for span, queries, keys in axes:
        along = isinstance(span, Span) and len(span.first) == len(span.last) == queries
        if not along or not all(0 <= a <= b < keys for a, b in zip(span.first, span.last, strict=True)):
            raise ValueError(f"parts(): expected spans of {query} in {key}, got {spans}")


def _from_first(
    pattern: Pattern, query: Lattice, key: Lattice, shifts: list[tuple[int, int]], spans: tuple[Span, ...] | None
) -> Piece:
    """Make shifts relative to the first, so that they are differences of positions and do not overflow."""
    dq, dk = shifts[0]
    moves = tuple((q - dq, k - dk) for q, k in shifts)
    return Piece(pattern, query._replace(offset=query.offset + dq), key._replace(offset=key.offset + dk), moves, spans)


def _checked(lattice: Lattice) -> Lattice:
    """Convert a lattice to Python ints; replace an oversized stride by 0 if its axis has one coordinate."""
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
    """Return the minimum and maximum position of a non-empty lattice."""
    reach = [stride * (extent - 1) for stride, extent in zip(strides, extents, strict=True)]
    return offset + sum(r for r in reach if r < 0), offset + sum(r for r in reach if r > 0)


def repeats(strides: Sequence[int], extents: Sequence[int]) -> bool:
    """Return whether two points of a lattice have the same position.

    This is impossible if every stride exceeds the distance that the axes with smaller strides span, as in a grid.
    Otherwise the function enumerates the points, which takes O(points) memory, at most the number of positions.
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
