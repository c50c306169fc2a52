"""PyTorch's operators on a GPU: the same graphs, ordered on the caller's stream."""

from __future__ import annotations

import pytest

import spattn
from spattn import patterns

pytestmark = [pytest.mark.family("sm80"), pytest.mark.gpu]

PATTERN = patterns.longformer(64, global_tokens=3)
DELAY = 400_000_000  # clock cycles, about 0.2 s
BOTH = pytest.mark.parametrize(
    ("family", "dtype"),
    [("sm80", "float32"), ("sm80", "bfloat16"), ("sm90", "bfloat16")],
    indirect=["family"],
)


@pytest.fixture(autouse=True)
def fresh(torch):
    """No graph of another test is found."""
    torch._dynamo.reset()
    torch.manual_seed(0)


def tensors(torch, dtype, length=300):
    """q, k and v of which gradients are wanted, with grouped heads and heads behind tokens in memory."""
    made = [torch.randn(2, length, heads, 64, device="cuda", dtype=getattr(torch, dtype)) for heads in (4, 2, 2)]
    return [x.transpose(1, 2).requires_grad_() for x in made]


def attend(q, k, v, pattern=PATTERN):
    out, lse = spattn.attention(2 * q, k, v, pattern, return_lse=True)
    return out + 1, lse.exp()


def step(torch, function, operands, *others):
    """Results and gradients."""
    out, lse = function(*operands, *others)
    return out, lse, *torch.autograd.grad((out * out).float().sum() + lse.sum(), operands)


def same(torch, got, want):
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@BOTH
def test_opcheck(torch, dtype):
    from spattn.dispatch.torch_operators import text_of  # which registers the operators

    operands, text = tensors(torch, dtype), text_of(PATTERN)
    torch.library.opcheck(torch.ops.spattn.attention.default, (*operands, text, None, None, "auto", None))
    plain = [x.detach() for x in operands]
    out, lse = spattn.attention(*plain, PATTERN, return_lse=True)
    given = torch.randn_like(out), torch.randn_like(lse), *plain, out, lse, text, None, None, "auto"
    torch.library.opcheck(torch.ops.spattn.attention_backward.default, given)


@BOTH
def test_one_graph(torch, dtype):
    """To the bit, of all lengths; a mask is an operand."""
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (300, 411):
        operands = tensors(torch, dtype, length)
        mask = torch.rand(length, length, device="cuda") < 0.4
        for others in ((), (mask,)):
            got = step(torch, compiled, operands, *others)
            assert same(torch, got, step(torch, attend, operands, *others))


@BOTH
def test_on_the_callers_stream(torch, dtype):
    """Operands that are still being written there are waited for there, and the host does not wait."""
    values = [x.detach() for x in tensors(torch, dtype)]
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    expected = compiled(*values)
    operands = [torch.full_like(x, torch.nan) for x in values]
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(DELAY)
        for x, value in zip(operands, values, strict=True):
            x.copy_(value)
        got = compiled(*operands)
        assert not side.query(), "the call waited for the stream"
    side.synchronize()
    assert same(torch, got, expected)


@BOTH
def test_captured(torch, dtype):
    """A compiled step, forward and backward, in a CUDA graph that is run again with other numbers."""
    operands = tensors(torch, dtype)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(torch, compiled, operands)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step(torch, compiled, operands)
    with torch.no_grad():
        for x in operands:
            x.copy_(torch.randn_like(x))
    graph.replay()
    assert same(torch, got, step(torch, attend, operands))


@BOTH
def test_graphs_of_the_compiler(torch, dtype):
    """By torch.compile's own compiler, which puts what it makes into CUDA graphs."""
    pytest.importorskip("triton", reason="PyTorch's compiler needs Triton for a GPU")
    compiled = torch.compile(attend, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        operands = tensors(torch, dtype)
        torch.compiler.cudagraph_mark_step_begin()
        got = [x.clone() for x in step(torch, compiled, operands)]
        for mine, theirs in zip(got, step(torch, attend, operands), strict=True):
            torch.testing.assert_close(mine, theirs)


@BOTH
def test_dropout(torch, dtype):
    """Seeds on the host and on the device; the compiler's CUDA graphs drop the pairs of each step's seed."""
    pytest.importorskip("triton", reason="PyTorch's compiler needs Triton for a GPU")

    def dropped(q, k, v, seed):
        out, lse = spattn.attention(2 * q, k, v, PATTERN, return_lse=True, dropout_p=0.3, seed=seed)
        return out + 1, lse.exp()

    one_graph = torch.compile(dropped, backend="aot_eager", fullgraph=True)
    captured = torch.compile(dropped, fullgraph=True, mode="reduce-overhead")
    for device in ("cuda", "cpu"):
        for seed in range(5):
            operands, own = tensors(torch, dtype), torch.tensor(seed, device=device)
            want = step(torch, dropped, operands, seed)
            assert same(torch, step(torch, one_graph, operands, own), want)
            torch.compiler.cudagraph_mark_step_begin()
            got = [x.clone() for x in step(torch, captured, operands, own)]
            for mine, theirs in zip(got, want, strict=True):
                torch.testing.assert_close(mine, theirs)


@BOTH
def test_opcheck_of_dropout(torch, dtype):
    from spattn.dispatch.torch_operators import text_of

    seed = torch.tensor(3, device="cuda")
    given = *tensors(torch, dtype), None, [], [], [], None, seed, 0.3, text_of(PATTERN), None, None, "auto", None
    torch.library.opcheck(torch.ops.spattn.scored_attention.default, given)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("family", ["sm80", "sm90"], indirect=True)
def test_layer(torch, compiled):
    """With padding, under autocast: as on the CPU."""
    from spattn.torch import SparseAttention

    layer = SparseAttention(256, 4, PATTERN, num_kv_heads=2)
    x, padding = torch.randn(2, 300, 256), torch.arange(300) >= torch.tensor([[300], [211]])
    want = layer(x, x, x, padding)[0]
    on_gpu = SparseAttention(256, 4, PATTERN, num_kv_heads=2, device="cuda")
    on_gpu.load_state_dict(layer.state_dict())
    run = torch.compile(on_gpu, backend="aot_eager", fullgraph=True) if compiled else on_gpu
    x, padding = x.cuda(), padding.cuda()
    with torch.autocast("cuda", torch.bfloat16):
        got = run(x, x, x, padding)[0]
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float().cpu(), want, rtol=0.05, atol=0.05)
    got.float().square().sum().backward()
    assert all(one.grad is not None and one.grad.isfinite().all() for one in on_gpu.parameters())
