"""Plans of calls that have a GPU together: whose tiles are smaller, whose lists are split. The figures behind these
choices are in ``benchmarks/results/grouped_cuda-h200.json``."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import spattn
from spattn import cuda
from spattn import patterns as sp
from spattn.choose import group_plans as _sharing
from spattn.request.call import Call
from spattn.schedule import compiler

pytestmark = [pytest.mark.family("sm90"), pytest.mark.usefixtures("card")]

SMS = 132
IMAGE, WINDOWS = sp.Neighborhood((56, 56), 7), sp.windowed((56, 56), 7)


def call_of(tokens, head_dim=128, heads=4, batch=1):
    x = np.broadcast_to(np.zeros((), ml_dtypes.bfloat16), (batch, heads, tokens, head_dim))
    return Call.of(x, x, x)


def member(pattern, call, kept=False, plan=None):
    own = plan or cuda.plan_for(pattern, call)
    return _sharing.Member(call, own, kept, _sharing.workers(2 * SMS, call.batch * call.heads_q))


def shared(*members):
    return list(_sharing.shared(dict(enumerate(members)), SMS).values())


def longest(plan):
    return int((plan.work["end"] - plan.work["begin"]).max())


MUCH = (sp.SlidingWindow(1000), call_of(8192, heads=16))


def test_lists_that_nobody_waits_for_stay_whole():
    """By itself the call would have them split."""
    few = sp.Causal(), call_of(4096)
    assert longest(cuda.plan_for(*few)) < 64
    plan, _ = shared(member(*few), member(*MUCH))
    assert longest(plan) == 64 and plan.slots == 0


def test_lists_that_all_others_would_wait_for_are_split():
    """Of one long sequence beside short ones, but for plans that are kept, and as often as is best."""
    long, short = (sp.Full(), call_of(8192, heads=1)), (sp.SlidingWindow(64), call_of(2048))
    plan, other = shared(member(*long), member(*short))
    assert plan.slots > 0 and longest(plan) == 32 and other.slots == 0
    for workers in (1, 33):
        given = spattn.plan(sp.Full(), 8192, tiling=spattn.Tiling(tile=(128, 64), workers=workers))
        assert shared(member(*long, kept=True, plan=given), member(*short))[0] is given
    nearly, _ = shared(member(sp.Causal(), call_of(8192, 64, heads=2)), member(sp.SlidingWindow(64), call_of(2048, 64)))
    assert longest(nearly) == 128  # pieces would be priced 7 % lower, which says nothing


def test_pieces_finish_after_all_that_is_before_them():
    """Two pieces of each list would take as long as whole ones: a second launch starts when the first has ended."""
    call, short = call_of(16384, heads=1), member(sp.SlidingWindow(64), call_of(2048))
    plan, _ = shared(member(sp.Causal(), call), short)
    halves = spattn.plan(sp.Causal(), 16384, tiling=spattn.Tiling(tile=(128, 64), workers=33))
    assert longest(halves) == 128 and longest(plan) == 32
    ends = [
        _sharing._ends(made, call, 0.01, SMS)
        for made in (halves, spattn.plan(sp.Causal(), 16384, tiling=spattn.Tiling(tile=(128, 64))))
    ]
    assert ends[0] > ends[1] > _sharing._ends(plan, call, 0.01, SMS)


def test_tiles_are_smaller_where_that_saves_more_than_a_launch():
    images = [member(pattern, call_of(3136, 32, batch=16)) for pattern in (IMAGE, WINDOWS)]
    dense = member(sp.Full(), call_of(2048, 32))
    assert [plan.block_q for plan in shared(*images, dense)] == [64, 49, 128]
    small = [member(pattern, call_of(3136, 32, heads=1)) for pattern in (IMAGE, WINDOWS)]
    assert all(one.plan.block_q < 128 for one in small)
    assert [plan.block_q for plan in shared(*small, dense)] == [128, 128, 128]
    few = member(sp.BigBird(64), call_of(2048, 64))  # which by itself would be in large tiles
    assert few.plan.block_q == 128 and shared(few, *[few] * 3)[0].block_q == 64


@pytest.mark.slow
def test_kept_plans_have_their_tiles():
    """And a launch of their own, which others may be in."""
    given = spattn.plan(IMAGE, 3136, tiling=spattn.Tiling(tile=(64, 64), box=(8, 8), workers=3))
    alone = member(sp.BigBird(64), call_of(1024, 64, heads=8))
    dense = member(sp.Full(), call_of(2048, 64, heads=16))
    assert shared(alone, dense)[0].block_q == 128
    kept = member(IMAGE, call_of(3136, 64, heads=1), kept=True, plan=given)
    plans = shared(alone, dense, kept)
    assert plans[2] is given and [plan.block_q for plan in plans] == [64, 128, 64]


def test_calls_that_were_not_measured_have_the_tiles_of_most_plans():
    short = [member(sp.SlidingWindow(4), call_of(tokens, 64, heads=64, batch=64)) for tokens in (255, 256)]
    plans = shared(member(IMAGE, call_of(3136, 256, batch=16)), *short)
    assert [plan.block_q for plan in plans] == [128, 128, 64]


def test_where_there_is_no_room_calls_have_their_own_plans(monkeypatch):
    """Nothing is planned anew for the group."""
    members = [member(sp.Causal(), call_of(4096)), member(*MUCH)]

    def fail(*args, **kwargs):
        raise ValueError("max_bytes")

    monkeypatch.setattr(_sharing, "among_others", lambda *args: [_sharing.How((128, 64))])
    monkeypatch.setattr(compiler, "plan", fail)
    for plan, one in zip(shared(*members), members, strict=True):
        assert plan is one.plan


def test_calls_without_pairs():
    nothing = sp.Full() - sp.Full()
    plans = shared(member(nothing, call_of(300)), member(nothing, call_of(200)))
    assert [plan.tiles for plan in plans] == [0, 0]
