"""Statistics for the search: pairs by row, and their counts per diagonal, column and row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from ..._util.index_checks import q_offset
from ..._util.ragged import ramp
from ...index_set import AffineRows, Runs
from ..base.pattern import Pattern
from ..base.predicate import allowed

__all__ = ["Counts", "Evidence", "KeyRuns", "Pairs", "covered", "intervals", "capacity", "usual_spacing"]

_PAIRS_AT_ONCE = 1 << 16  # fits into a core's cache
_CELLS_AT_ONCE = 1 << 18  # chunk size for a mask, and for a pattern compared with it
_NEARLY_ALL = 0.9
T = TypeVar("T")


class KeyRuns(NamedTuple):
    """Sorted runs of consecutive keys: the query at position `q` has the keys ``start <= k < stop`` (int32 arrays)."""

    q: np.ndarray
    start: np.ndarray
    stop: np.ndarray

    def cut(self, start: np.ndarray, stop: np.ndarray) -> KeyRuns:
        """Clip each run to ``[start, stop)`` and drop empty runs."""
        start, stop = np.maximum(self.start, start, dtype=np.int32), np.minimum(self.stop, stop, dtype=np.int32)
        keep = np.flatnonzero(start < stop)
        return KeyRuns(self.q[keep], start[keep], stop[keep])

    def shares(self, at_least: int) -> Iterator[KeyRuns]:
        """Yield the runs in chunks."""
        at_once = max(_PAIRS_AT_ONCE, at_least)
        for first in range(0, len(self.q), at_once):
            yield KeyRuns(*(each[first : first + at_once] for each in self))

    def causal(self) -> KeyRuns:
        """Keep the keys up to each query's own."""
        return self.cut(self.start, self.q + 1)

    def split(self, width: int) -> KeyRuns:
        """Split the runs at multiples of `width`."""
        pieces = (self.stop - 1) // width - self.start // width + 1
        q, start, stop = (np.repeat(each, pieces) for each in self)
        edge = (start // width + ramp(pieces)) * width
        return KeyRuns(q, start, stop).cut(edge, edge + width)


class Pairs:
    """The sorted pairs of an index set as CSR arrays, with the number of patterns that cover each pair."""

    def __init__(self, indptr: np.ndarray, keys: np.ndarray, kv_len: int):
        self.indptr, self.keys = indptr, keys
        self.q_len, self.kv_len = len(indptr) - 1, kv_len
        self.first = q_offset(self.q_len, kv_len)
        self.covered = np.zeros(len(keys), dtype=np.int8)  # number of patterns that cover each pair
        self._apart = np.ones(len(keys) + 1, dtype=bool)  # True if a pair is not adjacent to the previous one
        for start in range(1, len(keys), _PAIRS_AT_ONCE):
            some = slice(start, min(start + _PAIRS_AT_ONCE, len(keys)))
            np.not_equal(np.diff(keys[some.start - 1 : some.stop]), 1, out=self._apart[some])
        self._apart[indptr] = True

    @classmethod
    def of_mask(cls, mask: np.ndarray) -> Pairs:
        """Convert a boolean array (q_len, kv_len); takes six bytes per pair."""
        q_len, kv_len = mask.shape
        indptr, keys = np.zeros(q_len + 1, np.int64), np.zeros(np.count_nonzero(mask), np.int32)
        rows = max(1, _CELLS_AT_ONCE // max(kv_len, 1))
        for start in range(0, q_len, rows):
            strip = mask[start : start + rows]
            cell, row_start = np.flatnonzero(strip), kv_len * np.arange(len(strip))
            ends = np.append(np.searchsorted(cell, row_start[1:]), len(cell))
            found, before = slice(start + 1, start + 1 + len(strip)), int(indptr[start])
            indptr[found] = before + ends
            keys[before : before + len(cell)] = cell - np.repeat(row_start, np.diff(ends, prepend=0))
        return cls(indptr, keys, kv_len)

    @property
    def q(self) -> np.ndarray:
        return np.arange(self.first, self.kv_len, dtype=np.int64)  # position of each row's query

    def _strips(self) -> Iterator[tuple[slice, slice]]:
        """Yield slices of rows and of their pairs."""
        cuts = np.searchsorted(self.indptr, np.arange(0, max(len(self.keys), 1), _PAIRS_AT_ONCE)).tolist()
        for start, stop in zip(cuts, [*cuts[1:], self.q_len], strict=True):
            yield slice(start, stop), slice(int(self.indptr[start]), int(self.indptr[stop]))

    def runs_left(self) -> KeyRuns:
        """Return the uncovered pairs as runs."""
        found = [(np.zeros(0, np.int32),) * 3]
        for rows, some in self._strips():
            keys, covered = self.keys[some], self.covered[some] > 0
            starts, stops = ~covered, ~covered
            starts[1:] &= self._apart[some][1:] | covered[:-1]
            stops[:-1] &= self._apart[some][1:] | covered[1:]
            first = np.flatnonzero(starts)
            in_row = np.diff(np.searchsorted(first, self.indptr[rows.start : rows.stop + 1] - some.start))
            q = np.repeat(np.arange(rows.start, rows.stop, dtype=np.int32) + np.int32(self.first), in_row)
            found.append((q, keys[first], keys[stops] + 1))
        return KeyRuns(*(np.concatenate(column) for column in zip(*found, strict=True)))

    def cover(self, pattern: Pattern, runs: Runs) -> np.ndarray:
        """Mark the pairs of `pattern`, which has these `runs`, as covered; return (row, key) of its missing pairs."""
        found = 0
        for some, here in self.evaluated(pattern):
            found += int(np.count_nonzero(here))
            self.covered[some] += here
        return self._missing(runs) if found < runs.count.sum() else np.zeros((2, 0), np.int64)

    def uncover(self, pattern: Pattern) -> bool:
        """Undo cover() if other patterns cover all pairs of `pattern`; return whether they do."""
        if any((self.covered[some] == here)[here].any() for some, here in self.evaluated(pattern)):
            return False
        for some, here in self.evaluated(pattern):
            self.covered[some] -= here
        return True

    def evaluated(self, pattern: Pattern) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield (slice of the pairs, values of a bound pattern) of chunks of rows."""
        for rows, some in self._strips():
            q = np.repeat(self.q[rows], np.diff(self.indptr[rows.start : rows.stop + 1]))
            yield some, np.broadcast_to(allowed(pattern, q, self.keys[some].astype(np.int64)), q.shape)

    def _missing(self, runs: Runs) -> np.ndarray:
        """Return (row, key) of the pairs of `runs` that the index set lacks, sorted."""
        found = [np.zeros((2, 0), np.int64)]
        ends = np.cumsum(runs.count.sum(axis=1))
        cuts = np.searchsorted(ends, np.arange(_CELLS_AT_ONCE, ends[-1], _CELLS_AT_ONCE))
        for start, stop in zip([0, *cuts], [*cuts, self.q_len], strict=True):
            some = Runs(runs.start[start:stop], runs.step[start:stop], runs.count[start:stop])
            indptr, key = AffineRows.from_runs(some, self.kv_len).to_csr()
            row, of_rows = np.repeat(np.arange(start, stop), np.diff(indptr)), self.indptr[start : stop + 1]
            own_row = np.repeat(np.arange(start, stop), np.diff(of_rows))
            here, code = own_row * self.kv_len + self.keys[of_rows[0] : of_rows[-1]], row * self.kv_len + key
            absent = np.searchsorted(here, code, side="right") == np.searchsorted(here, code)
            found.append(np.stack([row[absent], key[absent]]))
        return np.concatenate(found, axis=1)

    def listed_left(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the uncovered pairs as CSR arrays."""
        left = self.covered == 0
        indptr = np.zeros_like(self.indptr)
        for rows, some in self._strips():
            numbers = np.flatnonzero(left[some])
            ends = self.indptr[rows.start + 1 : rows.stop + 1] - some.start
            indptr[rows.start + 1 : rows.stop + 1] = indptr[rows.start] + np.searchsorted(numbers, ends)
        return indptr, self.keys[left]


@dataclass(frozen=True)
class Counts:
    """Pairs, and their counts per diagonal, key and row."""

    all_runs: KeyRuns
    diagonals: np.ndarray  # by distance q - k, in ascending order
    keys: dict[int | None, np.ndarray]  # by key; [None] counts all pairs, [0] the causal ones
    rows: dict[int | None, np.ndarray]  # by row; [None] and [0] as in `keys`

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
        """Return all pairs if `low` is None, else the causal ones."""
        return self.all_runs if low is None else self.all_runs.causal()

    @property
    def nnz(self) -> int:
        return int(self.diagonals.sum())


def covered(start: np.ndarray, stop: np.ndarray, length: int) -> np.ndarray:
    """Count, for each index below `length`, the intervals ``[start, stop)`` that contain it."""
    edges = np.bincount(start, minlength=length + 1) - np.bincount(stop, minlength=length + 1)
    return np.cumsum(edges)[:length]


@dataclass(frozen=True)
class Evidence:
    """Input of the proposers: all pairs, the uncovered pairs, and the required fill."""

    pairs: Pairs
    capacity: Counts  # counts of every possible pair, without runs
    total: Counts  # counts of all pairs
    left: Counts  # counts of the uncovered pairs
    fill: float  # fraction of a line's pairs that must be present; 1 = all
    grid: tuple[int, ...] | None  # tokens along each axis; None for a plain sequence

    @property
    def low(self) -> int | None:
        """Return 0 if nearly all uncovered pairs are causal, else None."""
        return 0 if self.left.keys[0].sum() >= _NEARLY_ALL * self.left.nnz else None

    def of_both(self, measure: Callable[[Counts], T]) -> tuple[T, T]:
        """Evaluate `measure` on all pairs and on the uncovered ones; only once if none is covered."""
        total = measure(self.total)
        return total, total if self.left is self.total else measure(self.left)

    def filled(self, capacity: np.ndarray, total: np.ndarray, left: np.ndarray) -> np.ndarray:
        """Return True for each line that has a fraction `fill` of its possible pairs, or of those not covered yet."""
        return (total >= self.fill * capacity) | (left >= self.fill * (capacity - (total - left)))


def capacity(pairs: Pairs) -> Counts:
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
    """Return the most frequent spacing of sorted `numbers` and their most frequent remainder modulo it, or None."""
    distances, times = np.unique(np.diff(numbers), return_counts=True)
    if not len(distances):
        return None
    spacing = int(distances[times.argmax()])
    return spacing, int(np.bincount(numbers % spacing).argmax())
