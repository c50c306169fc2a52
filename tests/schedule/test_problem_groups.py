"""Problems that run together: their tiles, the workers of each, and the order of all of their tasks."""

from __future__ import annotations

import numpy as np

from spattn import Tiling, patterns, plan
from spattn.schedule.group import in_turns, pieces, tiles_of, workers
from spattn.schedule.tasks import TASK

DIFFERENT = patterns.PerHead((patterns.Causal(), patterns.strided(16), patterns.Causal(), patterns.SlidingWindow(30)))


def test_tiles_of_every_batch_entry_and_head():
    """Each head counts the tiles of its own variant."""
    made = plan(DIFFERENT, 512, tiling=Tiling(tile=(128, 64), workers=4), heads=4)
    alone = [plan(part, 512, tiling=Tiling(tile=(128, 64))).tiles for part in DIFFERENT.patterns]
    assert tiles_of(made, 3, 4) == 3 * sum(alone)
    assert tiles_of(plan(patterns.Causal(), 512, tiling=Tiling(tile=(128, 64))), 2, 5) == 10 * alone[0]
    assert tiles_of(plan(patterns.Full() - patterns.Full(), 512), 2, 5) == 0


def test_tiles_of_chosen_items():
    """Of the items of every variant, as often as heads have it."""
    made = plan(DIFFERENT, 512, tiling=Tiling(tile=(128, 64), workers=4), heads=4)
    chosen = np.arange(len(made.work)) % 3 == 0
    both = [tiles_of(made, 3, 4, of) for of in (chosen, ~chosen)]
    assert sum(both) == tiles_of(made, 3, 4) and min(both) > 0
    assert tiles_of(made, 3, 4, np.zeros(len(made.work), bool)) == 0
    length = (made.work["end"] - made.work["begin"])[: made.work_indptr[1]]  # of the pattern that two heads have
    first = np.arange(len(made.work)) < made.work_indptr[1]
    assert tiles_of(made, 3, 4, first) == 3 * 2 * length.sum()


def test_workers_share_the_heads():
    """At least one worker has each head."""
    assert [workers(264, heads) for heads in (1, 16, 264, 1000)] == [264, 17, 1, 1]
    assert workers(264, 0) == 264


def test_pieces_fill_rounds_of_blocks():
    """A piece more than blocks have room for would wait for one of them."""
    assert [pieces(132, lists, 1025) for lists in (1, 8, 32, 64, 66, 132, 1000)] == [132, 16, 4, 2, 2, 1, 1]
    assert [pieces(132, lists, 1025) for lists in (67, 90, 100)] == [7, 4, 5]  # four rounds, three and four
    assert pieces(132, 8, 16384) == 33 and pieces(132, 8, 1) == 1  # items and merges take time, too
    assert pieces(132, 0, 1025) == 132 and pieces(132, 8, 0) == 1


def of(items, heads):
    """Tasks of some items, each for all of some heads."""
    tasks = np.zeros(len(items) * len(heads), TASK)
    tasks["item"], tasks["head_q"] = np.repeat(items, len(heads)), np.tile(heads, len(items))
    return tasks


def test_longer_items_come_first_and_problems_stay_together():
    length = np.array([9, 8, 4, 1, 15, 8, 5, 100])
    first, second = of([0, 1, 2, 3], [0, 1]), of([7, 4, 5, 6], [0])
    tasks = in_turns([first, second], length)
    assert tasks["item"].tolist() == [7, 0, 0, 1, 1, 4, 5, 2, 2, 6, 3, 3]
    assert tasks["head_q"].tolist() == [0, 0, 1, 0, 1, 0, 0, 0, 1, 0, 0, 1]
    assert len(in_turns([np.zeros(0, TASK)] * 2, np.zeros(0, np.int32))) == 0
