"""Affine lattices of positions."""

from __future__ import annotations

from typing import NamedTuple

from ..._util.index_checks import q_offset

__all__ = [
    "Ends",
    "Lattice",
    "Span",
    "column_lattices",
    "lattice_product",
    "whole_lattices",
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
