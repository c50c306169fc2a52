"""The Hopper kernels against the oracle: every pattern, head dimension, layout and way of calling them."""

from __future__ import annotations

import numpy as np
import pytest

import spattn
from spattn import cuda, patterns
from spattn.cuda import device, hopper, portable
from spattn.patterns._base import pattern_class
from spattn.plan import plan
from spattn.testing import Expectation, inputs

pytestmark = pytest.mark.gpu

LONGER = {
    "full": (patterns.Full(), 200, 333),
    "causal, more keys": (patterns.Causal(), 260, 391),
    "causal, more queries": (patterns.Causal(), 391, 260),
    "decoding": (patterns.Causal(), 1, 517),
    "window": (patterns.SlidingWindow(70), 400, 400),
    "dilated": (patterns.DilatedWindow(20, 20, 3), 401, 401),
    "strided": (patterns.Strided(16), 400, 400),
    "fixed": (patterns.Fixed(32, 8), 384, 384),
    "longformer": (patterns.Longformer(64, global_tokens=(0, 1, 200)), 400, 400),
    "neighborhood": (patterns.Neighborhood((18, 22), 7), 396, 396),
    "neighborhood 3-D": (patterns.Neighborhood((6, 8, 9), (3, 5, 5)), 432, 432),
    "neighborhood dilated": (patterns.Neighborhood((18, 24), 3, 3), 432, 432),
    "shifted windows": (patterns.Windowed((16, 24), (8, 8), 4), 384, 384),
    "columns": (patterns.Columns(13, 3, 5) & patterns.Causal(), 300, 300),
    "some empty rows": (patterns.BlockLocal(50) & ~patterns.SlidingWindow(20, 90), 300, 300),
    "nothing": (patterns.Full() - patterns.Full(), 150, 150),
    "per head": (patterns.PerHead((patterns.Causal(), patterns.SlidingWindow(30), patterns.Strided(12))), 260, 260),
    "per batch entry": (patterns.Documents(((100, 150), (30, 40, 180))), 250, 250),
}  # fmt: skip
SMALL = {name: pattern_class(name).example() for name in patterns.names()}
PROBLEMS = LONGER | {name: (pattern, length, length) for name, (pattern, length) in SMALL.items()}


@pytest.fixture(autouse=True)
def hopper_kernels(monkeypatch):
    """Skips elsewhere, and fails a test whose call silently went to the portable kernels."""
    if device.get().capability != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    monkeypatch.setenv("SPATTN_CUDA_KERNEL", "auto")
    monkeypatch.setattr(portable, "forward", lambda call: pytest.fail("the portable kernels were called"))


@pytest.fixture
def portable_allowed(hopper_kernels, monkeypatch):
    """How often the portable kernels took over."""
    calls = []
    monkeypatch.undo()
    original = portable.forward
    monkeypatch.setattr(portable, "forward", lambda call: (calls.append(call), original(call)))
    return calls


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_patterns(check, problem, head_dim, dtype):
    pattern, q_len, kv_len = PROBLEMS[problem]
    batch, heads = (max(own, least) for own, least in zip(pattern.sizes(), (1, 2), strict=True))
    check(pattern, *inputs(batch, heads, 1, q_len, kv_len, head_dim, dtype=dtype), kinds=("torch",))


@pytest.mark.parametrize("dims", [(64, 128), (128, 40), (8, 256), (192, 192), (72, 64)], ids=str)
def test_head_dims_differ(check, dims):
    q, k, v = inputs(2, 4, 2, 150, 181, *dims, dtype="bfloat16")
    check(patterns.SlidingWindow(40, 30), q, k, v, kinds=("torch",))


@pytest.mark.parametrize("pattern", [patterns.Causal(), patterns.Strided(16)], ids=repr)
def test_heads_inside_tokens(torch, attend, pattern):
    """(batch, tokens, heads, features) in memory: batch and head are then two axes, with maps of their own."""
    q, k, v = inputs(3, 4, 2, 300, 300, 64, dtype="bfloat16")
    expected = attend("torch")(q, k, v, pattern)
    moved = [torch.from_numpy(x.astype(np.float32)).cuda().bfloat16().mT.contiguous().mT for x in (q, k, v)]
    moved = [x.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3) for x in moved]
    out, lse = cuda.forward(*moved, cuda.plan_for(pattern, *moved), 0.125)
    np.testing.assert_array_equal(out.float().cpu(), expected[0].astype(np.float32))
    np.testing.assert_array_equal(lse.cpu(), expected[1])


@pytest.mark.parametrize("workers", [1, 16, 132])
def test_split_lists(check, workers):
    q, k, v = inputs(1, 2, 2, 130, 4000, 64, dtype="bfloat16")
    made = plan(patterns.Causal(), 130, 4000, heads=2, tile=hopper.TILE, workers=workers)
    check(patterns.Causal(), q, k, v, 0.125, forward=lambda q, k, v, pattern, scale: cuda.forward(q, k, v, made, scale))


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-42, 7.0])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scale(check, dtype, scale):
    check(patterns.SlidingWindow(30, 30), *inputs(1, 2, 2, 150, 200, 64, dtype=dtype), scale)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("pattern", [patterns.SlidingWindow(20, 5), patterns.Strided(12)], ids=repr)
