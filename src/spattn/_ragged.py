"""Rows of different lengths in one flat array."""

from __future__ import annotations

import numpy as np

__all__ = ["ramp"]


def ramp(lengths: np.ndarray) -> np.ndarray:
    """0 … n−1 for each n of `lengths`, one after another."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)
