"""``precision="tf32"``: one product of rounded operands, held against a naive formula that rounds the same operands."""

from __future__ import annotations

import numpy as np
import pytest

import spattn
from spattn import Tiling, cuda, patterns, plan, reference
from spattn.testing import assert_within_bound, dense_mask, inputs, naive

pytestmark = pytest.mark.family("sm80")

EPS = 2.0**-10  # of TF32


def rounded(x: np.ndarray) -> np.ndarray:
    """The nearest TF32 number, ties away from zero."""
    return ((x.astype(np.float32).view(np.uint32) + 0x1000) & 0xFFFFE000).view(np.float32)


def naive_tf32(q, k, v, mask, scale):
    """Attention in float32 of operands that were rounded to TF32, probabilities among them."""
    q, k, v = map(rounded, (q, k, v))
    group = q.shape[1] // k.shape[1]
    s = np.where(mask, q @ np.repeat(k, group, 1).swapaxes(2, 3) * np.float32(scale), -np.inf).astype(np.float32)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    out = rounded(p) @ np.repeat(v, group, 1) / p.sum(axis=-1, keepdims=True)
    return out, naive(q, k, v, mask, scale)[1]


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(32, 32), (64, 64), (96, 96), (128, 128), (256, 256), (64, 128), (33, 65)], ids=str)
@pytest.mark.parametrize("pattern", [patterns.Causal(), patterns.strided(24), patterns.SlidingWindow(40, 30)], ids=str)
def test_within_budget(pattern, dims):
    q, k, v = inputs(2, 4, 2, 260, 260, *dims)
    scale = dims[0] ** -0.5
    results = cuda.forward(q, k, v, spattn.plan_for(pattern, q, k, v, backend="cuda"), scale, precision="tf32")
    expected = reference.attend(q, k, v, pattern, scale)
    lows = naive_tf32(q, k, v, dense_mask(pattern, 2, 4, 260, 260), scale)
    for what, got, want, low in zip(("out", "lse"), results, expected, lows, strict=True):
        budget = 2 * np.abs(low - want).max() + EPS * np.abs(want).max()
        assert np.abs(got - want).max() <= budget, what
    exact = cuda.forward(q, k, v, spattn.plan_for(pattern, q, k, v, backend="cuda"), scale)[0]
    assert np.abs(exact - expected[0]).max() < np.abs(results[0] - expected[0]).max() / 50


def naive_tf32_gradients(dout, q, k, v, mask, scale):
    """Gradients in float32 of operands that were rounded to TF32, weights and gradients of logits among them."""
    out, lse = (x.astype(np.float32) for x in reference.attend(q, k, v, mask, scale))
    delta = (dout * out).sum(axis=-1, keepdims=True)
    dout, q, k, v = map(rounded, (dout, q, k, v))
    group = q.shape[1] // k.shape[1]
    keys, values = (np.repeat(x, group, 1) for x in (k, v))
    p = np.exp(np.where(mask, q @ keys.swapaxes(2, 3) * np.float32(scale), -np.inf) - lse[..., None])
    ds = rounded(p * (dout @ values.swapaxes(2, 3) - delta))
    each = ds.swapaxes(2, 3) @ q * np.float32(scale), rounded(p).swapaxes(2, 3) @ dout
    dk, dv = (x.reshape(*k.shape[:2], group, *x.shape[2:]).sum(axis=2) for x in each)
    return ds @ keys * np.float32(scale), dk, dv


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(32, 32), (64, 64), (96, 96), (128, 128), (256, 256), (64, 128), (33, 65)], ids=str)
@pytest.mark.parametrize("pattern", [patterns.Causal(), patterns.strided(24), patterns.SlidingWindow(40, 30)], ids=str)
def test_gradients_within_budget(pattern, dims):
    q, k, v = inputs(2, 4, 2, 260, 260, *dims)
    dout, scale = inputs(2, 4, 4, 260, 260, *dims[::-1], seed=5)[0], dims[0] ** -0.5
    out, lse = spattn.attention(q, k, v, pattern, return_lse=True, backend="cuda")
    results, exact = (
        spattn.attention_backward(dout, q, k, v, out, lse, pattern, backend="cuda", precision=precision)
        for precision in ("tf32", None)
    )
    expected = reference.gradients(dout, q, k, v, pattern, scale)
    lows = naive_tf32_gradients(dout, q, k, v, dense_mask(pattern, 2, 4, 260, 260), scale)
    for what, got, full, want, low in zip(("dq", "dk", "dv"), results, exact, expected, lows, strict=True):
        budget = 2 * np.abs(low - want).max() + EPS * np.abs(want).max()
        assert np.abs(got - want).max() <= budget, what
        assert np.abs(full - want).max() < np.abs(got - want).max() / 50


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, 0x7F800001, 0xFFFFFFFF], ids=hex)
@pytest.mark.parametrize("precision", [None, "tf32"])
def test_every_nan_is_seen(precision, bits):
    """Rounding must not turn a NaN into a number."""
    q, k, v = inputs(1, 1, 1, 100, 100, 64)
    k.view(np.uint32)[:, :, 50, 7] = bits
    v.view(np.uint32)[:, :, 20, 9] = bits
    pattern = patterns.SlidingWindow(10, 10)
    out, lse = cuda.forward(q, k, v, spattn.plan_for(pattern, q, k, v, backend="cuda"), 0.125, precision=precision)
    sees = dense_mask(pattern, 1, 1, 100, 100)[0, 0]
    assert np.array_equal(np.isnan(lse[0, 0]), sees[:, 50])
    assert np.array_equal(np.isnan(out[0, 0, :, 9]), sees[:, 50] | sees[:, 20])


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1e-30, 1e-35, 1e30, 1e37])
def test_small_and_large_values(size):
    """Low parts near the smallest float32 and sums near the largest lose no more than float32 does."""
    q, k, v = inputs(1, 2, 2, 200, 200, 64)
    v *= np.float32(size)
    out, _ = cuda.forward(q, k, v, spattn.plan_for(patterns.Causal(), q, k, v, backend="cuda"), 0.125)
    low = naive(q, k, v, dense_mask(patterns.Causal(), 1, 2, 200, 200), 0.125)[0]
    assert_within_bound(out, reference.attend(q, k, v, patterns.Causal(), 0.125)[0], low)


