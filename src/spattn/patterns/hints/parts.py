"""Parts shared by several patterns: the whole sequence, and residue classes."""

from __future__ import annotations

from ..._util.index_checks import q_offset
from ..base.pattern import Part, Pattern
from .lattice import Lattice, whole_lattices

__all__ = ["residue_parts", "whole_part"]


def whole_part(pattern: Pattern, q_len: int, kv_len: int) -> tuple[Part, ...]:
    """Return one part with explicit lattices, so that a union plans it separately."""
    return (Part(pattern, *whole_lattices(q_len, kv_len)),)


def residue_parts(pattern: Pattern, stride: int, offset: int, q_len: int, kv_len: int) -> tuple[Part, ...]:
    """Pair each residue class of queries modulo `stride` with the class of keys `offset` before it.

    Classes of equal extents and equal distance between first query and first key share one part with shifts, as the
    pattern depends on distances alone: at most four parts. Classes of one key need no views.
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
