"""float8_attention on the CPU: the formula in float32, and what it refuses."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import spattn
from spattn import patterns
from spattn.arrays import to_host
from spattn.testing import dense_mask, naive

FLOAT8 = ml_dtypes.float8_e4m3fn
UNION = patterns.Causal() & (patterns.SlidingWindow(9, 0) | patterns.Columns(7, 2, 3) | patterns.DilatedWindow(4, 4, 5))


def arrays(batch=2, heads_q=4, heads_kv=2, length=61, dim=24):
    rng = np.random.default_rng(0)
    shapes = [(batch, heads, length, dim) for heads in (heads_q, heads_kv, heads_kv)]
    return [rng.standard_normal(shape).astype(FLOAT8) for shape in shapes]


def expected(q, k, v, scales, pattern):
    """The formula in float64, without the library's kernels."""
    group = q.shape[1] // k.shape[1]
    factors = [
        np.broadcast_to(np.float32(x), a.shape[:2])[..., None, None] for x, a in zip(scales, (q, k, v), strict=True)
    ]
    q, k, v = (x.astype(np.float64) * factor for x, factor in zip((q, k, v), factors, strict=True))
    k, v = k.repeat(group, axis=1), v.repeat(group, axis=1)
    return naive(q, k, v, dense_mask(pattern, *q.shape[:3], k.shape[2]), q.shape[-1] ** -0.5)


@pytest.fixture(params=["numpy", "torch", "jax"])
def library(request):
    """Conversions from NumPy to a library."""
    if request.param == "numpy":
        return lambda x: x
    if request.param == "jax":
        return pytest.importorskip("jax.numpy").asarray
    torch = pytest.importorskip("torch")
    return lambda x: (
        torch.from_numpy(x.view(np.uint8)).view(torch.float8_e4m3fn) if x.dtype == FLOAT8 else torch.from_numpy(x)
    )


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("pattern", [patterns.Full(), UNION], ids=["full", "union"])
def test_formula(library, pattern, layout):
    q, k, v = arrays()
    of_keys = np.array([[0.5, -3.0]], np.float32)
    of_values = np.array([[0.1], [40.0]], np.float32)
    want, want_lse = expected(q, k, v, (1.5, of_keys, of_values), pattern)
    given = [library(x if layout == "bhsd" else x.swapaxes(1, 2).copy()) for x in (q, k, v)]
    scales = 1.5, library(of_keys), library(of_values)
    for _ in range(2):
        out, lse = spattn.float8_attention(*given, pattern, scales=scales, return_lse=True, layout=layout)
        assert type(out) is type(given[0]) and "bfloat16" in str(out.dtype)
        out = to_host(out).astype(np.float64)
        out = out if layout == "bhsd" else out.swapaxes(1, 2)
        np.testing.assert_allclose(out, want, rtol=2.0**-8, atol=1e-5)
        np.testing.assert_allclose(to_host(lse), want_lse, rtol=1e-5, atol=1e-5)


def test_numbers_as_scales(library):
    """Numbers are the same scales as arrays; the defaults are 1."""
    given = [library(x) for x in arrays()]
    (plain, numbers, ones), other = (
        [
            to_host(spattn.float8_attention(*given, "causal", **scales))
            for scales in ({}, {"scales": (0.5, 2, 4.0)}, {"scales": (library(np.ones((1, 1), np.float32)), 1.0, 1.0)})
        ],
        to_host(spattn.float8_attention(*given, "causal", scale=24**-0.5)),
    )
    assert np.array_equal(plain, ones) and np.array_equal(plain, other)
    assert np.array_equal(4 * plain.astype(np.float32), numbers.astype(np.float32))


def test_a_plan_and_the_reference():
    q, k, v = arrays()
    made = spattn.plan(UNION, 61, heads=4, batch=2)
    want = spattn.float8_attention(q, k, v, UNION, backend="reference").astype(np.float32)
    out = spattn.float8_attention(q, k, v, made).astype(np.float32)
    np.testing.assert_allclose(out, want, rtol=2.0**-7, atol=1e-6)


def sum_of_the_tensor_cores(products):
    """The sum over the first axis, 32 addends at a time, as measured on an H200: each is truncated to 13 bits after the
    first one of the largest, the sum so far included."""
    total = np.zeros(products.shape[1:])
    for at in range(0, len(products), 32):
        addends = np.concatenate([total[None], products[at : at + 32]])
        unit = 2.0 ** (np.frexp(np.abs(addends).max(0))[1] - 14)
        total = (np.trunc(addends / unit) * unit).sum(0)
    return total


def test_keys_of_a_sum():
    """Sums of the kernels' 128 products lose at most 2^-6, as docs/numerics.rst says; those of 4096 lose more, and
    those of a whole row of 16384 over a tenth of their size."""
    rng = np.random.default_rng(0)
    weights = (90 * np.exp(rng.standard_normal((16384, 8)) - 4)).astype(FLOAT8).astype(float)
    products = weights * (rng.standard_normal((16384, 1)) + 1).astype(FLOAT8).astype(float)
    exact, sizes = products.sum(0), np.abs(products).sum(0)
    lost = {}
    for keys in (128, 4096, 16384):
        parts = [sum_of_the_tensor_cores(products[at : at + keys]) for at in range(0, 16384, keys)]
        lost[keys] = (np.abs(np.sum(parts, 0) - exact) / sizes).max()
    assert lost[128] <= 2.0**-6 < lost[4096] and lost[16384] > 0.1, lost


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (TypeError, "q: expected one of float8_e4m3fn, got float32", {"q": np.zeros((2, 4, 61, 24), np.float32)}),
        (TypeError, r"scales: expected a tuple \(q_scale, k_scale, v_scale\), got 1.0", {"scales": 1.0}),
        (
            TypeError,
            "k_scale: expected a float, or an array of numpy on cpu like q, got '2'",
            {"scales": (1.0, "2", 1.0)},
        ),
        (
            ValueError,
            r"v_scale: expected a shape that broadcasts to \(2, 2\), got \(4,\)",
            {"scales": (1.0, 1.0, np.ones(4))},
        ),
        (ValueError, "scale must be finite", {"scales": (1.0, np.inf, 1.0)}),
        (ValueError, "layout: expected", {"layout": "sbhd"}),
        (TypeError, "unexpected keyword argument 'score'", {"score": None}),
    ],
)
def test_refusals_of_arguments(error, message, change):
    options = dict(zip("qkv", arrays(), strict=True)) | change
    with pytest.raises(error, match=message):
        spattn.float8_attention(**options)


def test_attention_names_the_function():
    with pytest.raises(TypeError, match=r"got float8_e4m3fn; use spattn.float8_attention\(\)"):
        spattn.attention(*arrays())


def test_torch_gradients_and_graphs_are_refused():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x.view(np.uint8)).view(torch.float8_e4m3fn) for x in arrays())
    with pytest.raises(TypeError, match="not supported in graphs"):
        torch.export.export(_Module(torch)(), (q, k, v))
    q.requires_grad_()
    with pytest.raises(RuntimeError, match=r"q: float8_attention\(\) does not record gradients"):
        spattn.float8_attention(q, k, v)
    with torch.no_grad():
        spattn.float8_attention(q, k, v)


def _Module(torch):
    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return spattn.float8_attention(q, k, v)

    return Module
