"""How many pairs lie on each line: on each diagonal, in each key's column and in each query's row."""

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
    """Some pairs, and how many of them each line has.

    Parameters
    ----------
    all_runs : KeyRuns
        The pairs.
    diagonals : (q_len + kv_len - 1,) int64 array
        By distance ``q - k``, from the least on.
    keys, rows : dict of (kv_len,) and (q_len,) int64 arrays
        Under None of all pairs, under 0 of those at distance 0 or more: the causal ones.
    """

    all_runs: KeyRuns
    diagonals: np.ndarray
    keys: dict[int | None, np.ndarray]
    rows: dict[int | None, np.ndarray]

    @classmethod
    def of(cls, runs: KeyRuns, pairs: Pairs) -> Counts:
        """Counted run by run."""
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
        """All pairs, or the causal ones."""
        return self.all_runs if low is None else self.all_runs.causal()

    @property
    def nnz(self) -> int:
        """Number of pairs."""
        return int(self.diagonals.sum())


def covered(start: np.ndarray, stop: np.ndarray, length: int) -> np.ndarray:
    """How many of the intervals ``[start, stop)`` each number below `length` lies in."""
    edges = np.bincount(start, minlength=length + 1) - np.bincount(stop, minlength=length + 1)
    return np.cumsum(edges)[:length]


@dataclass(frozen=True)
class Evidence:
    """What candidates are made of: all pairs, those that nothing covers yet, and how full a pattern has to be.

    Parameters
    ----------
    pairs : Pairs
        The index set.
    room, total, left : Counts
        Of all pairs that there could be (without their runs), of those that there are, and of those that are left.
    fill : float
        Share of the pairs of a line that has to be there, 1 where nothing may be missing.
    grid : tuple of int or None
        Tokens along each axis; None for tokens in a row.
    """

    pairs: Pairs
    room: Counts
    total: Counts
    left: Counts
    fill: float
    grid: tuple[int, ...] | None

    @property
    def low(self) -> int | None:
        """0 where nearly all that is left is causal, else None."""
        return 0 if self.left.keys[0].sum() >= _NEARLY_ALL * self.left.nnz else None

    def of_both(self, measure: Callable[[Counts], T]) -> tuple[T, T]:
        """What `measure` says of all pairs and of those that are left, asked once where these are the same."""
        total = measure(self.total)
        return total, total if self.left is self.total else measure(self.left)

    def filled(self, room: np.ndarray, total: np.ndarray, left: np.ndarray) -> np.ndarray:
        """Lines of which enough is there, at all or of what nothing covers yet."""
        return (total >= self.fill * room) | (left >= self.fill * (room - (total - left)))


def room(pairs: Pairs) -> Counts:
    """Counts of every pair of these lengths, with no runs."""
    q, k, last = pairs.q, np.arange(pairs.kv_len), pairs.kv_len - 1
    distance = np.arange(pairs.first - last, pairs.kv_len)
    diagonals = np.minimum(last, distance + last) - np.maximum(pairs.first, distance) + 1
    keys = {None: np.full_like(k, pairs.q_len), 0: np.clip(pairs.kv_len - k, 0, pairs.q_len)}
    rows = {None: np.full_like(q, pairs.kv_len), 0: np.clip(q + 1, 0, pairs.kv_len)}
    nothing = np.zeros(0, np.int32)
    return Counts(KeyRuns(nothing, nothing, nothing), diagonals, keys, rows)


def intervals(flags: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where maximal groups of neighbouring True start and stop."""
    edges = np.flatnonzero(np.diff(flags.astype(np.int8), prepend=0, append=0))
    return edges[::2], edges[1::2]


def usual_spacing(numbers: np.ndarray) -> tuple[int, int] | None:
    """The most frequent distance of neighbours among sorted `numbers`, and the most frequent rest modulo it."""
    distances, times = np.unique(np.diff(numbers), return_counts=True)
    if not len(distances):
        return None
    spacing = int(distances[times.argmax()])
    return spacing, int(np.bincount(numbers % spacing).argmax())
