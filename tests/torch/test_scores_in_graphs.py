"""Score functions and sinks in graphs of PyTorch: torch.compile, torch.export, vmap, and the operators themselves."""

import functools

import numpy as np
import pytest

import spattn
from spattn import patterns as p
from spattn import score as f
from spattn.testing import inputs

torch = pytest.importorskip("torch")

from spattn.dispatch.torch_text import text_of  # noqa: E402
from spattn.score.serialized import serialize  # noqa: E402
from spattn.score.tracing import trace  # noqa: E402
from spattn.torch import SparseAttention  # noqa: E402

from .test_graphs import fresh, graphs  # noqa: E402, F401

WINDOW = p.SlidingWindow(5, 2)
HEADS, Q_LEN, KV_LEN = 4, 18, 23


def tensors(q_len=Q_LEN, kv_len=KV_LEN, batch=2, dtype="float64"):
    return [torch.from_numpy(x).requires_grad_() for x in inputs(batch, HEADS, 2, q_len, kv_len, 8, dtype=dtype)]


def random(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).requires_grad_()


def same(got, want):
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(got, want, strict=True))


def step(function, operands, *captured):
    """out, lse, and the gradients of all operands and captured tensors."""
    out, lse = function(*operands, *captured)
    leaves = [*operands, *(x for x in captured if x.requires_grad)]
    return out, lse, *torch.autograd.grad(out.square().sum() + lse.square().sum(), leaves)


def compiled(function, **options):
    return torch.compile(function, **{"backend": "aot_eager", "fullgraph": True} | options)


class Layer(torch.nn.Module):
    """Captured parameters, a Python float, a NumPy array, and a size of the call."""

    def __init__(self):
        super().__init__()
        self.slopes = torch.nn.Parameter(random(HEADS))
        self.table = torch.nn.Parameter(random(HEADS, 9, seed=1))
        self.sinks = torch.nn.Parameter(random(HEADS, seed=2))
        self.cap, self.gains = 3.0, np.linspace(1, 2, HEADS)
        self.alibi = f.alibi(self.slopes)

    def score(self, score, b, h, q, k):
        return score + self.table[h][torch.clamp(k - q, -4, 4) + 4].exp()

    def forward(self, q, k, v):
        n = k.shape[2]
        score = f.softcap(self.cap) | self.alibi | self.score | (lambda s, b, h, i, j: s - (j - i) / n)
        if self.gains is not None:
            score = score | (lambda s, b, h, i, j: s * self.gains[h])
        return spattn.attention(q, k, v, WINDOW, score=score, sinks=self.sinks, return_lse=True)


# -- torch.compile -----------------------------------------------------------------------------------------------------

HALF, TWO = np.float32(0.5), np.int64(2)
BUCKETS = torch.arange(9) % 3


def user_function(table):
    """Look-ups, functions of torch, methods, NumPy's numbers, a row of a table, a sum of all elements."""

    def score(s, b, h, q, k):
        near = torch.where((q - k).abs() < 3, 2.5 * torch.sigmoid(s) ** 2, torch.maximum(s, (k - q).float() * HALF))
        row = table[h]
        return (
            near + row[k - q + 30] * row[k] - table[-1, BUCKETS[q % 9]] + torch.div(k, TWO, rounding_mode="floor") * b
        )

    return f.from_score_mod(score) | (
        lambda s, b, h, q, k: s + 0.01 * table.sum() * f.exp(-0.5) - f.maximum(table[0, 0], 0.25)
    )


def library(table):
    """Every function that captures arrays."""
    parts = f.bias(table[:, None, :KV_LEN]), f.alibi(symmetric=True), f.alibi(table[:, 0]), f.softcap(table[:, 1].exp())
    parts += f.temperature(table[:, 2].exp()), f.t5_bias(table.mT[:32]), f.relative_bias(table[:, :9])
    return f.compose(*parts, f.swin_bias(table.mT[:9], (2, 2)), f.natten_rpb(table[:, :25], 13), f.softcap(5.0))


@pytest.mark.parametrize("make", [user_function, library])
def test_one_graph(make):
    """With eager's bits, also of gradients, where the function is made in the graph."""

    def attend(q, k, v, table, sinks):
        return spattn.attention(q, k, v, WINDOW, score=make(table), sinks=sinks, return_lse=True)

    captured = random(HEADS, 60), random(HEADS, seed=1)
    got, want = step(compiled(attend), tensors(), *captured), step(attend, tensors(), *captured)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)  # literals are constants in eager calls
    assert graphs() == 1


