"""The portable backward kernels against the oracle: every pattern, dtype, head dimension, layout and kind of array."""

from __future__ import annotations

import numpy as np
import pytest

import spattn
from spattn import patterns, plan
from spattn.testing import inputs

pytestmark = pytest.mark.gpu

KINDS = ("numpy", "torch", "cupy")  # CuPy last: where it has no bfloat16 it skips the rest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_dim", [32, 128])
def test_patterns(check_gradients, problem, head_dim, dtype):
    pattern, q_len, kv_len = problem
    batch, heads = (max(own, least) for own, least in zip(pattern.sizes(), (1, 2), strict=True))
    check_gradients(pattern, *inputs(batch, heads, 1, q_len, kv_len, head_dim, dtype=dtype))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("dims", [(1, 256), (40, 56), (64, 64), (96, 96), (256, 256)], ids=str)
def test_dimensions(check_gradients, dims, dtype):
    q, k, v = inputs(2, 4, 2, 190, 201, *dims, dtype=dtype)
    check_gradients(patterns.Strided(24), q, k, v, kinds=KINDS)


@pytest.mark.parametrize("kind", ["torch-cpu", "jax"])
def test_other_arrays(check_gradients, kind):
    check_gradients(patterns.Strided(24), *inputs(2, 4, 2, 190, 190, 64), kinds=(kind,))


@pytest.mark.parametrize("tile", [(16, 64), (48, 128), (256, 64)], ids=str)
def test_tiles(check_gradients, tile):
    """Any that the portable forward takes."""
    q, k, v = inputs(1, 2, 2, 300, 300, 32)
    pattern = patterns.Longformer(40, global_tokens=(0, 1, 200))
    check_gradients(pattern, q, k, v, made=plan(pattern, 300, heads=2, tile=tile, workers=8))


def test_finite_differences():
    rng = np.random.default_rng(3)
    q, k, v, dout = rng.standard_normal((4, 1, 2, 20, 8))
    pattern, dlse = patterns.SlidingWindow(5), rng.standard_normal((1, 2, 20))

    def loss(q, k, v):
        out, lse = spattn.attention(q, k, v, pattern, return_lse=True, backend="cuda")
        return (out * dout).sum() + (lse * dlse).sum()

    out, lse = spattn.attention(q, k, v, pattern, return_lse=True, backend="cuda")
    gradients = spattn.attention_backward(dout, q, k, v, out, lse, pattern, dlse=dlse, backend="cuda")
    for name, x, gradient in zip("qkv", (q, k, v), gradients, strict=True):
        for at in np.ndindex(1, 2, 3, 2):
            step = np.zeros_like(x)
            step[at] = 1e-6
            ends = [loss(**{"q": q, "k": k, "v": v, name: x + sign * step}) for sign in (1, -1)]
            assert abs((ends[0] - ends[1]) / 2e-6 - gradient[at]) < 1e-6


def test_nothing_to_differentiate(torch):
    """No keys, no queries, no heads: gradients of the right shapes, all zero."""
    for batch, heads, q_len, kv_len in ((1, 2, 3, 0), (1, 2, 0, 5), (0, 2, 3, 5), (2, 0, 3, 5)):
        q, dout, out = (torch.ones(batch, heads, q_len, 16, device="cuda") for _ in range(3))
        k, v = (torch.ones(batch, heads, kv_len, 16, device="cuda") for _ in range(2))
        lse = torch.full((batch, heads, q_len), -torch.inf, device="cuda")
        got = spattn.attention_backward(dout, q, k, v, out, lse)
        assert [x.shape for x in got] == [q.shape, k.shape, v.shape]
        assert not any(x.any() for x in got)
