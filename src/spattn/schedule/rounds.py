"""Rounds: workers that take equal items one after the other are done at different times, unless some items are cut."""

from __future__ import annotations

import heapq

import numpy as np

__all__ = ["cut_for_rounds"]

_ROUNDS = 40  # with more of them the last one hardly counts
_PIECES = 2, 3, 4, 5, 6, 8
_WORTH = 0.01, 8  # of the time, and steps of a worker: what is cut has to be summed


def cut_for_rounds(length: np.ndarray, heads: int, workers: int) -> np.ndarray:
    """Into how many pieces lists are cut so that workers end together.

    Parameters
    ----------
    length : (lists,) int array
        Steps of each list, the same for every head.
    heads : int
    workers : int
        Who take the lists of all heads, the longest first.

    Returns
    -------
    (lists,) int array
    """
    whole = np.ones(len(length), np.int64)
    if not 0 < len(length) * heads <= _ROUNDS * workers:
        return whole
    best, time = whole, _time(length, whole, heads, workers)
    shared = float(length.sum()) * heads / workers
    if time <= (1 + _WORTH[0]) * shared + _WORTH[1]:
        return whole
    left = -(-(len(length) * heads % workers) // heads)  # lists of a head in the last round
    for pieces in _PIECES:
        for count in (left, left + 1):
            cut = whole.copy()
            cut[np.argsort(length, kind="stable")[:count]] = pieces
            if (found := _time(length, cut, heads, workers)) < time - 0.5:
                best, time = cut, found
    return best


def _time(length: np.ndarray, pieces: np.ndarray, heads: int, workers: int) -> float:
    """When the last worker is done."""
    items = np.repeat(np.repeat(length / pieces, pieces), heads)
    ends = [0.0] * workers
    for item in np.sort(items)[::-1].tolist():
        heapq.heapreplace(ends, ends[0] + item)
    return max(ends)
