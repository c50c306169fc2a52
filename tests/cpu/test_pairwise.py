"""Plans whose tiles have one query, which are computed pair by pair: against the oracle, and as any other plan."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

import spattn
from spattn import Tiling, cpu, patterns, plan, reference
from spattn.testing import (
    DTYPES,
    LAYOUTS,
    Expectation,
    GradientExpectation,
    assert_within_bound,
    dense_mask,
    inputs,
    naive_from_results,
    naive_gradients,
    random,
)

ISAS = cpu.instruction_sets()
TILE = (1, 64)


def scattered(q_len, kv_len, share, seed=0):
    return patterns.Mask(np.random.default_rng(seed).random((q_len, kv_len)) < share)


def planned(pattern, q, k, tile=TILE, workers=1):
    return plan(
        pattern, q.shape[2], k.shape[2], tiling=Tiling(tile=tile, workers=workers), batch=q.shape[0], heads=q.shape[1]
    )


def check(q, k, v, pattern, isa, made=None):
    """The forward within its budget."""
    out, lse = cpu.forward(q, k, v, made or planned(pattern, q, k), q.shape[3] ** -0.5, isa=isa)
    Expectation(pattern, q, k, v, q.shape[3] ** -0.5).check(out, lse, isa)
    return out, lse


def check_gradients(q, k, v, pattern, isa, made=None):
    """Of what the forward returns: the backward within its budget."""
    made, scale = made or planned(pattern, q, k), q.shape[3] ** -0.5
    dout = random((*q.shape[:3], v.shape[3]), q.dtype, seed=99)
    out, lse = cpu.forward(q, k, v, made, scale, isa=isa)
    got = cpu.backward(dout, q, k, v, out, lse, made, scale, isa=isa)
    mask = dense_mask(pattern, *q.shape[:3], k.shape[2])
    wide = np.longdouble if q.dtype == np.float64 else np.float64
    expected = reference.gradients(dout, q, k, v, pattern, scale, wide)
    low = [naive_gradients(dout, q, k, v, mask, scale)]
    for order in range(8):
        low.append(naive_from_results(dout, q, k, v, mask, scale, order=order, ulps=order % 3 - 1))
    for name, x, exact, lossy in zip(("dq", "dk", "dv"), got, expected, zip(*low, strict=True), strict=True):
        assert_within_bound(x, exact, list(lossy), q.dtype, f"{isa} {name}")
    return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("share", [0.02, 0.5])
def test_scattered_pairs(isa, dtype, share):
    arrays = inputs(2, 4, 2, q_len=90, kv_len=211, head_dim=32, head_dim_v=48, dtype=dtype)
    check(*arrays, scattered(90, 211, share), isa)
    check_gradients(*arrays, scattered(90, 211, share), isa)


@pytest.mark.parametrize("head_dim", [1, 7, 80, 200, 512])
@pytest.mark.parametrize("isa", ISAS)
def test_head_dims(isa, head_dim):
    for dtype in DTYPES:
        arrays = inputs(1, 2, q_len=40, kv_len=130, head_dim=head_dim, head_dim_v=abs(201 - head_dim), dtype=dtype)
        check(*arrays, scattered(40, 130, 0.2), isa)
        check_gradients(*arrays, scattered(40, 130, 0.2), isa)


@pytest.mark.parametrize("isa", ISAS)
def test_patterns_of_any_kind(isa, pattern):
    """Full tiles, views with strides, and views that are no line."""
    for made in (pattern, patterns.Neighborhood((6, 15), 5)):
        arrays = inputs(1, 2, q_len=90, kv_len=90, head_dim=16)
        check(*arrays, made, isa)
        check_gradients(*arrays, made, isa)


@pytest.mark.parametrize("group", [3, 8, 20])
@pytest.mark.parametrize("isa", ISAS)
def test_heads_of_a_group_are_as_if_alone(isa, group):
    q, k, v = inputs(1, 2 * group, 2, q_len=20, kv_len=150, head_dim=16)
    pattern = scattered(20, 150, 0.2)
    together = check(q, k, v, pattern, isa)
    for head in range(2 * group):
        one, kv = slice(head, head + 1), slice(head // group, head // group + 1)
        alone = cpu.forward(q[:, one], k[:, kv], v[:, kv], planned(pattern, q[:, one], k), 0.25, isa=isa)
        for x, y in zip(together, alone, strict=True):
            np.testing.assert_allclose(x[:, one], y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("isa", ISAS)
def test_heads_with_different_patterns(isa):
    masks = np.random.default_rng(3).random((2, 4, 30, 100)) < 0.1
    arrays = inputs(2, 4, 2, q_len=30, kv_len=100, head_dim=16)
    pattern = patterns.Mask(masks)
    check(*arrays, pattern, isa)
    check_gradients(*arrays, pattern, isa)


@pytest.mark.parametrize("workers", [1, 64])
@pytest.mark.parametrize("isa", ISAS)
def test_long_rows_of_several_items_and_chunks(isa, workers):
    arrays = inputs(1, 1, q_len=3, kv_len=5000, head_dim=16)
    pattern = scattered(3, 5000, 0.3)
    made = planned(pattern, *arrays[:2], workers=workers)
    assert made.slots > 0
    check(*arrays, pattern, isa, made)
    check_gradients(*arrays, pattern, isa, made)


@pytest.mark.parametrize("isa", ISAS)
def test_items_that_end_within_a_run(isa):
    """Of full tiles, of which a run has many."""
    arrays = inputs(1, 1, q_len=3, kv_len=1500, head_dim=16)
    made = planned(patterns.Full(), *arrays[:2], workers=16)
    ends = made.work["end"]
    assert made.slots > 1 and (~np.isin(ends, made.tile_indptr)).any()
    check(*arrays, patterns.Full(), isa, made)
    check_gradients(*arrays, patterns.Full(), isa, made)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts(dtype, layout):
    arrays = inputs(2, 3, q_len=30, kv_len=130, head_dim=16, dtype=dtype, layout=layout)
    for isa in ISAS:
        check(*arrays, scattered(30, 130, 0.1), isa)
        check_gradients(*arrays, scattered(30, 130, 0.1), isa)


@pytest.mark.parametrize("isa", ISAS)
def test_rows_without_a_key(isa):
    mask = np.random.default_rng(0).random((30, 130)) < 0.1
    mask[::3] = False
    q, k, v = inputs(q_len=30, kv_len=130, head_dim=16)
    out, lse = check(q, k, v, patterns.Mask(mask), isa)
    assert not out[:, :, ::3].any() and (lse[:, :, ::3] == -np.inf).all()
    dq, *_ = check_gradients(q, k, v, patterns.Mask(mask), isa)
    assert not dq[:, :, ::3].any()


@pytest.mark.parametrize("isa", ISAS)
def test_delta_is_summed_as_products_are(isa):
    """Where O is V, as of a row with one key whose score is 0, the gradient of that score is 0 exactly."""
    q, k, v = inputs(q_len=64, kv_len=64, head_dim=40)
    k[...] = 0
    dq, dk, dv = check_gradients(q, k, v, patterns.SlidingWindow(0, 0), isa)
    assert not dq.any() and not dk.any() and dv.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_hidden_values_have_no_influence(isa, dtype):
    q, k, v = inputs(1, 2, q_len=40, kv_len=130, head_dim=16, dtype=dtype)
    pattern = scattered(40, 130, 0.05)
    made = planned(pattern, q, k)
    dout = random(q.shape, q.dtype)

    def results(k, v):
        out, lse = cpu.forward(q, k, v, made, 0.25, isa=isa)
        return out, lse, *cpu.backward(dout, q, k, v, out, lse, made, 0.25, isa=isa)

    hidden = ~dense_mask(pattern, 1, 2, 40, 130)[0, 0].any(axis=0)
    assert hidden.any()
    clean = results(k, v)
    k, v = k.copy(), v.copy()
    k[:, :, hidden], v[:, :, hidden] = np.nan, np.inf
    for x, y in zip(results(k, v), clean, strict=True):
        assert np.array_equal(x, y)


@pytest.mark.parametrize("isa", ISAS)
def test_values_that_are_not_finite_reach_their_rows_alone(isa):
    q, k, v = inputs(1, 1, q_len=40, kv_len=130, head_dim=16)
    pattern = scattered(40, 130, 0.1)
    made, mask = planned(pattern, q, k), dense_mask(pattern, 1, 1, 40, 130)[0, 0]
    key = int(mask.sum(axis=0).argmax())
    before, _ = cpu.forward(q, k, v, made, 0.25, isa=isa)
    v[0, 0, key] = np.nan
    out, _ = cpu.forward(q, k, v, made, 0.25, isa=isa)
    assert np.isnan(out[0, 0, mask[:, key]]).all()
    assert np.array_equal(out[0, 0, ~mask[:, key]], before[0, 0, ~mask[:, key]])


@pytest.mark.parametrize("scale", [0.0, -0.7, 1e4])
@pytest.mark.parametrize("isa", ISAS)
def test_scales(isa, scale):
    q, k, v = inputs(q_len=40, kv_len=90, head_dim=16, dtype="float64")
    pattern = scattered(40, 90, 0.2)
    made, gradients = planned(pattern, q, k), GradientExpectation(pattern, q, k, v, scale, with_dlse=True)
    out, lse = cpu.forward(q, k, v, made, scale, isa=isa)
    Expectation(pattern, q, k, v, scale).check(out, lse, isa)
    dlse = gradients.dlse
    gradients.check(cpu.backward(gradients.dout, q, k, v, out, lse, made, scale, dlse=dlse, isa=isa), isa)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_number_of_threads_has_the_same_bits(dtype):
    q, k, v = inputs(2, 4, 2, q_len=300, kv_len=300, head_dim=32, dtype=dtype)
    made, dout, found = planned(scattered(300, 300, 0.1), q, k, workers=4), random(q.shape, q.dtype), []
    for threads in (1, 2, 5):
        with threadpool_limits(threads):
            out, lse = cpu.forward(q, k, v, made, 0.2)
            found.append((out, lse, *cpu.backward(dout, q, k, v, out, lse, made, 0.2)))
    for other in found[1:]:
        assert all(np.array_equal(x, y) for x, y in zip(other, found[0], strict=True))


@settings(deadline=None)
@given(st.data())
def test_any_mask(data):
    q_len, kv_len = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 200))
    share, seed = data.draw(st.sampled_from([0.01, 0.1, 0.6, 1.0])), data.draw(st.integers(0, 99))
    isa, dtype = data.draw(st.sampled_from(ISAS)), data.draw(st.sampled_from(sorted(DTYPES)))
    block_kv = data.draw(st.sampled_from([64, 192]))
    pattern = scattered(q_len, kv_len, share, seed)
    q, k, v = inputs(1, 2, 1, q_len=q_len, kv_len=kv_len, head_dim=data.draw(st.integers(1, 40)), dtype=dtype)
    check(q, k, v, pattern, isa, planned(pattern, q, k, (1, block_kv)))


def test_scattered_pairs_are_planned_pair_by_pair():
    """Unless that takes more memory than there may be."""
    like = inputs(1, 8, q_len=1024, kv_len=1024, head_dim=64)
    row, key = np.nonzero(np.random.default_rng(0).random((1024, 1024)) < 0.02)
    pattern = patterns.interop.from_pairs(row, key, 1024, 1024)
    made = spattn.plan_for(pattern, *like, backend="cpu")
    assert made.tile == TILE
    assert spattn.plan_for(pattern, *like, backend="cpu", max_bytes=made.nbytes - 1).tile == cpu.TILE


@pytest.mark.parametrize(
    "pattern, q_len",
    [(patterns.SlidingWindow(2), 1024), (patterns.Full(), 9), (patterns.SlidingWindow(0, 0), 1), (patterns.Full(), 60)],
    ids=repr,
)
def test_other_patterns_keep_their_tile(pattern, q_len):
    q, k, v = inputs(1, 2, q_len=q_len, kv_len=1024, head_dim=64)
    assert spattn.plan_for(pattern, q, k, v, backend="cpu").tile == cpu.TILE


@pytest.mark.slow
@pytest.mark.parametrize("also", [None, patterns.Causal()])
def test_pairs_that_are_few_in_every_tile_have_one_plan(no_plans, also):
    """That of tiles, which would hold a bitmask for each pair, is not made."""
    rng = np.random.default_rng(0)
    listed = patterns.interop.from_pairs(np.repeat(np.arange(2048), 3), rng.integers(0, 2048, 6144), 2048, 2048)
    pattern = listed if also is None else also & listed
    arrays = inputs(1, 2, q_len=2048, kv_len=2048, head_dim=16)
    out, lse = spattn.attention(*arrays, pattern, backend="cpu", return_lse=True)
    Expectation(pattern, *arrays).check(out, lse)
    assert spattn.plan_cache_info().plans == 1
    assert spattn.plan_for(pattern, *arrays, backend="cpu").tile == (1, 64)
