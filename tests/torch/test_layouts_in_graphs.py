"""Layouts in graphs of PyTorch, under its autograd and its transformations: resolved before an operator is called."""

import pytest

import spattn
from spattn import patterns as p

torch = pytest.importorskip("torch")
import spattn.torch  # noqa: E402 - which needs PyTorch

GRID = (6, 5)
NEAR = p.Neighborhood(GRID, 3)
PACKED = p.Documents.from_cu_seqlens([0, 12, 12, 30])
CASES = {
    "bshd": ((2, 30, 4, 8), p.Causal(), "bshd"),
    "thd": ((30, 4, 8), PACKED, "thd"),
    "grid": ((2, 4, *GRID, 8), NEAR, "bhsd"),
    "grid, bshd": ((2, *GRID, 4, 8), NEAR, "bshd"),
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request):
    return request.param


@pytest.fixture(autouse=True)
def no_graphs():
    torch.compiler.reset()


def tensors(shape, requires_grad=False, **options):
    torch.manual_seed(0)
    return [torch.randn(shape, **options).requires_grad_(requires_grad) for _ in range(3)]


def test_gradients_are_recorded(case):
    shape, pattern, layout = case
    operands = tensors(shape, True, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda *given: spattn.attention(*given, pattern, layout=layout, return_lse=True), operands, fast_mode=True
    )


def test_gradients_of_sums_and_of_turned_results(case):
    """dout repeats one number, or its axes lie in memory in the opposite order."""
    shape, pattern, layout = case
    q, k, v = tensors(shape, True)
    for loss in (torch.sum, lambda out: (out.permute(*reversed(range(out.ndim))).contiguous() ** 2).sum()):
        found = torch.autograd.grad(loss(spattn.attention(q, k, v, pattern, layout=layout)), (q, k, v))
        out, lse = (x.detach() for x in spattn.attention(q, k, v, pattern, layout=layout, return_lse=True))
        dout = torch.autograd.grad(loss(out.requires_grad_()), out)[0].contiguous()
        plain = [x.detach() for x in (dout, q, k, v, out)]
        expected = spattn.attention_backward(*plain, lse, pattern, layout=layout)
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_calls(case, dynamic):
    shape, pattern, layout = case

    def attend(q, k, v):
        return spattn.attention(q, k, v, pattern, layout=layout, return_lse=True)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    operands = tensors(shape, True)
    found, expected = compiled(*operands), attend(*operands)
    assert all(map(torch.equal, found, expected)) and found[0].stride() == expected[0].stride()
    dout = torch.ones_like(found[0])
    for x, y in zip(*(torch.autograd.grad(one[0], operands, dout) for one in (found, expected)), strict=True):
        assert torch.equal(x, y)
    out, lse = (x.detach() for x in expected)
    backward = torch.compile(spattn.attention_backward, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    given = [x.detach() for x in (dout, *operands, out, lse)]
    gradients = (one(*given, pattern, layout=layout) for one in (backward, spattn.attention_backward))
    assert all(map(torch.equal, *gradients))


def test_calls_over_a_batch(case):
    shape, pattern, layout = case
    many = tensors((3, *shape))
    mapped = torch.func.vmap(lambda *given: spattn.attention(*given, pattern, layout=layout, return_lse=True))(*many)
    for n, one in enumerate(zip(*many, strict=True)):
        single = spattn.attention(*one, pattern, layout=layout, return_lse=True)
        assert all(torch.equal(batch[n], x) for batch, x in zip(mapped, single, strict=True))


def test_exported_calls(case):
    shape, pattern, layout = case

    class Attend(torch.nn.Module):
        def forward(self, q, k, v):
            return spattn.torch.attention(q, k, v, pattern, layout=layout)

    operands = tuple(tensors(shape))
    program = torch.export.export(Attend(), operands)
    assert torch.equal(program.module()(*operands), Attend()(*operands))


@pytest.mark.parametrize(
    "pattern", [p.Neighborhood((5, 6), 3), p.Full(), torch.ones(30, 30, dtype=torch.bool)], ids=type
)
def test_a_graph_of_arrays_whose_grid_is_not_the_patterns(pattern):
    def attend(q):
        return spattn.attention(q, q, q, pattern)

    q = tensors((2, 4, *GRID, 8))[0]
    with pytest.raises(ValueError, match="^q: expected the grid of the pattern"):
        torch.func.vmap(attend)(q[None])
    with pytest.raises(Exception, match="q: expected the grid of the pattern"):
        torch.compile(attend, fullgraph=True, backend="aot_eager")(q)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_graph_of_what_is_no_tensor(name):
    """The graph ends before the call, which names it."""
    given = dict.fromkeys("qkv", tensors((1, 30, 4, 8))[0]) | {name: [1]}
    compiled = torch.compile(lambda: spattn.attention(**given, layout="bshd"), backend="aot_eager")
    with pytest.raises(TypeError, match=f"^{name}: expected a NumPy, PyTorch, CuPy or JAX array, got list"):
        compiled()


def test_a_graph_of_an_unknown_layout():
    q = tensors((2, 4, 30, 8))[0]
    with pytest.raises(ValueError, match="^layout: expected one of 'bhsd', 'bshd', 'thd'; got 'bdsh'"):
        torch.func.vmap(lambda q: spattn.attention(q, q, q, layout="bdsh"))(q[None])
