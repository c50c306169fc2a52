"""The fallback candidate: the longest run of each row."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..sequence.intervals import RowIntervals
from ._candidate import Candidate
from ._counts import Evidence

__all__ = ["longest_runs"]

_LEAST_RUN = 16  # keys; shorter runs are listed as pairs
_LEAST_SHARE = 4  # the longest runs must hold a quarter of the uncovered pairs


def longest_runs(evidence: Evidence) -> Iterator[Candidate]:
    """Propose the longest uncovered run of each row."""
    runs, rows = evidence.left.runs(None), evidence.pairs.q_len
    length = runs.stop - runs.start
    order = np.argsort(length, kind="stable")
    order = order[length[order] >= _LEAST_RUN]
    start, stop = np.zeros((2, rows), np.int64)
    row = runs.q[order] - evidence.pairs.first
    start[row], stop[row] = runs.start[order], runs.stop[order]  # the last assignment wins: the longest run
    new = int((stop - start).sum())
    if _LEAST_SHARE * new >= evidence.left.nnz:
        yield Candidate(RowIntervals(start, stop), None, None, new, 0, 2 * rows)
