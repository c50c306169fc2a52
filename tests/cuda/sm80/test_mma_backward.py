"""The portable backward kernels against the oracle: every pattern, dtype, head dimension, layout and kind of array."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import spattn
from spattn import Tiling, patterns, plan
from spattn.testing import inputs

pytestmark = [pytest.mark.family("sm80"), pytest.mark.gpu]

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
    check_gradients(patterns.strided(24), q, k, v, kinds=KINDS)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("dims", [(64, 128), (128, 40), (192, 96), (8, 256)], ids=str)
def test_head_dims_differ(check_gradients, dims, dtype):
    """Sums of dK and dV that fit into the registers together, and such as do not."""
    q, k, v = inputs(1, 4, 2, 150, 181, *dims, dtype=dtype)
    check_gradients(patterns.SlidingWindow(40, 30), q, k, v, kinds=("torch",))


def test_heads_of_a_group_differ(check_gradients):
    """dK and dV are sums over the query heads of a group, each with its own pattern."""
    per_head = patterns.PerHead((patterns.Causal(), patterns.SlidingWindow(30), patterns.strided(12), patterns.Full()))
    check_gradients(per_head, *inputs(2, 4, 2, 260, 260, 64, dtype="float16"), kinds=("torch",))
    check_gradients(patterns.Causal(), *inputs(1, 16, 2, 260, 300, 64, dtype="bfloat16"), kinds=("torch",))


@pytest.mark.parametrize("workers", [1, 16, 132])
def test_split_lists(check_gradients, workers):
    q, k, v = inputs(1, 2, 2, 130, 4000, 64, dtype="bfloat16")
    made = plan(patterns.Causal(), 130, 4000, tiling=Tiling(tile=(128, 64), workers=workers), heads=2)
    check_gradients(patterns.Causal(), q, k, v, made=made)


def test_long_columns(check_gradients):
    """Keys that all queries see: their lists are cut, and the pieces summed in order."""
    pattern = patterns.longformer(64, global_tokens=(0, 1, 900))
    check_gradients(pattern, *inputs(1, 1, 1, 2300, 2300, 64, dtype="bfloat16"), kinds=("torch",))


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-42, 3.0])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_scale(check_gradients, dtype, scale):
    check_gradients(patterns.SlidingWindow(30, 30), *inputs(1, 2, 2, 150, 200, 64, dtype=dtype), scale)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_rows_that_are_padding(torch, dtype):
    """The bits of queries beyond the end mean nothing: a key that no query sees has no gradient, NaN as it may be."""
    mask = np.arange(64) % 7 != np.zeros((20, 1))
    made = plan(patterns.Mask(mask), 20, 64, tiling=Tiling(tile=(64, 64)))
    bits = made.masks.copy()
    bits[:, 20:] = ~np.uint64(0)
    made = dataclasses.replace(made, masks=bits)
    q, dout = torch.randn(2, 1, 1, 20, 64, device="cuda", dtype=getattr(torch, dtype)).unbind()
    k, v = torch.randn(2, 1, 1, 64, 64, device="cuda", dtype=getattr(torch, dtype)).unbind()
    k[:, :, ::7] = v[:, :, ::7] = torch.nan
    out, lse = spattn.attention(q, k, v, made, return_lse=True)
    dq, dk, dv = spattn.attention_backward(dout, q, k, v, out, lse, made)
    assert all(torch.isfinite(x).all() for x in (dq, dk, dv))
    assert not dk[:, :, ::7].any() and not dv[:, :, ::7].any()


@pytest.mark.parametrize("dims", [(64, 64), (40, 56), (128, 128)], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_rows_that_are_not_aligned(torch, dtype, dims):
    """Features two apart, between numbers that nobody may read, give the bits of arrays in order."""
    pattern, sizes = patterns.strided(16), [dims[1], *dims[:1] * 2, dims[1]]
    plain = [torch.randn(1, 2, 200, size, device="cuda", dtype=getattr(torch, dtype)) for size in sizes]
    apart = [torch.full((*x.shape[:3], 2 * x.shape[3] + 1), torch.nan, device="cuda", dtype=x.dtype) for x in plain]
    for wide, x in zip(apart, plain, strict=True):
        wide[..., 1::2] = x
    both = []
    for dout, q, k, v in (plain, [wide[..., 1::2] for wide in apart]):
        out, lse = spattn.attention(q, k, v, pattern, return_lse=True)
        both.append(spattn.attention_backward(dout, q, k, v, out, lse, pattern))
    assert all(torch.equal(x, y) for x, y in zip(*both, strict=True))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -6e4])
@pytest.mark.parametrize("which", range(4), ids=["dout", "q", "k", "v"])
@pytest.mark.parametrize("pattern", [patterns.SlidingWindow(20, 5), patterns.strided(12)], ids=repr)
@pytest.mark.parametrize(
    ("dtype", "head_dim", "precision"),
    [
        ("float16", 32, None),
        ("bfloat16", 64, None),
        ("bfloat16", 128, None),
        ("float32", 64, None),
        ("float32", 64, "tf32"),
    ],
)
def test_values_that_are_not_allowed(torch, dtype, head_dim, precision, pattern, which, bad):
    """Gradients that a value has no part in keep every bit, whatever it is; what is not finite reaches all others."""
    arrays = [torch.randn(1, 1, 300, head_dim, device="cuda", dtype=getattr(torch, dtype)) for _ in range(4)]
    rows, at = np.arange(300), [3, 140, 299]
    mask = np.broadcast_to(pattern.allows(rows[:, None], rows[None]), (300, 300))
    queries = np.isin(rows, at) if which < 2 else mask[:, at].any(axis=1)
    keys = mask[queries].any(axis=0)
    results = spattn.attention(*arrays[1:], pattern, return_lse=True, precision=precision)
    clean = spattn.attention_backward(*arrays, *results, pattern, precision=precision)
    arrays[which] = arrays[which].clone()
    arrays[which][:, :, at] = bad
    seen = spattn.attention(*arrays[1:], pattern, return_lse=True, precision=precision)
    blind = torch.from_numpy(~queries).cuda()
    for x, y in zip(results, seen, strict=True):  # the forward's may move in their last bits
        x[:, :, ~blind] = y[:, :, ~blind]
    dirty = spattn.attention_backward(*arrays, *results, pattern, precision=precision)
    for x, y, touched in zip(clean, dirty, (queries, keys, keys), strict=True):
        keeps = torch.from_numpy(~touched).cuda()
        assert torch.equal(x[0, 0, keeps], y[0, 0, keeps])
    if not np.isfinite(bad):
        assert not any(torch.isfinite(x[0, 0, torch.from_numpy(queries).cuda()]).any() for x in dirty[:1])


def test_one_feature_of_dout_that_is_not_finite(torch):
    """It reaches that feature of dV of the keys that its query sees, and no other feature."""
    dout, q, k, v = (torch.randn(1, 1, 200, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    out, lse = spattn.attention(q, k, v, "causal", return_lse=True)
    dout[0, 0, 120, 7] = np.inf
    dv = spattn.attention_backward(dout, q, k, v, out, lse, "causal")[2][0, 0]
    expected = torch.zeros(200, 64, dtype=torch.bool, device="cuda")
    expected[:121, 7] = True
    assert torch.equal(dv == np.inf, expected) and torch.isfinite(dv[~expected]).all()


@pytest.mark.parametrize("kind", ["torch-cpu", "jax"])
def test_other_arrays(check_gradients, kind):
    check_gradients(patterns.strided(24), *inputs(2, 4, 2, 190, 190, 64), kinds=(kind,))


@pytest.mark.parametrize("tile", [(16, 64), (48, 128), (256, 64)], ids=str)
def test_tiles(check_gradients, tile):
    """Any that the portable forward takes."""
    q, k, v = inputs(1, 2, 2, 300, 300, 32)
    pattern = patterns.longformer(40, global_tokens=(0, 1, 200))
    check_gradients(pattern, q, k, v, made=plan(pattern, 300, tiling=Tiling(tile=tile, workers=8), heads=2))


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
