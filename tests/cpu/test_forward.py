"""The CPU kernels against the oracle: every instruction set, dtype, shape and memory layout."""

from __future__ import annotations

import numpy as np
import pytest

import spattn
from spattn import Tiling, cpu, patterns, plan, reference
from spattn.testing import DTYPES, LAYOUTS, assert_within_bound, at_protected_page, dense_mask, inputs, naive_orders

ISAS = cpu.instruction_sets()


def oracle(q, k, v, pattern, scale):
    """`reference`, but in a wider type where the inputs are as wide as `reference` itself."""
    if q.dtype != np.float64 or not all(np.isfinite(x).all() for x in (q, k, v)):
        return reference.attend(q, k, v, pattern, scale)
    k, v = (np.repeat(x.astype(np.longdouble), q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    s = np.einsum("bhqd,bhkd->bhqk", q.astype(np.longdouble), k) * scale
    s = np.where(dense_mask(pattern, *q.shape[:2], q.shape[2], k.shape[2]), s, -np.inf)
    row_max = np.maximum(s.max(axis=-1, keepdims=True), np.finfo(float).min)
    p = np.exp(s - row_max)
    row_sum = p.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.log(row_sum) + row_max
    out = np.einsum("bhqk,bhkd->bhqd", p / np.where(row_sum == 0, 1, row_sum), v)
    return out.astype(float), np.where(row_sum == 0, -np.inf, lse)[..., 0].astype(float)


def check(q, k, v, pattern, isa=None, made=None, scale=None):
    scale = q.shape[3] ** -0.5 if scale is None else scale
    made = made or spattn.plan_for(pattern, q, k, v, backend="cpu")
    out, lse = cpu.forward(q, k, v, made, scale, isa=isa)
    mask = dense_mask(pattern, *q.shape[:2], q.shape[2], k.shape[2])
    expected = oracle(q, k, v, pattern, scale)
    simple = naive_orders(q, *(np.where(np.isfinite(x), x, 0) for x in (k, v)), mask, scale)  # for finite rows
    assert out.dtype == q.dtype and out.shape == (*q.shape[:3], v.shape[3])
    assert lse.dtype == np.promote_types(q.dtype, np.float32) if q.dtype == np.float64 else np.float32
    for what, actual, exact, low in zip(("out", "lse"), (out, lse), expected, simple, strict=True):
        assert_within_bound(actual, exact, low, q.dtype, what)
    return out, lse


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_patterns(isa, dtype, pattern):
    check(*inputs(2, 4, 2, q_len=150, kv_len=181, head_dim=32, head_dim_v=40, dtype=dtype), pattern, isa)


@pytest.mark.parametrize("head_dim", [1, 3, 8, 16, 24, 40, 64, 80, 96, 104, 128, 192, 248, 256, 576])
@pytest.mark.parametrize("isa", ISAS)
def test_head_dims(isa, head_dim):
    pattern = patterns.SlidingWindow(30, 9)
    for dtype in DTYPES:
        check(*inputs(1, 1, 1, 70, 70, head_dim, abs(257 - head_dim), dtype=dtype), pattern, isa)
        check(*inputs(q_len=70, kv_len=70, head_dim=head_dim, dtype=dtype, seed=1), pattern, isa)


@pytest.mark.parametrize("tile", [(1, 64), (7, 64), (16, 64), (48, 64), (60, 192), (128, 64), (130, 128)])
@pytest.mark.parametrize("isa", ISAS)
def test_any_tile_shape(isa, tile):
    pattern = patterns.SlidingWindow(33, 21) | patterns.GlobalTokens(3)
    for dtype in ("float32", "float64"):
        q, k, v = inputs(1, 2, q_len=190, kv_len=211, head_dim=24, dtype=dtype)
        check(q, k, v, pattern, isa, plan(pattern, 190, 211, tiling=Tiling(tile=tile)))


@pytest.mark.parametrize("q_len, kv_len", [(1, 1), (1, 300), (2, 64), (47, 5), (49, 65), (300, 1)])
@pytest.mark.parametrize("isa", ISAS)
def test_lengths(isa, q_len, kv_len):
    for pattern in (patterns.Full(), patterns.Causal()):
        check(*inputs(1, 2, q_len=q_len, kv_len=kv_len, head_dim=16), pattern, isa)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts(dtype, layout):
    for isa in ISAS:
        check(*inputs(2, 3, q_len=70, kv_len=130, head_dim=16, dtype=dtype, layout=layout), patterns.Causal(), isa)


def test_out_has_the_memory_order_of_q():
    q, k, v = inputs(2, 4, q_len=50, head_dim=16, head_dim_v=24, layout="bshd")
    out, _ = check(q, k, v, patterns.Causal())
    assert out.transpose(0, 2, 1, 3).flags.c_contiguous


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_reads_nothing_beyond_the_arrays(isa, dtype):
    for q_len, kv_len, head_dim in ((65, 130, 8), (3, 63, 20), (48, 64, 64), (1, 1, 1)):
        arrays = inputs(q_len=q_len, kv_len=kv_len, head_dim=head_dim, dtype=dtype)
        check(*map(at_protected_page, arrays), patterns.Causal(), isa)
        reverse = [at_protected_page(x[:, :, ::-1, ::-1])[:, :, ::-1, ::-1] for x in arrays]
        check(*reverse, patterns.Full(), isa)


@pytest.mark.parametrize("scale", [0.0, -0.7, 1e4])
@pytest.mark.parametrize("isa", ISAS)
def test_scales(isa, scale):
    check(*inputs(q_len=60, kv_len=90, head_dim=16, dtype="float64"), patterns.Causal(), isa, scale=scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_exponential(isa, dtype):
    """lse = log(1 + exp(x)) shows the error of the weights: that of exp2, 2.7e-6 where it is coarse, or that of weights
    in the integers, 0.5 %; the logarithm's slope is at most 1/2 where both weights differ from 1."""
    x = np.linspace(-8, 8, 4001).astype(dtype)
    q, k = x[None, None, :, None], np.array([0, 1], dtype)[None, None, :, None]
    _, lse = cpu.forward(q, k, k, spattn.plan_for(patterns.Full(), q, k, k, backend="cpu"), 1.0, isa=isa)
    error = np.abs(lse[0, 0] - np.logaddexp(0, x.astype(float)))
    bound = {"float64": 1e-14, "bfloat16": 2.6e-3 if isa == "amx" else 3.7e-6}.get(x.dtype.name, 1e-6)
    assert error.max() < bound


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_weights_add_up_to_one(isa, dtype):
    """However weights are rounded, the average of equal values is that value."""
    q, k, v = inputs(1, 2, q_len=70, kv_len=200, head_dim=32, dtype=dtype)
    v[...] = np.pi
    made = spattn.plan_for(patterns.SlidingWindow(40, 3), q, k, v, backend="cpu")
    out, _ = cpu.forward(q, k, v, made, 0.3, isa=isa)
    tolerance = {"float64": 1e-14, "float32": 1e-6}.get(q.dtype.name, 0)
    np.testing.assert_allclose(out.astype(float), float(v.flat[0]), rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_early_and_late_keys_weigh_the_same(isa, dtype):
    """What a list of 128 tiles has summed up is carried from tile to tile without a bias."""
    q, k, v = inputs(1, 1, q_len=50, kv_len=8192, head_dim=32, dtype=dtype)
    k[...] = k[:, :, :1]
    v[:, :, :4096], v[:, :, 4096:] = 1, -1
    made = plan(patterns.Full(), 50, 8192, tiling=Tiling(tile=cpu.TILE))
    assert (made.work["end"] - made.work["begin"]).max() >= 64
    out, _ = cpu.forward(q, k, v, made, 3.0, isa=isa)
    np.testing.assert_allclose(out.astype(float), 0, atol=1e-14 if dtype == "float64" else 1e-6)


def test_strides_beyond_32_bits():
    base = np.zeros(6 * 2**30, np.uint8).view(np.float16)  # touched only where a row is
    rows = np.lib.stride_tricks.as_strided(base, (1, 1, 6, 16), (0, 0, 2**30, 2))
    q, k, v = inputs(q_len=6, head_dim=16, dtype="float16")
    rows[...] = k
    made = spattn.plan_for(patterns.Causal(), q, k, v, backend="cpu")
    out, _ = cpu.forward(q, rows, v, made, 0.25)
    np.testing.assert_array_equal(out, cpu.forward(q, k, v, made, 0.25)[0])


def test_many_batch_entries_and_heads():
    q, k, v = inputs(70_000, 1, q_len=1, kv_len=2, head_dim=4)
    made = spattn.plan_for(patterns.Full(), q, k, v, backend="cpu")
    out, _ = cpu.forward(q, k, v, made, 0.5)
    last = cpu.forward(q[-1:], k[-1:], v[-1:], made, 0.5)[0]
    np.testing.assert_array_equal(out[-1:], last)


@pytest.mark.parametrize("shape", [(0, 2, 3, 3), (2, 0, 3, 3), (2, 2, 0, 3), (2, 2, 3, 0)])
def test_empty(shape):
    batch, heads, q_len, kv_len = shape
    q, k, v = inputs(batch, heads, q_len=q_len, kv_len=kv_len, head_dim=8)
    out, lse = cpu.forward(q, k, v, spattn.plan_for(patterns.Full(), q, k, v, backend="cpu"), 1.0)
    assert out.shape == q.shape and (out == 0).all() and (lse == -np.inf).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
class TestNonFinite:
    """Keys that are not allowed have no influence; keys that are have exactly the formula's."""

    pattern = patterns.SlidingWindow(20, 10)

    def arrays(self, dtype):
        return inputs(1, 2, q_len=50, kv_len=140, head_dim=16, dtype=dtype)

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_values(self, isa, dtype, value):
        q, k, v = self.arrays(dtype)
        v[:, :, 90, 3] = value
        out, _ = check(q, k, v, self.pattern, isa)
        touched = dense_mask(self.pattern, 1, 2, 50, 140)[..., 90]
        assert (~np.isfinite(out.astype(float)) == touched[..., None] * (np.arange(16) == 3)).all()

    def test_keys(self, isa, dtype):
        q, k, v = self.arrays(dtype)
        k[:, 0, 90, 0] = np.nan
        out, lse = check(q, k, v, self.pattern, isa)
        assert (np.isnan(lse) == dense_mask(self.pattern, 1, 2, 50, 140)[..., 90] & [[[True], [False]]]).all()

    def test_infinite_logits(self, isa, dtype):
        q, k, v = self.arrays(dtype)
        q[..., 0] = 1
        k[:, :, 90, 0] = -np.inf
        k[:, :, 75:110, 0] = -np.inf  # some rows have no other keys
        out, lse = check(q, k, v, self.pattern, isa)
        assert np.isfinite(out.astype(float)).all() and (lse == -np.inf).any()

    def test_huge_logits(self, isa, dtype):
        q, k, v = self.arrays(dtype)
        check(q * q.dtype.type(30), k * k.dtype.type(30), v, self.pattern, isa, scale=1.0)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("q_len, kv_len", [(3, 70), (40, 70), (3, 40), (40, 40)])
@pytest.mark.parametrize("isa", ISAS)
def test_logits_near_the_largest_number(isa, q_len, kv_len, sign):
    """The logit is finite, its product with log2(e) is not, or rounds by more than any weight can make good."""
    q, k, v = inputs(1, 1, q_len=q_len, kv_len=kv_len, head_dim=4)
    q[...], k[...] = 0, 0
    q[..., 0], k[..., 0] = 1e19, sign * np.linspace(2e19, 3e19, kv_len)
    out, lse = cpu.forward(q, k, v, spattn.plan_for(patterns.Full(), q, k, v, backend="cpu"), 1.0, isa=isa)
    largest = kv_len - 1 if sign > 0 else 0
    np.testing.assert_array_equal(out, np.broadcast_to(v[:, :, [largest]], out.shape))
    np.testing.assert_allclose(lse, (q @ k.swapaxes(2, 3))[..., largest], rtol=1e-6)


def test_rejects_what_the_kernels_cannot_do():
    q, k, v = inputs(1, 2, q_len=10, head_dim=8)
    made = spattn.plan_for(patterns.Full(), q, k, v, backend="cpu")
    with pytest.raises(TypeError, match="q: expected one of float32"):
        cpu.forward(q.astype(int), k, v, made, 1.0)
    with pytest.raises(TypeError, match="v: expected dtype float32 like q, got float64"):
        cpu.forward(q, k, v.astype(float), made, 1.0)
    with pytest.raises(ValueError, match=r"k: expected shape \(1, 2, 10, 8\), got \(1, 2, 10, 7\)"):
        cpu.forward(q, k[..., :7], v, made, 1.0)
    with pytest.raises(ValueError, match="plan: expected lengths 9 and 10, got 10 and 10"):
        cpu.forward(q[:, :, :9], k, v, made, 1.0)
    wide = inputs(q_len=4, head_dim=1025)
    with pytest.raises(ValueError, match="head_dim: expected 1 … 1024 .*, got 1025"):
        cpu.forward(*wide, spattn.plan(patterns.Full(), 4), 1.0)


def test_out_of_memory():
    """More than the address space has, so that no system can promise it."""
    q, k, v = (np.broadcast_to(x, (2**22, 2**22, 3, 8)) for x in inputs(q_len=3, head_dim=8))
    with pytest.raises(MemoryError):
        cpu.forward(q, k, v, plan(patterns.Full(), 3, tiling=Tiling(tile=cpu.TILE)), 1.0)