def test_values_that_are_not_allowed(attend, pattern, bad):
    """Every row but those that attend to the bad keys is bitwise what it is without them."""
    q, k, v = inputs(1, 1, 1, 300, 300, 128, dtype="bfloat16")
    clean = attend("torch")(q, k, v, pattern)
    for array in (k, v):
        array[:, :, [3, 140, 299]] = bad
    out, lse = attend("torch")(q, k, v, pattern)
    mask = pattern.allows(np.arange(300)[:, None], np.arange(300)[None])
    touched = mask[:, [3, 140, 299]].any(1)
    assert not np.isnan(out[0, 0, ~touched].astype(float)).any()
    np.testing.assert_allclose(out[0, 0, ~touched].astype(float), clean[0][0, 0, ~touched].astype(float), atol=0.02)
    np.testing.assert_allclose(lse[0, 0, ~touched], clean[1][0, 0, ~touched], rtol=1e-5, atol=1e-5)
    if np.isnan(bad):
        assert np.isnan(out[0, 0, touched].astype(float)).all()


def test_decoding(check):
    for q_len in (1, 3, 16):
        check(patterns.Causal(), *inputs(2, 8, 2, q_len, 3000, 128, dtype="bfloat16"), kinds=("torch",))


def test_many_tensor_maps(check):
    """Views that share no map: 25 + 25 of them need the larger parameter block."""
    check(patterns.Neighborhood((30, 35), 3, 5), *inputs(1, 2, 2, 1050, 1050, 64, dtype="bfloat16"), kinds=("torch",))


def test_arrays_that_tma_cannot_read(check, portable_allowed):
    """Odd addresses and strides run on the portable kernels; nothing is copied or refused."""
    q, k, v = inputs(1, 2, 2, 200, 200, 64, dtype="float16")

    def forward(q, k, v, pattern, scale=None):
        import torch

        padded = torch.zeros(1, 2, 200, 65, device="cuda", dtype=torch.float16)
        padded[..., 1:] = torch.from_numpy(np.array(q)).cuda()
        rest = [torch.from_numpy(np.array(x)).cuda() for x in (k, v)]
        out, lse = cuda.forward(padded[..., 1:], *rest, cuda.plan_for(pattern, padded[..., 1:], *rest), 0.125)
        return out.cpu().numpy(), lse.cpu().numpy()

    check(patterns.Causal(), q, k, v, forward=forward)
    assert len(portable_allowed) == 1


def test_results_are_repeatable(torch):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 3000, 128, device="cuda", dtype=torch.bfloat16)
    for pattern in (patterns.Longformer(128, global_tokens=(0, 5)), patterns.Strided(64), patterns.Causal()):
        made = cuda.plan_for(pattern, q, k, v)
        first = cuda.forward(q, k, v, made, 0.1)
        for _ in range(1000):
            out, lse = cuda.forward(q, k, v, made, 0.1)
            assert torch.equal(out, first[0]) and torch.equal(lse, first[1])


def test_new_addresses(torch):
    """Tensor maps follow the arrays: same shapes, other memory."""
    for seed in range(5):
        torch.manual_seed(seed)
        keep = torch.empty(seed * 12345 + 1, device="cuda")
        q, k, v = (torch.randn(1, 2, 300, 64, device="cuda", dtype=torch.float16) for _ in range(3))
        out, _ = cuda.forward(q, k, v, cuda.plan_for(patterns.Causal(), q, k, v), 0.125)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.testing.assert_close(out, expected, rtol=0.01, atol=0.01)
        del keep


