"""float8 on the Hopper kernels: results within the error bound of docs/numerics.rst, and what is refused."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import spattn
from spattn import Tiling, patterns, plan
from spattn.choose.specializations import TILE, WIDEST
from spattn.schedule import compiler
from spattn.testing import dense_mask

pytestmark = [pytest.mark.family("sm90"), pytest.mark.gpu, pytest.mark.usefixtures("hopper_kernels")]

FLOAT8 = ml_dtypes.float8_e4m3fn
# (pattern, query heads, heads of keys, queries, keys)
PROBLEMS = {
    "one tile": (patterns.Full(), 2, 2, 128, 128),
    "few keys": (patterns.Full(), 2, 2, 40, 5),
    "odd lengths": (patterns.Full(), 2, 2, 201, 333),
    "causal": (patterns.Causal(), 2, 2, 391, 391),
    "causal, more queries": (patterns.Causal(), 2, 2, 391, 260),
    "decoding": (patterns.Causal(), 8, 2, 1, 1517),
    "grouped-query heads": (patterns.Causal(), 8, 2, 100, 391),
    "window": (patterns.SlidingWindow(70), 2, 2, 500, 500),
    "longformer": (patterns.longformer(64, global_tokens=(0, 1, 200)), 2, 2, 400, 400),
    "strided": (patterns.strided(16), 2, 2, 400, 400),
    "documents": (patterns.Documents((100, 150, 37)), 2, 2, 287, 287),
    "neighborhood": (patterns.Neighborhood((18, 22), 7), 2, 2, 396, 396),
    "union": (
        patterns.Causal()
        & (patterns.SlidingWindow(30, 0) | patterns.DilatedWindow(9, 9, 7) | patterns.Columns(13, 3, 5)),
        3,
        3,
        411,
        411,
    ),
    "some empty rows": (patterns.BlockLocal(50) & ~patterns.SlidingWindow(20, 90), 2, 2, 300, 300),
    "per head": (
        patterns.PerHead((patterns.Causal(), patterns.SlidingWindow(30), patterns.strided(12))),
        3,
        3,
        260,
        260,
    ),
}
SCALES = {
    "ones": (1.0, 1.0, 1.0),
    "numbers": (0.5, 0.03, 7.0),
    "per head": (0.7, np.array([[1.5], [-2.0]]), np.array([[0.1], [4.0]])),
}


def arrays(batch, heads_q, heads_kv, q_len, kv_len, dim=128, dim_v=None, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (heads_q, q_len, dim), (heads_kv, kv_len, dim), (heads_kv, kv_len, dim_v or dim)
    return [rng.standard_normal((batch, *shape)).astype(FLOAT8) for shape in shapes]


def on_gpu(torch, *given):
    return [torch.from_numpy(x.view(np.uint8)).view(torch.float8_e4m3fn).cuda() for x in given]


def dequantized(q, k, v, scales):
    """q, k and v in float64, with the heads of k and v repeated."""
    found = []
    for x, scale in zip((q, k, v), scales, strict=True):
        x = x.astype(np.float64) * np.broadcast_to(np.float32(scale), x.shape[:2])[..., None, None]
        found.append(x.repeat(q.shape[1] // x.shape[1], axis=1))
    return found


def largest_of_sums(q, k):
    """The largest magnitude among products of features and their sums over the first 32, 64, ... features."""
    parts = range(32, q.shape[-1] + 32, 32)
    found = np.max([np.abs(q[..., :n] @ k[..., :n].swapaxes(-1, -2)) for n in parts], axis=0)
    for d in range(q.shape[-1]):
        np.maximum(found, np.abs(q[..., None, d] * k[..., None, :, d]), out=found)
    return found


def expected(q, k, v, scales, mask):
    """out and lse in float64, and the bounds of their errors: docs/numerics.rst."""
    q, k, v = dequantized(q, k, v, scales)
    scale = q.shape[-1] ** -0.5
    scores = np.where(mask, scale * q @ k.swapaxes(-1, -2), -np.inf)
    delta = 2.0**-6 * scale * np.where(mask, largest_of_sums(q, k), 0).max(-1, keepdims=True)
    largest = scores.max(-1, keepdims=True)
    largest[np.isinf(largest)] = 0
    weights = np.exp(scores - largest)
    total = weights.sum(-1, keepdims=True)
    weights /= np.where(total == 0, 1, total)
    out = weights @ v
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + largest)[..., 0]
    epsilon = np.exp(2 * delta) * (1 + 2.0**-4) * (1 + 2.0**-6) - 1
    errors = epsilon * weights + np.exp(2 * delta) * 2.0**-16 * weights.max(-1, keepdims=True) * mask
    bound = errors @ np.abs(v) + 2.0**-8 * np.abs(out)
    return out, lse, bound, delta[..., 0] + 2.0**-20 * (1 + np.abs(np.where(np.isinf(lse), 0, lse)))


def check(torch, pattern, given, scales=SCALES["ones"], mask=None):
    q, k, v = given
    batch, heads, q_len, _ = q.shape
    owned = tuple(x if isinstance(x, float) else torch.from_numpy(x).cuda() for x in scales)
    out, lse = spattn.float8_attention(*on_gpu(torch, q, k, v), pattern, scales=owned, return_lse=True)
    assert out.dtype == torch.bfloat16
    mask = dense_mask(pattern, batch, heads, q_len, k.shape[2]) if mask is None else mask
    want, want_lse, bound, bound_lse = expected(q, k, v, scales, mask)
    error = np.abs(out.double().cpu().numpy() - want)
    assert (error <= bound).all(), (error / np.maximum(bound, 1e-300)).max()
    real, lse = np.isfinite(want_lse), lse.double().cpu().numpy()
    assert (lse[~real] == -np.inf).all()
    assert (np.abs(lse - want_lse)[real] <= bound_lse[real]).all()
    return error.max()


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("name", PROBLEMS)
def test_float8(torch, name, scales):
    pattern, heads_q, heads_kv, q_len, kv_len = PROBLEMS[name]
    check(torch, pattern, arrays(2, heads_q, heads_kv, q_len, kv_len), SCALES[scales])


@pytest.mark.parametrize("dims", [(16, 16), (64, 64), (96, 48), (48, 112)], ids=str)
def test_smaller_head_dims(torch, dims):
    check(torch, patterns.Causal(), arrays(1, 2, 2, 300, 300, *dims))


def test_weights_of_all_sizes(torch):
    """Scores between -40 and 40: weights are rounded to zero, and the running maximum moves often."""
    given = arrays(1, 2, 2, 200, 2000)
    check(torch, patterns.Full(), given, (4.0, 2.0, 1.0))
    order = np.argsort(given[0][0, 0, 0].astype(float) @ given[1][0, 0].astype(float).T)
    rising = [given[0], given[1][:, :, order], given[2]]
    check(torch, patterns.Full(), rising, (4.0, 2.0, 1.0))


def test_largest_numbers(torch):
    """Scores of 1.6 million in base 2, which the kernel's softmax does not resolve: rows are computed in float64."""
    q, k, v = arrays(1, 1, 1, 130, 200)
    q[..., ::2] = k[:, :, 7] = 448
    out = spattn.float8_attention(*on_gpu(torch, q, k, v), "causal").double().cpu().numpy()
    np.testing.assert_allclose(out, np.broadcast_to(v[:, :, 7].astype(float), (1, 1, 130, 128)), rtol=2.0**-8)