@pytest.mark.gpu
def test_long_rows(torch):
    """Sums over 65536 keys, whose mean rounding towards zero would show: no worse than PyTorch's own float32."""
    torch.manual_seed(0)
    q = torch.randn(1, 1, 64, 128, device="cuda")
    k, v = torch.randn(2, 1, 1, 65536, 128, device="cuda").unbind()
    v = v + 1
    expected = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    peer = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    made = plan(patterns.Full(), 64, 65536, tiling=Tiling(tile=cuda.tile("float32", 128), workers=1))
    out, _ = cuda.forward(q, k, v, made, 128**-0.5)
    error, peer_error = ((x - expected).abs().max().item() for x in (out, peer))
    assert error <= 2 * peer_error + 2.0**-23 * expected.abs().max().item()


@pytest.mark.gpu
@pytest.mark.parametrize("precision", [None, "tf32"])
def test_repeatable(precision):
    q, k, v = inputs(2, 4, 2, 500, 500, 96)
    made = spattn.plan_for(patterns.longformer(128, global_tokens=(0, 5)), q, k, v, backend="cuda")
    first = cuda.forward(q, k, v, made, 0.1, precision=precision)
    for _ in range(10):
        again = cuda.forward(q, k, v, made, 0.1, precision=precision)
        assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.gpu
def test_public_face():
    q, k, v = inputs(1, 2, 2, 100, 100, 64)
    out = spattn.attention(q, k, v, "causal", backend="cuda", precision="tf32")
    made = spattn.plan_for(patterns.Causal(), q, k, v, backend="cuda")
    assert np.array_equal(out, cuda.forward(q, k, v, made, 0.125, precision="tf32")[0])
    large = plan(patterns.Causal(), 100, 100, tiling=Tiling(tile=(256, 64)), heads=2)
    np.testing.assert_array_equal(out, cuda.forward(q, k, v, large, 0.125, precision="tf32")[0])


@pytest.mark.parametrize(
    ("dtype", "precision", "backend", "error", "message"),
    [
        ("float32", "tf16", "cuda", ValueError, "precision: expected None or 'tf32', got 'tf16'"),
        ("bfloat16", "tf32", "cuda", TypeError, "precision: 'tf32' needs float32 arrays, got bfloat16"),
        ("float64", "tf32", "auto", TypeError, "precision: 'tf32' needs float32 arrays, got float64"),
        ("float32", "tf32", "auto", ValueError, "precision: 'tf32' is not supported by backend 'cpu'"),
        ("float32", "tf32", "reference", ValueError, "precision: 'tf32' is not supported by backend 'reference'"),
    ],
)
def test_refused(dtype, precision, backend, error, message):
    q, k, v = inputs(1, 1, 1, 20, 20, 8, dtype=dtype)
    with pytest.raises(error, match=message):
        spattn.attention(q, k, v, backend=backend, precision=precision)
    out, lse = spattn.attention(q, k, v, return_lse=True)
    with pytest.raises(error, match=message):
        spattn.attention_backward(q, q, k, v, out, lse, backend=backend, precision=precision)


@pytest.mark.gpu
def test_recorded(torch):
    """A gradient that PyTorch records has the precision of its call."""
    dout, q, k, v = (torch.randn(1, 2, 200, 64, device="cuda") for _ in range(4))
    operands = [x.clone().requires_grad_() for x in (q, k, v)]
    spattn.attention(*operands, "causal", precision="tf32").backward(dout)
    out, lse = spattn.attention(q, k, v, "causal", return_lse=True, precision="tf32")
    gradients = spattn.attention_backward(dout, q, k, v, out, lse, "causal", precision="tf32")
    assert all(torch.equal(x.grad, y) for x, y in zip(operands, gradients, strict=True))
