"""Plans that move: one for the steps of generation at every length."""

from __future__ import annotations

import dataclasses
import threading
from dataclasses import dataclass

import numpy as np
import pytest

import spattn
from spattn import cpu
from spattn import patterns as p
from spattn.planning.contract import cache as _cache
from spattn.planning.contract.validated import mark_validated, moved, validate, validated
from spattn.schedule import compiler
from spattn.testing import check_plan

pytestmark = pytest.mark.usefixtures("no_plans")

STREAMING = (p.Sinks(4) | p.SlidingWindow(150, 0)) & p.Causal()
PADDED = p.PerBatch((p.SlidingWindow(90, 0), p.SlidingWindow(90, 0) - p.Sinks(7)))
BY_HEAD = p.PerHead((STREAMING, p.SlidingWindow(64, 0)))
MOVING = [
    STREAMING,
    PADDED,
    BY_HEAD,
    p.SlidingWindow(63, 0),
    p.Sinks(5),
    p.Sinks(130) | p.SlidingWindow(129, 0),  # both ends are of one shape
    p.longformer(20, global_tokens=(0, 1, 3)),
]


def test_views_of_queries_start_at_the_first_row():
    """Views with an offset move, so a plan whose queries have one must not be marked as one that moves."""
    made = dataclasses.replace(spattn.plan(p.DilatedWindow(3, 3, 4), 50))
    with pytest.raises(RuntimeError, match="^plan: the offset of a query view depends on kv_len"):
        mark_validated(made, 10, None)
    assert mark_validated(made, None, None) is made


def planned(pattern, kv_len, q_len=2, **options):
    return compiler.plan(pattern, q_len, kv_len, batch=2, heads=4, **options)


@pytest.mark.parametrize("tile", [(128, 64), (48, 64), (1, 192)], ids=str)
@pytest.mark.parametrize("q_len", [1, 2, 5, 16])
@pytest.mark.parametrize("pattern", MOVING, ids=repr)
def test_a_moved_plan_is_that_of_its_length(pattern, q_len, tile):
    """Number for number the plan that is made there, and the pattern's pairs."""
    planned(pattern, 700, q_len, tile=tile, workers=9)
    moved = [planned(pattern, kv_len, q_len, tile=tile, workers=9) for kv_len in (701, 640, 302, 1500)]
    assert spattn.plan_cache_info()[:3] == (4, 1, 1)
    for plan in moved:
        spattn.clear_plan_cache()
        anew = planned(pattern, plan.kv_len, q_len, tile=tile, workers=9)
        for field in dataclasses.fields(plan):
            np.testing.assert_array_equal(getattr(plan, field.name), getattr(anew, field.name), field.name)
            np.testing.assert_array_equal(getattr(plan, field.name), getattr(validated(plan), field.name), field.name)
        check_plan(plan, [own.index_set(q_len, plan.kv_len) for own in pattern.variants(2, 4)[0]])
        validate(dataclasses.replace(plan))


@pytest.mark.parametrize("pattern", MOVING, ids=repr)
def test_the_shortest_length(pattern):
    """A sequence in which both ends meet has a plan of its own; one key more, and it moves."""
    least = validated(planned(pattern, 5000)).least
    for kv_len in range(max(1, least - 2), least + 2):
        plan = planned(pattern, kv_len)
        assert (validated(plan).least is None) == (kv_len < least)
        check_plan(plan, [own.index_set(2, kv_len) for own in pattern.variants(2, 4)[0]])


@pytest.mark.parametrize(
    "pattern",
    [
        p.Full() - p.Full(),
        p.strided(16),
        p.SlidingWindow(90, 0) | p.Stride(50),
        p.PerHead((STREAMING, p.strided(16))),
        p.PerHead((p.Causal(), p.strided(16))),
    ],
    ids=repr,
)
def test_other_plans_stay(pattern):
    """Those of patterns, or of one of their variants, that have no ends."""
    assert validated(planned(pattern, 700)).least is None
    planned(pattern, 701)
    assert spattn.plan_cache_info()[:3] == (0, 2, 2)


def test_plans_go_nowhere_else():
    with pytest.raises(ValueError, match=r"^plan: expected 156 keys or more, got 155$"):
        moved(validated(planned(STREAMING, 700, 1)), 155)
    with pytest.raises(ValueError, match=r"^plan: expected 700 keys, got 701$"):
        moved(validated(planned(p.strided(16), 700)), 701)


