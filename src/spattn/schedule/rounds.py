"""Wave quantization: split some of the lists so that all workers finish together."""

from __future__ import annotations

import heapq

import numpy as np

__all__ = ["cut_for_rounds"]

_ROUNDS = 40  # with more rounds, an incomplete last round hardly matters
_PIECES = 2, 3, 4, 5, 6, 8
_WORTH = 0.01, 8  # saving at most this share of the ideal time plus 8 iterations is not worth a reduction


def cut_for_rounds(length: np.ndarray, heads: int, workers: int) -> np.ndarray:
    """Return the number of items to split each list into, so that all workers finish together.

    `length` has each list's iterations, the same for all heads. Workers take the lists of all heads, longest first.
    """
    whole = np.ones(len(length), np.int64)
    if not 0 < len(length) * heads <= _ROUNDS * workers:
        return whole
    best, time = whole, _time(length, whole, heads, workers)
    shared = float(length.sum()) * heads / workers
    if time <= (1 + _WORTH[0]) * shared + _WORTH[1]:
        return whole
    left = -(-(len(length) * heads % workers) // heads)  # number of lists of each head in the last round
    for pieces in _PIECES:
        for count in (left, left + 1):
            cut = whole.copy()
            cut[np.argsort(length, kind="stable")[:count]] = pieces
            if (found := _time(length, cut, heads, workers)) < time - 0.5:
                best, time = cut, found
    return best


def _time(length: np.ndarray, pieces: np.ndarray, heads: int, workers: int) -> float:
    """Return the time at which the last worker finishes, in iterations."""
    items = np.repeat(np.repeat(length / pieces, pieces), heads)
    ends = [0.0] * workers
    for item in np.sort(items)[::-1].tolist():
        heapq.heapreplace(ends, ends[0] + item)
    return max(ends)
