"""Which plans the Hopper kernels are given: what was measured to be fast, found again without planning, and fitting.

Times are medians of one H200, by ``benchmarks/costs/price_cuda.py``.
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest

import spattn
from spattn import cuda
from spattn import patterns as sp
from spattn.choose import chooser
from spattn.choose import machine_gpu as _choice
from spattn.choose.chooser import Sizes
from spattn.choose.machine_gpu import cost_ms
from spattn.choose.specializations import TILE
from spattn.cuda.sm80 import forward as portable
from spattn.cuda.sm90.forward.tables import make_layout
from spattn.request.call import Call
from spattn.request.score import ScoreOperands
from spattn.schedule import compiler
from spattn.schedule.pack_heads import pack_heads
from spattn.schedule.tensor_maps import MAPS, maps_of
from spattn.testing import inputs

pytestmark = pytest.mark.family("sm90")

SMS = 132
PADDED = sp.KeyPadding.from_lengths([2000], 2048)
IMAGE, WINDOWS = sp.Neighborhood((56, 56), 7), sp.windowed((56, 56), 7)


def call_of(tokens, head_dim=64, heads=16, batch=1, dtype=ml_dtypes.bfloat16, kv_len=None):
    q = np.broadcast_to(np.zeros((), dtype), (batch, heads, tokens, head_dim))
    k = np.broadcast_to(np.zeros((), dtype), (batch, heads, kv_len or tokens, head_dim))
    return Call.of(q, k, k)


def chosen(pattern, tokens, *args, **kwargs):
    return cuda.plan_for(pattern, call_of(tokens, *args, **kwargs))


def boxes(plan):
    return {tuple(box.tolist()) for box in plan.views["box"][plan.components["query_view"]]}


# (pattern, tokens, head_dim, heads, tile, box)
MEASURED = [
    (sp.Full(), 4096, 128, 16, (128, 64), (1, 1, 128)),
    (sp.Causal(), 8192, 64, 4, (128, 64), (1, 1, 128)),
    (sp.SlidingWindow(256), 16384, 128, 8, (128, 64), (1, 1, 128)),
    (sp.BigBird(64), 4096, 64, 16, (64, 64), (1, 1, 64)),
    (sp.strided(64), 4096, 64, 16, (64, 64), (1, 1, 64)),
    (sp.strided(128), 8192, 128, 8, (64, 64), (1, 1, 64)),
    (sp.longformer(512, global_tokens=64), 8192, 128, 8, (64, 64), (1, 1, 64)),
    (sp.longformer(512, global_tokens=16), 16384, 128, 16, (64, 64), (1, 1, 64)),  # 0.221 ms, with 128 queries 0.222
    (sp.axial((64, 64), 0), 4096, 64, 16, (64, 64), (1, 1, 64)),
    (IMAGE, 3136, 64, 32, (64, 64), (1, 8, 8)),
    (sp.Neighborhood((12, 12, 16), 5), 2304, 64, 32, (64, 64), (4, 4, 4)),
    (WINDOWS, 3136, 64, 32, (49, 64), (1, 7, 7)),
]


@pytest.mark.parametrize(("pattern", "tokens", "head_dim", "heads", "tile", "box"), MEASURED, ids=repr)
def test_what_was_measured_to_be_fast_is_chosen(card, pattern, tokens, head_dim, heads, tile, box):
    made = chosen(pattern, tokens, head_dim, heads)
    assert made.tile == tile and boxes(made) == {box}


@pytest.mark.parametrize("kv_len", [65536, 65537, 100_000, 131072])
@pytest.mark.parametrize(
    ("heads_q", "heads_kv", "batch", "pieces"), [(32, 8, 1, 33), (64, 8, 1, 33), (32, 32, 1, 8), (32, 8, 8, 4)]
)
def test_few_queries_are_cut_into_one_round_of_pieces(card, kv_len, heads_q, heads_kv, batch, pieces):
    """Two pieces for each SM, in one round: two CTAs of such tiles share an SM."""
    q, k = (
        np.broadcast_to(np.zeros((), ml_dtypes.bfloat16), (batch, *own))
        for own in ((heads_q, 1, 128), (heads_kv, kv_len, 128))
    )
    made = cuda.plan_for(sp.Causal(), Call.of(q, k, k))
    packed = pack_heads(made, heads_q // heads_kv)
    assert len((packed or made).work) == pieces and pieces * heads_kv * batch <= 2 * SMS
    length = made.work["end"] - made.work["begin"]
    assert length.sum() == made.tiles and length.max() - length.min() <= 1
    window = cuda.plan_for(sp.SlidingWindow(63), Call.of(q, k, k))
    assert len(window.work) == 1  # of a few tiles


def test_pieces_of_few_queries_grow_with_the_keys(card):
    """A piece has four tiles or more."""
    short, longer, long = (
        cuda.plan_for(sp.Causal(), call_of(1, 128, 8, kv_len=kv_len)) for kv_len in (100, 8192, 65536)
    )
    assert [len(made.work) for made in (short, longer, long)] == [1, 32, 33]


def scattered(share):
    pairs = (np.random.default_rng(0).random((4096, 4096)) < share).nonzero()
    return sp.interop.from_pairs(*pairs, 4096, 4096)


@pytest.mark.parametrize(
    ("share", "head_dim", "gathered"), [(0.001, 128, True), (0.01, 64, True), (0.01, 128, True), (0.03, 128, False)]
)
def test_keys_of_scattered_pairs_are_gathered_where_that_was_faster(card, share, head_dim, gathered):
    made = chosen(scattered(share), 4096, head_dim)
    assert made.gathered == gathered and (made.block_q == 64 or not gathered)


def test_scattered_pairs_are_planned_once(card):
    """The plan of tiles that hold a pair or two each would be many times as large."""
    keys = 4096 * np.arange(16) + np.random.default_rng(0).integers(0, 4096, (1 << 16, 16))
    pattern = sp.CSR(np.arange(0, (1 << 20) + 1, 16), keys.ravel(), 1 << 16)
    made = chosen(pattern, 1 << 16, heads=1)
    assert made.gathered and made.tile == (64, 64) and spattn.plan_cache_info().plans == 1
    assert cuda.cheaper(made, 1, 1, 64, 64, "bfloat16") is None and spattn.plan_cache_info().plans == 1


@pytest.fixture
def plans(monkeypatch):
    """Every plan that is made, in turn."""
    made, original = [], compiler._compile
    monkeypatch.setattr(compiler, "_compile", lambda *args: made.append(original(*args)) or made[-1])
    return made


def squares():
    """A fifth of the pairs of a fifth of all squares of 64 × 64."""
    rng = np.random.default_rng(0)
    filled = np.kron(rng.random((64, 64)) < 0.2, np.ones((64, 64), bool))
    return sp.interop.from_pairs(*(filled & (rng.random((4096, 4096)) < 0.2)).nonzero(), 4096, 4096)


def test_listed_pairs_without_an_order_are_planned_once_in_each_way(card, plans):
    """What they have where tokens may be taken in another order are tiles of 64 queries with tokens in a row."""
    chosen(squares(), 4096)
    assert sorted((*made.tile, made.gathered) for made in plans) == [
        (64, 64, False),
        (64, 64, True),
        (128, 64, False),
    ]


def test_pairs_with_an_order_are_planned_with_tokens_in_a_row_too(card, plans):
    """Clusters of two stretches of tokens, which leave many halves of tiles empty."""
    labels = np.repeat(np.random.default_rng(0).permutation(np.arange(512) // 2), 8)
    chosen(sp.Clusters(labels), 4096)
    small = [made for made in plans if made.tile == (64, 64) and not made.gathered]
    assert sorted(made.ordered for made in small) == [False, True]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("count", [8, 32, 128])
def test_clusters_are_taken_together(card, count, head_dim):
    pattern = sp.Clusters(np.random.default_rng(0).integers(0, count, 4096))
    made = chosen(pattern, 4096, head_dim)
    assert made.ordered and made.tile == (64, 64)
    assert not cuda.plan_for(pattern, call_of(4096, head_dim), backward=True).ordered


def test_prices_of_what_is_looked_up(card):
    """Within a quarter of what was measured on 4096 tokens, 16 heads, where keys are gathered."""
    measured = {(0.001, 64): 0.0319, (0.001, 128): 0.0433, (0.01, 64): 0.1247, (0.01, 128): 0.1846}
    for (share, head_dim), ms in measured.items():
        made = compiler.plan(scattered(share), 4096, heads=16, tile=(64, 64), gathered=True)
        assert abs(cuda.predicted_ms(made, 1, 16, head_dim, head_dim, "bfloat16") / ms - 1) < 0.25


def test_kernels_asked_for_later_get_a_plan_of_their_own(card, monkeypatch):
    """Where they cannot execute the one that a call was prepared with."""
    call, given = call_of(3136), []
    plans = [chosen(pattern, 3136) for pattern in (WINDOWS, sp.Full())]
    monkeypatch.setattr(cuda, "prepare", lambda call, plan: lambda *args: given.append(plan))
    monkeypatch.setenv("SPATTN_CUDA_KERNEL", "portable")
    for plan in plans:
        cuda._forward_again(call.q, call.k, call.v, plan, 0.5, precision=None, score=None)
    assert plans[0].block_q == 49 and portable.accepts(*given[0].tile) and given[0].pattern == WINDOWS
    assert given[1] is plans[1]


@pytest.mark.gpu
def test_portable_kernels_asked_for_later(torch, portable_allowed, monkeypatch):
    """The call that they find was prepared with tiles that they do not have."""
    q, k, v = torch.randn(3, 1, 16, 3136, 64, device="cuda", dtype=torch.bfloat16)
    expected = spattn.attention(q, k, v, WINDOWS)
    assert not portable_allowed
    monkeypatch.setenv("SPATTN_CUDA_KERNEL", "portable")
    torch.testing.assert_close(spattn.attention(q, k, v, WINDOWS), expected, atol=0.04, rtol=0.02)
    assert len(portable_allowed) == 1


@pytest.mark.parametrize(("pattern", "least"), [(IMAGE, 0.17), (WINDOWS, 0.35), (sp.windowed((56, 56), 7, 3), 0.25)])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_the_efficiency_that_is_paid_for_an_image(card, pattern, least, head_dim):
    assert chosen(pattern, 3136, head_dim).efficiency >= least


def test_lists_are_cut_where_there_are_few_heads(card):
    """0.026 ms against 0.054 for one head of 4096 tokens, 0.080 against 0.060 for 16 of 2048."""
    few, many = chosen(sp.Full(), 4096, 128, 1), chosen(sp.Full(), 2048, 128, 16)
    assert len(few.work) == 4 * 4096 // 128 and len(few.merge_rows)
    assert len(many.work) == 2048 // 128 and not len(many.merge_rows)


# (pattern, tokens, head_dim, heads, tile, box, workers, milliseconds)
TIMES = [
    (sp.Full(), 2048, 128, 16, (128, 64), None, 17, 0.0801),
    (sp.Full(), 2048, 128, 16, (128, 64), None, 1, 0.0604),
    (sp.Full(), 4096, 128, 1, (128, 64), None, 264, 0.0259),
    (sp.Causal(), 4096, 128, 16, (128, 64), None, 1, 0.1491),
    (sp.Causal(), 1024, 128, 8, (64, 64), None, 33, 0.0179),
    (sp.SlidingWindow(64), 16384, 64, 16, (64, 64), None, 17, 0.0727),
    (sp.SlidingWindow(1023, 0), 8192, 128, 8, (128, 64), None, 33, 0.1209),
    (sp.SlidingWindow(1023, 0), 8192, 128, 8, (128, 64), None, 1, 0.0730),
    (sp.strided(64), 4096, 64, 16, (64, 64), None, 17, 0.0518),
    (sp.BigBird(64), 4096, 64, 16, (128, 64), None, 17, 0.0627),
    (sp.BigBird(64), 4096, 64, 16, (64, 64), None, 17, 0.0441),
    (IMAGE, 3136, 64, 32, (128, 64), None, 9, 0.0691),
    (IMAGE, 3136, 64, 32, (64, 64), (8, 8), 9, 0.0335),
    (WINDOWS, 3136, 64, 32, (49, 64), (7, 7), 9, 0.0299),
    (sp.Neighborhood((12, 12, 16), 5), 2304, 64, 32, (128, 64), (4, 4, 8), 9, 0.0507),
]


@pytest.mark.parametrize(("pattern", "tokens", "head_dim", "heads", "tile", "box", "workers", "ms"), TIMES, ids=repr)
def test_predicted_times_are_within_a_quarter(pattern, tokens, head_dim, heads, tile, box, workers, ms):
    made = compiler.plan(pattern, tokens, heads=heads, tile=tile, box=box, workers=workers)
    assert cost_ms(made, Sizes(1, heads, heads, head_dim, head_dim), SMS) == pytest.approx(ms, rel=0.25)


@pytest.mark.parametrize("pattern", [sp.Causal(), sp.BigBird(64), sp.Documents((700, 30, 1318)), PADDED])
def test_a_plan_is_found_again_without_planning_or_pricing(card, monkeypatch, pattern):
    made = chosen(pattern, 2048)
    for name in ("cost_ms", "_may_stay_whole", "_halves"):
        monkeypatch.setattr(_choice, name, lambda *args: pytest.fail("planned again"))
    monkeypatch.setattr(chooser.Tried, "add", lambda *args: pytest.fail("planned again"))
    misses = spattn.plan_cache_info().misses
    assert chosen(pattern, 2048) is made and spattn.plan_cache_info().misses == misses


@pytest.mark.parametrize("pattern", [sp.SlidingWindow(256), PADDED, sp.Documents((1024, 1024))])
def test_one_plan_is_made_where_others_cannot_cost_less(card, pattern):
    chosen(pattern, 2048, 128, heads=264)
    assert spattn.plan_cache_info().misses == 1


def test_long_items_of_narrow_heads_have_three_warpgroups(card):
    for pattern in (sp.Full(), sp.Causal(), sp.SlidingWindow(1023, 0)):
        assert [chosen(pattern, 16384, dim).tile for dim in (32, 64, 72, 128)] == [(192, 64)] * 2 + [TILE] * 2
    assert chosen(sp.SlidingWindow(256), 16384).tile == TILE  # short items
    scored = dataclasses.replace(call_of(16384), score=ScoreOperands(None, (), (), (), np.zeros(16, "f4"), (), None))
    assert cuda.plan_for(sp.Causal(), scored).tile == TILE


def test_tiles_are_not_found_anew_for_other_workers(card, monkeypatch):
    from spattn.planning.tiles import build as _build

    calls, original = [], _build.tile_pattern
    monkeypatch.setattr(_build, "tile_pattern", lambda *args: calls.append(args) or original(*args))
    made = chosen(sp.SlidingWindow(1023, 0), 8192, 128, 8)
    assert len(calls) == 1 and spattn.plan_cache_info().misses == 2
    spattn.clear_plan_cache()
    whole = compiler.plan(sp.SlidingWindow(1023, 0), 8192, heads=8, tile=(128, 64))
    for name, value in vars(whole).items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(getattr(made, name), value)


@pytest.mark.parametrize(
    "call", [{"tokens": 255}, {"tokens": 3136, "head_dim": 136}, {"tokens": 3136, "dtype": np.float64}], ids=str
)
def test_calls_that_were_not_measured_have_the_plan_they_had(card, call):
    tokens = call["tokens"]
    pattern = IMAGE if tokens == 3136 else sp.strided(15)
    own = call_of(**call)
    assert cuda.plan_for(pattern, own) is cuda.plan_for(pattern, own, backward=True)


@pytest.mark.parametrize("pattern", [IMAGE, sp.BigBird(64), sp.Full()])
def test_gradients_have_the_tiles_that_their_kernels_have(card, pattern):
    own = call_of(3136)
    assert cuda.plan_for(pattern, own, backward=True).tile == (128, 64)
    assert cuda.accepts(cuda.plan_for(pattern, own), own)


@pytest.mark.parametrize("name", sp.registry.names())
def test_maps_are_counted_as_they_are_laid_out(name):
    pattern, q_len, kv_len = sp.registry.example(name)
    for tile in ((128, 64), (64, 64)):
        made = compiler.plan(pattern, q_len, kv_len, tile=tile)
        for moves in (False, True):
            assert maps_of(made, moves) == make_layout(made, moves).maps


@pytest.mark.parametrize(
    ("pattern", "tokens"),
    [
        (sp.Neighborhood((16, 16, 32), 5), 8192),
        (sp.Neighborhood((256, 256), 9), 65536),
        (sp.windowed((224, 224), 7, 3), 224 * 224),
    ],
)
@pytest.mark.parametrize("joint", [True, False])
def test_no_plan_has_more_maps_than_the_kernels_take(card, monkeypatch, pattern, tokens, joint):
    """Where batch entries do not lie one after the other, each has maps of its own."""
    monkeypatch.setattr(_choice, "_joint", lambda call: joint)
    made = chosen(pattern, tokens, heads=8, batch=2)
    assert maps_of(made, False) * (1 if joint else 2) <= MAPS[-1]


def test_a_plan_that_takes_more_bytes_than_it_may_is_not_chosen(card):
    pattern, own = sp.SlidingWindow(64), call_of(16384)
    assert cuda.plan_for(pattern, own, 49152).tile == (64, 64)
    assert cuda.plan_for(pattern, own, 49151).tile == (128, 64)
    with pytest.raises(ValueError, match="bytes"):
        cuda.plan_for(pattern, own, 36863)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens_first", [False, True])
@pytest.mark.parametrize(
    ("pattern", "tokens"),
    [
        (IMAGE, 3136),
        (WINDOWS, 3136),
        (sp.windowed((56, 56), 7, 3), 3136),
        (sp.Neighborhood((12, 12, 16), 5), 2304),
        (sp.strided(64), 2048),
        (sp.BigBird(64), 2048),
        (sp.axial((64, 64), 0), 4096),
        (sp.Full(), 2048),
        (sp.Causal(), 2048),
    ],
    ids=repr,
)
def test_chosen_plans_are_computed_right(torch, hopper_kernels, arrays, pattern, tokens, tokens_first):
    from spattn.testing import Expectation

    q, k, v = inputs(2, 3, 3, tokens, tokens, 64, dtype="bfloat16")
    operands = [arrays("torch")(x) for x in (q, k, v)]
    if tokens_first:
        operands = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in operands]
    call = Call.of(*operands)
    assert cuda.plan_for(pattern, call) is cuda.plan_for(pattern, call)
    out, lse = spattn.attention(*operands, pattern, return_lse=True)
    again, _ = spattn.attention(*operands, pattern, return_lse=True)
    assert torch.equal(out, again)
    Expectation(pattern, q, k, v).check(spattn.arrays.to_host(out), spattn.arrays.to_host(lse), "torch")
