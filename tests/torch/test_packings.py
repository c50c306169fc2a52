"""Graphs whose patterns change: one for all packings, compared with dense attention in float64."""

import pickle

import numpy as np
import pytest

import spattn
from spattn import patterns as p

torch = pytest.importorskip("torch")
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402

N, WIDTH = 61, 16
Q, K = np.arange(N)[:, None], np.arange(N)[None]


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def packing(rng, count=None):
    cuts = np.sort(rng.choice(np.arange(1, N), count or rng.integers(1, 9), replace=False))
    return np.concatenate([[0], cuts, [N]])


def owner(cu_seqlens):
    return np.repeat(np.arange(len(cu_seqlens) - 1), np.diff(cu_seqlens))


def together(cu_seqlens):
    return owner(cu_seqlens)[:, None] == owner(cu_seqlens)


def operands(batch=1):
    draw = np.random.default_rng(0).standard_normal
    sizes = (batch, 4, N, WIDTH), (batch, 2, N, WIDTH), (batch, 2, N, WIDTH)
    return [torch.from_numpy(draw(size)).requires_grad_() for size in sizes]


def dense(q, k, v, mask, bias=0.0, sinks=None):
    """Results and gradients of their sum of squares, by PyTorch's autograd in float64."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    scores = q @ k.repeat_interleave(2, 1).mT / WIDTH**0.5 + bias
    scores = scores.masked_fill(~torch.from_numpy(np.broadcast_to(mask, scores.shape).copy()), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    out = scores.softmax(-1)[..., :N] @ v.repeat_interleave(2, 1)
    return out.detach(), torch.autograd.grad(out.square().sum(), (q, k, v))


def check(step, given, mask, q, k, v, **modified):
    out = step(q, k, v, given)
    found = torch.autograd.grad(out.square().sum(), (q, k, v))
    expected, gradients = dense(q, k, v, mask, **modified)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found, gradients, rtol=1e-9, atol=1e-9)


INSIDE = {
    "causal": (
        lambda cu: p.Causal() & p.Documents.from_cu_seqlens(cu),
        lambda cu: together(cu) & (K <= Q),
    ),
    "window or global": (
        lambda cu: p.Causal() & (p.SlidingWindow(5, right=0) & p.Documents.from_cu_seqlens(cu) | p.Sinks(3)),
        lambda cu: (together(cu) & (K >= Q - 5) | (K < 3)) & (K <= Q),
    ),
    "flash attention": (
        lambda cu: p.interop.from_flash_attention((7, 2), cu_seqlens_q=cu),
        lambda cu: together(cu) & (K >= Q - 7) & (K <= Q + 2),
    ),
    "lengths": (
        lambda cu: p.Documents(cu[1:] - cu[:-1]) - p.SlidingWindow(-1, -1) | p.SlidingWindow(0, 0) | p.Columns(9, 0, 1),
        lambda cu: (Q == K) | (K % 9 == 0),
    ),
}


@pytest.mark.parametrize("name", INSIDE)
def test_packings_of_a_tensor_in_the_graph(name):
    make, mask = INSIDE[name]
    counter = CompileCounterWithBackend("eager")
    step = torch.compile(
        lambda q, k, v, cu: spattn.attention(q, k, v, make(cu)), backend=counter, fullgraph=True, dynamic=True
    )
    rng, tensors = np.random.default_rng(1), operands()
    for _ in range(6):
        cu = packing(rng)
        check(step, torch.from_numpy(cu), mask(cu), *tensors)
    assert counter.frame_count == 1


def test_fifty_packings_that_are_made_outside():
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(lambda q, k, v, x: spattn.attention(q, k, v, x), backend=counter, fullgraph=True)
    rng, (q, k, v) = np.random.default_rng(2), operands()
    for _ in range(50):
        cu = packing(rng, 5)  # the number of documents is fixed: one graph also without dynamic shapes
        pattern = p.Causal() & (p.Documents.from_cu_seqlens(cu) | p.Sinks(2))
        out = step(q, k, v, pattern)
        expected, _ = dense(q, k, v, (together(cu) | (K < 2)) & (K <= Q))
        torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    assert counter.frame_count == 1
    check(step, p.Documents.from_cu_seqlens([0, 60, 61]) | p.Full(), together([0, N]), q, k, v)  # another class
    assert counter.frame_count == 2


def test_numbers_of_documents_are_a_dynamic_size():
    counter = CompileCounterWithBackend("eager")
    step = torch.compile(lambda q, k, v, x: spattn.attention(q, k, v, x), backend=counter, fullgraph=True)
    rng, (q, k, v) = np.random.default_rng(3), operands(2)
    for number in range(8):
        entries = [packing(rng, 1 + number), packing(rng, 3)]
        documents = p.Documents(tuple(tuple(np.diff(cu).tolist()) for cu in entries))
        mask = np.stack([together(cu) & (K <= Q) for cu in entries])[:, None]
        check(step, p.Causal() & documents, mask, q, k, v)
    assert counter.frame_count <= 2  # PyTorch first takes a size for a constant


def test_equal_parameters_share_a_graph_and_others_do_not():
    counter = CompileCounterWithBackend("eager")
    step = torch.compile(lambda q, k, v, x: spattn.attention(q, k, v, x), backend=counter, fullgraph=True)
    tensors = operands()
    for reach, graphs in ((4, 1), (4, 1), (5, 2), (6, 3), (5, 3), (4, 3)):
        near = (K <= Q) & (K >= Q - reach)
        check(step, p.Causal() & p.SlidingWindow(reach, None or 0), near, *tensors)
        assert counter.frame_count == graphs


def arrays_of(rng):
    """Patterns with arrays, twice of the same shapes, and their masks for each batch entry and head."""
    valid, bits = rng.random((2, N)) < 0.8, rng.random((4, N, N)) < 0.5
    low, labels = rng.integers(0, N // 2, (2, 4, N)), rng.integers(0, 5, (2, 1, N))
    valid[:, 0], bits[..., 0] = True, True
    yield p.Causal() & p.KeyPadding(valid), (K <= Q) & valid[:, None, None]
    yield p.Mask(bits), bits
    yield p.RowIntervals(low, low + 20), (low[..., None] <= K) & (low[..., None] + 20 > K)
    yield p.Clusters(labels), labels[..., None] == labels[..., None, :]
    yield p.QueriesAt(p.Causal(), low[0, 0]), low[0, 0][:, None] >= K
    yield pickle.loads(pickle.dumps(p.KeyPadding(valid))) | p.Sinks(1), valid[:, None, None] | (K < 1)


def test_arrays_of_patterns_are_operands():
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(lambda q, k, v, x: spattn.attention(q, k, v, x), backend=counter, fullgraph=True)
    rng, tensors = np.random.default_rng(4), operands(2)
    for _ in range(3):
        for pattern, mask in arrays_of(rng):
            check(step, pattern, mask, *tensors)
    assert counter.frame_count == 6


def test_score_sinks_and_dropout_with_packings():
    slopes, sinks = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64), torch.arange(4.0, dtype=torch.float64)
    counter = CompileCounterWithBackend("aot_eager")

    def run(q, k, v, ids):
        documents = p.Causal() & p.Documents.from_segment_ids(ids)
        return spattn.attention(q, k, v, documents, score=lambda s, b, h, i, j: s - slopes[h] * (i - j), sinks=sinks)

    step = torch.compile(run, backend=counter, fullgraph=True)
    rng, (q, k, v) = np.random.default_rng(5), operands()
    bias = -slopes[:, None, None] * torch.from_numpy(Q - K)
    for _ in range(5):
        cu = packing(rng)
        check(step, torch.from_numpy(owner(cu)), together(cu) & (K <= Q), q, k, v, bias=bias, sinks=sinks)
    assert counter.frame_count == 1
    drops = torch.compile(
        lambda q, k, v, x: spattn.attention(q, k, v, x, dropout_p=0.3, seed=7), backend="eager", fullgraph=True
    )
    pattern = p.Causal() & p.Documents.from_cu_seqlens(packing(rng))
    expected = spattn.attention(q, k, v, pattern, dropout_p=0.3, seed=7)
    torch.testing.assert_close(drops(q, k, v, pattern), expected, rtol=0, atol=0)


def test_inductor_and_a_graph_break():
    cu = packing(np.random.default_rng(6))
    q, k, v = operands()

    def breaks(q, k, v, cu):
        pattern = p.Causal() & p.Documents.from_cu_seqlens(cu)
        torch._dynamo.graph_break()
        return spattn.attention(q, k, v, pattern)

    mask = together(cu) & (K <= Q)
    check(torch.compile(breaks, backend="eager"), torch.from_numpy(cu), mask, q, k, v)
    check(torch.compile(INSIDE_STEP), torch.from_numpy(cu), mask, q, k, v)


def INSIDE_STEP(q, k, v, cu):
    return spattn.attention(q, k, v, INSIDE["causal"][0](cu))


def test_bad_values_raise_when_the_graph_runs():
    q, k, v = operands()
    step = torch.compile(INSIDE_STEP, backend="eager", fullgraph=True)
    with pytest.raises(ValueError, match="cu_seqlens: expected non-decreasing"):
        step(q, k, v, torch.tensor([0, 9, 4, N]))
    with pytest.raises(ValueError, match=r"lengths: expected at most 61 tokens \(kv_len\), got 70"):
        step(q, k, v, torch.tensor([0, 9, 40, 70]))
    wrong = torch.compile(
        lambda q, k, v: spattn.attention(q, k, v, p.SlidingWindow(-7)), backend="eager", fullgraph=True
    )
    with pytest.raises(ValueError, match="left: expected"):
        wrong(q, k, v)


def test_batches_of_calls():
    cu = packing(np.random.default_rng(7))
    q, k, v = (x.detach() for x in operands(3))
    documents = p.Causal() & p.Documents.from_cu_seqlens(cu)

    def run(q, k, v, pattern):
        return torch.func.vmap(lambda q, k, v: spattn.attention(q[None], k[None], v[None], pattern)[0])(q, k, v)

    step = torch.compile(run, backend="eager", fullgraph=True)
    expected, _ = dense(q, k, v, together(cu) & (K <= Q))
    torch.testing.assert_close(step(q, k, v, documents), expected, rtol=1e-9, atol=1e-9)
    with pytest.raises(Exception, match="must not differ between batch entries"):
        step(q, k, v, p.KeyPadding(np.ones((3, N), bool)))