def test_graph_capture(torch):
    q, k, v = (torch.randn(1, 4, 1000, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    made = cuda.plan_for(patterns.Strided(32), q, k, v)
    cuda.forward(q, k, v, made, 0.125)  # compiles, uploads
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = cuda.forward(q, k, v, made, 0.125)
    q.copy_(torch.randn_like(q))
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    expected = cuda.forward(q, k, v, made, 0.125)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_streams_side_by_side(torch):
    """Calls that run at the same time do not share a work counter."""
    q, k, v = (torch.randn(1, 2, 2000, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    made = cuda.plan_for(patterns.Strided(32), q, k, v)
    expected, _ = cuda.forward(q, k, v, made, 0.125)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    results = []
    for _ in range(50):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(cuda.forward(q, k, v, made, 0.125)[0])
    torch.cuda.synchronize()
    assert all(torch.equal(result, expected) for result in results)


def test_agrees_with_the_portable_kernels(torch, monkeypatch):
    monkeypatch.undo()
    q, k, v = (torch.randn(2, 4, 777, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    pattern = patterns.Longformer(100, global_tokens=4) & patterns.Causal()
    results = []
    for choice in ("auto", "portable"):
        monkeypatch.setenv("SPATTN_CUDA_KERNEL", choice)
        results.append(cuda.forward(q, k, v, cuda.plan_for(pattern, q, k, v), 0.1))
    torch.testing.assert_close(*(out for out, _ in results), rtol=0.02, atol=0.01)
    torch.testing.assert_close(*(lse for _, lse in results), rtol=1e-4, atol=1e-4)


def test_expectation_is_met_by_host_arrays():
    q, k, v = inputs(2, 4, 2, 190, 190, 64, dtype="bfloat16")
    pattern = patterns.Strided(24)
    Expectation(pattern, q, k, v).check(*cuda.forward(q, k, v, cuda.plan_for(pattern, q, k, v), 0.125))


@pytest.mark.parametrize("heads_kv", [1, 2, 4])
@pytest.mark.parametrize("q_len", [1, 3, 16])
@pytest.mark.parametrize("pattern", [patterns.Causal(), patterns.SlidingWindow(300), patterns.Strided(16)], ids=repr)
def test_packed_heads(check, pattern, q_len, heads_kv):
    """Heads of a group in one query tile: groups of 12, 6 and 3."""
    check(pattern, *inputs(2, 12, heads_kv, q_len, 2000, 128, dtype="bfloat16"), kinds=("torch",))


def test_packed_heads_with_bad_values(check):
    """The slow path finds the rows of a packed tile."""
    q, k, v = inputs(1, 8, 2, 5, 700, 64, dtype="float16")
    k[:, 0, 697], v[:, 1, 699] = np.nan, np.inf
    check(patterns.Causal(), q, k, v, kinds=("torch",))


def test_packed_heads_need_one_axis(torch):
    """(batch, tokens, heads, features) in memory: rows of heads have no constant stride, and nothing is packed."""
    sizes = (8, 5), (2, 900), (2, 900)
    q, k, v = (torch.randn(2, *size, 64, device="cuda", dtype=torch.float16) for size in sizes)
    made = cuda.plan_for(patterns.Causal(), q, k, v)
    expected = cuda.forward(q, k, v, made, 0.125)
    moved = q.transpose(1, 2).contiguous().transpose(1, 2)
    out, lse = cuda.forward(moved, k, v, made, 0.125)
    assert made.cache["hopper packed", 4] is not None
    torch.testing.assert_close(out, expected[0], rtol=2e-3, atol=1e-3)
    torch.testing.assert_close(lse, expected[1], rtol=1e-5, atol=1e-5)


@pytest.fixture
def no_routes():
    from spattn import _api

    _api._routes.clear()
    return _api._routes


@pytest.mark.parametrize("heads_kv", [8, 2])
@pytest.mark.parametrize(
    "pattern", [patterns.SlidingWindow(32), patterns.Strided(16), patterns.Longformer(32, global_tokens=(0,))], ids=repr
)
def test_repeated_calls(torch, no_routes, pattern, heads_kv):
    """The short way of a repeated call gives the same bits: other values, addresses, scales, streams and threads."""
    import threading

    def arrays():
        shapes = ((2, 8, 100, 64), (2, heads_kv, 100, 64), (2, heads_kv, 100, 64))
        return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]

    def same(scale=None):
        q, k, v = arrays()
        expected = cuda.forward(q, k, v, cuda.plan_for(pattern, q, k, v), 0.125 if scale is None else scale)
        out, lse = spattn.attention(q, k, v, pattern, scale=scale, return_lse=True)
        results.append(torch.equal(out, expected[0]) and torch.equal(lse, expected[1]))
        return q, k, v, out, lse

    results = []
    kept = [same() for _ in range(5)] + [same(scale) for scale in (0.3, -0.1, 0.0)]
    assert len(no_routes) == 1 and None not in no_routes.values()
    with torch.cuda.stream(torch.cuda.Stream()):
        kept.append(same())
    threads = [threading.Thread(target=same) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    q, k, v, *_ = kept[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = spattn.attention(q, k, v, pattern)
    q.copy_(torch.randn_like(q))
    graph.replay()
    results.append(torch.equal(out, spattn.attention(q, k, v, pattern)))
    assert len(no_routes) == 1 and len(results) == 14 and all(results)


def test_repeated_calls_that_must_not_take_the_short_way(torch, no_routes, portable_allowed):
    """Gradients, odd addresses and wrong arguments meet the same checks as a first call."""
    q, k, v = (torch.randn(1, 2, 100, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    expected = spattn.attention(q, k, v, "causal")
    room = torch.empty(q.numel() + 1, device="cuda", dtype=torch.float16)
    odd = room[1:].view(q.shape).copy_(q)
    torch.testing.assert_close(spattn.attention(odd, k, v, "causal"), expected, rtol=0.01, atol=0.01)
    assert len(portable_allowed) == 1 and len(no_routes) == 1
    with pytest.raises(RuntimeError, match="gradient"):
        spattn.attention(q.clone().requires_grad_(), k, v, "causal")
    with pytest.raises(TypeError, match="dtype"):
        spattn.attention(q, k.float(), v, "causal")
    with pytest.raises(ValueError, match="scale"):
        spattn.attention(q, k, v, "causal", scale=float("nan"))
    with pytest.raises(TypeError, match="precision"):
        spattn.attention(q, k, v, "causal", precision="tf32")
