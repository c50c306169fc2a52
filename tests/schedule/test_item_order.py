"""In which order the CPU takes work items."""

import numpy as np
import pytest

import spattn
from spattn import cpu
from spattn import patterns as sp
from spattn.schedule.item_order import by_rows, neighbours_together

PATTERNS = [
    (4096, sp.Neighborhood((64, 64), 13)),
    (20480, sp.Neighborhood((160, 128), 13)),
    (1000, sp.Causal()),
    (1000, sp.longformer(64, global_tokens=4)),
    (600, sp.BigBird(block=32, window_blocks=3, global_blocks=1, random_blocks=2, seed=1)),
    (0, sp.Full()),
]


def make(n, pattern):
    x = np.zeros((1, 4, n, 16), np.float32)
    return spattn.plan_for(pattern, x, x, x, backend="cpu")


@pytest.mark.parametrize("order", [by_rows, neighbours_together])
@pytest.mark.parametrize(("n", "pattern"), PATTERNS, ids=str)
def test_every_item_of_a_variant_once(n, pattern, order):
    plan = make(n, pattern)
    taken = order(plan)
    for begin, end in zip(plan.work_indptr[:-1], plan.work_indptr[1:], strict=True):
        assert sorted(taken[begin:end].tolist()) == sorted(plan.work[begin:end].tolist())


def test_strips_of_a_grid():
    n, pattern = PATTERNS[1]
    plan = spattn.plan(pattern, n, tiling=spattn.Tiling(tile=cpu.TILE), heads=4)  # whatever the machine would choose
    work = neighbours_together(plan)
    width = plan.views["grid"][plan.components["query_view"][0], -1]
    assert width > 8
    length = work["end"] - work["begin"]
    work = work[np.rint(length / length.mean()) == 1]  # those in the corners are shorter and come last
    column = work["query_tile"] % width
    assert (np.diff(column // 8) >= 0).all()  # one strip after the other
    for strip in np.unique(column // 8):
        assert (np.diff(work["query_tile"][column // 8 == strip]) > 0).all()  # each from the top to the bottom


def test_long_items_first():
    work = neighbours_together(make(1000, sp.Causal()))
    length = work["end"] - work["begin"]
    assert length[0] > 1.5 * length.mean()
    assert length[-1] < 0.5 * length.mean()


def test_kept_with_the_plan():
    plan = make(*PATTERNS[0])
    assert neighbours_together(plan) is neighbours_together(plan)


def test_boxes_with_keys_of_their_own_are_in_the_order_of_their_rows():
    """They meet neighbouring keys, whichever border of the grid they lie at."""
    plan = spattn.plan(sp.Neighborhood((12, 12), 5), 144, tiling=spattn.Tiling(tile=(4, 64), box=(2, 2)))
    work = neighbours_together(plan)
    starts = plan.views["offset"][plan.components["query_view"][work["component"]]]
    assert (plan.components["query_tiles"] == 1).all() and (np.diff(starts) > 0).all()
