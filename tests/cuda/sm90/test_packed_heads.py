"""How the Hopper kernels are called: heads of a group packed into one tile, and calls that repeat."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import spattn
from spattn import cuda, patterns, reference
from spattn.planning.contract import cache as _cache
from spattn.planning.contract.validated import validated
from spattn.schedule.pack_heads import pack_heads
from spattn.testing import inputs

pytestmark = [pytest.mark.family("sm90"), pytest.mark.gpu, pytest.mark.usefixtures("hopper_kernels")]


@pytest.mark.parametrize("heads_kv", [1, 2, 4])
@pytest.mark.parametrize("q_len", [1, 3, 5, 16, 31, 64])
@pytest.mark.parametrize("pattern", [patterns.Causal(), patterns.SlidingWindow(300), patterns.strided(16)], ids=repr)
def test_packed_heads(check, pattern, q_len, heads_kv):
    """Heads of a group in one query tile, all or as many as fit: groups of 12, 6 and 3."""
    check(pattern, *inputs(2, 12, heads_kv, q_len, 2000, 128, dtype="bfloat16"), kinds=("torch",))


def test_packed_heads_with_bad_values(attend):
    """The slow path finds the rows of a packed tile: bad keys reach the rows that they reach without packing."""
    q, k, v = inputs(1, 8, 2, 5, 700, 64, dtype="float16")
    k[:, 0, 697], v[:, 1, 699] = np.nan, np.inf
    packed = attend("torch")(q, k, v, patterns.Causal())
    alone = attend("torch")(q, *(np.repeat(x, 4, axis=1) for x in (k, v)), patterns.Causal())
    assert np.isnan(packed[0][0, :4, 2:].astype(float)).all() and np.isfinite(packed[0][0, :4, :2].astype(float)).all()
    np.testing.assert_allclose(packed[0].astype(float), alone[0].astype(float), rtol=2e-3, atol=1e-3)
    np.testing.assert_allclose(packed[1], alone[1], rtol=1e-5, atol=1e-5)


def test_packed_heads_need_one_axis(torch):
    """(batch, tokens, heads, features) in memory: rows of heads have no constant stride, and nothing is packed."""
    sizes = (8, 5), (2, 900), (2, 900)
    q, k, v = (torch.randn(2, *size, 64, device="cuda", dtype=torch.float16) for size in sizes)
    made = spattn.plan_for(patterns.Causal(), q, k, v, backend="cuda")
    expected = cuda.forward(q, k, v, made, 0.125)
    moved = q.transpose(1, 2).contiguous().transpose(1, 2)
    out, lse = cuda.forward(moved, k, v, made, 0.125)
    assert validated(made).derived[pack_heads.__wrapped__, 4] is not None
    torch.testing.assert_close(out, expected[0], rtol=2e-3, atol=1e-3)
    torch.testing.assert_close(lse, expected[1], rtol=1e-5, atol=1e-5)


@pytest.fixture
def kept():
    """The calls that were prepared and are kept."""
    spattn.clear_plan_cache()
    return _cache._calls


@pytest.mark.parametrize("heads_kv", [8, 2])
@pytest.mark.parametrize(
    "pattern", [patterns.SlidingWindow(32), patterns.strided(16), patterns.longformer(32, global_tokens=(0,))], ids=repr
)
def test_repeated_calls(torch, kept, pattern, heads_kv):
    """A repeated call gives the same bits: other values, addresses, scales, streams and threads."""

    def arrays():
        shapes = ((2, 8, 100, 64), (2, heads_kv, 100, 64), (2, heads_kv, 100, 64))
        return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]

    def same(scale=None):
        q, k, v = arrays()
        made = spattn.plan_for(pattern, q, k, v, backend="cuda")
        expected = cuda.forward(q, k, v, made, 0.125 if scale is None else scale)
        out, lse = spattn.attention(q, k, v, pattern, scale=scale, return_lse=True)
        results.append(torch.equal(out, expected[0]) and torch.equal(lse, expected[1]))
        return q, k, v, out, lse

    results = []
    results_of = [same() for _ in range(5)] + [same(scale) for scale in (0.3, -0.1, 0.0)]
    assert len(kept) == 1
    with torch.cuda.stream(torch.cuda.Stream()):
        results_of.append(same())
    threads = [threading.Thread(target=same) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    q, k, v, *_ = results_of[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = spattn.attention(q, k, v, pattern)
    q.copy_(torch.randn_like(q))
    graph.replay()
    results.append(torch.equal(out, spattn.attention(q, k, v, pattern)))
    assert len(kept) == 2 and len(results) == 14 and all(results)  # calls that want the lse, and others


def test_repeated_calls_that_are_not_like_the_first(torch, kept, portable_allowed):
    """Gradients, odd addresses and wrong arguments meet the same checks as a first call."""
    q, k, v = (torch.randn(1, 2, 100, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    expected = spattn.attention(q, k, v, "causal")
    room = torch.empty(q.numel() + 1, device="cuda", dtype=torch.float16)
    odd = room[1:].view(q.shape).copy_(q)
    torch.testing.assert_close(spattn.attention(odd, k, v, "causal"), expected, rtol=0.01, atol=0.01)
    assert len(portable_allowed) == 1 and len(kept) == 1
    with pytest.raises(RuntimeError, match="gradient"):
        spattn.attention_backward(q, q.clone().requires_grad_(), k, v, q, q[..., 0].float(), "causal")
    with pytest.raises(TypeError, match="dtype"):
        spattn.attention(q, k.float(), v, "causal")
    with pytest.raises(ValueError, match="scale"):
        spattn.attention(q, k, v, "causal", scale=float("nan"))
    with pytest.raises(TypeError, match="precision"):
        spattn.attention(q, k, v, "causal", precision="tf32")


STREAMING = (patterns.Sinks(4) | patterns.SlidingWindow(1023, 0)) & patterns.Causal()
LEFT_PADDED = patterns.PerBatch((STREAMING, patterns.SlidingWindow(1023, 0) - patterns.Sinks(900)))


@pytest.mark.parametrize(
    "pattern", [STREAMING, LEFT_PADDED, patterns.Sinks(64) | patterns.SlidingWindow(63, 0)], ids=repr
)
@pytest.mark.parametrize("q_len", [1, 4])
def test_steps(torch, kept, pattern, q_len):
    """One prepared call, with the bits of a plan that is made for each length, wherever the keys lie."""
    shapes = (2, 32, q_len, 128), (2, 8, 3000, 128), (2, 8, 3000, 128)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    k[:, :, 300:900], v[:, :, 300:900] = torch.nan, torch.inf  # between both ends
    v[0, 0, 2000] = torch.inf  # queries before it have it in a tile of theirs, and take the exact path
    for kv_len in (2000, 2002, 2100, 1990, 2999, 2002):
        own = k[:, :, :kv_len], v[:, :, :kv_len]
        results = [
            spattn.attention(q, *(place(x) for x in own), pattern, return_lse=True)
            for place in (lambda x: x, torch.clone, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2))
        ]
        assert len(kept) == 1
        made = spattn.plan_for(pattern, q, *own, backend="cuda")
        expected = cuda.forward(q, *own, made, 128**-0.5)
        for out, lse in results:
            torch.testing.assert_close(out, expected[0], rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(lse, expected[1], rtol=0, atol=0, equal_nan=True)
        exact, _ = reference.attend(*(x.float().cpu().numpy() for x in (q, *own)), pattern)
        torch.testing.assert_close(
            results[0][0].double().cpu(), torch.from_numpy(exact), rtol=0.02, atol=0.02, equal_nan=True
        )
