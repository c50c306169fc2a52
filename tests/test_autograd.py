"""Gradients that PyTorch records: right for every pattern, and only where somebody wants them."""

import numpy as np
import pytest

import spattn
from spattn import patterns as p
from spattn.patterns.base import class_registry as _registry
from spattn.testing import inputs

torch = pytest.importorskip("torch")

WINDOW = p.SlidingWindow(7, 2)


@pytest.fixture
def leaves():
    """q, k and v in float64, of which gradients are wanted."""
    return [torch.from_numpy(x).requires_grad_() for x in inputs(1, 4, 2, 20, 30, 8, dtype="float64")]


def dense(q, k, v, pattern):
    """The same by PyTorch's own operations: out and lse."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    allowed = torch.from_numpy(pattern.index_set(q.shape[2], k.shape[2]).to_dense())
    logits = (q @ k.mT * q.shape[3] ** -0.5).masked_fill(~allowed, -torch.inf)
    return torch.softmax(logits, -1) @ v, torch.logsumexp(logits, -1)


@pytest.mark.filterwarnings("ignore:.*cells are evaluated")
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", p.registry.names())
def test_finite_differences(name, backend):
    """Of out and, where a row has keys, of lse."""
    pattern, q_len, kv_len = p.registry.example(name)
    _, heads = pattern.sizes()
    heads = max(2, heads)
    given = inputs(max(1, pattern.sizes()[0]), heads, heads, q_len, kv_len, 3, dtype="float64")

    def both(q, k, v):
        out, lse = spattn.attention(q, k, v, pattern, backend=backend, return_lse=True)
        return out, torch.where(lse == -torch.inf, 0, lse)

    assert torch.autograd.gradcheck(both, [torch.from_numpy(x).requires_grad_() for x in given], fast_mode=True)


@pytest.mark.parametrize("used", ["out", "lse", "both"])
def test_as_through_dense_attention(leaves, used):
    """Whatever the loss is made of; a sum hands back a gradient of stride 0."""

    def loss(out, lse):
        return (out.sum() if used != "lse" else 0) + (lse.square().sum() if used != "out" else 0)

    got = torch.autograd.grad(loss(*spattn.attention(*leaves, WINDOW, return_lse=True)), leaves, allow_unused=True)
    want = torch.autograd.grad(loss(*dense(*leaves, WINDOW)), leaves, allow_unused=True)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, torch.zeros_like(mine) if theirs is None else theirs)


def test_only_what_somebody_wants(leaves):
    q, k, v = leaves
    out = spattn.attention(q.detach(), k, v.detach(), WINDOW)
    out.sum().backward()
    assert k.grad is not None and q.grad is None and v.grad is None
    assert not spattn.attention(*(x.detach() for x in leaves), WINDOW).requires_grad
    with torch.no_grad():
        assert not spattn.attention(*leaves, WINDOW).requires_grad
    with torch.inference_mode():
        assert spattn.attention(*leaves, WINDOW).is_inference()


@pytest.mark.parametrize("loss", [torch.sum, torch.norm], ids=["linear", "norm"])
def test_a_second_derivative_is_an_error(leaves, loss):
    """Also where the loss is linear, so that its own gradient requires none."""
    (first,) = torch.autograd.grad(loss(spattn.attention(*leaves, WINDOW)), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="^spattn.attention is not twice differentiable"):
        (first.square().sum() + leaves[0].sum()).backward()


def test_operands_that_were_changed_are_an_error(leaves):
    out = spattn.attention(*leaves, WINDOW)
    with torch.no_grad():
        leaves[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_checkpoints(leaves):
    """A forward that is thrown away and computed again leaves the same bits."""
    from torch.utils.checkpoint import checkpoint

    expected = torch.autograd.grad(spattn.attention(*leaves, WINDOW).square().sum(), leaves)
    again = checkpoint(lambda *x: spattn.attention(*x, WINDOW).square().sum(), *leaves, use_reentrant=False)
    assert all(map(torch.equal, torch.autograd.grad(again, leaves), expected))


@pytest.mark.parametrize("kind", ["array", "name"])
def test_the_pattern_is_that_of_the_forward(leaves, kind):
    """Whatever became of the mask, or of the name, before the backward."""
    q, k, v = leaves
    mask = WINDOW.index_set(20, 30).to_dense()

    def register(pattern):
        @p.authoring.register("of_a_forward")
        class OfAForward(p.Pattern):
            def allows(self, q, k):
                return pattern.allows(q, k)

    try:
        register(WINDOW)
        out = spattn.attention(q, k, v, mask if kind == "array" else "of_a_forward")
        mask[...] = True
        register(p.Causal())
        got = torch.autograd.grad(out.square().sum(), leaves)
    finally:
        _registry._REGISTRY.pop("of_a_forward", None)
    want = torch.autograd.grad(spattn.attention(q, k, v, WINDOW).square().sum(), leaves)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_wrong_arguments_are_named_as_ever(leaves):
    q, k, v = leaves
    with pytest.raises(TypeError, match="^k: expected dtype float64 like q, got float32"):
        spattn.attention(q, k.float(), v, WINDOW)
    with pytest.raises(TypeError, match="^v: expected a torch array like q, got numpy"):
        spattn.attention(q, k, v.detach().numpy(), WINDOW)
    with pytest.raises(ValueError, match="^pattern: expected one of "):
        spattn.attention(q, k, v, "nothing_of_that_name")
    with pytest.raises(ValueError, match="^scale must be finite"):
        spattn.attention(q, k, v, WINDOW, scale=np.nan)


def test_a_layer_learns():
    """A step of a layer with projections: the same as through dense attention."""

    def step(attend):
        torch.manual_seed(0)
        layer = torch.nn.ModuleList(torch.nn.Linear(16, 16, dtype=torch.float64) for _ in range(4))
        optimiser, x = torch.optim.SGD(layer.parameters(), 0.1), torch.randn(2, 30, 16, dtype=torch.float64)
        for _ in range(3):
            q, k, v = (one(x).view(2, 30, 4, 4).transpose(1, 2) for one in layer[:3])
            loss = (layer[3](attend(q, k, v, WINDOW)[0].transpose(1, 2).reshape(2, 30, 16)) - x).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        return [loss.detach(), *(x.detach() for x in layer.parameters())]

    def attend(*arguments):
        return spattn.attention(*arguments, return_lse=True)

    for mine, theirs in zip(step(attend), step(dense), strict=True):
        torch.testing.assert_close(mine, theirs)
