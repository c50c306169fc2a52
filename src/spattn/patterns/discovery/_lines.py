"""Column and row candidates: global keys and queries, and the longest run of each row."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..base.pattern import Pattern
from ..sequence.basic import Columns, Sinks
from ..sequence.intervals import RowIntervals
from ..sequence.tokens import GlobalTokens
from ._candidate import Candidate
from ._counts import Counts, Evidence, covered, intervals, usual_spacing

__all__ = ["columns", "global_tokens", "longest_runs", "rows"]

_MOST_TOKENS = 1 << 12
_SHORT = 8  # ignore lines shorter than the longest by this factor: any window fills them
_LEAST_RUN = 16  # keys; shorter runs are listed as pairs
_LEAST_SHARE = 4  # the longest runs must hold a quarter of the uncovered pairs


class _Lines:
    """Columns or rows and whether they are filled, among all pairs (`low` is None) or the causal ones."""

    def __init__(self, evidence: Evidence, axis: str, low: int | None):
        self.low = low
        room, total, self.left = (getattr(each, axis)[low] for each in (evidence.room, evidence.total, evidence.left))
        self.missing = room - total
        self.chosen = evidence.filled(room, total, self.left) & (_SHORT * room >= room.max(initial=0))

    def candidate(self, base: Pattern, members: np.ndarray, cost: int = 0) -> Candidate:
        """Make the candidate of some lines."""
        new, missing = (int(each[members].sum()) for each in (self.left, self.missing))
        return Candidate(base, self.low, None, new, missing, cost)

    def members(self) -> np.ndarray:
        """Return the groups of filled lines that contain an uncovered pair; whole groups are simpler."""
        starts, stops = intervals(self.chosen)
        sums = np.append(0, np.cumsum(self.left))
        some_left = np.flatnonzero(sums[stops] > sums[starts])
        found = [np.arange(starts[group], stops[group]) for group in some_left]
        return np.concatenate(found) if found else np.zeros(0, np.int64)


def columns(evidence: Evidence) -> Iterator[Candidate]:
    """Propose keys that all (later) queries see, periodic or not."""
    for low in (None, 0):
        lines = _Lines(evidence, "keys", low)
        periodic = _period(lines.chosen)
        if periodic is not None:
            place = np.arange(evidence.pairs.kv_len) % periodic[0]
            found = lines.candidate(Columns(*periodic), (place >= periodic[1]) & (place < periodic[2]))
            if found.new and found.is_there(evidence.fill):
                yield found
                continue  # other keys remain for the next round
        key = lines.members()
        if 0 < len(key) <= _MOST_TOKENS:
            tokens = _tokens(key)
            base = Sinks(tokens) if isinstance(tokens, int) else GlobalTokens(tokens, queries=False)
            yield lines.candidate(base, key, len(key))


def rows(evidence: Evidence) -> Iterator[Candidate]:
    """Propose queries that see all keys, or all earlier ones."""
    for low in (None, 0):
        lines = _Lines(evidence, "rows", low)
        lines.chosen &= evidence.pairs.q >= 0
        row = lines.members()
        if 0 < len(row) <= _MOST_TOKENS:
            yield lines.candidate(GlobalTokens(_tokens(evidence.pairs.q[row]), keys=False), row, len(row))


def global_tokens(evidence: Evidence) -> Iterator[Candidate]:
    """Propose tokens that all queries see and that see all keys."""
    pairs, q = evidence.pairs, evidence.pairs.q
    seen, seeing = _Lines(evidence, "keys", None), _Lines(evidence, "rows", None)
    row = np.flatnonzero(seeing.chosen & (q >= 0))
    key = np.intersect1d(q[row], np.flatnonzero(seen.chosen))
    if not 0 < len(key) <= _MOST_TOKENS:
        return

    def count(each: Counts) -> int:
        """Count the pairs in these rows, and in these columns of the other rows."""
        runs = each.runs(None)
        others = np.flatnonzero(~np.isin(runs.q, key))
        of_columns = covered(runs.start[others], runs.stop[others], pairs.kv_len)
        return int(each.rows[None][key - pairs.first].sum() + of_columns[key].sum())

    missing = len(key) * (pairs.kv_len + pairs.q_len - len(key)) - count(evidence.total)
    yield Candidate(GlobalTokens(_tokens(key)), None, None, count(evidence.left), missing, len(key))


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


def _period(chosen: np.ndarray) -> tuple[int, int, int] | None:
    """Return (period, start, stop) of evenly spaced groups of equal width that most chosen keys form."""
    starts, stops = intervals(chosen)
    spacing = usual_spacing(starts)
    if spacing is None:
        return None
    period, start = spacing
    stop = start + int(np.bincount(stops - starts).argmax())
    return (period, start, stop) if stop <= period else None


def _tokens(positions: np.ndarray) -> int | tuple[int, ...]:
    """Return the number of tokens if they are the first ones, else the tokens."""
    prefix = positions[-1] == len(positions) - 1
    return len(positions) if prefix else tuple(positions.tolist())
