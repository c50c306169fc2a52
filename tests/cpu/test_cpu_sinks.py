"""Sinks on every CPU path, forward and backward, against a dense float64 formula."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

import spattn
from spattn import Tiling, cpu, patterns
from spattn.request.call import Call
from spattn.request.score import ScoreOperands
from spattn.schedule import compiler
from spattn.testing import DTYPES, assert_within_bound, dense_mask, inputs, random

from ..sink_formula import NAMES, dense, lossy

ISAS = cpu.instruction_sets()
HEADS, HEADS_KV, Q_LEN, KV_LEN, SCALE = 4, 2, 90, 131, 0.4
SINKS = (0.5, -3.0, 2.0, -np.inf)  # the last head has none
CLUSTERS = patterns.Clusters(np.random.default_rng(0).integers(-1, 4, (HEADS, KV_LEN)))
NINTH = np.broadcast_to(np.arange(Q_LEN)[:, None] % 9 == 0, (Q_LEN, KV_LEN))
STRIDED = patterns.strided(8) & ~patterns.Mask(NINTH)  # every ninth row attends to nothing
WINDOW = patterns.SlidingWindow(20, 5)
TILES = {"vectors": (48, 64), "AMX": (64, 128), "decode": (8, 64), "pairs": (1, 64)}
each_tile = pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
each_isa = pytest.mark.parametrize("isa", ISAS)


def wide(dtype):
    """The dtype of lse and of the sinks."""
    return "float64" if dtype == "float64" else "float32"


def problem(dtype, q_len=Q_LEN, kv_len=KV_LEN, head_dim=16, head_dim_v=12, batch=2):
    q, k, v = inputs(batch, HEADS, HEADS_KV, q_len, kv_len, head_dim, head_dim_v, dtype=dtype)
    dout = random((batch, HEADS, q_len, head_dim_v), dtype, seed=9)
    dlse = random((batch, HEADS, q_len), wide(dtype), seed=8)
    return q, k, v, dout, dlse


def run(sinks, plan, q, k, v, dout, dlse, isa=ISAS[0], scale=SCALE):
    """Results and gradients; None as `sinks` is a call without ScoreOperands."""
    score = None if sinks is None else ScoreOperands(None, sinks=np.array(sinks, wide(q.dtype.name)))
    call, own = replace(Call.of(q, k, v, scale=scale), score=score), () if score is None else (score,)
    out, lse = cpu.prepare(call, plan, isa=isa)(q, k, v, scale, *own)
    gradients = cpu.prepare_backward(call, plan, isa=isa)(dout, q, k, v, out, lse, dlse, scale, *own)
    if score is None:
        return out, lse, *gradients
    dq, dk, dv, dtables, dsinks = gradients
    assert dtables == () and dsinks.dtype == lse.dtype
    return out, lse, dq, dk, dv, dsinks


def planned(pattern, tile, workers=1, q_len=Q_LEN, kv_len=KV_LEN, **options):
    plan = compiler.plan(pattern, q_len, kv_len, heads=HEADS, tile=tile, workers=workers, **options)
    assert plan.tile == tile
    return plan


def formula(mask, sinks, q, k, v, dout, dlse, scale=SCALE, orders=8):
    """Exact results, and results with rounding errors."""
    args = q, k, v, mask, scale, np.array(sinks), dout, dlse
    return dense(*args, wide=np.longdouble if q.dtype == np.float64 else np.float64), lossy(q.dtype, orders, *args)


def check(expected, low, plan, args, sinks=SINKS, scale=SCALE, names=NAMES):
    """Every instruction set within the bound."""
    for isa in ISAS:
        got = run(sinks, plan, *args, isa, scale)
        for name, x, want, *rounded in zip(NAMES, got, expected, *low, strict=True):
            if name in names:
                assert_within_bound(x, want, rounded, args[0].dtype, f"{isa} {name}")


@functools.cache
def attended(dtype, pattern, *sizes, orders=8):
    """A problem and the formula's results."""
    args = problem(dtype, *sizes)
    mask = dense_mask(pattern, args[0].shape[0], HEADS, args[0].shape[2], args[1].shape[2])
    return args, *formula(mask, SINKS, *args, orders=orders)


@each_tile
@pytest.mark.parametrize("pattern", [STRIDED, CLUSTERS], ids=["partials", "permuted"])
@each_dtype
def test_tiles(dtype, pattern, tile):
    """Rows in one part and in several, which are combined; rows that attend to nothing."""
    plan = planned(pattern, tile, workers=8, ordered=pattern is CLUSTERS)
    assert (plan.slots > 0, plan.ordered) == (pattern is STRIDED, pattern is CLUSTERS)
    assert not dense_mask(pattern, 1, HEADS, Q_LEN, KV_LEN).any(axis=3).all()
    args, *expected = attended(dtype, pattern)
    check(*expected, plan, args)


