"""Pairs row by row: what discovery counts, as runs of consecutive keys, and crosses off, pair by pair."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..._index_checks import q_offset
from ..._ragged import offsets, ramp
from ...index_set import AffineRows, Runs
from .._pattern import Pattern
from .._predicate import allowed

__all__ = ["KeyRuns", "Pairs"]

_PAIRS_AT_ONCE = 1 << 16  # as many as stay in a core's cache
_CELLS_AT_ONCE = 1 << 20  # of a mask, or of a pattern that is compared with it


class KeyRuns(NamedTuple):
    """Runs of consecutive keys, ``start <= k < stop`` of the query at `q`, sorted: int64 arrays of one length."""

    q: np.ndarray
    start: np.ndarray
    stop: np.ndarray

    def cut(self, start: np.ndarray, stop: np.ndarray) -> KeyRuns:
        """The keys of each run from `start` on and before `stop`."""
        start, stop = np.maximum(self.start, start), np.minimum(self.stop, stop)
        keep = np.flatnonzero(start < stop)
        return KeyRuns(self.q[keep], start[keep], stop[keep])

    def causal(self) -> KeyRuns:
        """The keys up to each query's own."""
        return self.cut(self.start, self.q + 1)

    def split(self, width: int) -> KeyRuns:
        """The same keys in runs that end where a multiple of `width` is."""
        pieces = (self.stop - 1) // width - self.start // width + 1
        q, start, stop = (np.repeat(each, pieces) for each in self)
        edge = (start // width + ramp(pieces)) * width
        return KeyRuns(q, np.maximum(start, edge), np.minimum(stop, edge + width))


class Pairs:
    """The pairs of an index set, sorted, each marked as covered or left.

    Parameters
    ----------
    indptr : (q_len + 1,) int64 array
        Where the keys of each row start.
    keys : (nnz,) int32 array
        Keys, row by row.
    kv_len : int
        Keys of the sequence.
    """

    def __init__(self, indptr: np.ndarray, keys: np.ndarray, kv_len: int):
        self.indptr, self.keys = indptr, keys
        self.q_len, self.kv_len = len(indptr) - 1, kv_len
        self.first = q_offset(self.q_len, kv_len)
        self.covered = np.zeros(len(keys), dtype=np.int8)  # by how many patterns
        self._apart = np.ones(len(keys) + 1, dtype=bool)  # from the pair before
        np.not_equal(np.diff(keys), 1, out=self._apart[1:-1])
        self._apart[indptr] = True

    @classmethod
    def of_mask(cls, mask: np.ndarray) -> Pairs:
        """The pairs of a boolean array (q_len, kv_len); they take six bytes each."""
        q_len, kv_len = mask.shape
        rows = max(1, _CELLS_AT_ONCE // max(kv_len, 1))
        counts, keys = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)]
        for start in range(0, q_len, rows):
            strip = mask[start : start + rows]
            cell = np.flatnonzero(strip)
            row_start = kv_len * np.arange(len(strip))
            count = np.diff(np.searchsorted(cell, row_start), append=len(cell))
            keys.append((cell - np.repeat(row_start, count)).astype(np.int32))
            counts.append(count)
        return cls(offsets(np.concatenate(counts)), np.concatenate(keys), kv_len)

    @property
    def q(self) -> np.ndarray:
        """Position of each row's query."""
        return np.arange(self.first, self.kv_len, dtype=np.int64)

    def runs_left(self) -> KeyRuns:
        """The pairs that nothing covers."""
        covered = self.covered > 0
        left = ~covered
        starts, stops = left & self._apart[:-1], left & self._apart[1:]
        starts[1:] |= left[1:] & covered[:-1]
        stops[:-1] |= left[:-1] & covered[1:]
        first, last = np.flatnonzero(starts), np.flatnonzero(stops)
        q = np.repeat(self.q, np.diff(np.searchsorted(first, self.indptr)))
        return KeyRuns(q, self.keys[first].astype(np.int64), self.keys[last].astype(np.int64) + 1)

    def cover(self, pattern: Pattern, runs: Runs) -> np.ndarray:
        """Marks the pairs that a pattern allows; returns (row, key) of those that it allows and that are not here.

        Parameters
        ----------
        pattern : Pattern
            Asked pair by pair.
        runs : Runs
            The same pattern in closed form.
        """
        found = 0
        for some, here in self._allowed(pattern):
            found += int(np.count_nonzero(here))
            self.covered[some] += here
        return self._missing(runs) if found < runs.count.sum() else np.zeros((2, 0), np.int64)

    def uncover(self, pattern: Pattern) -> bool:
        """Takes the marks of a pattern back if others cover all of its pairs; whether they do."""
        if any((self.covered[some] == here)[here].any() for some, here in self._allowed(pattern)):
            return False
        for some, here in self._allowed(pattern):
            self.covered[some] -= here
        return True

    def _allowed(self, pattern: Pattern) -> Iterator[tuple[slice, np.ndarray]]:
        """Which pairs a pattern allows, some rows at a time."""
        cuts = np.searchsorted(self.indptr, np.arange(0, max(len(self.keys), 1), _PAIRS_AT_ONCE))
        for start, stop in zip(cuts, [*cuts[1:], self.q_len], strict=True):
            indptr = self.indptr[start : stop + 1]
            some = slice(int(indptr[0]), int(indptr[-1]))
            q = np.repeat(np.arange(start, stop) + self.first, np.diff(indptr))
            yield some, np.broadcast_to(allowed(pattern, q, self.keys[some].astype(np.int64)), q.shape)

    def _missing(self, runs: Runs) -> np.ndarray:
        """(row, key) of the pairs of `runs` that are not here, sorted; searched for some rows at a time."""
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
        """Compressed sparse rows of the pairs that nothing covers."""
        left = np.flatnonzero(self.covered == 0)
        return np.searchsorted(left, self.indptr), self.keys[left]
