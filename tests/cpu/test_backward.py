"""The CPU backward against the oracle and finite differences: every pattern, instruction set, dtype and layout."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

import spattn
from spattn import Tiling, cpu, patterns, plan, reference
from spattn.patterns.registry import example
from spattn.testing import (
    DTYPES,
    LAYOUTS,
    GradientExpectation,
    assert_within_bound,
    at_protected_page,
    count_orders,
    dense_mask,
    inputs,
    naive_from_results,
    naive_gradients,
    random,
)
from spattn.testing.strategies import cases, compositions, problems

ISAS = cpu.instruction_sets()
NAMES = ("dq", "dk", "dv")


def problem(*shape, dtype="float32", layout="contiguous", seed=0, **sizes):
    """dout, q, k, v."""
    q, k, v = inputs(*shape, dtype=dtype, layout=layout, seed=seed, **sizes)
    return random((*q.shape[:3], v.shape[3]), dtype, layout=layout, seed=seed + 99), q, k, v


def gradients(dout, q, k, v, pattern, isa=None, made=None, scale=None):
    scale = q.shape[3] ** -0.5 if scale is None else scale
    made = made or spattn.plan_for(pattern, q, k, v, backend="cpu")
    out, lse = cpu.forward(q, k, v, made, scale, isa=isa)
    return cpu.backward(dout, q, k, v, out, lse, made, scale, isa=isa)


def naive_orders(dout, q, k, v, mask, scale):
    """The naive gradients in several orders of keys and features, four of each: one evaluation may be exact by luck."""
    found = []
    for order in range(-(-count_orders(q, k, mask) // 4)):
        rng = np.random.default_rng(order)
        features, columns = rng.permutation(q.shape[3]), rng.permutation(v.shape[3])
        keys = rng.permutation(k.shape[2])
        args = dout[..., columns], q[..., features], k[:, :, keys][..., features], v[:, :, keys][..., columns]
        back, column, place = np.argsort(features), np.argsort(columns), np.argsort(keys)
        args = *args, mask[..., keys], scale
        forwards = zip((2 * order, 2 * order + 1, 5), (-1, 0, 1), strict=True)  # 5 sums one after another
        low = [naive_from_results(*args, order=one, ulps=ulps) for one, ulps in forwards]
        for dq, dk, dv in (naive_gradients(*args), *low):
            found.append((dq[..., back], dk[:, :, place][..., back], dv[:, :, place][..., column]))
    return [list(one) for one in zip(*found, strict=True)]


def check(dout, q, k, v, pattern, made=None, scale=None):
    """Every instruction set within the budget; returns the gradients of the best one."""
    wide = np.longdouble if q.dtype == np.float64 else np.float64
    expected = reference.gradients(dout, q, k, v, pattern, scale, wide)
    low = naive_orders(dout, q, k, v, dense_mask(pattern, *q.shape[:3], k.shape[2]), scale)
    for isa in reversed(ISAS):
        got = gradients(dout, q, k, v, pattern, isa, made, scale)
        for name, x, like, exact, lossy in zip(NAMES, got, (q, k, v), expected, low, strict=True):
            assert x.dtype == like.dtype and x.shape == like.shape
            assert_within_bound(x, exact, lossy, q.dtype, f"{isa} {name}")
    return got


def assert_same(a, b):
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(np.ascontiguousarray(x).view(np.uint8), np.ascontiguousarray(y).view(np.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim, head_dim_v", [(24, 40), (64, 32)])
def test_patterns(dtype, pattern, head_dim, head_dim_v):
    check(*problem(1, 4, 2, q_len=100, kv_len=131, head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype), pattern)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", patterns.registry.names())
def test_every_pattern(dtype, name):
    pattern, q_len, kv_len = example(name)
    batch, heads = (max(1, size) for size in pattern.sizes())
    check(*problem(batch, heads, q_len=q_len, kv_len=kv_len, head_dim=24, head_dim_v=16, dtype=dtype), pattern)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=max(5, settings.default.max_examples // 10))
@given(data=st.data())
def test_any_problem(dtype, data):
    """Parameters, lengths, groups of heads and layouts as they come."""
    drawn = data.draw(problems(cases(max_len=300) | compositions(max_len=300), dtype=dtype))
    q, k, v = inputs(*drawn.shape, dtype=dtype, layout=drawn.layout, seed=drawn.seed)
    check(random((*q.shape[:3], v.shape[3]), dtype, seed=drawn.seed + 1), q, k, v, drawn.case.pattern)


def test_few_pairs_show_little_of_what_is_natural_to_lose():
    """In one order of evaluation the naive gradients lose less than the kernels by luck, in more orders they do not."""
    pattern = patterns.windowed((2, 5, 12), (2, 1, 2), (0, 0, 1))
    q, k, v = inputs(1, 1, 1, 120, 120, 24, 64, dtype="float64", seed=50410)
    check(random((1, 1, 120, 64), "float64", seed=50411), q, k, v, pattern)


@pytest.mark.parametrize("name", patterns.registry.names())
def test_finite_differences(name):
    """Central differences in up to 60 coordinates of each of q, k and v, for every registered pattern."""
    pattern, q_len, kv_len = example(name)
    heads = max(1, pattern.sizes()[1])
    dout, q, k, v = problem(1, heads, q_len=q_len, kv_len=kv_len, head_dim=2, head_dim_v=3, dtype="float64")
    made = spattn.plan_for(pattern, q, k, v, backend="cpu")
    step = 2.0**-17  # truncation is O(step²), rounding O(eps / step), both about 1e-10

    def loss():
        return float((dout * cpu.forward(q, k, v, made, 0.7)[0]).sum())

    for x, gradient in zip((q, k, v), gradients(dout, q, k, v, pattern, made=made, scale=0.7), strict=True):
        for at in np.random.default_rng(0).permutation(x.size)[:60]:
            value = x.flat[at]
            x.flat[at] = value + step
            above = loss()
            x.flat[at] = value - step
            difference = (above - loss()) / (2 * step)
            x.flat[at] = value
            assert abs(difference - gradient.flat[at]) < 1e-8


@pytest.mark.parametrize("head_dim", [1, 3, 8, 24, 40, 64, 80, 104, 128, 248, 256, 576])
def test_head_dims(head_dim):
    pattern = patterns.SlidingWindow(20, 9)
    for dtype in DTYPES:
        check(*problem(q_len=50, kv_len=66, head_dim=head_dim, head_dim_v=abs(257 - head_dim), dtype=dtype), pattern)


@pytest.mark.parametrize("tile", [(1, 64), (7, 64), (16, 64), (48, 64), (60, 192), (128, 64), (130, 128)])
def test_any_tile_shape(tile):
    pattern = patterns.SlidingWindow(33, 21) | patterns.GlobalTokens(3)
    for dtype in ("float32", "float64", "bfloat16"):
        arrays = problem(1, 2, q_len=190, kv_len=211, head_dim=24, dtype=dtype)
        check(*arrays, pattern, plan(pattern, 190, 211, tiling=Tiling(tile=tile)))


@pytest.mark.parametrize(
    "pattern",
    [
        patterns.Neighborhood((9, 11), (5, 3)),
        patterns.Neighborhood((4, 5, 5), 3),
    ],
    ids=repr,
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_boxes_of_grids(dtype, pattern):
    tokens = int(np.prod(pattern.grid))
    for head_dim in (16, 32):
        check(*problem(1, 2, q_len=tokens, head_dim=head_dim, dtype=dtype), pattern)


@pytest.mark.parametrize("q_len, kv_len", [(1, 1), (1, 300), (2, 64), (47, 5), (49, 65), (300, 1)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lengths(dtype, q_len, kv_len):
    for pattern in (patterns.Full(), patterns.Causal()):
        check(*problem(1, 2, q_len=q_len, kv_len=kv_len, head_dim=16, dtype=dtype), pattern)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_with_one_key(dtype):
    """Where O = V nothing depends on Q and K, and dS = P (dO V' - rowsum(dO O)) is 0 without a rounding error."""
    dout, q, k, v = problem(1, 2, q_len=70, head_dim=24, head_dim_v=80, dtype=dtype)
    made = spattn.plan_for(patterns.SlidingWindow(0, 0), q, k, v, backend="cpu")
    for isa in ISAS:
        _, lse = cpu.forward(q, k, v, made, 0.2, isa=isa)
        dq, dk, dv = cpu.backward(dout, q, k, v, v, lse, made, 0.2, isa=isa)
        assert (dq == 0).all() and (dk == 0).all()
        np.testing.assert_allclose(dv.astype(float), dout.astype(float), rtol=1e-5)


@pytest.mark.parametrize("heads_q, heads_kv", [(8, 8), (8, 2), (6, 1), (9, 9)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_grouped_queries(dtype, heads_q, heads_kv):
    for batch in (1, 2):
        arrays = problem(batch, heads_q, heads_kv, q_len=110, head_dim=16, dtype=dtype)
        check(*arrays, patterns.SlidingWindow(40, 3))


@pytest.mark.parametrize("heads_kv", [1, 2, 4])
def test_patterns_that_differ_per_head(heads_kv):
    own = patterns.Causal(), patterns.SlidingWindow(5, 5), patterns.registry.get("strided", stride=9), patterns.Full()
    pattern = patterns.PerHead(own)
    arrays = problem(2, 4, heads_kv, q_len=120, head_dim=16)
    check(*arrays, pattern)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 64])
def test_layouts(dtype, layout, head_dim):
    arrays = problem(2, 3, q_len=70, kv_len=130, head_dim=head_dim, dtype=dtype, layout=layout)
    plain = [np.ascontiguousarray(x) for x in arrays]
    for isa in ISAS:
        assert_same(gradients(*arrays, patterns.Causal(), isa), gradients(*plain, patterns.Causal(), isa))


def test_strided_results_of_the_forward():
    dout, q, k, v = problem(2, 3, q_len=70, head_dim=16)
    made = spattn.plan_for(patterns.Causal(), q, k, v, backend="cpu")
    out, lse = cpu.forward(q, k, v, made, 0.25)
    expected = cpu.backward(dout, q, k, v, out, lse, made, 0.25)
    out, lse = out[..., ::-1].copy()[..., ::-1], lse.transpose(2, 0, 1).copy().transpose(1, 2, 0)
    assert_same(cpu.backward(dout, q, k, v, out, lse, made, 0.25), expected)


def test_gradients_have_the_memory_order_of_the_inputs():
    for x in check(*problem(2, 8, q_len=50, head_dim=16, head_dim_v=32, layout="bshd"), patterns.Causal()):
        assert x.transpose(0, 2, 1, 3).flags.c_contiguous


@pytest.mark.parametrize("dtype", DTYPES)
def test_reads_nothing_beyond_the_arrays(dtype):
    for q_len, kv_len, head_dim in ((65, 130, 8), (3, 63, 20), (48, 64, 64), (1, 1, 1)):
        arrays = problem(q_len=q_len, kv_len=kv_len, head_dim=head_dim, dtype=dtype)
        check(*map(at_protected_page, arrays), patterns.Causal())
        reverse = [at_protected_page(x[:, :, ::-1, ::-1])[:, :, ::-1, ::-1] for x in arrays]
        check(*reverse, patterns.Full())


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("scale", [0.0, -0.7, 30.0])
def test_scales(dtype, scale):
    check(*problem(q_len=60, kv_len=90, head_dim=16, dtype=dtype), patterns.Causal(), scale=scale)


@pytest.mark.parametrize("shape", [(0, 2, 3, 3), (2, 0, 3, 3), (2, 2, 0, 3), (2, 2, 3, 0)])
def test_empty(shape):
    batch, heads, q_len, kv_len = shape
    dout, q, k, v = problem(batch, heads, q_len=q_len, kv_len=kv_len, head_dim=8)
    for x, like in zip(gradients(dout, q, k, v, patterns.Full()), (q, k, v), strict=True):
        assert x.shape == like.shape and (x == 0).all()


def test_rows_and_keys_without_a_partner():
    pattern = patterns.Causal() & patterns.Documents((30, 0, 20))
    dout, q, k, v = problem(1, 2, q_len=90, kv_len=70, head_dim=16)  # the first queries stand before every key
    dq, dk, dv = check(dout, q, k, v, pattern)
    mask = dense_mask(pattern, 1, 2, 90, 70)
    assert not mask.any(axis=3).all() and not mask.any(axis=2).all()
    assert (dq[~mask.any(axis=3)] == 0).all() and (dk[~mask.any(axis=2)] == 0).all()


@pytest.mark.parametrize("head_dim", [16, 32])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
class TestNonFinite:
    """NaN and infinities reach exactly the gradients that the formula gives them to."""

    pattern = patterns.SlidingWindow(20, 10) | patterns.GlobalTokens(1)

    def arrays(self, dtype, head_dim):
        return problem(1, 2, q_len=70, kv_len=140, head_dim=head_dim, dtype=dtype)

    def check(self, arrays, isa):
        clean = [np.where(np.isfinite(x), x, x.dtype.type(0)) for x in arrays]
        expected = reference.gradients(*arrays, self.pattern)
        low = naive_orders(*clean, dense_mask(self.pattern, 1, 2, 70, 140), None)
        for name, got, exact, lossy in zip(NAMES, gradients(*arrays, self.pattern, isa), expected, low, strict=True):
            finite, got = np.isfinite(exact), got.astype(float)
            assert (np.isfinite(got) == finite).all(), name
            assert_within_bound(np.where(finite, got, 0), np.where(finite, exact, 0), lossy, arrays[0].dtype, name)

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    @pytest.mark.parametrize("which", [0, 1, 2, 3], ids=["dout", "q", "k", "v"])
    def test_one_value(self, isa, dtype, head_dim, which, value):
        arrays = self.arrays(dtype, head_dim)
        arrays[which][:, 0, 40, 3] = value
        self.check(arrays, isa)

    def test_keys_that_nobody_may_see(self, isa, dtype, head_dim):
        dout, q, k, v = self.arrays(dtype, head_dim)
        pattern = patterns.SlidingWindow(20, 10)
        expected = gradients(dout, q, k, v, pattern, isa)
        k[:, :, :40], v[:, :, :40] = np.nan, np.inf
        assert_same(gradients(dout, q, k, v, pattern, isa), expected)

    def test_rows_without_a_finite_logit(self, isa, dtype, head_dim):
        arrays = self.arrays(dtype, head_dim)
        arrays[1][..., 0] = 1
        arrays[2][:, :, 75:, 0] = -np.inf
        arrays[2][:, :, 0, 0] = -np.inf  # the global token
        expected = gradients(*arrays, self.pattern, isa)
        rows = ~dense_mask(self.pattern, 1, 2, 70, 140)[..., 1:75].any(axis=3)
        assert rows.any() and (expected[0][rows] == 0).all()
        assert np.isfinite(expected[1].astype(float)).all() and np.isfinite(expected[2].astype(float)).all()


def longformer(isa=None, dtype="float32", heads=4):
    pattern = patterns.registry.get("longformer", window=64, global_tokens=8)
    return gradients(*problem(1, heads, 2, q_len=500, head_dim=32, dtype=dtype), pattern, isa)


@pytest.mark.skipif(not cpu._core.OPENMP, reason="built without OpenMP")
def test_thread_count_does_not_change_the_result():
    for isa in ISAS:
        for dtype, heads in (("float32", 2), ("float32", 12), ("bfloat16", 4)):
            results = []
            for threads in (1, 2, 3):
                with threadpool_limits(threads, user_api="openmp"):
                    results.append(longformer(isa, dtype, heads))
            assert_same(results[0], results[1])
            assert_same(results[0], results[2])


def test_fault_35_interrupt(assert_interruptible):
    dout, q, k, v = (np.broadcast_to(x, (8, 8, 4096, 64)) for x in problem(q_len=4096, head_dim=64, dtype="float64"))
    made = spattn.plan_for(patterns.Full(), q, k, v, backend="cpu")
    lse = np.zeros(q.shape[:3])
    assert_interruptible(lambda: cpu.backward(dout, q, k, v, q, lse, made, 0.1, isa="baseline"))
    longformer()


def test_out_of_memory():
    dout, q, k, v = (np.broadcast_to(x, (2**20, 2**20, 3, 8)) for x in problem(q_len=3, head_dim=8))
    with pytest.raises(MemoryError):
        cpu.backward(dout, q, k, v, q, q[..., 0], plan(patterns.Full(), 3, tiling=Tiling(tile=cpu.TILE)), 1.0)


def test_public_interface():
    dout, q, k, v = problem(2, 4, 2, q_len=100, head_dim=16)
    out, lse = spattn.attention(q, k, v, "causal", return_lse=True)
    got = spattn.attention_backward(dout, q, k, v, out, lse, "causal", backend="cpu")
    assert_same(got, gradients(dout, q, k, v, patterns.Causal()))


def test_rejects_what_the_kernels_cannot_do():
    dout, q, k, v = problem(1, 2, q_len=10, head_dim=8)
    made = spattn.plan_for(patterns.Full(), q, k, v, backend="cpu")
    out, lse = cpu.forward(q, k, v, made, 1.0)
    with pytest.raises(TypeError, match="^dout: expected float32, got float64"):
        cpu.backward(dout.astype(float), q, k, v, out, lse, made, 1.0)
    with pytest.raises(ValueError, match=r"out: expected shape \(1, 2, 10, 8\), got \(1, 2, 10, 7\)"):
        cpu.backward(dout, q, k, v, out[..., :7], lse, made, 1.0)
    with pytest.raises(ValueError, match=r"lse: expected shape \(1, 2, 10\), got \(1, 1, 10\)"):
        cpu.backward(dout, q, k, v, out, lse[:, :1], made, 1.0)
    with pytest.raises(ValueError, match="isa: expected one of .*baseline, got 'sse9'"):
        cpu.backward(dout, q, k, v, out, lse, made, 1.0, isa="sse9")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_gradient_of_lse(isa, dtype):
    """Rows that attend to nothing have no lse to differentiate, whatever is handed over for them."""
    pattern = patterns.BlockLocal(50) & ~patterns.SlidingWindow(20, 90)
    q, k, v = inputs(2, 4, 2, 130, 130, 32, 48, dtype=dtype)
    expected = GradientExpectation(pattern, q, k, v, with_dlse=True)
    made = spattn.plan_for(pattern, q, k, v, backend="cpu")
    out, lse = cpu.forward(q, k, v, made, 32**-0.5, isa=isa)
    empty = lse == -np.inf
    assert empty.any() and not empty.all()
    dlse = np.where(empty, lse.dtype.type(np.nan), expected.dlse.astype(lse.dtype))
    got = cpu.backward(expected.dout, q, k, v, out, lse, made, 32**-0.5, dlse=dlse, isa=isa)
    expected.check(got, isa)


def test_gradient_of_lse_alone():
    """With dout = 0 it is that of the softmax's sum, by finite differences in float64."""
    rng = np.random.default_rng(3)
    q, k, v = rng.standard_normal((3, 1, 2, 20, 8))
    pattern, dlse = patterns.SlidingWindow(5), rng.standard_normal((1, 2, 20))

    def loss(q, k):
        return (spattn.attention(q, k, v, pattern, return_lse=True)[1] * dlse).sum()

    out, lse = spattn.attention(q, k, v, pattern, return_lse=True)
    dq, dk, dv = spattn.attention_backward(np.zeros_like(out), q, k, v, out, lse, pattern, dlse=dlse)
    np.testing.assert_array_equal(dv, 0)
    for name, x, gradient in (("q", q, dq), ("k", k, dk)):
        for at in np.ndindex(1, 2, 3, 2):
            step = np.zeros_like(x)
            step[at] = 1e-6
            ends = [loss(**{"q": q, "k": k, name: x + sign * step}) for sign in (1, -1)]
            assert abs((ends[0] - ends[1]) / 2e-6 - gradient[at]) < 1e-6
