"""Parts that several patterns share: the whole sequence, and residue classes."""

from __future__ import annotations

from ..._util.index_checks import q_offset
from ..base.pattern import Part, Pattern
from .lattice import Lattice, whole_lattices

__all__ = ["residue_parts", "whole_part"]


def whole_part(pattern: Pattern, q_len: int, kv_len: int) -> tuple[Part, ...]:
    """A pattern as one part with views of its own: in a union it is planned apart from the others."""
    return (Part(pattern, *whole_lattices(q_len, kv_len)),)


def residue_parts(pattern: Pattern, stride: int, offset: int, q_len: int, kv_len: int) -> tuple[Part, ...]:
    """Pairs each residue class of queries modulo `stride` with the class of keys that lies `offset` before it.

    Classes with equal extents and equal distance between their first query and first key share their shifts: a pattern
    of differences looks the same in all of them. There are at most four such groups. Classes of one key need no views.
    """
    if stride >= kv_len:
        return (Part(pattern),)
    groups: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for first in range(min(stride, q_len)):
        query = q_offset(q_len, kv_len) + first
        key = (query - offset) % stride
        queries, keys = -((first - q_len) // stride), -((key - kv_len) // stride)
        if keys > 0:
            groups.setdefault((queries, keys, query - key), []).append((query, key))
    return tuple(
        Part(
            pattern,
            Lattice(first[0][0], (stride,), (queries,)),
            Lattice(first[0][1], (stride,), (keys,)),
            tuple((query - first[0][0], key - first[0][1]) for query, key in first),
        )
        for (queries, keys, _), first in groups.items()
    )