def test_captured_values_are_operands():
    """Fifty steps of one graph see changes of parameters, and of a NumPy array."""
    layer, operands = Layer(), tensors()
    run = compiled(layer)
    leaves = list(layer.parameters())
    for _ in range(50):
        (out, lse), want = run(*operands), layer(*operands)
        assert same((out, lse), want)
        gradients = torch.autograd.grad(out.sum() + lse.sum(), leaves)
        with torch.no_grad():
            for x, gradient in zip(leaves, gradients, strict=True):
                x -= 0.01 * gradient
        layer.gains *= 1.01
    assert graphs() == 1


def test_captured_numbers_are_guarded():
    """A changed Python float is never stale; a tensor without axes needs no other graph."""
    q, k, v = tensors()

    def attend(cap):
        return spattn.attention(q, k, v, WINDOW, score=lambda s, b, h, i, j: cap * torch.tanh(s / cap), return_lse=True)

    run = compiled(attend, backend="eager")
    for cap in (3.0, 2.0, torch.tensor(2.0), torch.tensor(1.0)):
        assert same(run(cap), attend(cap))
    assert graphs() == 3


def test_one_graph_of_all_lengths():
    """Lengths that the function uses are numbers of the graph."""
    layer = Layer()
    run = compiled(layer, dynamic=True)
    for q_len, kv_len, batch in ((20, 30, 5), (33, 64, 3), (7, 100, 9)):  # equal lengths would be one for ever
        operands = tensors(q_len, kv_len, batch)
        leaves = [*operands, *layer.parameters()]
        got, want = run(*operands), layer(*operands)
        assert same(got, want)
        gradients = [torch.autograd.grad(out.square().sum() + lse.sum(), leaves) for out, lse in (got, want)]
        assert same(*gradients)
    assert graphs() == 1


@pytest.mark.filterwarnings("ignore:.*Dynamo does not know how to trace", "ignore:.*lru_cache")
def test_functions_of_numpy_break_the_graph():
    """The operator then gets what eager tracing finds; fullgraph=True refuses it."""
    table, operands = random(HEADS), tensors()

    def attend(q, k, v):
        score = lambda s, b, h, i, j: np.tanh(s) + table[h] * TABLE[h]  # noqa: E731
        return spattn.attention(2 * q, k, v, WINDOW, score=score, return_lse=True)

    assert same(step(compiled(attend, fullgraph=False), operands), step(attend, operands))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(attend)(*operands)


TABLE = np.linspace(1, 2, HEADS)


@pytest.mark.filterwarnings("ignore:.*Dynamo does not know how to trace", "ignore:.*lru_cache")
def test_functions_that_change_tensors_are_refused():
    """As by eager calls; the graph does not hold the change either."""
    q, k, v = (x.detach() for x in tensors())
    table = random(HEADS, 60).detach()
    before = table.clone()
    run = compiled(lambda q: spattn.attention(q, k, v, score=lambda s, b, h, i, j: s + table.mul_(2)[h, j]))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="score: a score function must not change arrays"):
        run(q)
    assert torch.equal(table, before)


def test_the_backward_and_layouts():
    """The public backward function is one operator, too; it returns the gradients of captured floats, then of sinks."""
    table, sinks, whole = random(HEADS).detach(), random(HEADS, seed=1).detach(), torch.arange(HEADS)
    q, k, v = (x.detach()[0].transpose(0, 1) for x in tensors())
    options = {"score": lambda s, b, h, i, j: s * table[h] + whole[h], "sinks": sinks, "layout": "thd"}

    def both(q, k, v):
        out, lse = spattn.attention(q, k, v, WINDOW, return_lse=True, **options)
        dq, dk, dv, (dtable,), dsinks = spattn.attention_backward(out, q, k, v, out, lse, WINDOW, dlse=lse, **options)
        return out, lse, dq, dk, dv, dtable, dsinks

    assert same(compiled(both)(q, k, v), both(q, k, v))