@pytest.mark.slow
def test_many_steps_take_one_place_in_the_cache():
    """They do not fill it, nor push out what others use, and the last of them are kept."""
    others = [spattn.plan(p.Causal(), length) for length in range(50, 60)]
    planned(STREAMING, 999)
    before = spattn.plan_cache_info()
    plans = [planned(STREAMING, kv_len) for kv_len in range(1000, 3000)]
    info = spattn.plan_cache_info()
    assert info.plans == before.plans == 11 and info.misses == before.misses
    assert info.bytes - before.bytes < 64 * 10_000
    assert planned(STREAMING, 2999) is plans[-1] and planned(STREAMING, 999) is planned(STREAMING, 999)
    assert all(spattn.plan(p.Causal(), plan.q_len) is plan for plan in others)


def test_what_is_made_of_a_moved_plan_counts(monkeypatch):
    q, k, v = (np.ones((1, 1, length, 8), np.float32) for length in (8, 900, 900))
    spattn.plan_for(STREAMING, q, k, v, backend="cpu")
    before = spattn.plan_cache_info().bytes
    k, v = k[:, :, 1:], v[:, :, 1:]
    out, lse = spattn.attention(q, k, v, STREAMING, return_lse=True)
    spattn.attention_backward(out, q, k, v, out, lse, STREAMING)
    made = validated(spattn.plan_for(STREAMING, q, k, v, backend="cpu"))
    own = made.derived_bytes + made.views.nbytes + _cache._OBJECT_BYTES
    assert made.kv_len == 899 and made.derived_bytes and spattn.plan_cache_info().bytes == before + own
    monkeypatch.setattr(_cache, "MAX_BYTES", spattn.plan_cache_info().bytes - 1)
    spattn.plan(p.Causal(), 10)
    assert spattn.plan_cache_info().plans == 1, "the plan that moves went, with all that was made of it"


def test_calls_of_a_moved_plan_are_kept(monkeypatch):
    """Those that do not move, as those of a backward, are prepared once for each length."""
    calls, own = [], cpu.prepare_backward
    monkeypatch.setattr(cpu, "prepare_backward", lambda call, plan: calls.append(call) or own(call, plan))
    q, k, v = (np.ones((1, 1, length, 8), np.float32) for length in (8, 900, 900))
    for kv_len in (900, 899, 900, 899):
        keys, values = k[:, :, :kv_len], v[:, :, :kv_len]
        out, lse = spattn.attention(q, keys, values, STREAMING, return_lse=True)
        spattn.attention_backward(out, q, keys, values, out, lse, STREAMING)
    assert len(calls) == 2


def test_threads_that_plan_several_lengths():
    found = [[] for _ in range(8)]

    def work(mine):
        mine += [planned(STREAMING, kv_len) for kv_len in range(800, 830)]

    threads = [threading.Thread(target=work, args=(mine,)) for mine in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for same in zip(*found, strict=True):
        assert all(plan is same[0] for plan in same) and same[0].kv_len == 800 + found[0].index(same[0])
    assert spattn.plan_cache_info().plans == 1


@dataclass(frozen=True)
class Half(p.Pattern):
    """A window of half of the sequence, which becomes one where the length is known."""

    def bind(self, q_len, kv_len):
        return p.SlidingWindow(kv_len // 2, 0)


def test_what_a_length_makes_of_a_pattern_does_not_move():
    assert [planned(Half(), kv_len).nnz for kv_len in (400, 600)] == [2 * 201, 2 * 301]


@dataclass(frozen=True)
class Said(p.Pattern):
    """The first key, with ends that somebody wrote."""

    ends_of: object

    def allows(self, q, k):
        return (q == q) & (k == 0)

    def ends(self, q_len):
        return self.ends_of


@pytest.mark.parametrize(
    ("ends", "error", "message"),
    [
        ((1, 0, False), TypeError, r"^ends\(\): expected Ends or None from Said"),
        (p.authoring.Ends(1, 0, "no"), TypeError, r"^ends\(\): expected Ends or None from Said"),
        (p.authoring.Ends(1.0, 0), TypeError, r"^ends\(\): expected an integer, got 1.0"),
        (p.authoring.Ends(-1, 0), ValueError, r"^ends\(\): expected an integer >= 0, got -1"),
    ],
    ids=str,
)
def test_ends_that_are_none(ends, error, message):
    with pytest.raises(error, match=message):
        planned(Said(ends), 100)


@pytest.mark.parametrize("ends", [p.authoring.Ends(1, 0), p.authoring.Ends(np.int64(1), 2**70), None], ids=str)
def test_ends_that_somebody_wrote(ends):
    for kv_len in (100, 101):
        assert planned(Said(ends), kv_len).nnz == 2