@pytest.mark.parametrize("q_len, pattern", [(1, patterns.Full()), (3, patterns.Causal())])
@each_dtype
def test_few_queries(dtype, q_len, pattern):
    """The heads of a group are rows of one matrix, each with its own sink."""
    plan = planned(pattern, (16, 64), q_len=q_len, kv_len=300)
    args, *expected = attended(dtype, pattern, q_len, 300, 16, 16, orders=16)
    check(*expected, plan, args)


@each_dtype
def test_neighbourhoods(dtype):
    """Boxes of few queries."""
    pattern = patterns.Neighborhood((9, 9), 5)
    plan = spattn.plan(pattern, 81, tiling=Tiling(tile=(4, 64), box=(2, 2)), heads=HEADS)
    args, *expected = attended(dtype, pattern, 81, 81)
    check(*expected, plan, args)


@each_tile
@each_isa
def test_rows_without_keys(isa, tile):
    """Their lse is the sink, exactly, and a change of it goes to the sink."""
    q, k, v, dout, dlse = problem("float32")
    for pattern in (STRIDED, patterns.Full() & ~patterns.Full()):
        none = ~dense_mask(pattern, 2, HEADS, Q_LEN, KV_LEN).any(axis=3)
        plan = planned(pattern, tile, workers=8)
        out, lse, dq, _, _, _ = run(SINKS, plan, q, k, v, dout, dlse, isa)
        sinks = np.broadcast_to(np.float32(SINKS)[:, None], lse.shape)
        np.testing.assert_array_equal(lse[none], sinks[none])
        assert (out[none] == 0).all() and (dq[none] == 0).all()
    _, _, *gradients, dsinks = run(SINKS, plan, q, k, v, dout, dlse, isa)
    assert none.all() and not any(x.any() for x in gradients)
    np.testing.assert_allclose(dsinks, np.where(np.isinf(SINKS), 0, dlse.astype(float).sum(axis=(0, 2))), rtol=1e-6)


@each_tile
@each_isa
@each_dtype
def test_extreme_sinks(dtype, isa, tile):
    """A sink far below the scores changes no bit, one far above takes all weight; NaN stays within its head."""
    args, plan = problem(dtype), planned(STRIDED, tile, workers=8)
    some = dense_mask(STRIDED, 2, HEADS, Q_LEN, KV_LEN).any(axis=3)
    plain = run(None, plan, *args, isa)
    low = run((-np.inf, -1e4, -1e4, -np.inf), plan, *args, isa)
    for n, (x, y) in enumerate(zip(plain[:3], low[:3], strict=True)):
        np.testing.assert_array_equal(x[some], y[some], NAMES[n])
    for n in (3, 4):
        np.testing.assert_array_equal(plain[n], low[n], NAMES[n])
    assert (low[5][[0, 3]] == 0).all()
    high = run((1e4, np.inf, np.nan, -1e4), plan, *args, isa)
    total = args[4].astype(float).sum(axis=(0, 2))
    for head, sink in ((0, 1e4), (1, np.inf)):
        assert (high[0][:, head] == 0).all() and (high[1][:, head] == sink).all() and (high[2][:, head] == 0).all()
        np.testing.assert_allclose(high[5][head], total[head], rtol=1e-6)
    assert np.isnan(high[0][:, 2].astype(float)).all() and np.isnan(high[1][:, 2]).all() and np.isnan(high[5][2])
    for n in range(3):
        np.testing.assert_array_equal(high[n][:, 3][some[:, 3]], plain[n][:, 3][some[:, 3]], NAMES[n])
    assert (high[3][:, 0] == 0).all() and (high[4][:, 0] == 0).all()  # the key head of the first two
    assert np.isnan(high[4][:, 1].astype(float)).any()


@functools.cache
def scaled(dtype, scale):
    """A problem with exact products q·k, sinks near the lse of its rows, and the formula's results."""
    q, k, *rest = problem(dtype, batch=1)
    q, k = (np.round(4 * x) / 4 for x in (q, k))
    mask = dense_mask(WINDOW, 1, HEADS, Q_LEN, KV_LEN)
    typical = np.median(dense(q, k, rest[0], mask, scale, np.full(HEADS, -np.inf), *rest[1:])[1])
    sinks = (typical + np.array([0, -abs(typical) / 4, abs(typical) / 4, 1])).astype(wide(dtype))
    return (q, k, *rest), sinks, *formula(mask, sinks, q, k, *rest, scale=scale)


@pytest.mark.parametrize("tile", [(48, 64), (8, 64), (1, 64)], ids=str)
@pytest.mark.parametrize("scale", [0.0, -0.4, 1e4])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_scales(dtype, scale, tile):
    """The scale does not apply to the sinks. From an lse of 2^14 on, the backward computes float32 rows in float64."""
    args, sinks, *expected = scaled(dtype, scale)
    check(*expected, planned(WINDOW, tile, workers=8), args, sinks, scale)


