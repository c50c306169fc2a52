"""The plans that are kept: how many bytes, which ones, and that a result never depends on it."""

from __future__ import annotations

import sys
import threading
import warnings

import numpy as np
import pytest

import spattn
from spattn import cpu
from spattn import patterns as p
from spattn.planning.contract import cache as _cache
from spattn.schedule import compiler
from spattn.testing import inputs

pytestmark = pytest.mark.usefixtures("no_plans")


def masks(count, n):
    rng = np.random.default_rng(0)
    return (p.Mask(rng.random((n, n)) < 0.3) for _ in range(count))


def test_hits_and_misses():
    for length in (100, 101, 100, 100):
        spattn.plan(p.Causal(), length)
    info = spattn.plan_cache_info()
    assert info[:3] == (2, 2, 2) and 0 < info.bytes < 1 << 16 and info.max_bytes == 256 << 20
    spattn.clear_plan_cache()
    assert spattn.plan_cache_info()[:4] == (0, 0, 0, 0)


@pytest.mark.parametrize(
    "other",
    [{"heads": 2}, {"batch": 2}, {"tile": (64, 64)}, {"workers": 99}, {"q_len": 299}, {"kv_len": 301}],
    ids=str,
)
def test_every_argument_tells_plans_apart(other):
    arguments = {"q_len": 300, "kv_len": 300, "batch": 1, "heads": 4}
    made = [compiler.plan(p.BigBird(16), **arguments), compiler.plan(p.BigBird(16), **arguments | other)]
    assert made[0] is not made[1] and spattn.plan_cache_info().misses == 2
    if "heads" in other:
        assert [plan.variants for plan in made] == [4, 2]


def test_the_plan_used_longest_ago_goes_first(monkeypatch):
    monkeypatch.setattr(_cache, "_MAX_PLANS", 3)
    first = spattn.plan(p.Causal(), 100)
    for length in (101, 102, 100, 103, 104):  # 100 is used again before there are too many
        spattn.plan(p.Causal(), length)
    assert spattn.plan(p.Causal(), 100) is first and spattn.plan_cache_info().plans == 3
    misses = spattn.plan_cache_info().misses
    for length in (101, 102):
        spattn.plan(p.Causal(), length)
    assert spattn.plan_cache_info().misses == misses + 2


def test_bytes_are_bounded(monkeypatch):
    monkeypatch.setattr(_cache, "MAX_BYTES", 1 << 20)
    for mask in masks(12, 400):  # 160,000 bytes each, and as much for the plan
        spattn.plan(mask, 400)
        assert spattn.plan_cache_info().bytes <= 1 << 20
    assert 2 <= spattn.plan_cache_info().plans <= 6


def test_a_plan_larger_than_all_may_be_is_not_kept(monkeypatch):
    kept = spattn.plan(p.Causal(), 100)
    monkeypatch.setattr(_cache, "MAX_BYTES", 100_000)
    for mask in masks(1, 400):
        assert spattn.plan(mask, 400) is not spattn.plan(mask, 400)
    assert spattn.plan(p.Causal(), 100) is kept


def test_what_backends_make_of_a_plan_counts(monkeypatch):
    q, k, v = inputs(1, 2, 2, 600)
    plan = spattn.plan_for(p.SlidingWindow(50), q, k, v, backend="cpu")
    before = spattn.plan_cache_info().bytes
    out, lse = cpu.forward(q, k, v, plan, 0.1)
    assert spattn.plan_cache_info().bytes >= before + plan.work.nbytes
    monkeypatch.setattr(_cache, "MAX_BYTES", spattn.plan_cache_info().bytes)
    cpu.backward(out, q, k, v, out, lse, plan, 0.1)
    assert spattn.plan_cache_info().plans == 0, "its units made it too large"


@pytest.mark.parametrize("form", ["mask", "one of a batch", "within a composition"])
def test_a_mask_of_n_bytes_costs_at_most_3n(form):
    """A look-up table takes 8n and lives as long as planning does."""
    n = 1200
    for mask in masks(1, n):
        pattern = {
            "mask": mask,
            "one of a batch": p.Mask(mask.mask[None, None]),
            "within a composition": mask & p.Causal(),
        }[form]
        plan = spattn.plan(pattern, n)
        kept = spattn.plan_cache_info().bytes
        assert n * n < kept <= 3 * n * n
        assert _cache.size_of((pattern, plan)) <= 3 * n * n
        if form == "mask":
            assert set(vars(mask)) <= {"mask", "_hash", "_writeable_mask"}, "planning leaves nothing with the pattern"


def test_size_counts_each_thing_once():
    mask = next(masks(1, 1000))
    assert _cache.size_of(mask) == pytest.approx(10**6, rel=0.01)
    both = mask | (mask & p.Causal()) | p.PerHead((mask, mask))
    assert _cache.size_of(both) == pytest.approx(10**6, rel=0.01)
    assert _cache.size_of(p.Documents((9,) * 5000)) > 8 * 5000


def test_numbers_of_a_tuple_are_counted_once():
    """As often as they are in it, and in others."""
    number = 1 << 5000
    one, other = (number, number, 7), (7, number, 8)
    size = sum(map(sys.getsizeof, (number, 7, 8, one, other, (one, other))))
    assert _cache.size_of((one, other)) == size


@pytest.mark.slow
@pytest.mark.footprint
def test_changing_shapes_and_masks_do_not_fill_the_memory(python):
    """2,000 lengths and 64 masks of 1024²: 64 MiB of masks alone."""
    source = """
import numpy as np, spattn
from spattn import patterns as p
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20
rng = np.random.default_rng(0)
x = rng.standard_normal((3, 1, 1, 1024, 8), dtype=np.float32)
spattn.attention(*x, p.Causal())
before = resident()
for length in range(1, 2001):
    spattn.plan(p.SlidingWindow(9), length % 1000 + 1, 1000 + length // 2)
    if not length % 32:
        spattn.attention(*x, rng.random((1024, 1024)) < 0.3)
print(resident() - before)
"""
    assert int(python(source)) < 180


def test_results_do_not_depend_on_what_is_kept(monkeypatch):
    arrays = inputs(1, 2, 2, 200)
    made = [p.SlidingWindow(left) for left in range(0, 60, 10)]
    expected = [spattn.attention(*arrays, pattern) for pattern in made]
    monkeypatch.setattr(_cache, "_MAX_PLANS", 2)
    wrong = []

    def work(seed):
        for n in np.random.default_rng(seed).integers(0, len(made), 60):
            if n == 0:
                spattn.clear_plan_cache()
            wrong.extend([n] * (not np.array_equal(spattn.attention(*arrays, made[n]), expected[n])))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong and not any(thread.is_alive() for thread in threads)
    assert spattn.plan_cache_info().plans <= 2


@pytest.mark.usefixtures("slow_plans", "no_plans")
def test_only_new_plans_warn():
    q, k, v = (np.zeros((1, 1, 100, 8), np.float32) for _ in range(3))
    calls = [
        lambda: spattn.plan(p.Causal(), 100),
        lambda: spattn.plan_for(p.Causal(), q, k, v, backend="cpu"),
        lambda: spattn.attention(q, k, v, p.SlidingWindow(9), backend="cpu"),
    ]
    for call in calls:
        with pytest.warns(spattn.PlanningWarning, match="planning took") as seen:
            call()
        assert [one.filename for one in seen] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for call in calls:
            call()
