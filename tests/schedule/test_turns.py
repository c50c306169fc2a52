"""Turns of items at the sums of dQ."""

from __future__ import annotations

import numpy as np
import pytest

from spattn import patterns, plan
from spattn.schedule.subtiles import Cut, by_keys
from spattn.schedule.turns import take_turns


def turns_of(pattern, length, heads=1, side_by_side=8):
    """(pass, subtile of each entry, turns): subtiles of 64 queries of plans with one query view."""
    made = plan(pattern, length, heads=heads)
    keys = by_keys(made, 1, heads, 1, Cut.consecutive(made, 64), 2, 1)
    subtile = 2 * keys.entries["tile"] + keys.entries["part"]
    return keys, subtile, take_turns(keys, subtile, side_by_side)


@pytest.mark.parametrize("heads", [1, 2])
def test_ranks_follow_the_order_of_items(heads):
    """A rank for each time that something is added: 0, 1, ... in the order in which items are taken."""
    keys, subtile, turns = turns_of(patterns.SlidingWindow(300), 2000, heads)
    count = np.zeros((1, subtile.max() + 1), int)
    for item in keys.work:
        for entry in range(item["begin"], item["end"]):
            place = keys.entries["head"][entry], subtile[entry]
            assert turns.rank[entry] == count[place]
            count[place] += 1
    assert (count > 0).all()


def test_items_of_a_window_go_ahead_of_each_other():
    """Each was at the queries that it shares with the next one two steps earlier, so that nobody waits."""
    keys, _, turns = turns_of(patterns.SlidingWindow(256), 16384)
    assert turns.lag < 0.1
    longest = keys.work[keys.work["end"] - keys.work["begin"] == (keys.work["end"] - keys.work["begin"]).max()]
    assert (np.diff(longest["tile"]) < 0).all()


def test_items_that_begin_at_the_same_queries_follow_each_other():
    _, _, turns = turns_of(patterns.Full(), 4096)
    assert 1.0 <= turns.lag <= 2.0
    _, _, alone = turns_of(patterns.Full(), 4096, side_by_side=1)
    assert alone.lag == 0.0
