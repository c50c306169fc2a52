"""Split parts with spans into query boxes, each with a separate key view.

The key tiles of a shared key view lie on one grid, so a query tile also computes keys around those that it needs. A
separate key view starts at the first key that the query box needs, and contains only the keys that the box needs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from ...patterns.hints.closed_forms import Lattice, Span

__all__ = ["Kind", "in_boxes", "kinds_along", "moved"]


class Kind(NamedTuple):
    """Consecutive queries along an axis and their keys, relative to the first query."""

    queries: int
    keys: int
    ahead: int  # distance from the first query to the first key
    span: Span  # keys of each query, relative to the first key


class Boxes(NamedTuple):
    """Query boxes of one kind: lattices and spans of the first box, and the shifts (query, key) of all boxes."""

    query: Lattice
    key: Lattice
    spans: tuple[Span, ...]
    moves: list[tuple[int, int]]


def in_boxes(query: Lattice, key: Lattice, spans: tuple[Span, ...], box: tuple[int, ...]) -> list[Boxes]:
    """Split the lattices of a part into query boxes, each with the keys that it needs."""
    found = []
    for along in itertools.product(*(kinds_along(*axis).items() for axis in zip(spans, box, strict=True))):
        kinds, starts = zip(*along, strict=True)
        moves = [
            (_distance(query, corner), _distance(key, (c + kind.ahead for c, kind in zip(corner, kinds, strict=True))))
            for corner in itertools.product(*starts)
        ]
        own_query = query._replace(extents=tuple(kind.queries for kind in kinds))
        own_key = key._replace(extents=tuple(kind.keys for kind in kinds))
        found.append(Boxes(own_query, own_key, tuple(kind.span for kind in kinds), moves))
    return found


def moved(shifts: list[tuple[int, int]], moves: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the sums of each shift and each move."""
    return [(dq + q, dk + k) for dq, dk in shifts for q, k in moves]


def kinds_along(span: Span, side: int) -> dict[Kind, list[int]]:
    """Split the queries along an axis into intervals of `side`; return the starts of the intervals of each kind."""
    kinds: dict[Kind, list[int]] = {}
    for start in range(0, len(span.first), side):
        first, last = span.first[start : start + side], span.last[start : start + side]
        begin, end = min(first), max(last) + 1
        own = Span(tuple(x - begin for x in first), tuple(x - begin for x in last))
        kinds.setdefault(Kind(len(first), end - begin, begin - start, own), []).append(start)
    return kinds


def _distance(lattice: Lattice, coordinates: Iterable[int]) -> int:
    """Return the distance in tokens from the lattice's first point to the point with these coordinates."""
    return sum(stride * c for stride, c in zip(lattice.strides, coordinates, strict=True))