@pytest.mark.parametrize("how", ["ordered", "gathered"])
def test_copied_rows(torch, how):
    pattern = patterns.Clusters(np.arange(500) ** 2 % 7) & patterns.Causal()
    made = compiler.plan(pattern, 500, 500, batch=1, heads=2, tile=TILE, **{how: True})
    assert made.ordered
    check(torch, made, arrays(1, 2, 2, 500, 500), mask=dense_mask(pattern, 1, 2, 500, 500))


@pytest.mark.parametrize("tile", [TILE, WIDEST], ids=str)
@pytest.mark.parametrize("name", PROBLEMS)
def test_tiles(torch, name, tile):
    """Two and three warpgroups."""
    pattern, heads_q, heads_kv, q_len, kv_len = PROBLEMS[name]
    made = plan(pattern, q_len, kv_len, batch=2, heads=heads_q, tiling=Tiling(tile=tile, workers=3))
    given = arrays(2, heads_q, heads_kv, q_len, kv_len)
    check(torch, made, given, SCALES["per head"], dense_mask(pattern, 2, heads_q, q_len, kv_len))


def test_scores_that_jump(torch):
    """The first keys of a row have scores of -140, later ones of 140: weights overflow float32, and the writer computes
    the row. Scores of up to 40 move the running maximum instead."""
    q, k, v = arrays(1, 2, 2, 200, 700)
    q[:] = 1
    for factor in (1, 4):
        k[:] = np.repeat([-3.0 * factor, 3.0 * factor], [400, 300])[:, None]
        check(torch, patterns.Full(), (q, k, v))


