"""Parts whose queries have boxes of keys, cut into boxes of queries that have views of keys of their own.

A view of keys that all queries share is cut into tiles where it starts, and a query tile meets every tile that any of
its keys lies in. A view that begins with the first key of a box of queries holds what they reach and nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from ...patterns.hints.lattice import Lattice, Span

__all__ = ["Kind", "in_boxes", "kinds_along", "moved"]


class Kind(NamedTuple):
    """Queries side by side along an axis, and their keys: what boxes that look alike have in common.

    Attributes
    ----------
    queries, keys : int
        How many.
    ahead : int
        From the first query to the first key.
    span : Span
        The keys of each query, counted from the first.
    """

    queries: int
    keys: int
    ahead: int
    span: Span


class Boxes(NamedTuple):
    """Boxes of one kind: the lattices and spans of the first one, and by how much each of them lies behind it."""

    query: Lattice
    key: Lattice
    spans: tuple[Span, ...]
    moves: list[tuple[int, int]]


def in_boxes(query: Lattice, key: Lattice, spans: tuple[Span, ...], box: tuple[int, ...]) -> list[Boxes]:
    """The lattices of a part, cut into boxes of queries with the keys that they reach."""
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
    """All moves at all shifts."""
    return [(dq + q, dk + k) for dq, dk in shifts for q, k in moves]


def kinds_along(span: Span, side: int) -> dict[Kind, list[int]]:
    """The intervals of `side` queries along an axis, those that look alike together: where each of them starts."""
    kinds: dict[Kind, list[int]] = {}
    for start in range(0, len(span.first), side):
        first, last = span.first[start : start + side], span.last[start : start + side]
        begin, end = min(first), max(last) + 1
        own = Span(tuple(x - begin for x in first), tuple(x - begin for x in last))
        kinds.setdefault(Kind(len(first), end - begin, begin - start, own), []).append(start)
    return kinds


def _distance(lattice: Lattice, coordinates: Iterable[int]) -> int:
    """From the first point to the one with these coordinates, in tokens."""
    return sum(stride * c for stride, c in zip(lattice.strides, coordinates, strict=True))
