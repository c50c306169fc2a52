"""What plans say of themselves, and the warning where attention over all pairs costs less."""

import warnings

import numpy as np
import pytest

import spattn
from spattn import cpu
from spattn import patterns as sp
from spattn.patterns.authoring import Lattice, Part
from spattn.request.call import Call
from spattn.schedule import compiler

WINDOWS = sp.windowed((56, 56), 7)


class Scattered(sp.Pattern):
    """All keys of 128 tokens, or those up to the query's, in views of every 32nd, or another number, of which none
    fills a tile."""

    def __init__(self, step=32, causal=True):
        self.step, self.causal = step, causal

    def __eq__(self, other):
        return type(other) is Scattered and (other.step, other.causal) == (self.step, self.causal)

    def __hash__(self):
        return self.step

    def allows(self, q, k):
        return (k <= q) if self.causal else (k >= 0) & (q >= 0)

    def parts(self, q_len, kv_len):
        lattices = [Lattice(first, (self.step,), (128 // self.step,)) for first in range(self.step)]
        return tuple(Part(self, query, key) for query in lattices for key in lattices)


def arrays(tokens=128, heads=8):
    return np.random.default_rng(0).standard_normal((3, 1, heads, tokens, 16), dtype=np.float32)


def test_the_text_says_what_was_chosen_and_what_is_cheaper():
    found = spattn.explain(spattn.plan(WINDOWS, 3136, tiling=spattn.Tiling(tile=(48, 64))), heads=3, head_dim=32)
    text = str(found)
    for words in ("48 queries × 64 keys", "6 × 8 queries", "153664 allowed", "all pairs", "7 × 7"):
        assert words in text
    assert found.cheaper.tile == (49, 64) and found.cheaper_ms < found.predicted_ms < found.dense_ms
    assert f"{found.predicted_ms:.3g} ms on one CPU thread" in text and "this plan is faster" in text


def test_the_cheapest_plan_has_nothing_that_is_cheaper():
    found = spattn.explain(spattn.plan(WINDOWS, 3136, tiling=spattn.Tiling(tile=(49, 64), box=(7, 7))))
    assert found.cheaper is None and "cheaper:" not in str(found)


def test_dense_attention_wins_where_views_are_smaller_than_tiles():
    found = spattn.explain(spattn.plan(Scattered(), 128, tiling=spattn.Tiling(tile=(48, 64))))
    assert found.dense_ms < found.predicted_ms and "dense attention is faster" in str(found)


def test_prices_of_a_gpu():
    """Those of what its backend takes, and of the tiles that everything had before."""
    how = {"heads": 32, "dtype": "bfloat16", "device": "cuda"}
    found = spattn.explain(spattn.plan(WINDOWS, 3136, tiling=spattn.Tiling(tile=(128, 64)), heads=32), **how)
    assert found.cheaper.tile == (49, 64) and found.cheaper_ms < 0.5 * found.predicted_ms < 0.5 * found.dense_ms
    text = str(found)
    assert f"{found.predicted_ms:.3g} ms on an H200" in text and "boxes of 7 × 7 queries" in text
    assert spattn.explain(found.cheaper, **how).cheaper is None


def test_gathered_keys_are_what_a_gpu_is_priced_for():
    """On the CPU, which does not execute them, it is another plan, and the text says so."""
    allowed = np.random.default_rng(0).random((600, 600)) < 0.01
    plan = compiler.plan(sp.interop.from_pairs(*allowed.nonzero(), 600, 600), 600, tile=(64, 64), gathered=True)
    on_gpu, on_cpu = str(spattn.explain(plan, dtype="bfloat16", device="cuda")), str(spattn.explain(plan))
    assert "keys: gathered per query tile\n" in on_gpu and "without gathering" not in on_gpu
    assert "the prediction is without gathering" in on_cpu and "this plan is" not in on_cpu


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"dtype": "float32"}, "^dtype: the GPU cost model requires float16 or bfloat16, got float32$"),
        ({"head_dim": 136}, r"^head_dim 136 is not covered by the GPU cost model \(max 128\)$"),
        ({"device": "tpu"}, "^device: "),
        (
            {"tile": (48, 128)},
            "^plan: the GPU cost model requires tiles of 64 keys and of 192, 128 or at most 64 queries, got",
        ),
    ],
)
def test_prices_of_a_gpu_that_nobody_measured(how, message):
    plan = spattn.plan(sp.Causal(), 300, tiling=spattn.Tiling(tile=how.pop("tile", (128, 64))))
    with pytest.raises(ValueError, match=message):
        spattn.explain(plan, **({"dtype": "float16", "device": "cuda"} | how))


