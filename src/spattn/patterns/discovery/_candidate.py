"""What discovery proposes: a registered pattern, cut to a band of diagonals."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...index_set import Runs
from ..base.pattern import Pattern
from ..sequence.basic import Causal, Full, Stride
from ..sequence.windows import DilatedWindow, SlidingWindow

__all__ = ["TILE", "Candidate", "band"]

TILE = 128, 64  # by which views are weighed against contiguous tiles; those of other sizes weigh alike


class Candidate(NamedTuple):
    """The pairs of `base` whose query stands `low` to `high` tokens behind their key.

    Parameters
    ----------
    base : Pattern
        One with closed forms.
    low, high : int or None
        Distances ``q - k`` of positions, both included; None = unbounded. Causal is 0 to None.
    new : int
        How many pairs it covers that nothing covered before.
    missing : int
        How many of its pairs are not there.
    cost : int
        How many pairs it has to cover to be worth it: numbers that it takes to write it down, and cells of tiles that
        it leaves empty.
    """

    base: Pattern
    low: int | None
    high: int | None
    new: int
    missing: int
    cost: int = 0

    def is_there(self, fill: float) -> bool:
        """Whether at least such a share of its new pairs is not missing."""
        return self.missing <= (1 - fill) * (self.new + self.missing)

    def pattern(self) -> Pattern:
        """The same pairs, as people write them."""
        low, high, base = self.low, self.high, self.base
        if isinstance(base, Full):
            return band(low, high)
        if isinstance(base, Stride) and not base.offset and low is not None and high is not None and low <= 0 <= high:
            return DilatedWindow(high // base.stride, -low // base.stride, base.stride)
        return base if (low, high) == (None, None) else band(low, high) & base

    def runs(self, q: np.ndarray, kv_len: int) -> Runs:
        """Closed form of the keys of queries at `q`; `base` is bound to the lengths."""
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
    """Queries that stand `low` to `high` tokens behind their key."""
    if (low, high) == (None, None):
        return Full()
    if (low, high) == (0, None):
        return Causal()
    if low is not None and low > 0:
        return SlidingWindow(high, 0) - SlidingWindow(low - 1, 0)
    if high is not None and high < 0:
        return SlidingWindow(0, low if low is None else -low) - SlidingWindow(0, -high - 1)
    return SlidingWindow(high, low if low is None else -low)
