"""Candidates of last resort: the longest run of each row."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..sequence.intervals import RowIntervals
from ._candidate import Candidate
from ._counts import Evidence

__all__ = ["longest_runs"]

_LEAST_RUN = 16  # keys; a shorter run is as well listed
_LEAST_SHARE = 4  # of the pairs that are left: where rows have many runs, the longest ones mean nothing


def longest_runs(evidence: Evidence) -> Iterator[Candidate]:
    """In each row the keys of its longest run among the pairs that are left."""
    runs, rows = evidence.left.runs(None), evidence.pairs.q_len
    length = runs.stop - runs.start
    order = np.argsort(length, kind="stable")
    order = order[length[order] >= _LEAST_RUN]
    start, stop = np.zeros((2, rows), np.int64)
    row = runs.q[order] - evidence.pairs.first
    start[row], stop[row] = runs.start[order], runs.stop[order]  # of a row's runs the longest is written last
    new = int((stop - start).sum())
    if _LEAST_SHARE * new >= evidence.left.nnz:
        yield Candidate(RowIntervals(start, stop), None, None, new, 0, 2 * rows)
