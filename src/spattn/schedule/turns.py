"""Turns of items that add to the same sums: a pass by keys that computes dQ on the way adds it up, slab by slab of
queries, always in the order of the items, so that the sums are the same every time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .._util.ragged import ramp
from .slabs import Pass

__all__ = ["Turns", "take_turns"]

_LATENCY = 1.5  # steps from the end of one until the next one can add to the same sums


class Turns(NamedTuple):
    """The turns of a pass.

    Attributes
    ----------
    rank : (entries,) int32 array
        How many entries add to an entry's sums before it.
    lag : float
        Steps by which an item has to stay behind those before it that run beside it, on average.
    """

    rank: np.ndarray
    lag: float


def take_turns(made: Pass, slab: np.ndarray, side_by_side: int) -> Turns:
    """The turns of items that are taken in the order of `made.work`, all of one variant.

    Parameters
    ----------
    slab : (entries,) array
        The sums that an entry adds to, those of its head.
    side_by_side : int
        How many items of a head run at the same time.
    """
    length = (made.work["end"] - made.work["begin"]).astype(np.int64)
    item, step = np.repeat(np.arange(len(length)), length), ramp(length)
    entry = np.repeat(made.work["begin"].astype(np.int64), length) + step
    sums = made.entries["head"][entry].astype(np.int64) * (int(slab.max(initial=0)) + 1) + slab[entry]
    order = np.argsort(sums, kind="stable")
    rank = np.zeros(len(slab), np.int32)
    rank[entry[order]] = ramp(np.unique(sums, return_counts=True)[1])
    before, after = order[:-1], order[1:]
    meet = (sums[before] == sums[after]) & (item[after] - item[before] < side_by_side)
    lag = np.zeros(len(length))
    np.maximum.at(lag, item[after][meet], (step[before] - step[after])[meet] + _LATENCY)
    return Turns(rank, float(lag.mean()) if len(lag) else 0.0)
