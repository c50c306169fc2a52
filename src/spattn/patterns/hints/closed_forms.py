"""Closed forms: affine lattices, spans, ends and interval conjuncts of parts; row programs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..._util.index_checks import q_offset
from ..._util.ragged import offsets, ramp
from ..base.check import REACH

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = [
    "AND",
    "NOT",
    "NO_KEY_AHEAD",
    "NO_RANGES",
    "OR",
    "Bands",
    "Ends",
    "Lattice",
    "Place",
    "Program",
    "Span",
    "column_lattices",
    "either",
    "joined",
    "lattice_product",
    "nearby",
    "operands_of",
    "run",
    "same_keys",
    "union",
    "whole",
    "whole_lattices",
]

_MOST_CONJUNCTS = 8


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


class Bands(NamedTuple):
    """One conjunct: the pairs whose key is in a run of the query's band, or whose distance is in an interval.

    Runs and intervals may be unsorted, overlap and exceed the sequence. All arrays are int64.
    """

    start: np.ndarray  # (bands + 1,) first position of each band and end of the last; non-decreasing
    indptr: np.ndarray  # (bands + 1,) offset of the first run of each band
    first: np.ndarray  # (runs,) first key of each run
    stop: np.ndarray  # (runs,) end of each run, exclusive
    near: np.ndarray  # (intervals, 2) half-open intervals of distances q - k


_NOTHING = np.zeros(0, np.int64)
NO_RANGES = np.zeros((0, 2), np.int64)
_EVERYWHERE = np.array([-REACH, REACH])
_AT_ZERO = np.zeros(1, np.int64)


def nearby(ranges: npt.ArrayLike) -> Bands:
    """Return the conjunct of pairs whose distance ``q - k`` is in one of `ranges`, (n, 2) half-open intervals."""
    return Bands(_AT_ZERO, _AT_ZERO, _NOTHING, _NOTHING, np.ascontiguousarray(ranges, np.int64).reshape(-1, 2))


NO_KEY_AHEAD = nearby([0, REACH])


def same_keys(first: np.ndarray, stop: np.ndarray, near: np.ndarray = NO_RANGES) -> Bands:
    """Return a conjunct with one band: every query attends to the keys in the runs and at the distances in `near`."""
    return Bands(_EVERYWHERE, np.array([0, len(first)]), first, stop, near)


def either(operands: list[tuple[Bands, ...]]) -> tuple[Bands, ...] | None:
    """Convert a union of conjunctions to a conjunction of unions; return None if it exceeds _MOST_CONJUNCTS."""
    found = operands[0]
    for more in operands[1:]:
        if len(found) * len(more) > _MOST_CONJUNCTS:
            return None
        found = tuple(_joined(*pair) for pair in itertools.product(found, more))
    return found


def _joined(one: Bands, other: Bands) -> Bands:
    """Unite two conjuncts."""
    near = np.concatenate([one.near, other.near])
    sides = [side for side in (one, other) if len(side.start) > 1]
    if len(sides) < 2:
        return (sides[0] if sides else one)._replace(near=near)
    start = np.union1d(one.start, other.start)
    count = np.zeros(len(start) - 1, np.int64)
    columns: list[tuple[np.ndarray, ...]] = []
    for side in sides:
        band = np.searchsorted(side.start, start[:-1], side="right") - 1
        inside = (band >= 0) & (band < len(side.start) - 1)
        band = np.where(inside, band, 0)
        own = np.where(inside, np.diff(side.indptr)[band], 0)
        run = np.repeat(side.indptr[band], own) + ramp(own)
        columns.append((np.repeat(np.arange(len(own)), own), side.first[run], side.stop[run]))
        count += own
    owner, first, stop = (np.concatenate(column) for column in zip(*columns, strict=True))
    order = np.argsort(owner, kind="stable")
    return Bands(start, offsets(count), first[order], stop[order], near)


class Place(NamedTuple):
    """A position that depends on the query's: `by` plus, unless `block` is 0, the query's position.

    The position is rounded down to ``offset + n * block``.
    """

    by: int
    block: int = 0
    offset: int = 0


Instruction = tuple[int, ...]  # operation, start, stop and step, as in _util/bit_rows.pyx
Program = tuple[Instruction, ...]  # in reverse Polish notation
_EMPTY, _RUN, _WHOLE, _OR, _AND, _NOT = range(6)
_NO_OPERANDS = (0,) * 7
OR, AND, NOT = ((operation, *_NO_OPERANDS) for operation in (_OR, _AND, _NOT))


def run(start: Place, stop: Place, step: int = 1) -> Instruction:
    """Return the keys ``start, start + step, ...`` below `stop`, clipped to the sequence; `start` may be negative."""
    return _RUN, *start, *stop, step


def whole(first: int, stop: int) -> Instruction:
    """Return all keys for the queries at ``[first, stop)``, and none for others."""
    return _WHOLE, *Place(first), *Place(stop), 0


def union(*instructions: Instruction) -> Program:
    """Return the program of a pattern that is a union of runs and whole rows."""
    return (_EMPTY, *_NO_OPERANDS), *instructions


def joined(programs: Iterable[Program | None], operator: Instruction) -> Program | None:
    """Return the program that combines others; None if there is none for one of them."""
    found: Program = ()
    for own in programs:
        if own is None:
            return None
        simple = operator == OR and all(operation in (_RUN, _WHOLE) for operation, *_ in own[1:])
        found += own if not found else own[1:] if simple else (*own, operator)
    return found


def operands_of(program: Program) -> int:
    """Return the largest number of operands at a time."""
    return max(itertools.accumulate((first == _EMPTY) - (first in (_OR, _AND)) for first, *_ in program))
