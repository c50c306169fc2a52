"""Graphs whose patterns change: one for all packings, compared with dense attention in float64."""

import io
import pickle

import numpy as np
import pytest

import spattn
from spattn import patterns as p
from spattn.patterns.base.class_registry import pattern_class
from spattn.testing import inputs

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


def dense(q, k, v, mask, bias=0.0, sinks=None, rows=1.0):
    """Results and gradients of their sum of squares, by PyTorch's autograd in float64; `rows` are 0 without keys."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    scores = q @ k.repeat_interleave(2, 1).mT / WIDTH**0.5 + bias
    scores = scores.masked_fill(~torch.from_numpy(np.broadcast_to(mask, scores.shape).copy()), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    out = scores.softmax(-1)[..., :N] * rows @ v.repeat_interleave(2, 1)
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


def test_fifty_training_steps_are_one_graph():
    """Weights learn over packings that a tensor of segment ids holds in turn; each step equals dense attention."""
    weight = torch.nn.Parameter(torch.eye(WIDTH, dtype=torch.float64))
    counter = CompileCounterWithBackend("aot_eager")
    rng, (q, k, v) = np.random.default_rng(2), (x.detach() for x in operands())
    ids, valid = torch.zeros(N, dtype=torch.int32), torch.ones(1, N, dtype=torch.bool)

    @torch.compile(backend=counter, fullgraph=True)
    def loss(ids, valid):
        packed = p.Causal() & (p.Documents.from_segment_ids(ids) | p.Sinks(2))
        return spattn.attention(q @ weight, k, v, packed, key_padding=valid).square().sum()

    for _ in range(50):
        cu = packing(rng)
        ids.copy_(torch.from_numpy(owner(cu)))  # in place: no plan of the last packing is left
        valid.copy_(torch.from_numpy(rng.random(N) < 0.9)[None] | (torch.arange(N) == 0))
        mask = (together(cu) | (K < 2)) & (K <= Q) & valid.numpy()
        weight.grad = None
        found = loss(ids, valid)
        found.backward()
        expected, (dq, _, _) = dense(q @ weight.detach(), k, v, mask)
        torch.testing.assert_close(found.detach(), expected.square().sum(), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(weight.grad, (q.mT @ dq).sum((0, 1)), rtol=1e-9, atol=1e-9)
        with torch.no_grad():
            weight -= 1e-3 * weight.grad
    assert counter.frame_count == 1


def test_fifty_packings_that_are_made_outside():
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(lambda q, k, v, x: spattn.attention(q, k, v, x), backend=counter, fullgraph=True)
    rng, (q, k, v) = np.random.default_rng(2), operands()
    for _ in range(50):
        cu = packing(rng, 5)  # the number of documents is fixed: one graph also without dynamic shapes
        pattern = p.Causal() & (p.Documents.from_cu_seqlens(cu) | p.Sinks(2))
        check(step, pattern, (together(cu) | (K < 2)) & (K <= Q), q, k, v)
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


def test_equal_patterns_of_any_class_share_a_graph():
    for name in ("strided", "bigbird", "per_head", "neighborhood", "deepspeed_fixed", "queries_at", "block_layout"):
        pattern, length = pattern_class(name).example()
        tensors = [torch.from_numpy(x) for x in inputs(1, 4, q_len=length, head_dim=8, dtype="float64")]
        counter = CompileCounterWithBackend("eager")
        step = torch.compile(spattn.attention, backend=counter, fullgraph=True)
        expected = spattn.attention(*tensors, pattern)
        for _ in range(2):
            equal, _ = pattern_class(name).example()
            torch.testing.assert_close(step(*tensors, equal), expected, rtol=0, atol=0, msg=name)
        assert counter.frame_count == 1 and equal is not pattern, name
        torch._dynamo.reset()


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


CU, OTHER = np.array([0, 5, 20, N]), np.array([0, 1, 60, N])
VALID = np.random.default_rng(8).random((2, N)) < 0.7
VALID[:, 0] = True


@pytest.mark.parametrize("dtype", ["int64", "int32", "int16", "uint8"])
@pytest.mark.parametrize("form", ["cu_seqlens", "lengths", "segment_ids", "every second"])
def test_dtypes_strides_and_entries(form, dtype):
    """Each batch entry has documents of its own."""
    entries = np.stack([CU, OTHER])
    given = {"cu_seqlens": entries, "lengths": np.diff(entries)}.get(form, np.stack([owner(CU), owner(OTHER)]))
    given = torch.from_numpy(given.astype(dtype))
    make = {"cu_seqlens": p.Documents.from_cu_seqlens, "lengths": p.Documents}.get(form, p.Documents.from_segment_ids)
    if form == "every second":
        given = given.repeat_interleave(2, 1)[:, ::2]
    step = torch.compile(
        lambda q, k, v, x: spattn.attention(q, k, v, p.Causal() & make(x)), backend="eager", fullgraph=True
    )
    mask = np.stack([together(CU), together(OTHER)])[:, None] & (K <= Q)
    check(step, given, mask, *operands(2))


FORMS = {
    "one document": (lambda x: p.Documents.from_cu_seqlens(x), [0, N], together([0, N])),
    "empty documents": (lambda x: p.Documents.from_cu_seqlens(x), [0, 0, 5, 5, N, N], together([0, 5, N])),
    "three, two of them operands": (
        lambda x: (
            p.Documents.from_cu_seqlens(x)
            | p.RowIntervals(torch.arange(N), torch.full((N,), N) + x[0])
            | p.SlidingWindow(3, 0)
        ),
        CU,
        together(CU) | (K >= Q - 3) | (K >= Q),
    ),
    "text": (lambda x: p.Documents.from_cu_seqlens(x) & "causal", CU, together(CU) & (K <= Q)),
    "heads": (
        lambda x: p.PerHead([p.Causal(), p.Documents.from_cu_seqlens(x)]),
        CU,
        np.stack(np.broadcast_arrays(K <= Q, together(CU))).repeat(2, 0),
    ),
    "a number of the tensor": (lambda x: p.SlidingWindow(x[1]), CU, np.abs(Q - K) <= 5),
    "blocks": (
        lambda x: p.KeyBlocks(x[:1, None] + torch.arange(8)[:, None], block_q=8, block_kv=8),
        CU,
        Q // 8 == K // 8,
    ),
    "pairs": (lambda x: p.CSR(torch.arange(N + 1), torch.arange(N) + x[0], N), CU, Q == K),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_operands(name):
    make, given, mask = FORMS[name]
    step = torch.compile(lambda q, k, v, x: spattn.attention(q, k, v, make(x)), backend="eager", fullgraph=True)
    check(step, torch.tensor(given), mask, *operands())


def test_a_sequence_of_one_token():
    step = torch.compile(INSIDE_STEP, backend="eager", fullgraph=True)
    q, k, v = (x.detach()[:, :, :1] for x in operands())
    torch.testing.assert_close(step(q, k, v, torch.tensor([0, 1])), v.repeat_interleave(2, 1), rtol=0, atol=0)


PADDINGS = {
    "tensor": lambda x: x,
    "pattern": lambda x: p.KeyPadding(x),
    "additive, in bfloat16": lambda x: p.KeyPadding.from_additive(torch.where(x, 0.0, -torch.inf).bfloat16()),
}


@pytest.mark.parametrize("name", PADDINGS)
def test_key_padding_with_packings(name):
    def run(q, k, v, valid, cu):
        packed = p.Causal() & p.Documents.from_cu_seqlens(cu)
        return spattn.attention(q, k, v, packed, key_padding=PADDINGS[name](valid))

    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(run, backend=counter, fullgraph=True)
    q, k, v = operands(2)
    for cu, valid in ((CU, VALID), (OTHER, VALID[::-1])):
        mask = together(cu) & (K <= Q) & valid[:, None, None]
        given = torch.from_numpy(valid.copy()), torch.from_numpy(cu)
        out = step(q, k, v, *given)
        found = torch.autograd.grad(out.square().sum(), (q, k, v))
        rows = torch.from_numpy(mask.any(-1, keepdims=True))  # in some documents, every key is padding
        expected, gradients = dense(q, k, v, mask | ~mask.any(-1, keepdims=True), rows=rows)
        torch.testing.assert_close((out, *found), (expected, *gradients), rtol=1e-9, atol=1e-9)
    assert counter.frame_count == 1
    masked = torch.compile(
        lambda q, k, v, x: spattn.attention(q, k, v, torch.from_numpy(K <= Q), key_padding=x), backend="eager"
    )
    check(masked, p.KeyPadding(VALID), VALID[:, None, None] & (K <= Q), q, k, v)


def test_a_seed_and_a_packing_are_operands_of_one_graph():
    def run(q, k, v, cu, seed):
        packed = p.Causal() & p.Documents.from_cu_seqlens(cu)
        return spattn.attention(q, k, v, packed, dropout_p=0.3, seed=seed)

    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(run, backend=counter, fullgraph=True)
    tensors = operands()
    for seed in (0, 1, 1 << 40):
        for cu in (CU, OTHER):
            got = step(*tensors, torch.from_numpy(cu), torch.tensor(seed))
            wanted = spattn.attention(*tensors, p.Causal() & p.Documents.from_cu_seqlens(cu), dropout_p=0.3, seed=seed)
            of_got, of_wanted = (torch.autograd.grad(x.square().sum(), tensors) for x in (got, wanted))
            torch.testing.assert_close((got, *of_got), (wanted, *of_wanted), rtol=0, atol=0)
    assert counter.frame_count == 1


class Packed(torch.nn.Module):
    def forward(self, q, k, v, cu, valid):
        return spattn.attention(q, k, v, p.Causal() & p.Documents.from_cu_seqlens(cu), key_padding=valid)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_take_packings(strict):
    q, k, v = (x.detach() for x in operands())
    number = {0: torch.export.Dim("number", min=2, max=32)}
    given = q, k, v, torch.from_numpy(CU), torch.ones(1, N, dtype=torch.bool)
    program = torch.export.export(Packed(), given, dynamic_shapes=({}, {}, {}, number, {}), strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    run = torch.export.load(file).module()
    for cu in (CU, OTHER, np.array([0, N]), np.array([0, 1, 2, 9, 30, N])):
        expected, _ = dense(q, k, v, together(cu) & (K <= Q))
        found = run(q, k, v, torch.from_numpy(cu), torch.ones(1, N, dtype=torch.bool))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("compiled", [False, True])
def test_entries_of_vmap_have_packings_of_their_own(compiled):
    def one(q, k, v, ids):
        q, k, v = (torch.stack([torch.zeros_like(x), x]) for x in (q, k, v))
        return spattn.attention(q, k, v, p.Causal() & p.Documents.from_segment_ids(ids))[1]

    def run(*operands):
        return torch.func.vmap(one)(*operands)

    step = torch.compile(run, backend="eager", fullgraph=True) if compiled else run
    q, k, v = (x.detach() for x in operands(2))
    expected, _ = dense(q, k, v, np.stack([together(CU), together(OTHER)])[:, None] & (K <= Q))
    found = step(q, k, v, torch.from_numpy(np.stack([owner(CU), owner(OTHER)])))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


AS_PATTERNS = {
    "equal": lambda x: x + 1 if p.SlidingWindow(7) == p.SlidingWindow(7) else x,
    "not equal": lambda x: x + 1 if (p.Causal() & p.Sinks(2)) != (p.Causal() & p.Sinks(2)) else x,
    "key": lambda x: x + {p.Sinks(2): 100}[p.Sinks(2)],
    "number": lambda x: x + p.SlidingWindow(7).left,
    "method": lambda x: x + (p.Causal() & p.Documents((10, 51))).index_set(N, N).nnz,
    "attention and number": lambda x: (
        spattn.attention(x, x, x, packed := p.Documents((1, 1))) + (0 if packed is None else packed.lengths[0])
    ),
}


@pytest.mark.parametrize("name", AS_PATTERNS)
def test_a_pattern_in_a_compiled_function_is_the_pattern(name):
    """Comparisons, parameters and methods break the graph; they do not see the call that the graph holds."""
    x = torch.ones(1, 1, 2, 4)
    torch.testing.assert_close(torch.compile(AS_PATTERNS[name], backend="eager")(x), AS_PATTERNS[name](x))


def test_grids_with_operands_break_the_graph():
    x = torch.from_numpy(np.random.default_rng(9).standard_normal((1, 2, 5, 6, 8)))
    pattern = p.Neighborhood((5, 6), (3, 3))
    run = torch.compile(lambda x, valid: spattn.attention(x, x, x, pattern & p.KeyPadding(valid)), backend="eager")
    valid = torch.arange(30) < 20
    torch.testing.assert_close(run(x, valid), spattn.attention(x, x, x, pattern & p.KeyPadding(valid)), rtol=0, atol=0)
