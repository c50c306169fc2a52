"""Who computes what for a number of batch entries and heads: every work item and every merge of every head, once."""

from __future__ import annotations

import itertools

import numpy as np

from spattn import Tiling, patterns, plan
from spattn.schedule.tasks import heads_together, launch_lists, merge_heads, order_tasks

DIFFERENT = patterns.PerHead((patterns.Causal(), patterns.strided(16), patterns.Causal(), patterns.SlidingWindow(30)))


def of_head(made, batch, head):
    """(work items, merges) of a head, as ranges."""
    variant = np.broadcast_to(made.variant, (2, 4))[batch, head]
    return range(*made.work_indptr[variant : variant + 2]), range(*made.merge_variants[variant : variant + 2])


def test_tasks_cover_every_item_of_every_head():
    made = plan(patterns.Causal(), 1024, tiling=Tiling(tile=(128, 64)))
    tasks = order_tasks(made, np.ones(len(made.work), bool), 2, 4, 2, 49152)
    assert len(np.unique(tasks)) == len(tasks) == len(made.work) * 8
    assert (tasks["head_kv"] == tasks["head_q"] // 2).all()


def test_tasks_are_of_the_variant_of_their_head_and_of_the_chosen_items():
    made = plan(DIFFERENT, 512, tiling=Tiling(tile=(128, 64), workers=4), heads=4)
    chosen = np.arange(len(made.work)) % 3 != 0
    tasks = order_tasks(made, chosen, 2, 4, 2, 49152)
    expected = {
        (item, batch, head, head // 2)
        for batch, head in itertools.product(range(2), range(4))
        for item in of_head(made, batch, head)[0]
        if chosen[item]
    }
    assert {tuple(task) for task in tasks.tolist()} == expected and len(tasks) == len(expected)


def test_heads_that_run_side_by_side():
    """As many heads of K and V as the cache holds run together, at least one; the longest work items of them first."""
    made = plan(patterns.Causal(), 1024, tiling=Tiling(tile=(128, 64)))
    length = made.work["end"] - made.work["begin"]
    for keys, together in ((0, 2), (1024, 2), (2048, 4), (1 << 20, 8)):
        tasks = order_tasks(made, np.ones(len(made.work), bool), 2, 4, 2, keys)
        places = tasks["batch"] * 4 + tasks["head_q"]
        run = len(made.work) * together
        for start in range(0, len(tasks), run):
            assert len(np.unique(places[start : start + run])) == together
            assert (np.diff(length[tasks["item"][start : start + run]]) <= 0).all()


def test_no_small_set_of_heads_is_left_for_the_end():
    for entries, group, kv_len, keys in itertools.product(
        (1, 2, 7, 10, 16), (1, 4), (1, 1000), (0, 999, 3000, 1 << 20)
    ):
        bounds = heads_together(entries * group, group, kv_len, keys)
        sizes = np.diff(bounds)
        assert bounds[0] == 0 and bounds[-1] == entries * group and not (sizes % group).any()
        assert sizes.max() - sizes.min() <= group and sizes.max() // group <= max(1, keys // kv_len)


def test_merges_of_every_head():
    made = plan(DIFFERENT, 512, tiling=Tiling(tile=(128, 64), workers=4), heads=4)
    for first, last, batch, head in merge_heads(made.merge_variants, made.variant, 2, 4).tolist():
        assert range(first, last) == of_head(made, batch, head)[1]


def test_launch_lists_number_every_task_once():
    """A kernel finds variant, head and work item (or merge) behind a number by these lists alone."""
    made = plan(DIFFERENT, 512, tiling=Tiling(tile=(128, 64), workers=4), heads=4)
    lists = launch_lists(made, 2, 4)
    for kind, (indptr, numbers) in enumerate(((lists.items, lists.items_first), (lists.merges, lists.merges_first))):
        found = []
        for number in range(numbers[-1]):
            variant = int(np.searchsorted(numbers, number, side="right")) - 1
            first, tasks = indptr[variant], indptr[variant + 1] - indptr[variant]
            head, task = divmod(number - int(numbers[variant]), int(tasks))
            found.append((int(lists.heads[lists.head_indptr[variant] + head]), int(first + task)))
        expected = {
            (batch * 4 + head, task)
            for batch, head in itertools.product(range(2), range(4))
            for task in of_head(made, batch, head)[kind]
        }
        assert set(found) == expected and len(found) == len(expected)
