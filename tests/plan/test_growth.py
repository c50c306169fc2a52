"""Plans of sequences that grow between their ends: one for the steps of generation of causal and full attention."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import spattn
from spattn import cpu
from spattn import patterns as p
from spattn.planning.contract.validated import moved, validate, validated
from spattn.schedule import compiler
from spattn.testing import check_plan

pytestmark = pytest.mark.usefixtures("no_plans")

GROWING = [
    p.Causal(),
    p.Full(),
    p.SlidingWindow(-1, 3),
    p.Causal() - p.Sinks(70),
    p.PerBatch((p.Causal(), p.Causal() - p.Sinks(20))),
    p.PerHead((p.SlidingWindow(50, 0) | p.Sinks(4), p.Causal())),
]
LENGTHS = (701, 704, 705, 640, 600, 1500)


def planned(pattern, kv_len, q_len=2, **options):
    return compiler.plan(pattern, q_len, kv_len, batch=2, heads=4, **options)


@pytest.mark.parametrize("tile", [(128, 64), (48, 64), (1, 192)], ids=str)
@pytest.mark.parametrize("q_len", [1, 5, 130])
@pytest.mark.parametrize("pattern", GROWING, ids=repr)
def test_a_grown_plan_is_that_of_its_length(pattern, q_len, tile):
    """Number for number the plan that is made there, and the pattern's pairs."""
    planned(pattern, 700, q_len, tile=tile, workers=2)
    plans = [planned(pattern, kv_len, q_len, tile=tile, workers=2) for kv_len in LENGTHS]
    assert spattn.plan_cache_info()[:3] == (len(LENGTHS), 1, 1)
    for plan in plans:
        spattn.clear_plan_cache()
        anew = planned(pattern, plan.kv_len, q_len, tile=tile, workers=2)
        for field in dataclasses.fields(plan):
            np.testing.assert_array_equal(getattr(plan, field.name), getattr(anew, field.name), field.name)
            np.testing.assert_array_equal(getattr(plan, field.name), getattr(validated(plan), field.name), field.name)
        check_plan(plan, [own.index_set(q_len, plan.kv_len) for own in pattern.variants(2, 4)[0]])
        validate(dataclasses.replace(plan))
        assert plan.tiles == dataclasses.replace(plan).tiles == validated(plan).tiles


@pytest.mark.parametrize("pattern", GROWING, ids=repr)
def test_the_shortest_length(pattern):
    """A sequence without a full tile between its ends has a plan of its own."""
    least = validated(planned(pattern, 5000)).least
    for kv_len in range(least - 2, least + 2):
        plan = planned(pattern, kv_len)
        assert (validated(plan).growth is None) == (kv_len < least)
        check_plan(plan, [own.index_set(2, kv_len) for own in pattern.variants(2, 4)[0]])
    with pytest.raises(ValueError, match=rf"^plan: expected {least} keys or more, got {least - 1}$"):
        moved(validated(planned(pattern, 5000)), least - 1)


@pytest.mark.parametrize("pattern", GROWING, ids=repr)
def test_no_query(pattern):
    """Nothing grows where nobody asks; each number of keys has its own plan, which backends take."""
    for kv_len in (700, 900):
        check_plan(planned(pattern, kv_len, 0), [own.index_set(0, kv_len) for own in pattern.variants(2, 4)[0]])
        out = spattn.attention(*(np.ones((2, 4, n, 8)) for n in (0, kv_len, kv_len)), pattern)
        assert out.shape == (2, 4, 0, 8)


def test_as_many_queries_as_keys_do_not_grow():
    """Whoever trains or reads a prompt asks for the tiles that suit the whole."""
    for pattern in (p.Causal(), p.Full()):
        assert validated(spattn.plan(pattern, 700)).least is None


@pytest.mark.parametrize("pattern", GROWING, ids=repr)
def test_steps_are_one_prepared_call(pattern, monkeypatch):
    """Steps of more queries than are planned by rows: results have the same bits as calls planned for their length."""
    calls, own = [], cpu.prepare
    monkeypatch.setattr(cpu, "prepare", lambda call, plan: calls.append(call) or own(call, plan))
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, heads, n, 8), np.float32) for heads, n in ((4, 9), (2, 900), (2, 900)))
    lengths = [*range(500, 700), 300, 899]

    def step(kv_len):
        return spattn.attention(q, k[:, :, :kv_len], v[:, :, :kv_len], pattern, return_lse=True)

    steps = [step(kv_len) for kv_len in lengths]
    assert len(calls) == 1 and spattn.plan_cache_info()[1:3] == (1, 1)
    for kv_len, (out, lse) in list(zip(lengths, steps, strict=True))[::9]:
        spattn.clear_plan_cache()
        anew = step(kv_len)
        assert np.array_equal(out, anew[0]) and np.array_equal(lse, anew[1])


@pytest.mark.slow
def test_many_steps_take_one_place_in_the_cache():
    before = planned(p.Causal(), 1000)
    info = spattn.plan_cache_info()
    plans = [planned(p.Causal(), kv_len) for kv_len in range(1001, 3000)]
    after = spattn.plan_cache_info()
    assert (after.plans, after.misses) == (info.plans, info.misses) == (1, 1)
    assert after.bytes - info.bytes < 64 * (10_000 + before.nbytes) and planned(p.Causal(), 2999) is plans[-1]