def test_long_rows(torch):
    """Sums over 32,768 keys with values near 1, which 14-bit sums of the tensor cores would round towards zero."""
    q, k, v = arrays(1, 1, 1, 64, 32768)
    v = (v.astype(np.float32) / 4 + 1).astype(FLOAT8)
    check(torch, patterns.Full(), (q, k, v))


def test_nan_and_infinite_scores(torch):
    """NaN at a key that a row may not attend to does not reach the row; e4m3 has no infinity."""
    q, k, v = arrays(1, 2, 2, 200, 200)
    want = expected(q, k, v, SCALES["ones"], dense_mask(patterns.Causal(), 1, 2, 200, 200))
    v[:, :, 150] = np.nan
    out = spattn.float8_attention(*on_gpu(torch, q, k, v), "causal").double().cpu().numpy()
    assert np.isnan(out[:, :, 150:]).all()
    assert (np.abs(out - want[0]) <= want[2])[:, :, :150].all()


def test_layouts_and_graphs(torch):
    """Transposed arrays, and a CUDA graph: the same bits."""
    q, k, v = on_gpu(torch, *arrays(2, 4, 4, 200, 200))
    want = spattn.float8_attention(q, k, v, "causal")
    moved = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    out = spattn.float8_attention(*moved, "causal", layout="bshd")
    assert torch.equal(out.transpose(1, 2), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = spattn.float8_attention(q, k, v, "causal")
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want)


def test_no_keys(torch):
    q, k, v = on_gpu(torch, *arrays(1, 2, 2, 20, 0))
    out = spattn.float8_attention(q, k, v)
    assert out.dtype == torch.bfloat16 and not out.any()


def test_refusals_of_the_kernels(torch, monkeypatch):
    q, k, v = on_gpu(torch, *arrays(1, 2, 2, 70, 70, 136))
    with pytest.raises(ValueError, match="at most 128; got 136 and 136 on .*convert q, k and v to bfloat16"):
        spattn.float8_attention(q, k, v)
    q, k, v = on_gpu(torch, *arrays(1, 2, 2, 70, 70, 32))
    with pytest.raises(ValueError, match="k starts at .* not 16-byte aligned; copy the array"):
        spattn.float8_attention(q[..., :16].contiguous(), k[..., 1:17], v)
    with pytest.raises(TypeError, match="k_scale: expected a float, or an array of torch on cuda:0"):
        spattn.float8_attention(q, k, v, scales=(1.0, np.ones((1, 2)), 1.0))
    monkeypatch.setenv("SPATTN_CUDA_KERNEL", "portable")
    with pytest.raises(ValueError, match="needs the kernels for compute capability 9.0"):
        spattn.float8_attention(q, k, v)
