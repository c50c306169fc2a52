"""Ragged arrays: rows of different lengths in one flat array."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

__all__ = ["offsets", "ramp"]


def offsets(lengths: ArrayLike) -> np.ndarray:
    """Return the exclusive prefix sum and the total, 0, n₀, n₀ + n₁, …, as int64."""
    lengths = np.asarray(lengths)
    found = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=found[1:])
    return found


def ramp(lengths: np.ndarray) -> np.ndarray:
    """Concatenate ``arange(n)`` for each n of `lengths`."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)
