"""Patterns in closed form: bands of queries that have the same runs of keys, and ranges of distances."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..._util.ragged import offsets, ramp
from ..base.check import REACH

__all__ = ["NO_KEY_AHEAD", "NO_RANGES", "Bands", "either", "nearby", "same_keys"]

_MOST_CONJUNCTS = 8


class Bands(NamedTuple):
    """The pairs whose key lies in a run of the query's band, or whose distance lies in a range.

    Runs of a band, and ranges, may come in any order, meet, and reach beyond the sequence.

    Attributes
    ----------
    start : (bands + 1,) int64 array
        Position of the first query of each band, and where the last one ends; never falling. Other queries have no
        runs.
    indptr : (bands + 1,) int64 array
        Where the runs of each band start.
    first, stop : (runs,) int64 arrays
        First key of each run, and the one after its last.
    near : (ranges, 2) int64 array
        Ranges of distances ``q - k``: the least, and the one after the greatest.
    """

    start: np.ndarray
    indptr: np.ndarray
    first: np.ndarray
    stop: np.ndarray
    near: np.ndarray


_NOTHING = np.zeros(0, np.int64)
NO_RANGES = np.zeros((0, 2), np.int64)
_EVERYWHERE = np.array([-REACH, REACH])
_AT_ZERO = np.zeros(1, np.int64)


def nearby(ranges: npt.ArrayLike) -> Bands:
    """The pairs whose distance ``q - k`` lies in one of ``(n, 2)`` ranges."""
    return Bands(_AT_ZERO, _AT_ZERO, _NOTHING, _NOTHING, np.ascontiguousarray(ranges, np.int64).reshape(-1, 2))


NO_KEY_AHEAD = nearby([0, REACH])


def same_keys(first: np.ndarray, stop: np.ndarray, near: np.ndarray = NO_RANGES) -> Bands:
    """Runs of keys that all queries have, and pairs whose distance lies in a range."""
    return Bands(_EVERYWHERE, np.array([0, len(first)]), first, stop, near)


def either(operands: list[tuple[Bands, ...]]) -> tuple[Bands, ...] | None:
    """What any of several patterns allows; None where that takes too many conjuncts."""
    found = operands[0]
    for more in operands[1:]:
        if len(found) * len(more) > _MOST_CONJUNCTS:
            return None
        found = tuple(_joined(*pair) for pair in itertools.product(found, more))
    return found


def _joined(one: Bands, other: Bands) -> Bands:
    """The pairs that one of two conjuncts allows."""
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
