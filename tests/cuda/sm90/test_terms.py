"""float32 on the Hopper kernels, as products of bfloat16 terms: accuracy, and all that a plan may ask for."""

from __future__ import annotations

import numpy as np
import pytest

import spattn
from spattn import Tiling, cuda, patterns, plan, reference
from spattn.schedule import compiler
from spattn.score import alibi, softcap
from spattn.testing import Expectation, assert_within_bound, dense_mask, inputs, naive

pytestmark = [pytest.mark.family("sm90"), pytest.mark.gpu, pytest.mark.usefixtures("hopper_kernels")]

TWO_TERMS = 2.0**-14  # relative error of a product of two terms each, with room for the weights' own
precisions = pytest.mark.parametrize("precision", [None, "tf32"])
UNION = patterns.Causal() & (
    patterns.SlidingWindow(30, 0) | patterns.DilatedWindow(9, 9, 7) | patterns.Columns(13, 3, 5)
)


def on_gpu(torch, *arrays):
    return [torch.from_numpy(np.array(x)).cuda() for x in arrays]


def assert_close(got, want, precision, low):
    """Within the bound of float32, or of two terms, which are more than TF32's eleven bits."""
    if precision is None:
        assert_within_bound(got, want, low)
    else:
        budget = 2 * np.abs(low - want).max() + TWO_TERMS * np.abs(want).max()
        assert np.abs(got - want).max() <= budget


@pytest.mark.parametrize("precision", ["tf32"])
@pytest.mark.parametrize("dims", [(32, 32), (64, 64), (96, 96), (128, 128), (64, 128), (8, 40)], ids=str)
@pytest.mark.parametrize("pattern", [UNION, patterns.strided(24), patterns.Neighborhood((13, 20), 5)], ids=str)
def test_two_terms(torch, pattern, dims, precision):
    q, k, v = inputs(2, 4, 2, 260, 260, *dims)
    scale = dims[0] ** -0.5
    out, lse = spattn.attention(*on_gpu(torch, q, k, v), pattern, return_lse=True, precision=precision)
    want, want_lse = reference.attend(q, k, v, pattern, scale)
    low, low_lse = naive(q, k, v, dense_mask(pattern, 2, 4, 260, 260), scale)
    real = np.isfinite(want_lse)
    assert_close(out.cpu().numpy(), want, precision, low)
    assert_close(lse.cpu().numpy()[real], want_lse[real], precision, low_lse[real])


@pytest.mark.parametrize("size", [1e-38, 1e-35, 1e-30, 1e30, 1e37])
def test_small_and_large_values(torch, size):
    """Values whose last terms would be denormals; values that overflow, whose rows are recomputed."""
    q, k, v = inputs(1, 2, 2, 200, 200, 64)
    v *= np.float32(size)
    out = spattn.attention(*on_gpu(torch, q, k, v), patterns.Causal()).cpu().numpy()
    low = naive(q, k, v, dense_mask(patterns.Causal(), 1, 2, 200, 200), 0.125)[0]
    assert_within_bound(out, reference.attend(q, k, v, patterns.Causal(), 0.125)[0], low)


@pytest.mark.parametrize("dim", [64, 128])
def test_long_rows(torch, dim):
    """Sums over 65,536 keys, whose mean rounding towards zero would show: no worse than PyTorch's own float32."""
    torch.manual_seed(0)
    q = torch.randn(1, 1, 64, dim, device="cuda")
    k, v = torch.randn(2, 1, 1, 65536, dim, device="cuda").unbind()
    v = v + 1
    expected = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    peer = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    made = plan(patterns.Full(), 64, 65536, tiling=Tiling(tile=(64, 64), workers=1))
    out, _ = cuda.forward(q, k, v, made, dim**-0.5)
    error, peer_error = ((x - expected).abs().max().item() for x in (out, peer))
    assert error <= 2 * peer_error + 2.0**-23 * expected.abs().max().item()


@precisions
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("how", ["ordered", "gathered"])
def test_rows_that_are_copied(torch, how, dim, precision):
    """Permuted queries and gathered keys: their terms are copied row by row."""
    pattern = patterns.Clusters(np.arange(500) ** 2 % 7) & patterns.Causal()
    q, k, v = inputs(2, 4, 2, 500, 500, dim)
    made = compiler.plan(pattern, 500, 500, batch=2, heads=4, tile=(64, 64), **{how: True})
    assert made.ordered
    out, lse = cuda.forward(*on_gpu(torch, q, k, v), made, 0.1, precision=precision)
    want, want_lse = reference.attend(q, k, v, pattern, 0.1)
    low, low_lse = naive(q, k, v, dense_mask(pattern, 2, 4, 500, 500), 0.1)
    assert_close(out.cpu().numpy(), want, precision, low)
    assert_close(lse.cpu().numpy(), want_lse, precision, low_lse)


