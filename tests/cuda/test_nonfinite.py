"""NaN and infinities: they reach exactly the rows that attend to them."""

from __future__ import annotations

import numpy as np
import pytest

import spattn
from spattn import cuda, patterns, reference
from spattn.arrays import to_host
from spattn.testing import dense_mask, inputs

pytestmark = [pytest.mark.family("sm80"), pytest.mark.gpu]

PATTERN = patterns.SlidingWindow(20, 10)
NARROW = ["float16", "bfloat16"]
ALL = [("sm80", dtype) for dtype in (*NARROW, "float32", "float64")]
ALL += [("sm90", dtype) for dtype in (*NARROW, "float32")]
every_kernel = pytest.mark.parametrize(("family", "dtype"), ALL, indirect=["family"])


def problem(dtype, **options):
    return inputs(1, 2, 2, 200, 200, 64, dtype=dtype, **options)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@every_kernel
def test_keys_out_of_sight(attend, dtype, poison):
    """Poison at a key leaves every row alone that may not see it, also in the same tile."""
    q, k, v = problem(dtype)
    clean = attend("numpy")(q, k, v, PATTERN)
    blind = ~dense_mask(PATTERN, 1, 1, 200, 200)[0, 0, :, 100]
    k[:, :, 100], v[:, :, 100] = poison, poison
    dirty = attend("numpy")(q, k, v, PATTERN)
    for before, after in zip(clean, dirty, strict=True):
        assert np.isfinite(after[:, :, blind].astype(float)).all()
        limit = 0.02 if dtype in NARROW else 1e-5  # such rows take another, more exact, path
        np.testing.assert_allclose(after[:, :, blind].astype(float), before[:, :, blind].astype(float), atol=limit)


@every_kernel
def test_nan_at_allowed_keys(attend, dtype):
    q, k, v = problem(dtype)
    sees = dense_mask(PATTERN, 1, 1, 200, 200)[0, 0]
    k[:, :, 50] = np.nan
    v[:, 0, 120, 3] = np.nan
    out, lse = attend("numpy")(q, k, v, PATTERN)
    assert np.array_equal(np.isnan(lse), np.broadcast_to(sees[:, 50], lse.shape))
    expected = np.broadcast_to(sees[:, 50, None], out.shape).copy()
    expected[:, 0, :, 3] |= sees[:, 120]
    assert np.array_equal(np.isnan(out.astype(float)), expected)


@every_kernel
def test_infinite_values_at_allowed_keys(attend, dtype):
    q, k, v = problem(dtype)
    v[:, :, 70, :5] = np.inf
    out, _ = attend("numpy")(q, k, v, PATTERN)
    expected, _ = reference.attend(q, k, v, PATTERN)
    assert np.array_equal(np.isinf(out.astype(float)), np.isinf(expected.astype(float)))


@every_kernel
def test_logits_of_minus_infinity(attend, dtype):
    """−∞ at some keys is a weight of zero; at all of them, an empty row."""
    q, k, v = problem(dtype)
    q[...] = np.abs(q) + q.dtype.type(0.125)
    k[:, :, 60:140:3] = -np.inf
    k[:, 1] = -np.inf
    out, lse = attend("numpy")(q, k, v, PATTERN)
    assert np.isfinite(out.astype(float)).all() and np.isfinite(lse[:, 0]).all()
    assert not out[:, 1].any() and (lse[:, 1] == -np.inf).all()
    expected = reference.attend(q, k, v, PATTERN)
    np.testing.assert_allclose(lse[:, 0], expected[1][:, 0], rtol=1e-3)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("sm80", "bfloat16"), ("sm80", "float32"), ("sm90", "bfloat16"), ("sm90", "float32")],
    indirect=["family"],
)
@pytest.mark.parametrize("pattern", [patterns.strided(24), patterns.longformer(64, global_tokens=(0, 5))], ids=repr)
def test_poison_and_merges(attend, dtype, pattern):
    """The same through the workspace: rows of several components, and lists in pieces."""
    q, k, v = inputs(1, 1, 1, 300, 300, 64, dtype=dtype)
    clean = attend("numpy")(q, k, v, pattern)
    v[:, :, 150] = np.nan
    dirty = attend("numpy")(q, k, v, pattern)
    sees = dense_mask(pattern, 1, 1, 300, 300)[0, 0, :, 150]
    assert np.array_equal(np.isnan(dirty[0].astype(float)).all(axis=3)[0, 0], sees)
    np.testing.assert_allclose(dirty[0][0, 0, ~sees].astype(float), clean[0][0, 0, ~sees].astype(float), atol=0.02)


