"""Candidates that fill columns or rows: keys that every query sees, and queries that see every key."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..basic import Columns
from ..tokens import GlobalTokens
from ._candidate import Candidate
from ._counts import Evidence, intervals, usual_spacing

__all__ = ["columns", "rows"]

_MOST_TOKENS = 1 << 12
_SHORT = 8  # a line that is shorter by this factor than the longest tells nothing: any window fills it


def columns(evidence: Evidence) -> Iterator[Candidate]:
    """Keys that all queries see, or all from theirs on: in every period, or at any places."""
    pairs = evidence.pairs
    for low in (None, 0):
        counts = tuple(each.keys[low] for each in (evidence.room, evidence.total, evidence.left))
        chosen = evidence.filled(*counts) & (_SHORT * counts[0] >= pairs.q_len)
        key = np.arange(pairs.kv_len)
        periodic = _period(chosen)
        if periodic is not None:
            period, start, stop = periodic
            yield _candidate(Columns(*periodic), low, *counts, (key % period >= start) & (key % period < stop))
        members = _groups_with(counts[2], chosen)
        if 0 < members.sum() <= _MOST_TOKENS:
            yield _candidate(GlobalTokens(_tokens(key[members]), queries=False), low, *counts, members)


def rows(evidence: Evidence) -> Iterator[Candidate]:
    """Queries that see all keys, or all up to theirs."""
    q = evidence.pairs.q
    for low in (None, 0):
        counts = tuple(each.rows[low] for each in (evidence.room, evidence.total, evidence.left))
        chosen = evidence.filled(*counts) & (_SHORT * counts[0] >= evidence.pairs.kv_len) & (q >= 0)
        members = _groups_with(counts[2], chosen)
        if 0 < members.sum() <= _MOST_TOKENS:
            yield _candidate(GlobalTokens(_tokens(q[members]), keys=False), low, *counts, members)


def _candidate(
    base: Columns | GlobalTokens,
    low: int | None,
    room: np.ndarray,
    total: np.ndarray,
    left: np.ndarray,
    members: np.ndarray,
) -> Candidate:
    return Candidate(base, low, None, int(left[members].sum()), int((room - total)[members].sum()))


def _groups_with(left: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """The chosen lines that have a pair left, and those beside them, which are covered: fewer groups are simpler."""
    starts, stops = intervals(chosen)
    sums = np.append(0, np.cumsum(left))
    members = np.zeros(len(chosen), dtype=bool)
    for start, stop in zip(starts, stops, strict=True):
        members[start:stop] = sums[stop] > sums[start]
    return members


def _period(chosen: np.ndarray) -> tuple[int, int, int] | None:
    """(period, start, stop) of groups of equal width at equal distances, which most of the chosen keys form."""
    starts, stops = intervals(chosen)
    spacing = usual_spacing(starts)
    if spacing is None:
        return None
    period, start = spacing
    stop = start + int(np.bincount(stops - starts).argmax())
    return (period, start, stop) if stop <= period else None


def _tokens(positions: np.ndarray) -> int | tuple[int, ...]:
    """How many of the first tokens these are, or which they are."""
    prefix = positions[-1] == len(positions) - 1
    return len(positions) if prefix else tuple(positions.tolist())