@pytest.mark.parametrize(
    ("options", "dim", "precision"),
    [
        ("alibi", 64, None),
        ("alibi", 128, "tf32"),
        ("softcap", 64, "tf32"),
        ("sinks", 128, None),
        ("sinks", 64, "tf32"),
        ("dropout", 64, None),
        ("dropout", 128, "tf32"),
    ],
)
def test_scores(torch, options, dim, precision):
    """Score functions, sinks and dropout: those of the CPU in float64."""
    given = {
        "alibi": {"score": alibi()},
        "softcap": {"score": softcap(2.0)},
        "sinks": {"sinks": np.linspace(-3, 3, 4, dtype=np.float32)},
        "dropout": {"dropout_p": 0.25, "seed": 5},
    }[options]
    q, k, v = inputs(1, 4, 2, 300, 300, dim)
    own = dict(given)
    wide = [x.astype(np.float64) for x in (q, k, v)]
    if "sinks" in own:
        own["sinks"] = own["sinks"].astype(np.float64)
        given["sinks"] = torch.from_numpy(given["sinks"]).cuda()
    want, want_lse = spattn.attention(*wide, UNION, return_lse=True, backend="cpu", **own)
    out, lse = spattn.attention(*on_gpu(torch, q, k, v), UNION, return_lse=True, precision=precision, **given)
    room = 1e-4 if precision else 3e-6  # of sums of up to 60 terms near one, and of tanh's approximation
    np.testing.assert_allclose(out.cpu().numpy(), want, rtol=room, atol=room)
    np.testing.assert_allclose(lse.cpu().numpy(), want_lse, rtol=room, atol=room)


@pytest.mark.parametrize("layout", ["bshd", "expanded", "odd"])
def test_strides(torch, layout):
    """The split reads any strides: heads inside tokens, one head for all, rows that are not aligned."""
    q, k, v = inputs(2, 4, 4, 300, 300, 64)
    if layout == "expanded":
        k[:], v[:] = k[:1, :1], v[:1, :1]
    given = on_gpu(torch, q, k, v)
    if layout == "bshd":
        given = [x.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3) for x in given]
    elif layout == "expanded":
        given[1:] = [x[:1, :1].expand(2, 4, 300, 64) for x in given[1:]]
    else:
        given = [torch.nn.functional.pad(x, (1, 0))[..., 1:] for x in given]
        given[0] = given[0].contiguous()  # the output has its memory order
    out, lse = spattn.attention(*given, UNION, return_lse=True)
    Expectation(UNION, q, k, v).check(out.cpu().numpy(), lse.cpu().numpy())


@precisions
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, 0x7F800001, 0xFFFFFFFF, 0x7F800000], ids=hex)
def test_every_number_that_is_not_finite(torch, precision, bits):
    """Splitting must not turn NaN or infinity into a number."""
    q, k, v = inputs(1, 1, 1, 100, 100, 64)
    k.view(np.uint32)[:, :, 50, 7] = bits
    v.view(np.uint32)[:, :, 20, 9] = bits
    pattern = patterns.SlidingWindow(10, 10)
    with np.errstate(invalid="ignore"):
        want, want_lse = reference.attend(q, k, v, pattern, 0.125)
    out, lse = spattn.attention(*on_gpu(torch, q, k, v), pattern, return_lse=True, precision=precision)
    np.testing.assert_allclose(out.cpu().numpy(), want, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(lse.cpu().numpy(), want_lse, rtol=1e-3, atol=1e-3)


@precisions
def test_repeatable_in_graphs(torch, precision):
    """The same bits from calls, streams and replays of a graph."""
    q, k, v = torch.randn(3, 1, 4, 1000, 64, device="cuda").unbind()
    pattern = patterns.longformer(128, global_tokens=(0, 5))
    first = spattn.attention(q, k, v, pattern, return_lse=True, precision=precision)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = spattn.attention(q, k, v, pattern, return_lse=True, precision=precision)
    for _ in range(20):
        graph.replay()
        again = spattn.attention(q, k, v, pattern, return_lse=True, precision=precision)
        assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(first, again, captured, strict=True))
