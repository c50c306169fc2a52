"""Affine lattices of positions, spans and ends."""

from __future__ import annotations

from typing import NamedTuple

from ..._util.index_checks import q_offset

__all__ = ["Ends", "Lattice", "Span", "column_lattices", "lattice_product", "whole_lattices"]


class Lattice(NamedTuple):
    """An affine lattice of positions: ``offset + Σ strides[a]·c_a, 0 ≤ c_a < extents[a]``, at most three axes.

    Parameters
    ----------
    offset : int
        Position of the first point.
    strides : tuple of int
        Distance in tokens between neighbours along each axis.
    extents : tuple of int
        Points along each axis.
    """

    offset: int
    strides: tuple[int, ...]
    extents: tuple[int, ...]

    def moved(self, by: int) -> Lattice:
        """Return the translated lattice.

        Parameters
        ----------
        by : int
            Translation in tokens.

        Returns
        -------
        Lattice
        """
        return self._replace(offset=self.offset + by)


class Span(NamedTuple):
    """Interval of keys per query along one axis, in coordinates of a part's lattices.

    Parameters
    ----------
    first, last : tuple of int
        First and last key coordinate, indexed by the coordinate of the query.
    """

    first: tuple[int, ...]
    last: tuple[int, ...]


class Ends(NamedTuple):
    """Keys to which the last queries attend in any sequence longer than ``first + last``.

    Parameters
    ----------
    first : int
        Number of leading keys, whose mask is the same at every length.
    last : int
        Number of trailing keys, whose mask is the same at every length.
    between : bool, optional
        Whether all keys in the middle are allowed; otherwise, none is.
    """

    first: int
    last: int
    between: bool = False


def whole_lattices(q_len: int, kv_len: int) -> tuple[Lattice, Lattice]:
    """Return the lattices of all queries and all keys."""
    return Lattice(q_offset(q_len, kv_len), (1,), (q_len,)), Lattice(0, (1,), (kv_len,))


def column_lattices(period: int, start: int, stop: int, kv_len: int) -> tuple[Lattice, ...]:
    """Return lattices of the keys ``start <= j % period < stop`` below kv_len; an incomplete period is separate."""
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
    """Combine one lattice per axis into a lattice of tokens of a grid with strides `steps`."""
    axes = list(zip(lattices, steps, strict=True))
    strides = tuple(stride * step for lattice, step in axes for stride in lattice.strides)
    extents = tuple(extent for lattice, _ in axes for extent in lattice.extents)
    return Lattice(sum(lattice.offset * step for lattice, step in axes), strides, extents)
