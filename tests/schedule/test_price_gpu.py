"""Counts of plans for a GPU, against counting tile by tile and dealing tasks out one by one."""

import heapq

import numpy as np
import pytest

import spattn
from spattn import patterns as sp
from spattn.choose import features_gpu as price_gpu
from spattn.choose.chooser import Sizes
from spattn.choose.features_gpu import KernelShape, count_on_gpu, last_done
from spattn.planning.contract.types import tile_lists
from spattn.schedule.reductions import find_reductions


@pytest.mark.parametrize("workers", [1, 7, 132])
@pytest.mark.parametrize("seed", range(6))
def test_tasks_are_dealt_to_whoever_is_free_first(workers, seed):
    rng = np.random.default_rng(seed)
    tasks = rng.integers(0, [2, 20, 500][seed % 3], (2, 9))
    cost = np.sort(rng.random(9) + 0.1)[::-1]
    done = [0.0] * workers
    for group in tasks:
        for number, each in zip(group, cost, strict=True):
            for _ in range(number):
                heapq.heapreplace(done, done[0] + each)
    np.testing.assert_allclose(last_done(tasks, cost, workers), max(done))


def test_what_is_not_dealt_keeps_all_workers_busy():
    tasks, cost = np.full((40, 4), 50), np.array([4.0, 3.0, 2.0, 1.0])
    share = float((tasks @ cost).sum()) / 13
    assert share <= last_done(tasks, cost, 13) <= share + 4


@pytest.mark.parametrize("tiles", [1, 2])
@pytest.mark.parametrize("workers", [1, 16])
@pytest.mark.parametrize(
    "pattern", [sp.Causal(), sp.SlidingWindow(200), sp.strided(64), sp.longformer(64, global_tokens=3)]
)
def test_counts_of_one_worker_are_sums_over_its_items(pattern, workers, tiles):
    plan = spattn.plan(pattern, 3000, tiling=spattn.Tiling(workers=workers, tile=(64, 64)))
    mask, found = tile_lists(plan).mask, find_reductions(plan)
    steps = partial = 0
    for begin, end in zip(plan.work["begin"].tolist(), plan.work["end"].tolist(), strict=True):
        for first in range(begin, end, tiles):
            own = mask[first : min(first + tiles, end)]
            steps += 1
            partial += len(own) < tiles or (own >= 0).any()
    heads, dim = 3, 64
    counts = count_on_gpu(plan, Sizes(2, heads, heads, dim, dim), KernelShape(64, tiles, dim, 1, 1 << 16))
    times, area = 2 * heads, 64 * tiles * 64
    assert counts.items == pytest.approx(times * len(plan.work))
    assert counts.weights == pytest.approx(times * steps * area)
    assert counts.products == pytest.approx(times * steps * area * dim)
    assert counts.partial == pytest.approx(times * partial * area)
    assert counts.launches == 1 + found.reduces.any()
    assert counts.merging == (len(found.merges.rows) > 0)
    assert counts.merged == pytest.approx(times * len(found.merges.sources) * dim)
    # Every row that a merge or a reduction reads was written.
    assert counts.written >= counts.merged
    assert counts.elements == 2 * heads * 2 * 3000 * 2 * dim


def test_a_short_launch_takes_its_longest_item():
    plan = spattn.plan(sp.Causal(), 2048, tiling=spattn.Tiling(tile=(64, 64)))
    counts = count_on_gpu(plan, Sizes(1, 1, 1, 64, 64), KernelShape(64, 2, 64, 264, 1 << 16))
    assert 0.9 * 2048 * 64 <= counts.weights <= 1.1 * 2048 * 64
    assert 1 <= counts.items < 2  # of 32: those of one worker


def test_plans_without_work_have_no_launch():
    plan = spattn.plan(sp.interop.from_pairs([], [], 128, 128), 128)
    counts = count_on_gpu(plan, Sizes(1, 1, 1, 64, 64), KernelShape(128, 2, 64, 132, 1 << 16))
    assert (counts.launches, counts.items, counts.merging) == (0, 0, 1)


def test_counting_is_kept_with_the_plan(monkeypatch):
    plan, sizes, kernel = spattn.plan(sp.Causal(), 512), Sizes(1, 2, 2, 64, 64), KernelShape(128, 2, 64, 132, 1 << 16)
    first = count_on_gpu(plan, sizes, kernel)
    monkeypatch.setattr(price_gpu, "find_reductions", None)
    assert count_on_gpu(plan, sizes, kernel) == first
