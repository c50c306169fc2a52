"""The portable kernels against the oracle: every pattern, dtype, head dimension and array library."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import spattn
from spattn import Tiling, cuda, patterns, plan, reference
from spattn.cuda.sm80 import forward as portable
from spattn.testing import DTYPES, Expectation, dense_mask, inputs
from spattn.testing.strategies import cases, compositions

pytestmark = [pytest.mark.family("sm80"), pytest.mark.gpu]

KINDS = ("numpy", "torch", "cupy")  # CuPy last: where it has no bfloat16 it skips the rest


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256])
def test_patterns(check, problem, head_dim, dtype):
    pattern, q_len, kv_len = problem
    batch, heads = (max(own, least) for own, least in zip(pattern.sizes(), (1, 2), strict=True))
    q, k, v = inputs(batch, heads, 1, q_len, kv_len, head_dim, dtype=dtype)
    check(pattern, q, k, v, kinds=KINDS)


@pytest.mark.parametrize("head_dim", [32, 64, 256])
@pytest.mark.parametrize(
    "problem", ["longer: causal, more keys", "longer: strided", "longer: neighborhood"], indirect=True
)
def test_float64(check, problem, head_dim):
    pattern, q_len, kv_len = problem
    check(pattern, *inputs(2, 2, 1, q_len, kv_len, head_dim, dtype="float64"), kinds=KINDS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(64, 128), (128, 40), (8, 256), (100, 1), (1, 65), (192, 192)], ids=str)
def test_head_dims_differ(check, dims, dtype):
    q, k, v = inputs(2, 4, 2, 150, 181, *dims, dtype=dtype)
    check(patterns.SlidingWindow(40, 30), q, k, v, kinds=("torch",))


@pytest.mark.parametrize("kind", ["torch-cpu", "jax"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_other_arrays(check, kind, dtype):
    check(patterns.strided(24), *inputs(2, 4, 2, 190, 190, 64, dtype=dtype), kinds=(kind,))


@given(
    st.one_of(cases(max_len=500), compositions(max_len=500)),
    st.sampled_from(list(DTYPES)),
    st.integers(0, 99),
    st.integers(33, 64),
    st.integers(33, 64),
    st.booleans(),
)
def test_random(case, dtype, seed, head_dim, head_dim_v, round_up):
    if round_up:  # 16-byte loads
        head_dim, head_dim_v = -(-head_dim // 8) * 8, -(-head_dim_v // 8) * 8
    q, k, v = inputs(*case.sizes, head_dim, head_dim_v, dtype=dtype, seed=seed)

    result = cuda.forward(q, k, v, spattn.plan_for(case.pattern, q, k, v, backend="cuda"), q.shape[3] ** -0.5)
    Expectation(case.pattern, q, k, v).check(*result)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("tile", [(16, 64), (48, 64), (64, 192), (128, 128), (176, 64), (256, 64)], ids=str)
def test_any_tile(check, tile, head_dim, dtype):
    """Plans of other tile shapes than the default run too, large tiles on several CTAs."""
    pattern = patterns.SlidingWindow(90, 40) | patterns.GlobalTokens(3)

    def forward(q, k, v, pattern, scale=None):
        made = plan(pattern, q.shape[2], k.shape[2], tiling=Tiling(tile=tile, workers=7), heads=2)
        return cuda.forward(q, k, v, made, q.shape[3] ** -0.5)

    check(pattern, *inputs(1, 2, 2, 300, 300, head_dim, dtype=dtype), forward=forward)


@pytest.mark.parametrize("workers", [1, 40])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_fallback_rows_of_large_tiles(dtype, workers):
    """NaN in a value reaches the rows that see it: those of the right CTA of a tile, and no others."""
    pattern, bad = patterns.SlidingWindow(20, 5), [100, 300]
    q, k, v = inputs(1, 2, 2, 500, 500, 64, dtype=dtype)
    made = plan(pattern, 500, 500, tiling=Tiling(tile=(256, 64), workers=workers), heads=2)
    clean, changed = cuda.forward(q, k, v, made, 0.125), v.copy()
    changed[:, :, bad] = np.nan
    out, lse = cuda.forward(q, k, changed, made, 0.125)
    touched = dense_mask(pattern, 1, 1, 500, 500)[0, 0][:, bad].any(axis=1)
    assert np.isnan(out[:, :, touched].astype(np.float64)).all()
    out[:, :, touched] = clean[0][:, :, touched]
    Expectation(pattern, q, k, v, 0.125).check(out, lse)


@pytest.mark.parametrize("workers", [1, 16, 132])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_split_lists(check, dtype, workers):
    """Long lists in pieces, merged: the same result whatever the pieces, and the same bits every time."""
    q, k, v = inputs(1, 2, 2, 130, 4000, 64, dtype=dtype)
    made = plan(patterns.Causal(), 130, 4000, tiling=Tiling(tile=cuda.tile(dtype, 64), workers=workers), heads=2)

    def forward(q, k, v, pattern, scale=None):
        return cuda.forward(q, k, v, made, 0.125)

    check(patterns.Causal(), q, k, v, 0.125, forward=forward)
    first = forward(q, k, v, None)
    for _ in range(20):
        assert all(np.array_equal(a, b) for a, b in zip(first, forward(q, k, v, None), strict=True))


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-42, 7.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scale(check, dtype, scale):
    q, k, v = inputs(1, 2, 2, 150, 200, 64, dtype=dtype)
    check(patterns.SlidingWindow(30, 30), q, k, v, scale)


def test_large_logits(attend):
    """Logits of 1e4 in float16 are finite and right."""
    q, k, v = inputs(1, 1, 1, 100, 100, 64, dtype="float16")
    q, k = (q * np.float16(16)).astype(np.float16), (k * np.float16(16)).astype(np.float16)
    out, lse = attend("numpy")(q, k, v, patterns.Causal(), 8.0)
    expected = reference.attend(q, k, v, patterns.Causal(), 8.0)
    assert np.abs(expected[1]).max() > 1e4
    np.testing.assert_allclose(lse, expected[1], rtol=1e-5)
    np.testing.assert_allclose(out.astype(float), expected[0], atol=2e-2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_grids_in_parts(attend, monkeypatch, dtype):
    """More blocks than a grid holds go into several launches."""
    q, k, v = inputs(2, 3, 3, 300, 300, 64, dtype=dtype)
    whole = attend("numpy")(q, k, v, patterns.strided(30))
    monkeypatch.setattr(portable, "LARGEST_GRID", 7)
    parts = attend("numpy")(q, k, v, patterns.strided(30))
    assert all(np.array_equal(a, b) for a, b in zip(whole, parts, strict=True))


@pytest.mark.parametrize("shape", [(70_000, 1), (1, 70_000), (40_000, 2)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_many_heads(torch, shape, dtype):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, *shape, 17, 32, device="cuda").to(getattr(torch, dtype))
    out, lse = cuda.forward(q, k, v, spattn.plan_for(patterns.Causal(), q, k, v, backend="cuda"), 0.2)
    s = (q.float() @ k.float().mT * 0.2).masked_fill(torch.ones(17, 17, device="cuda").triu(1) > 0, -torch.inf)
    torch.testing.assert_close(lse, s.logsumexp(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.float(), s.softmax(-1) @ v.float(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kind", ["numpy", "torch", "cupy", "jax"])
@pytest.mark.parametrize("shape", [(0, 2, 2, 9, 9), (2, 0, 0, 9, 9), (2, 2, 2, 0, 9), (2, 4, 2, 9, 0)], ids=str)
def test_nothing_to_do(attend, kind, shape):
    q, k, v = inputs(*shape, 32, dtype="float16")
    out, lse = attend(kind)(q, k, v, patterns.Full())
    assert out.shape == q.shape and not out.any()
    assert lse.shape == q.shape[:3] and (lse == -np.inf).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_results_are_repeatable(attend, dtype):
    q, k, v = inputs(2, 4, 2, 700, 700, 64, dtype=dtype)
    pattern = patterns.longformer(128, global_tokens=(0, 5))
    first = attend("torch")(q, k, v, pattern)
    for _ in range(10):
        assert all(np.array_equal(a, b) for a, b in zip(first, attend("torch")(q, k, v, pattern), strict=True))


def test_peer(torch, attend):
    """PyTorch's own attention with a boolean mask agrees."""
    q, k, v = torch.randn(3, 2, 4, 500, 64, device="cuda", dtype=torch.bfloat16)
    pattern = patterns.Neighborhood((20, 25), 5)
    mask = torch.from_numpy(pattern.allows(np.arange(500)[:, None], np.arange(500)[None])).cuda()
    out, _ = cuda.forward(q, k, v, spattn.plan_for(pattern, q, k, v, backend="cuda"), 0.125)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.125)
    torch.testing.assert_close(out, expected, rtol=0.02, atol=0.01)
