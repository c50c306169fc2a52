"""Problems that run together: their parts of the machine, and the order of all of their tasks."""

from __future__ import annotations

import numpy as np
import pytest

from spattn import patterns, plan
from spattn.schedule.group import in_turns, shares, tiles_of, workers
from spattn.schedule.tasks import TASK

DIFFERENT = patterns.PerHead((patterns.Causal(), patterns.Strided(16), patterns.Causal(), patterns.SlidingWindow(30)))


def test_tiles_of_every_batch_entry_and_head():
    """Each head counts the tiles of its own variant."""
    made = plan(DIFFERENT, 512, heads=4, tile=(128, 64), workers=4)
    alone = [plan(part, 512, tile=(128, 64)).tiles for part in DIFFERENT.patterns]
    assert tiles_of(made, 3, 4) == 3 * sum(alone)
    assert tiles_of(plan(patterns.Causal(), 512, tile=(128, 64)), 2, 5) == 10 * alone[0]
    assert tiles_of(plan(patterns.Full() - patterns.Full(), 512), 2, 5) == 0


def test_shares_are_parts_of_the_cost():
    assert shares([1, 2, 5]) == pytest.approx([0.125, 0.25, 0.625])
    assert shares([7]) == [1.0]
    assert shares([0, 0]) == [0.5, 0.5] and shares([0, 3]) == [0.0, 1.0]


def test_workers_of_a_share():
    """A problem that has all of the machine is split as a call by itself; at least one worker has each head."""
    assert [workers(264, heads) for heads in (1, 16, 264, 1000)] == [264, 17, 1, 1]
    assert [workers(264, 16, share) for share in (1.0, 0.5, 0.1, 0.0)] == [17, 9, 2, 1]
    assert workers(264, 0) == 264


def test_lists_are_cut_alike_whatever_problems_they_are_of():
    """Pieces of problems that share a machine are about as long, and longer than if each had it by itself."""
    sizes = {1024: 16, 4096: 4, 8192: 8}
    whole = {n: plan(patterns.Full(), n, heads=h, tile=(128, 64), workers=workers(264, h)) for n, h in sizes.items()}
    parts = shares([tiles_of(whole[n], 1, h) for n, h in sizes.items()])
    longest = []
    for (n, h), share in zip(sizes.items(), parts, strict=True):
        made = plan(patterns.Full(), n, heads=h, tile=(128, 64), workers=workers(264, h, share))
        longest.append((made.work["end"] - made.work["begin"]).max())
        assert longest[-1] >= (whole[n].work["end"] - whole[n].work["begin"]).max()
    assert longest == [16, 64, 128]  # a list of 1024 keys has 16 tiles in all; lengths are rounded to powers of two
    assert (whole[4096].work["end"] - whole[4096].work["begin"]).max() == 16


def test_no_item_is_longer_than_the_part_of_an_sm():
    """Of all the work, with a worker for two SMs; lists of up to 16 tiles stay whole."""
    sizes = [(130, 20000, 1), (4096, 4096, 4), (8192, 8192, 2), (1024, 1024, 16), (512, 512, 3)]
    plans = [plan(patterns.Causal(), q, kv, heads=heads, tile=(128, 64)) for q, kv, heads in sizes]
    costs = [tiles_of(made, 1, heads) for made, (*_, heads) in zip(plans, sizes, strict=True)]
    for (q, kv, heads), share in zip(sizes, shares(costs), strict=True):
        made = plan(patterns.Causal(), q, kv, heads=heads, tile=(128, 64), workers=workers(132 // 2, heads, share))
        length = made.work["end"] - made.work["begin"]
        assert length.max() <= max(16, sum(costs) / 132), (q, kv)


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