@every_kernel
def test_merges_of_empty_rows(attend, dtype):
    """Rows of several components, all of whose logits are -inf: every part that is merged is empty."""
    q, k, v = problem(dtype)
    q[...] = np.abs(q) + q.dtype.type(0.125)
    k[...] = -np.inf
    out, lse = attend("numpy")(q, k, v, patterns.strided(24))
    assert not out.any() and (lse == -np.inf).all()


@pytest.mark.parametrize("scale", [None, 1 / 3, -0.7], ids=str)
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
@pytest.mark.parametrize("pattern", [PATTERN, patterns.strided(24)], ids=repr)
@every_kernel
def test_logits_of_every_size(attend, family, dtype, pattern, head_dim, scale):
    """Rows of one tile whose logits reach from nothing to the largest that the dtype can make: no number is rounded and
    then subtracted from one that was not."""
    if (family, dtype) == ("sm90", "float32") and head_dim > 128:
        pytest.skip("runs on the portable kernels")
    largest = 9 if dtype == "float16" else 36  # decimal exponents
    q, k, v = inputs(1, 2, 1, 200, 200, head_dim, dtype=dtype)
    exponents = np.linspace(-largest, largest, 200)
    signs = np.where(np.arange(200) % 3, 1, -1)
    q[...] = 0
    q[..., 0] = np.random.default_rng(0).permutation(signs * 10 ** (exponents / 2))
    k[..., 0] = np.linspace(-1, 1, 200) * 10 ** (largest / 2)
    out, lse = attend("numpy")(q, k, v, pattern, scale)
    expected, expected_lse = reference.attend(q, k, v, pattern, scale)
    tolerance = {"rtol": 0.02, "atol": 0.02} if dtype in NARROW else {"rtol": 2e-5, "atol": 2e-5}
    np.testing.assert_allclose(out.astype(float), expected.astype(float), **tolerance)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-4)


def test_overflowing_sums(attend):
    """Values near the largest float32 whose weighted mean is finite although their weighted sum is not."""
    q, k, v = problem("float32")
    v[...] = 3e38
    out, _ = attend("numpy")(q, k, v, PATTERN)
    np.testing.assert_allclose(out, 3e38, rtol=1e-5)


@pytest.mark.parametrize("family", ["sm80", "sm90"], indirect=True)
def test_memory_left_by_others(torch):
    """NaN in memory that the result and the workspace will reuse has no effect."""
    q, k, v = torch.randn(3, 1, 2, 300, 64, device="cuda", dtype=torch.bfloat16)
    plan = spattn.plan_for(patterns.strided(24), q, k, v, backend="cuda")
    expected = cuda.forward(q, k, v, plan, 0.125)
    for _ in range(3):
        torch.full((1 << 22,), torch.nan, device="cuda")
        for size in (q.numel() * 2, q.numel() * 4 * 8, 2400):
            torch.full((size // 4,), torch.nan, device="cuda")
        for a, b in zip(expected, cuda.forward(q, k, v, plan, 0.125), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("kind", ["torch", "numpy"])
@every_kernel
def test_an_lse_that_nobody_wants(arrays, dtype, kind):
    """The same bits without it, in rows that are merged, not finite or empty too."""
    pattern = patterns.longformer(30, global_tokens=(0, 90)) & patterns.Documents((120, 80))
    q, k, v = problem(dtype)
    q[0, 0, 70] = np.nan
    q, k, v = (arrays(kind)(x) for x in (q, k, v))
    expected, lse = spattn.attention(q, k, v, pattern, backend="cuda", return_lse=True)
    for _ in range(2):
        out = spattn.attention(q, k, v, pattern, backend="cuda")
        assert to_host(out).tobytes() == to_host(expected).tobytes()
    assert np.isnan(to_host(lse)[0, 0, 70])
