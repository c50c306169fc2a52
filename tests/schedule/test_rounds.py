"""Lists that are cut so that those who take them are done at the same time."""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from spattn import Tiling, patterns, plan
from spattn.schedule.rounds import cut_for_rounds
from spattn.schedule.subtiles import Cut, by_keys


def time_of(length, pieces, heads, workers):
    """When the last worker is done, each of whom takes the longest item that is left."""
    items = [length[n] / p for n, p in enumerate(pieces) for _ in range(p * heads)]
    ends = [0] * workers
    for item in sorted(items, reverse=True):
        heapq.heappush(ends, heapq.heappop(ends) + item)
    return max(ends)


@pytest.mark.parametrize(("lists", "heads", "workers"), [(128, 16, 132), (64, 16, 132), (100, 8, 108), (9, 1, 8)])
def test_equal_lists_end_together(lists, heads, workers):
    length = np.full(lists, 256)
    pieces = cut_for_rounds(length, heads, workers)
    whole, best = time_of(length, np.ones(lists, int), heads, workers), 256 * lists * heads / workers
    assert time_of(length, pieces, heads, workers) - best <= (whole - best) / 2
    assert (pieces > 1).sum() <= workers // heads + 2  # few of them: what is cut has to be summed


@pytest.mark.parametrize(
    ("length", "heads"),
    [(np.arange(1, 129) * 2, 16), (np.full(128, 10), 16), (np.full(1320, 256), 16), (np.full(33, 256), 16), ([], 4)],
    ids=["triangle", "short", "many rounds", "no rest", "nothing"],
)
def test_lists_stay_whole_where_it_would_save_little(length, heads):
    assert (cut_for_rounds(np.array(length, int), heads, 132) == 1).all()


def test_items_of_all_heads_end_together():
    """Every entry once, in pieces where 32 lists of 8 heads are not a multiple of the workers."""
    made = plan(patterns.Full(), 4096, tiling=Tiling(workers=1), heads=8)
    cut = Cut.consecutive(made, 64)
    whole, even = by_keys(made, 1, 8, 8, cut, 2, 1), by_keys(made, 1, 8, 8, cut, 2, 1, rounds=96)
    assert len(even.work) > len(whole.work) == 32
    for made in (whole, even):
        covered = np.concatenate([np.arange(work["begin"], work["end"]) for work in made.work])
        np.testing.assert_array_equal(np.sort(covered), np.arange(len(made.entries)))
    assert even.slots == (even.work["slot"] >= 0).sum() > 0
