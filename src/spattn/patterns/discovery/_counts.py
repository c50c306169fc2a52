"""Pair counts per diagonal, per column and per row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ._pairs import KeyRuns, Pairs

__all__ = ["Counts", "Evidence", "covered", "intervals", "room", "usual_spacing"]

_NEARLY_ALL = 0.9
T = TypeVar("T")


@dataclass(frozen=True)
class Counts:
    """Pairs, and their number on each line."""

    all_runs: KeyRuns
    diagonals: np.ndarray  # by distance q - k, from the least on
    keys: dict[int | None, np.ndarray]  # by key: under None all pairs, under 0 the causal ones
    rows: dict[int | None, np.ndarray]  # by row, likewise

    @classmethod
    def of(cls, runs: KeyRuns, pairs: Pairs) -> Counts:
        """Count the pairs of all runs."""
        least, first = pairs.first - pairs.kv_len + 1, pairs.first
        diagonals = np.zeros(max(pairs.q_len + pairs.kv_len - 1, 0), np.int64)
        keys, rows = ({low: np.zeros(length, np.int64) for low in (None, 0)} for length in (pairs.kv_len, pairs.q_len))
        for share in runs.shares(len(diagonals)):
            diagonals += covered(
                share.q - share.stop + (1 - least), share.q - share.start + (1 - least), len(diagonals)
            )
            for low, some in ((None, share), (0, share.causal())):
                keys[low] += covered(some.start, some.stop, pairs.kv_len)
                rows[low] += np.bincount(some.q - first, some.stop - some.start, pairs.q_len).astype(np.int64)
        return cls(runs, diagonals, keys, rows)

    def runs(self, low: int | None) -> KeyRuns:
        """Return all pairs, or the causal ones."""
        return self.all_runs if low is None else self.all_runs.causal()

    @property
    def nnz(self) -> int:
        return int(self.diagonals.sum())


def covered(start: np.ndarray, stop: np.ndarray, length: int) -> np.ndarray:
    """Count, for each number below `length`, the intervals ``[start, stop)`` that contain it."""
    edges = np.bincount(start, minlength=length + 1) - np.bincount(stop, minlength=length + 1)
    return np.cumsum(edges)[:length]


@dataclass(frozen=True)
class Evidence:
    """The input of the proposers: all pairs, the uncovered pairs, and the required fill."""

    pairs: Pairs
    room: Counts  # of every possible pair, without runs
    total: Counts  # of all pairs
    left: Counts  # of the uncovered pairs
    fill: float  # share of a line's pairs that must be present; 1 = all
    grid: tuple[int, ...] | None  # tokens along each axis; None for a plain sequence

    @property
    def low(self) -> int | None:
        """0 if nearly all uncovered pairs are causal, else None."""
        return 0 if self.left.keys[0].sum() >= _NEARLY_ALL * self.left.nnz else None

    def of_both(self, measure: Callable[[Counts], T]) -> tuple[T, T]:
        """Evaluate `measure` on all pairs and on the uncovered ones, once if they are the same."""
        total = measure(self.total)
        return total, total if self.left is self.total else measure(self.left)

    def filled(self, room: np.ndarray, total: np.ndarray, left: np.ndarray) -> np.ndarray:
        """Whether enough of each line is present, of all its pairs or of its uncovered ones."""
        return (total >= self.fill * room) | (left >= self.fill * (room - (total - left)))


def room(pairs: Pairs) -> Counts:
    """Count every possible pair of these lengths, without runs."""
    q, k, last = pairs.q, np.arange(pairs.kv_len), pairs.kv_len - 1
    distance = np.arange(pairs.first - last, pairs.kv_len)
    diagonals = np.minimum(last, distance + last) - np.maximum(pairs.first, distance) + 1
    keys = {None: np.full_like(k, pairs.q_len), 0: np.clip(pairs.kv_len - k, 0, pairs.q_len)}
    rows = {None: np.full_like(q, pairs.kv_len), 0: np.clip(q + 1, 0, pairs.kv_len)}
    nothing = np.zeros(0, np.int32)
    return Counts(KeyRuns(nothing, nothing, nothing), diagonals, keys, rows)


def intervals(flags: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return start and stop of each run of True."""
    edges = np.flatnonzero(np.diff(flags.astype(np.int8), prepend=0, append=0))
    return edges[::2], edges[1::2]


def usual_spacing(numbers: np.ndarray) -> tuple[int, int] | None:
    """Return the most frequent spacing of sorted `numbers`, and the most frequent remainder modulo it."""
    distances, times = np.unique(np.diff(numbers), return_counts=True)
    if not len(distances):
        return None
    spacing = int(distances[times.argmax()])
    return spacing, int(np.bincount(numbers % spacing).argmax())
