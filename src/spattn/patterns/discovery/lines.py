"""Candidates that consist of lines: diagonals, columns, rows, and the longest run of each row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ...index_set import Runs
from ..base.check import MOST_RUNS
from ..base.pattern import Pattern
from ..sequence.basic import Causal, Columns, Full, Sinks, Stride
from ..sequence.intervals import RowIntervals
from ..sequence.tokens import GlobalTokens
from ..sequence.windows import DilatedWindow, SlidingWindow, VerticalSlash
from .evidence import Counts, Evidence, Pairs, covered, intervals, usual_spacing

__all__ = [
    "TILE",
    "Candidate",
    "band",
    "columns",
    "diagonals_without_order",
    "global_tokens",
    "longest_runs",
    "rows",
    "strides",
    "windows",
]

TILE = 128, 64  # tile size with which candidates' tiles are counted; other sizes give similar ratios
_MOST_TOKENS = 1 << 12
_SHORT = 8  # columns and rows shorter than the longest by this factor are ignored: any window fills them
_LEAST_RUN = 16  # minimum keys per run; shorter runs are listed as pairs
_LEAST_SHARE = 4  # the longest runs must hold a quarter of the uncovered pairs
_SHORT_DIAGONAL = 8  # diagonals shorter than the longest by this factor cannot be distinguished from noise
_AS_GOOD = 1.15  # residue classes may need up to this factor more tiles, because fewer pairs are then listed
_FEW = 4  # if there are more groups of diagonals than this, groups of at most this width are ignored


class Candidate(NamedTuple):
    """The pairs of `base`, which must define runs(), at distances ``low <= q - k <= high``."""

    base: Pattern
    low: int | None  # None = unbounded; (0, None) is causal
    high: int | None
    new: int  # its pairs that are uncovered so far
    missing: int  # its pairs that the mask lacks
    cost: int = 0  # stored integers and empty cells of tiles, which its new pairs must outweigh

    def is_present(self, fill: float) -> bool:
        """Return True if at least a fraction `fill` of its new pairs is present."""
        return self.missing <= (1 - fill) * (self.new + self.missing)

    def pattern(self) -> Pattern:
        """Return the simplest registered pattern of these pairs."""
        low, high, base = self.low, self.high, self.base
        if isinstance(base, Full):
            return band(low, high)
        if isinstance(base, Stride) and not base.offset and low is not None and high is not None and low <= 0 <= high:
            return DilatedWindow(high // base.stride, -low // base.stride, base.stride)
        return base if (low, high) == (None, None) else band(low, high) & base

    def runs(self, q: np.ndarray, kv_len: int) -> Runs:
        """Return the runs of query positions `q`; `base` must be bound to the lengths."""
        runs = self.base.runs(q, kv_len)
        if runs is None:
            raise ValueError(f"base: expected a pattern with closed forms, got {self.base!r}")
        start, step, count = runs.start, runs.step, runs.count
        first = np.zeros_like(q) if self.high is None else q - self.high
        last = np.full_like(q, kv_len) if self.low is None else q - self.low
        skipped = np.maximum(-((start - first[:, None]) // step), 0)
        kept = np.minimum(count, (last[:, None] - start) // step + 1)
        return Runs(start + skipped * step, step, np.maximum(kept - skipped, 0))


def band(low: int | None, high: int | None) -> Pattern:
    """Return the pattern of distances ``low <= q - k <= high``."""
    if (low, high) == (None, None):
        return Full()
    if (low, high) == (0, None):
        return Causal()
    left, right = -1 if high is None else high, -1 if low is None else -low
    if low is not None and low > 0:
        return SlidingWindow(left, 0) - SlidingWindow(low - 1, 0)
    if high is not None and high < 0:
        return SlidingWindow(0, right) - SlidingWindow(0, -high - 1)
    return SlidingWindow(left, right)


class _Lines:
    """Columns or rows, with flags of the filled ones, among all pairs (`low` is None) or the causal ones."""

    def __init__(self, evidence: Evidence, axis: str, low: int | None):
        self.low = low
        capacity, total, self.left = (
            getattr(each, axis)[low] for each in (evidence.capacity, evidence.total, evidence.left)
        )
        self.missing = capacity - total
        self.chosen = evidence.filled(capacity, total, self.left) & (_SHORT * capacity >= capacity.max(initial=0))

    def candidate(self, base: Pattern, members: np.ndarray, cost: int = 0) -> Candidate:
        """Return the candidate of the lines `members`."""
        new, missing = (int(each[members].sum()) for each in (self.left, self.missing))
        return Candidate(base, self.low, None, new, missing, cost)

    def members(self) -> np.ndarray:
        """Return the lines of every group of adjacent filled lines that contains an uncovered pair."""
        starts, stops = intervals(self.chosen)
        sums = np.append(0, np.cumsum(self.left))
        some_left = np.flatnonzero(sums[stops] > sums[starts])
        found = [np.arange(starts[group], stops[group]) for group in some_left]
        return np.concatenate(found) if found else np.zeros(0, np.int64)


def columns(evidence: Evidence) -> Iterator[Candidate]:
    """Propose keys, periodic or not, to which all queries or all later queries attend."""
    for low in (None, 0):
        lines = _Lines(evidence, "keys", low)
        periodic = _period(lines.chosen)
        if periodic is not None:
            phase = np.arange(evidence.pairs.kv_len) % periodic[0]
            found = lines.candidate(Columns(*periodic), (phase >= periodic[1]) & (phase < periodic[2]))
            if found.new and found.is_present(evidence.fill):
                yield found
                continue  # other keys remain for the next round
        key = lines.members()
        if 0 < len(key) <= _MOST_TOKENS:
            tokens = _tokens(key)
            base = Sinks(tokens) if isinstance(tokens, int) else GlobalTokens(tokens, queries=False)
            yield lines.candidate(base, key, len(key))


def rows(evidence: Evidence) -> Iterator[Candidate]:
    """Propose queries that attend to all keys or to all earlier keys."""
    for low in (None, 0):
        lines = _Lines(evidence, "rows", low)
        lines.chosen &= evidence.pairs.q >= 0
        row = lines.members()
        if 0 < len(row) <= _MOST_TOKENS:
            yield lines.candidate(GlobalTokens(_tokens(evidence.pairs.q[row]), keys=False), row, len(row))


def global_tokens(evidence: Evidence) -> Iterator[Candidate]:
    """Propose tokens that attend to all keys and to which all queries attend."""
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


class _Diagonals:
    """Diagonals in ascending order of distance, with flags of the filled ones."""

    def __init__(self, evidence: Evidence):
        capacity, total, self.left = (each.diagonals for each in (evidence.capacity, evidence.total, evidence.left))
        self.least, self.count = evidence.pairs.first - evidence.pairs.kv_len + 1, len(capacity)
        self.missing = capacity - total
        self.filled = evidence.filled(capacity, total, self.left)
        long = np.flatnonzero(_SHORT_DIAGONAL * capacity >= capacity.max(initial=0))
        if evidence.fill < 1 and len(long):  # short diagonals get the flag of the nearest long one
            self.filled[: long[0]], self.filled[long[-1] :] = self.filled[long[0]], self.filled[long[-1]]

    def candidate(self, base: Full | Stride, numbers: np.ndarray) -> Candidate:
        """Return the candidate of the diagonals `numbers`, which have the spacing of `base`."""
        step = base.stride if isinstance(base, Stride) else 1
        low = None if numbers[0] < step else int(numbers[0]) + self.least
        high = None if numbers[-1] + step >= self.count else int(numbers[-1]) + self.least
        return Candidate(base, low, high, int(self.left[numbers].sum()), int(self.missing[numbers].sum()))

    def fullest(self, base: Full | Stride, numbers: np.ndarray) -> Candidate | None:
        """Return the candidate of the run of filled diagonals in `numbers` that has the most uncovered pairs."""
        starts, stops = intervals(self.filled[numbers])
        if not len(starts):
            return None
        sums = np.append(0, np.cumsum(self.left[numbers]))
        best = (sums[stops] - sums[starts]).argmax()
        return self.candidate(base, numbers[starts[best] : stops[best]])


def windows(evidence: Evidence) -> Iterator[Candidate]:
    """Propose a group of adjacent diagonals; ignore narrow groups if there are many groups."""
    diagonals = _Diagonals(evidence)
    starts, stops = intervals(diagonals.filled)
    if len(starts) > _FEW:
        for start, stop in zip(starts, stops, strict=True):
            diagonals.filled[start:stop] &= stop - start > _FEW
    found = diagonals.fullest(Full(), np.arange(diagonals.count))
    if found is not None:
        yield found


def strides(evidence: Evidence) -> Iterator[Candidate]:
    """Propose evenly spaced diagonals if residue classes need fewer tiles than token order."""
    diagonals = _Diagonals(evidence)
    spacing = usual_spacing(intervals(diagonals.filled)[0])
    if spacing is None:
        return
    step, first = spacing
    found = diagonals.fullest(Stride(step, (first + diagonals.least) % step), np.arange(first, diagonals.count, step))
    if found is not None and found.new > 2 * evidence.pairs.q_len and _views_pay(found.new, step, evidence.pairs):
        yield found


def _views_pay(new: int, step: int, pairs: Pairs) -> bool:
    """Return True if `new` pairs on diagonals `step` apart need fewer tiles in residue classes than in token order."""
    block_q, block_kv = TILE
    queries, keys, diagonals = -(-pairs.q_len // step), -(-pairs.kv_len // step), -(-new // max(pairs.q_len, 1))

    def tiles(queries: int, keys: int, reach: int) -> int:
        """Count the tiles of a band of `reach` diagonals."""
        return -(-queries // block_q) * min(-(-keys // block_kv), -(-(block_q + reach) // block_kv) + 1)

    in_order = min(tiles(pairs.q_len, pairs.kv_len, diagonals * step), diagonals * tiles(pairs.q_len, pairs.kv_len, 1))
    return step * tiles(queries, keys, diagonals) <= _AS_GOOD * in_order


def diagonals_without_order(evidence: Evidence) -> Iterator[Candidate]:
    """Propose irregularly spaced causal diagonals, if their runs fit into one array."""
    diagonals = _Diagonals(evidence)
    numbers = np.flatnonzero(diagonals.filled & (diagonals.left > 0))
    numbers = numbers[numbers + diagonals.least >= 0]
    if 0 < len(numbers) <= MOST_RUNS // max(evidence.pairs.q_len, 1):
        base = VerticalSlash((), tuple((numbers + diagonals.least).tolist()))
        new, missing = (int(each[numbers].sum()) for each in (diagonals.left, diagonals.missing))
        yield Candidate(base, None, None, new, missing, len(numbers))


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
    """Return (period, start, stop) of the most frequent spacing and width of groups of chosen keys, or None."""
    starts, stops = intervals(chosen)
    spacing = usual_spacing(starts)
    if spacing is None:
        return None
    period, start = spacing
    stop = start + int(np.bincount(stops - starts).argmax())
    return (period, start, stop) if stop <= period else None


def _tokens(positions: np.ndarray) -> int | tuple[int, ...]:
    """Return the number of positions if they are the first ones, else a tuple of the positions."""
    prefix = positions[-1] == len(positions) - 1
    return len(positions) if prefix else tuple(positions.tolist())
