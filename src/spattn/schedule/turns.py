"""Deterministic accumulation order of the fused backward.

The dK/dV kernel adds to the rows of a query sub-tile of dQ in item order, so that sums are bitwise reproducible.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .._util.ragged import ramp
from .subtiles import Pass

__all__ = ["Turns", "take_turns"]

_LATENCY = 1.5  # minimum distance between two additions to the same sums, in iterations


class Turns(NamedTuple):
    """The accumulation order of a kernel."""

    rank: np.ndarray  # (entries,) int32: number of entries that add to the same sums before this entry
    lag: float  # mean number of iterations by which an item must trail earlier concurrent items


def take_turns(made: Pass, subtile: np.ndarray, side_by_side: int) -> Turns:
    """Return the accumulation order of items that run in the order of `made.work`, all of one variant.

    `subtile` is the query sub-tile of each entry, `side_by_side` the number of concurrent items of a head.
    """
    length = (made.work["end"] - made.work["begin"]).astype(np.int64)
    item, step = np.repeat(np.arange(len(length)), length), ramp(length)
    entry = np.repeat(made.work["begin"].astype(np.int64), length) + step
    sums = made.entries["head"][entry].astype(np.int64) * (int(subtile.max(initial=0)) + 1) + subtile[entry]
    order = np.argsort(sums, kind="stable")
    rank = np.zeros(len(subtile), np.int32)
    rank[entry[order]] = ramp(np.unique(sums, return_counts=True)[1])
    before, after = order[:-1], order[1:]
    meet = (sums[before] == sums[after]) & (item[after] - item[before] < side_by_side)
    lag = np.zeros(len(length))
    np.maximum.at(lag, item[after][meet], (step[before] - step[after])[meet] + _LATENCY)
    return Turns(rank, float(lag.mean()) if len(lag) else 0.0)