def test_a_layer():
    """A module as the score function, sinks of the layer, and a padding mask, which is an operand."""

    class Bias(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Parameter(torch.zeros(HEADS, 9))

        def forward(self, s, b, h, q, k):
            return s + self.table[h, (k - q).clamp(-4, 4) + 4]

    torch.manual_seed(0)
    layer = SparseAttention(32, HEADS, WINDOW, score=Bias(), sinks=True)
    x, padding = torch.randn(2, 20, 32), torch.zeros(2, 20, dtype=torch.bool)
    run = compiled(lambda x, padding: layer(x, x, x, key_padding_mask=padding)[0])
    for tokens in (20, 17):
        padding[:, tokens:] = True
        found = [call(x, padding) for call in (run, run._torchdynamo_orig_callable)]
        gradients = [torch.autograd.grad(out.square().sum(), list(layer.parameters())) for out in found]
        assert torch.equal(*found)
        for got, want in zip(*gradients, strict=True):
            torch.testing.assert_close(got, want)
    assert graphs() == 1


def test_autocast():
    """Casts q, k and v, not what is captured."""
    table, operands = random(HEADS), tensors(dtype="float32")
    score = lambda s, b, h, i, j: s * table[h]  # noqa: E731

    def attend(q, k, v):
        return spattn.attention(q @ torch.eye(8), k, v, WINDOW, score=score, sinks=table, return_lse=True)

    with torch.autocast("cpu", torch.bfloat16):
        got = step(compiled(attend), operands)
        assert same(got, step(attend, operands)) and got[0].dtype == torch.bfloat16


# -- torch.export ------------------------------------------------------------------------------------------------------

READER = """
import sys
import torch
import spattn.torch

program, operands, expected = sys.argv[1:]
found = torch.export.load(program).module()(*torch.load(operands))
print(all(map(torch.equal, found, torch.load(expected))))
"""


@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")  # of the recorder
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_export(strict, python, tmp_path):
    """Of all lengths; its parameters are operands; another process runs it without the function."""
    layer = Layer()
    if strict:
        layer.gains = None  # PyTorch cannot export NumPy arrays here
    operands = [x.detach() for x in tensors()]
    tokens, keys = torch.export.Dim("tokens", min=2, max=100), torch.export.Dim("keys", min=2, max=100)
    shapes = {"q": {2: tokens}, "k": {2: keys}, "v": {2: keys}}
    program = torch.export.export(layer, tuple(operands), dynamic_shapes=shapes, strict=strict)
    assert program.graph_module.code.count("torch.ops.spattn.") == 1
    assert set(program.state_dict) == {"slopes", "table", "sinks"}
    if strict:
        given = [x.detach() for x in tensors(41, 77)]
        files = [str(tmp_path / name) for name in ("program.pt2", "operands.pt", "expected.pt")]
        for write, value, file in zip(
            (torch.export.save, torch.save, torch.save), (program, given, layer(*given)), files, strict=True
        ):
            write(value, file)
        assert python(f"import sys; sys.argv[1:] = {files!r}\n{READER}") == "True\n"
    module = program.module()
    for q_len, kv_len in ((18, 23), (41, 77)):
        given = [x.detach() for x in tensors(q_len, kv_len)]
        assert same(module(*given), layer(*given))
    with torch.no_grad():
        module.table.mul_(2)
        layer.table.mul_(2)
    assert same(module(*given), layer(*given))


def test_arrays_of_other_libraries_are_refused_in_graphs():
    """Autograd could not follow them, and an exported program could not hold them."""
    q, k, v = (x.detach() for x in tensors())
    with pytest.raises(TypeError, match="sinks: expected a tensor or a NumPy array in a graph of PyTorch, got list"):
        torch.func.vmap(lambda q: spattn.attention(q, k, v, sinks=[0.0] * HEADS))(q[None])


# -- the operators -----------------------------------------------------------------------------------------------------


def arguments(sinks=True, score=True):
    """Arguments of the forward operator: two captured tensors, of which one has integers."""
    table, whole = random(HEADS, 60), torch.arange(HEADS)
    function = lambda s, b, h, i, j: 2.5 * torch.tanh(s / 2.5) * table[h, j - i + 23] + whole[h] * (i + 70000)  # noqa: E731
    text, floats, integers, tables = serialize(trace(function)) if score else (None, [], [], [])
    own_sinks = random(HEADS, seed=1) if sinks else None
    no_dropout = None, 0.0
    return *tensors(), own_sinks, tables, floats, integers, text, *no_dropout, text_of(WINDOW), None, None, "auto", None


@pytest.mark.parametrize(("sinks", "score"), [(False, True), (True, False)])
def test_opcheck(sinks, score):
    """Schema, autograd, tensors without values, traced graphs of both operators."""
    given = arguments(sinks, score)
    torch.library.opcheck(torch.ops.spattn.scored_attention.default, given)
    given = torch.utils._pytree.tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, given)
    out, lse = torch.ops.spattn.scored_attention(*given)
    wanted = [x.is_floating_point() for x in given[4]]
    backward = random(*out.shape).detach(), None, *given[:3], out, lse, *given[3:10], wanted, *given[10:]
    torch.library.opcheck(torch.ops.spattn.scored_attention_backward.default, backward)


