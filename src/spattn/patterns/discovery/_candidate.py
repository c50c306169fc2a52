"""Discovery candidates: a registered pattern intersected with a band of diagonals."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...index_set import Runs
from ..base.pattern import Pattern
from ..sequence.basic import Causal, Full, Stride
from ..sequence.windows import DilatedWindow, SlidingWindow

__all__ = ["TILE", "Candidate", "band"]

TILE = 128, 64  # compares views with contiguous tiles; other tile sizes give similar ratios


class Candidate(NamedTuple):
    """The pairs of `base`, which has closed forms, at distances ``low <= q - k <= high``."""

    base: Pattern
    low: int | None  # None = unbounded; causal is 0 to None
    high: int | None
    new: int  # pairs that nothing covered before
    missing: int  # its pairs that the mask lacks
    cost: int = 0  # pairs that it must cover to pay off: its serialized numbers and the empty cells of its tiles

    def is_there(self, fill: float) -> bool:
        """Whether at least this share of its new pairs is present."""
        return self.missing <= (1 - fill) * (self.new + self.missing)

    def pattern(self) -> Pattern:
        """Return the idiomatic pattern of these pairs."""
        low, high, base = self.low, self.high, self.base
        if isinstance(base, Full):
            return band(low, high)
        if isinstance(base, Stride) and not base.offset and low is not None and high is not None and low <= 0 <= high:
            return DilatedWindow(high // base.stride, -low // base.stride, base.stride)
        return base if (low, high) == (None, None) else band(low, high) & base

    def runs(self, q: np.ndarray, kv_len: int) -> Runs:
        """Return the closed form; `base` must be bound to the lengths."""
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