@functools.cache
def with_infinite_key(dtype):
    """A problem whose scores at one key are -inf, and the formula's results without that key."""
    q, k, v, *rest = problem(dtype, batch=1)
    q[..., 3], k[:, :, 70, 3], v[:, :, 70] = -np.abs(q[..., 3]) - 1, np.inf, 0
    mask, finite = dense_mask(WINDOW, 1, HEADS, Q_LEN, KV_LEN), k.copy()
    assert mask[0, 0, :, 70].any() and (mask.sum(axis=3) > mask[..., 70]).all()
    mask[..., 70], finite[:, :, 70, 3] = False, 0
    return (q, k, v, *rest), *formula(mask, SINKS, q, finite, v, *rest)


@each_tile
@each_dtype
def test_float64_rows(dtype, tile):
    """Rows that see an infinite key take the float64 fallback; dq and dk have terms 0 · inf."""
    args, *expected = with_infinite_key(dtype)
    check(*expected, planned(WINDOW, tile), args, names=("out", "lse", "dsinks"))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@each_tile
@each_dtype
def test_hidden_keys(dtype, tile, bad):
    """NaN and infinities at keys that no query sees leave every result as it is."""
    q, k, v, dout, dlse = problem(dtype)
    plan, seen = planned(WINDOW, tile, workers=8), dense_mask(WINDOW, 1, 1, Q_LEN, KV_LEN)[0, 0].any(axis=0)
    assert not seen.all()
    clean = run(SINKS, plan, q, k, v, dout, dlse)
    k[:, :, ~seen], v[:, :, ~seen] = bad, bad
    for x, y in zip(clean, run(SINKS, plan, q, k, v, dout, dlse), strict=True):
        np.testing.assert_array_equal(x, y)


@each_tile
@each_dtype
def test_threads(dtype, tile):
    args, plan, found = problem(dtype), planned(CLUSTERS, tile, workers=8), set()
    for threads in (1, 2, 3, 1):
        with threadpool_limits(threads):
            found.add(tuple(x.tobytes() for x in run(SINKS, plan, *args)))
    assert len(found) == 1


@each_dtype
def test_values_of_each_call(dtype):
    """One prepared call for other sinks, and for more keys."""
    q, k, v, *_ = problem(dtype, 1, 200, 64, 64, batch=1)
    score = ScoreOperands(None, sinks=np.zeros(HEADS, wide(dtype)))

    def prepared(kv_len, own):
        call = replace(Call.of(q, k[:, :, :kv_len], v[:, :, :kv_len], scale=SCALE), score=own)
        return cpu.prepare(call, spattn.plan(patterns.Causal(), 1, kv_len, heads=HEADS))

    once = prepared(160, score)
    for kv_len in (160, 161, 200):
        own = score._replace(sinks=np.full(HEADS, kv_len / 100, wide(dtype)))
        given = q, k[:, :, :kv_len], v[:, :, :kv_len], SCALE, own
        for x, y in zip(once(*given), prepared(kv_len, own)(*given), strict=True):
            np.testing.assert_array_equal(x, y)
        assert not np.array_equal(once(*given)[1], once(*given[:4], score)[1])


@each_dtype
def test_merged_parts(dtype):
    """A sink takes part in one part only; the merged parts are the whole."""
    args = problem(dtype)
    first = patterns.Columns(9, 2, 4)
    parts = [run(s, planned(x, (48, 64)), *args) for s, x in ((SINKS, WINDOW & first), (None, WINDOW & ~first))]
    out, lse = spattn.merge_attentions(*zip(*[(out, lse) for out, lse, *_ in parts], strict=True))
    expected, low = attended(dtype, WINDOW)[1:]
    for n, x in enumerate((out, lse)):
        assert_within_bound(x, expected[n], [y[n] for y in low], args[0].dtype, NAMES[n])


def test_errors():
    args, plan = problem("float32"), planned(WINDOW, (48, 64))
    q, k, v = args[:3]
    score = ScoreOperands(None, sinks=np.zeros(HEADS, np.float32))
    call = replace(Call.of(q, k, v, scale=SCALE), score=score)
    forward = cpu.prepare(call, plan)
    for sinks, what in ((np.zeros(3, np.float32), r"\(3,\) of float32"), (np.zeros(HEADS), r"\(4,\) of float64")):
        with pytest.raises(ValueError, match=rf"sinks: expected shape \(4,\) and dtype float32, got {what}"):
            forward(q, k, v, SCALE, score._replace(sinks=sinks))
    out, lse = forward(q, k, v, SCALE, score._replace(sinks=np.zeros(2 * HEADS, np.float32)[::2]))
    np.testing.assert_array_equal(out, forward(q, k, v, SCALE, score)[0])


def test_without_queries_or_keys():
    for q_len, kv_len in ((0, 5), (5, 0), (0, 0)):
        q, k, v, dout, dlse = problem("float32", q_len, kv_len)
        plan = spattn.plan(patterns.Full(), q_len, kv_len, heads=HEADS)
        out, lse, *_, dsinks = run(SINKS, plan, q, k, v, dout, dlse)
        assert (out == 0).all() and (lse == np.float32(SINKS)[:, None]).all()
        total = dlse.astype(float).sum(axis=(0, 2)) * np.isfinite(SINKS)
        np.testing.assert_allclose(dsinks, total, rtol=1e-6)
