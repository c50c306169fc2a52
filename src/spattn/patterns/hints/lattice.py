"""Affine lattices of positions, the pieces of patterns that are dense in them, and those that patterns share."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..._util.index_checks import q_offset

if TYPE_CHECKING:
    from ..base.pattern import Pattern

__all__ = [
    "Ends",
    "Lattice",
    "Part",
    "Span",
    "column_lattices",
    "lattice_product",
    "residue_parts",
    "whole_lattices",
    "whole_part",
]


class Lattice(NamedTuple):
    """An affine lattice of positions: ``offset + Σ strides[a]·c_a, 0 ≤ c_a < extents[a]``, at most three axes.

    Parameters
    ----------
    offset : int
        Position of the first point.
    strides : tuple of int
        Distance in tokens of neighbours along each axis.
    extents : tuple of int
        Points along each axis.
    """

    offset: int
    strides: tuple[int, ...]
    extents: tuple[int, ...]

    def moved(self, by: int) -> Lattice:
        """The same lattice at other positions.

        Parameters
        ----------
        by : int
            Distance in tokens, negative towards the first.

        Returns
        -------
        Lattice
        """
        return self._replace(offset=self.offset + by)


class Part(NamedTuple):
    """A piece of a pattern and the views in which it is dense.

    Parameters
    ----------
    pattern : Pattern
        What is allowed in this piece; only pairs of the two lattices count.
    query, key : Lattice or None
        Absolute positions of the queries and of the keys; None is the whole sequence.
    shifts : tuple of (int, int)
        The piece repeats with both lattices moved by each of these (query, key) offsets, and it is *the same* piece:
        in lattice coordinates the allowed pairs do not depend on the shift.
    spans : tuple of Span or None
        Where the keys of every query are a box of the key lattice: what that is along each axis. Plans may then have
        views of keys for each box of queries.
    """

    pattern: Pattern
    query: Lattice | None = None
    key: Lattice | None = None
    shifts: tuple[tuple[int, int], ...] = ((0, 0),)
    spans: tuple[Span, ...] | None = None


class Span(NamedTuple):
    """The keys of each query along an axis, in coordinates of the part's lattices.

    Parameters
    ----------
    first, last : tuple of int
        By coordinate of the query: the first and the last coordinate of its keys.
    """

    first: tuple[int, ...]
    last: tuple[int, ...]


class Ends(NamedTuple):
    """Where the last queries of any long sequence find their keys, at more than ``first + last`` keys.

    Parameters
    ----------
    first : int
        Of the first so many keys, each is allowed or not as its number says.
    last : int
        Of the last so many keys, each is allowed or not as its distance from the end says.
    between : bool, optional
        Whether the keys between them are allowed, all or none.
    """

    first: int
    last: int
    between: bool = False


def whole_lattices(q_len: int, kv_len: int) -> tuple[Lattice, Lattice]:
    """All queries, and all keys."""
    return Lattice(q_offset(q_len, kv_len), (1,), (q_len,)), Lattice(0, (1,), (kv_len,))


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


def column_lattices(period: int, start: int, stop: int, kv_len: int) -> tuple[Lattice, ...]:
    """The keys j < kv_len with ``start <= j % period < stop``: complete periods, then what the last one has left."""
    complete = max((kv_len - stop) // period + 1, 0)
    lattices = []
    if complete and stop - start == 1:
        lattices.append(Lattice(start, (period,), (complete,)))
    elif complete:
        lattices.append(Lattice(start, (period, 1), (complete, stop - start)))
    rest = complete * period + start
    if rest < kv_len:
        lattices.append(Lattice(rest, (1,), (kv_len - rest,)))
    return tuple(lattices)


def lattice_product(lattices: list[Lattice], steps: tuple[int, ...]) -> Lattice:
    """The tokens of a grid, `steps` apart along its axes, whose coordinate along each is in the lattice of its axis."""
    axes = list(zip(lattices, steps, strict=True))
    strides = tuple(stride * step for lattice, step in axes for stride in lattice.strides)
    extents = tuple(extent for lattice, _ in axes for extent in lattice.extents)
    return Lattice(sum(lattice.offset * step for lattice, step in axes), strides, extents)
