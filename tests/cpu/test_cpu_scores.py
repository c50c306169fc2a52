"""Score functions on every CPU path, forward and backward, against a dense float64 formula."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

import spattn
from spattn import Tiling, cpu, patterns
from spattn.request.call import Call
from spattn.request.score import ScoreOperands
from spattn.schedule import compiler
from spattn.testing import DTYPES, assert_within_bound, count_orders, dense_mask, eps, inputs, random

from .traced import assert_table_gradients, dense, traced

ISAS = cpu.instruction_sets()
NAMES = ("out", "lse", "dq", "dk", "dv")
HEADS, HEADS_KV, Q_LEN, KV_LEN = 4, 2, 90, 131


def softcap(*values: float) -> ScoreOperands:
    """A cap per head."""
    caps = np.array(values)
    return traced(lambda score, b, h, q, k: caps[h] * np.tanh(score / caps[h]))


def alibi(*values: float) -> ScoreOperands:
    """A slope per head."""
    slopes = np.array(values)
    return traced(lambda score, b, h, q, k: score + slopes[h] * (k - q))


SCORES = {"softcap": softcap(30.0, 0.5, -2.0, 5.0), "alibi": alibi(0.5, -0.25, 0.0, 2.0**-4)}
CLUSTERS = patterns.Clusters(np.random.default_rng(0).integers(-1, 4, (HEADS, KV_LEN)))
STRIDED = patterns.strided(8)
IMAGE = patterns.Neighborhood((12, 12), 5)
each_score = pytest.mark.parametrize("score", SCORES.values(), ids=SCORES)
each_tile = pytest.mark.parametrize(
    "tile", [(48, 64), (64, 128), (8, 64), (1, 64)], ids=["vectors", "AMX", "decode", "pairs"]
)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def run(score, q, k, v, plan, scale, dout, dlse, isa):
    given = () if score is None else (score,)
    call = replace(Call.of(q, k, v, scale=scale), score=score)
    out, lse = cpu.prepare(call, plan, isa=isa)(q, k, v, scale, *given)
    gradients = cpu.prepare_backward(call, plan, isa=isa)(dout, q, k, v, out, lse, dlse, scale, *given)
    return out, lse, *gradients[:3], *(gradients[3] if given else ())


def problem(dtype, q_len=Q_LEN, kv_len=KV_LEN, head_dim=32, head_dim_v=24, with_dlse=True):
    q, k, v = inputs(
        1, HEADS, HEADS_KV, q_len=q_len, kv_len=kv_len, head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype
    )
    dout = random((1, HEADS, q_len, head_dim_v), dtype, seed=99)
    lse_dtype = "float64" if dtype == "float64" else "float32"
    return q, k, v, dout, random((1, HEADS, q_len), lse_dtype, seed=98) if with_dlse else None


def check(score, pattern, plan, q, k, v, dout, dlse, scale=0.4, names=NAMES):
    """Every instruction set within the bound, for the results in `names`."""
    exact = np.longdouble if q.dtype == np.float64 else np.float64
    mask = dense_mask(pattern, 1, HEADS, q.shape[2], k.shape[2])
    args = score, q, k, v, mask, scale, dout, np.float32(0) if dlse is None else dlse
    expected = dense(np.dtype(exact), *args)
    low = [
        dense(q.dtype, *args, order=order, ulps=(None, -1, 0, 1)[order * 5 // 4 % 4])
        for order in range(max(8, count_orders(q, k, mask)))
    ]
    for isa in ISAS:
        got = run(score, q, k, v, plan, scale, dout, dlse, isa)
        for name, x, want, *lossy in zip(NAMES, got, expected, *low, strict=False):
            if name not in names:
                continue
            assert_within_bound(x, want, lossy, q.dtype, f"{isa} {name}")
        if names == NAMES:
            assert_table_gradients(got[5:], score, expected[5], [x[5] for x in low], q.dtype, f"{isa} gradient")


def planned(pattern, tile, workers=1, q_len=Q_LEN, kv_len=KV_LEN, **options):
    plan = compiler.plan(pattern, q_len, kv_len, heads=HEADS, tile=tile, workers=workers, **options)
    assert plan.tile == tile
    return plan


@each_tile
@pytest.mark.parametrize("pattern", [STRIDED, CLUSTERS], ids=["partials", "permuted"])
@each_dtype
@each_score
def test_tiles(score, dtype, pattern, tile):
    """Items in pieces, which are combined; permuted tokens, and rows that attend to nothing."""
    plan = planned(pattern, tile, workers=8, ordered=pattern is CLUSTERS)
    assert (plan.slots > 0, plan.ordered) == (pattern is STRIDED, pattern is CLUSTERS)
    check(score, pattern, plan, *problem(dtype))


@pytest.mark.skipif(not {"amx", "avx512bf16"} <= set(ISAS), reason="no AMX")
@each_score
def test_amx_kernels_run(score):
    """Their sums have an order of their own: forward and backward, and the gradients of captured arrays."""
    arrays, plan = problem("bfloat16", head_dim=64, head_dim_v=64), planned(STRIDED, cpu.TILE)
    amx, vectors = (run(score, *arrays[:3], plan, 0.4, *arrays[3:], isa) for isa in ("amx", "avx512bf16"))
    for x, y in zip(amx, vectors, strict=True):
        assert not np.array_equal(x, y)


@pytest.mark.parametrize("seed", range(3))
@each_tile
@each_dtype
@each_score
def test_random_masks(score, dtype, tile, seed):
    """A mask per head, joined with a window and sinks, and cut by another one; some rows attend to nothing."""
    rng = np.random.default_rng(seed)
    mask = rng.random((HEADS, Q_LEN, KV_LEN)) < rng.choice([0.02, 0.3, 0.9], (HEADS, Q_LEN, 1))
    pattern = (patterns.Mask(mask) | patterns.SlidingWindow(9, 2) | patterns.Sinks(3)) & ~patterns.Mask(mask[::-1])
    allowed = dense_mask(pattern, 1, HEADS, Q_LEN, KV_LEN)
    assert 0 < allowed.sum() < allowed.size
    check(score, pattern, planned(pattern, tile, workers=seed * 4 + 1), *problem(dtype))


@each_tile
@each_dtype
def test_infinite_key(dtype, tile):
    """The score at an infinite key is ±cap: the rows that see it take the float64 fallback."""
    q, k, v, dout, dlse = problem(dtype)
    pattern = patterns.SlidingWindow(20, 5)
    k[:, :, 70, 3] = np.inf
    plan = planned(pattern, tile)
    check(SCORES["softcap"], pattern, plan, q, k, v, dout, dlse, names=("out", "lse"))
    assert all(np.isfinite(run(None, q, k, v, plan, 0.4, dout, dlse, isa)[1]).mean() < 0.9 for isa in ISAS)


@pytest.mark.parametrize("q_len, pattern", [(1, patterns.Full()), (3, patterns.Causal())])
@each_dtype
@each_score
def test_few_queries(score, dtype, q_len, pattern):
    """The heads of a group are rows of one matrix, each with its own parameter."""
    plan = planned(pattern, (16, 64), q_len=q_len, kv_len=300)
    check(score, pattern, plan, *problem(dtype, q_len, 300, head_dim=64, head_dim_v=64, with_dlse=False))


@each_dtype
@each_score
def test_neighbourhoods(score, dtype):
    """Boxes of few queries and of keys, whose positions are not evenly spaced."""
    plan = spattn.plan(IMAGE, 144, tiling=Tiling(tile=(4, 64), box=(2, 2)), heads=HEADS)
    assert [1, 2, 2] in plan.views["box"].tolist()
    check(score, IMAGE, plan, *problem(dtype, 144, 144))


@pytest.mark.parametrize("head_dim, head_dim_v", [(1, 7), (40, 72), (128, 64), (576, 512)])
@each_dtype
@each_score
def test_head_dims(score, dtype, head_dim, head_dim_v):
    pattern = patterns.Causal()
    check(score, pattern, planned(pattern, (64, 64)), *problem(dtype, head_dim=head_dim, head_dim_v=head_dim_v))


@pytest.mark.parametrize("tile", [(48, 64), (8, 64), (1, 64)], ids=str)
@pytest.mark.parametrize("scale", [0.0, -0.4, 1e4])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@each_score
def test_scales(score, dtype, scale, tile):
    """Huge scores saturate a soft-cap; with a linear function the rows take the float64 fallback."""
    pattern = patterns.SlidingWindow(20, 20)
    check(score, pattern, planned(pattern, tile), *problem(dtype), scale=scale)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_tanh(dtype, isa):
    """The lse of a row with one key is its score, here tanh(x): within 2 ulp, and half of one for lse."""
    rng = np.random.default_rng(0)
    size = np.concatenate([np.exp(rng.uniform(np.log(1e-30), np.log(30), 20000)), rng.uniform(0, 3, 20000)])
    x = (size * rng.choice([-1, 1], size.size)).astype(dtype)
    q, k = x.reshape(1, 1, -1, 1), np.ones((1, 1, 1, 1), dtype)
    operands = traced(lambda score, b, h, q, k: np.tanh(score))
    plan = compiler.plan(patterns.Full(), x.size, 1, tile=(48, 64))
    _, lse = cpu.prepare(replace(Call.of(q, k, k, scale=1.0), score=operands), plan, isa=isa)(q, k, k, 1.0, operands)
    exact = np.tanh(x.astype(np.longdouble))
    assert (np.abs(lse.ravel() - exact) / np.spacing(np.abs(exact).astype(dtype))).max() < 2.5


@pytest.mark.parametrize("isa", ISAS)
@each_tile
@each_dtype
def test_infinite_scores(dtype, tile, isa):
    """A slope beside which all else rounds to nothing: +inf at masked keys, -inf at allowed ones, which it removes."""
    q, k, v, dout, dlse = problem(dtype)
    slope = 1e308 if dtype == "float64" else 3e38
    if dtype == "float64":  # in which the float64 fallback overflows as well
        v[:, :, :40] = np.nan
    plan = planned(patterns.Causal(), tile)
    out, lse, dq, dk, dv, _ = run(alibi(*[slope] * HEADS), q, k, v, plan, 0.4, dout, dlse, isa)
    own = np.repeat(v[:, :, -Q_LEN:], HEADS // HEADS_KV, axis=1)
    np.testing.assert_allclose(*(x[:, :, 1:].astype(np.float64) for x in (out, own)), rtol=2 * eps(dtype))
    assert np.isfinite(lse[:, :, 1:]).all()
    assert (dk[:, :, : KV_LEN - Q_LEN] == 0).all() and (dv[:, :, : KV_LEN - Q_LEN] == 0).all()


@pytest.mark.parametrize("isa", ISAS)
@each_tile
@each_dtype
def test_undefined_scores_of_masked_pairs(dtype, tile, isa):
    """0 * tanh(0 / 0) is NaN at masked keys, and 0 * tanh(x / 0) is 0 at the allowed ones."""
    q, k, v, dout, dlse = problem(dtype)
    pattern = patterns.SlidingWindow(20, 0)
    k[:, :, 100:] = 0
    q[:, :, 100 + Q_LEN - KV_LEN :] = 0
    rows = slice(0, 100 + Q_LEN - KV_LEN)  # these queries see keys below 100
    got = run(softcap(*[0.0] * HEADS), q, k, v, planned(pattern, tile), 0.4, dout, dlse, isa)
    counts = dense_mask(pattern, 1, HEADS, Q_LEN, KV_LEN).sum(axis=3)
    np.testing.assert_allclose(got[1][:, :, rows], np.log(counts)[:, :, rows], rtol=1e-6)
    assert np.isfinite(got[0][:, :, rows]).all()
    assert np.isnan(got[1][:, :, rows.stop :]).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@each_tile
@each_dtype
@each_score
def test_hidden_keys(score, dtype, tile, bad, isa):
    """NaN and infinities at keys that no query sees leave every result as it is."""
    q, k, v, dout, dlse = problem(dtype)
    pattern = patterns.SlidingWindow(20, 0)
    plan, seen = planned(pattern, tile), dense_mask(pattern, 1, 1, Q_LEN, KV_LEN)[0, 0].any(axis=0)
    assert not seen.all()
    clean = run(score, q, k, v, plan, 0.4, dout, dlse, isa)
    k[:, :, ~seen], v[:, :, ~seen] = bad, bad
    for x, y in zip(clean, run(score, q, k, v, plan, 0.4, dout, dlse, isa), strict=True):
        np.testing.assert_array_equal(x, y)


@each_dtype
@each_score
def test_threads(score, dtype):
    args = problem(dtype)
    for tile in [(48, 64), (8, 64), (1, 64)]:
        plan, found = planned(CLUSTERS, tile, workers=8), []
        for threads in (1, 2):
            with threadpool_limits(threads):
                found.append([x.tobytes() for x in run(score, *args[:3], plan, 0.4, *args[3:], ISAS[0])])
        assert found[0] == found[1]


def test_identity():
    """Operands without a program have the bits of a call without a score function."""
    q, k, v, dout, dlse = problem("float32")
    plan, operands = planned(patterns.Causal(), (48, 64)), ScoreOperands(None)
    plain = run(None, q, k, v, plan, 0.4, dout, dlse, ISAS[0])
    call = replace(Call.of(q, k, v, scale=0.4), score=operands)
    out, lse = cpu.prepare(call, plan)(q, k, v, 0.4, operands)
    *gradients, tables, sinks = cpu.prepare_backward(call, plan)(dout, q, k, v, out, lse, dlse, 0.4, operands)
    assert tables == () and sinks is None
    for x, y in zip(plain, (out, lse, *gradients), strict=True):
        np.testing.assert_array_equal(x, y)


def test_values_of_each_call():
    """Parameters and tables are those of the call, read in place; other shapes and dtypes are refused."""
    q, k, v, *_ = problem("float32")
    plan, first = planned(patterns.Causal(), (48, 64)), SCORES["alibi"]
    prepared = cpu.prepare(replace(Call.of(q, k, v, scale=0.4), score=first), plan)
    for values in (first.tables[0], -first.tables[0], np.array([1.0, 9, 2, 9, 3, 9, 4, 9])[::2]):
        expected = run(alibi(*values), q, k, v, plan, 0.4, q[..., :24], None, ISAS[0])[:2]
        for x, y in zip(expected, prepared(q, k, v, 0.4, first._replace(tables=(values,))), strict=True):
            np.testing.assert_array_equal(x, y)
    with pytest.raises(
        ValueError, match=r"score: expected array 0 of shape \(4,\) and dtype float64, got \(5,\) and fl"
    ):
        prepared(q, k, v, 0.4, first._replace(tables=(np.ones(5),)))
    with pytest.raises(ValueError, match=r"score: expected array 0 of shape \(4,\) and dtype float64, got .* float32"):
        prepared(q, k, v, 0.4, first._replace(tables=(np.ones(4, np.float32),)))
    with pytest.raises(ValueError, match="score: expected 0 parameters and 1 tables of the prepared call, got 0 and 0"):
        prepared(q, k, v, 0.4, first._replace(tables=()))