def test_predictions_follow_the_work():
    short, long = (spattn.explain(spattn.plan(sp.SlidingWindow(64), n)).predicted_ms for n in (4096, 16384))
    assert 3.5 < long / short < 4.5
    one, four = (spattn.explain(spattn.plan(sp.SlidingWindow(64), 4096), heads=h).predicted_ms for h in (1, 4))
    assert four == pytest.approx(4 * one)


def test_a_picture():
    pytest.importorskip("matplotlib")
    axes = spattn.explain(spattn.plan(sp.SlidingWindow(4), 64, tiling=spattn.Tiling(tile=(16, 64)))).draw()
    assert len(axes.collections[0].get_offsets()) == 16 * 64
    with pytest.raises(ValueError, match="^plan: drawing requires a pattern and at most 4096 tokens, got "):
        spattn.explain(spattn.plan(sp.SlidingWindow(4), 8192)).draw()


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ({"heads": 0}, ValueError),
        ({"head_dim": 1.5}, TypeError),
        ({"dtype": "int8"}, ValueError),
        ({"batch": True}, TypeError),
    ],
)
def test_what_explain_refuses(how, error):
    with pytest.raises(error, match=f"^{next(iter(how))}: expected "):
        spattn.explain(spattn.plan(sp.Causal(), 64), **how)


def test_plans_of_other_heads_are_refused():
    plan = spattn.plan(sp.PerHead((sp.Causal(), sp.SlidingWindow(3))), 64)
    with pytest.raises(ValueError, match="^plan: expected a plan for batch=1 and heads=3, got batch=1 and heads=2"):
        spattn.explain(plan, heads=3)
    assert spattn.explain(plan, heads=2).predicted_ms > 0


@pytest.mark.slow
def test_the_warning_comes_once_and_at_the_line_of_the_call():
    spattn.clear_plan_cache()
    q, k, v = arrays(heads=32)
    pattern = Scattered(64, causal=False)  # loses on every instruction set, pair by pair too
    cpu.plan_for(pattern, Call.of(q, k, v))
    plans = spattn.plan_cache_info().plans
    with pytest.warns(spattn.EfficiencyWarning, match="dense attention is predicted to take") as found:
        spattn.attention(q, k, v, pattern)
    assert len(found) == 1 and found[0].filename == __file__
    assert spattn.plan_cache_info().plans == plans  # dense attention is priced and not planned
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        spattn.attention(*arrays(heads=32), pattern)
        spattn.attention(*arrays(heads=32), pattern, scale=0.5, return_lse=True)


@pytest.mark.parametrize(
    ("pattern", "given"),
    [
        (sp.Causal(), {}),
        (sp.SlidingWindow(2), {}),
        (sp.windowed((8, 16), 2), {}),
        # Loses less than a millisecond.
        pytest.param(Scattered(64, causal=False), {"heads": 1}, marks=pytest.mark.slow),
    ],
)
def test_nobody_is_warned_of_what_is_cheap(pattern, given):
    spattn.clear_plan_cache()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        spattn.attention(*arrays(**given), pattern)


@pytest.mark.parametrize(
    ("pattern", "queries"),
    [
        (sp.Causal(), 1),  # a tile of which one query is real is no loss: kernels take no more than that
        (sp.SlidingWindow(8), 2),
        (sp.DilatedWindow(2, dilation=512), 4096),  # dense attention has far more tiles
    ],
)
def test_what_cannot_lose_is_not_priced(pattern, queries, monkeypatch):
    monkeypatch.setattr(cpu, "dense_ms", lambda *given: pytest.fail("priced"))
    spattn.clear_plan_cache()
    q, k, v = arrays(4096, heads=1)
    spattn.attention(q[:, :, -queries:], k, v, pattern)