def test_finite_differences():
    """To q, k, v, captured tensors and sinks."""
    q, k, v, sinks, tables, *rest = arguments()
    leaves = [x for x in tables if x.is_floating_point()]

    def both(q, k, v, sinks, *leaves):
        again = iter(leaves)
        given = [next(again) if x.is_floating_point() else x for x in tables]
        return torch.ops.spattn.scored_attention(q, k, v, sinks, given, *rest)

    assert len(leaves) == 1
    assert torch.autograd.gradcheck(both, (q, k, v, sinks, *leaves), fast_mode=True)


def test_only_captured_tensors_need_gradients():
    q, k, v, sinks, tables, *rest = arguments()
    out, _ = torch.ops.spattn.scored_attention(*(x.detach() for x in (q, k, v, sinks)), tables, *rest)
    (gradient,) = torch.autograd.grad(out.sum(), [x for x in tables if x.requires_grad])
    assert gradient.abs().sum() > 0


def test_changed_captured_tensors_are_refused():
    q, k, v, sinks, tables, *rest = arguments()
    out, _ = torch.ops.spattn.scored_attention(q, k, v, sinks, tables, *rest)
    with torch.no_grad():
        sinks += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_texts_of_unknown_versions_are_refused():
    given = list(arguments())
    given[7] = given[7].replace('{"score":1,', '{"score":2,')
    with pytest.raises(ValueError, match="version 2 of serialized score functions is not supported, expected 1"):
        torch.ops.spattn.scored_attention(*given)


def test_checkpoints_that_keep_attention_alone():
    """The policy is asked for the operator."""
    from torch.utils import checkpoint

    layer, operands, asked = Layer(), tensors(), []

    def policy(context, operator, *args, **kwargs):
        asked.append(operator)
        kept = operator == torch.ops.spattn.scored_attention.default
        return checkpoint.CheckpointPolicy.MUST_SAVE if kept else checkpoint.CheckpointPolicy.PREFER_RECOMPUTE

    def run(*operands):
        contexts = functools.partial(checkpoint.create_selective_checkpoint_contexts, policy)
        return checkpoint.checkpoint(layer, *operands, use_reentrant=False, context_fn=contexts)

    assert same(step(run, operands), step(layer, operands))
    assert torch.ops.spattn.scored_attention.default in asked


# -- torch.func --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", [(0, None, None), (None, 1, None), (0, None, 0)])
def test_a_batch_of_calls(dims):
    """One call if what is captured is shared, else a call for each entry; gradients of shared operands are sums."""
    q, k, v = tensors()
    given = q, random(HEADS, 60), random(HEADS, seed=1)
    leaves = [
        (x if dim is None else torch.stack([x, 2 * x, x - 1], dim)).detach().requires_grad_()
        for x, dim in zip(given, dims, strict=True)
    ]

    def attend(q, table, sinks):
        score = lambda s, b, h, i, j: s * table[h, j - i + 23] + b  # noqa: E731
        return spattn.attention(q, k, v, WINDOW, score=score, sinks=sinks, return_lse=True)

    got = torch.func.vmap(attend, dims)(*leaves)
    entries = [
        attend(*(x if d is None else x.select(d, n) for x, d in zip(leaves, dims, strict=True))) for n in range(3)
    ]
    want = tuple(map(torch.stack, zip(*entries, strict=True)))
    assert same(got, want)
    gradients = [torch.autograd.grad(out.square().sum() + lse.sum(), leaves) for out, lse in (got, want)]
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_batch_of_gradients():
    """Gradients of captured tensors are not summed over the mapped axis."""
    q, k, v = (x.detach() for x in tensors())
    table, sinks = random(HEADS).detach(), random(HEADS, seed=1).detach()
    options = {"score": lambda s, b, h, i, j: s * table[h], "sinks": sinks}
    out, lse = spattn.attention(q, k, v, WINDOW, return_lse=True, **options)

    def gradients(dout):
        dq, dk, dv, (dtable,), dsinks = spattn.attention_backward(dout, q, k, v, out, lse, WINDOW, **options)
        return dq, dk, dv, dtable, dsinks

    douts = random(3, *out.shape).detach()
    got, want = torch.func.vmap(gradients)(douts), map(torch.stack, zip(*map(gradients, douts), strict=True))
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_derivatives_of_torch_func_are_refused():
    q, k, v = (x.detach() for x in tensors())
    with pytest.raises(
        (TypeError, RuntimeError), match="sinks: expected a plain array, got a tensor inside a transfor"
    ):
        torch.func.grad(lambda sinks: spattn.attention(q, k, v, sinks=sinks).sum())(random(HEADS).detach())
