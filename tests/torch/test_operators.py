"""The operators themselves: what PyTorch asks of every operator, gradients, batches of calls, patterns as text."""

import importlib
import json
import pickle
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest

import spattn
from spattn import patterns as p
from spattn.testing import inputs, random

torch = pytest.importorskip("torch")
importlib.import_module("spattn.dispatch.torch_operators")  # registers the operators
text_of = importlib.import_module("spattn.dispatch.torch_text").text_of


WINDOW = p.SlidingWindow(7, 2)
OPTIONS = (None, None, "auto")  # allowed, scale, backend


def example(name):
    """A registered pattern's example with tensors q, k, v and dout in float64."""
    pattern, q_len, kv_len = p.registry.example(name)
    batch, heads = (max(least, size) for least, size in zip((1, 2), pattern.sizes(), strict=True))
    q, k, v = inputs(batch, heads, heads, q_len, kv_len, 3, dtype="float64")
    return pattern, [torch.from_numpy(x) for x in (q, k, v, random(q.shape, dtype="float64", seed=7))]


def check(q, k, v, dout, pattern, allowed=None, dlse=None):
    """Both operators are what PyTorch expects of one: schema, autograd, tensors without values, traced graphs."""
    text = text_of(pattern)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(torch.ops.spattn.attention.default, (*leaves, text, allowed, None, "auto", None))
    out, lse = torch.ops.spattn.attention(q, k, v, text, allowed, None, "auto", None)
    given = dout, dlse, q, k, v, out, lse, text, allowed, None, "auto"
    torch.library.opcheck(torch.ops.spattn.attention_backward.default, given)


@pytest.mark.filterwarnings("ignore:.*cells are evaluated")
@pytest.mark.parametrize("name", p.registry.names())
def test_opcheck(name):
    pattern, given = example(name)
    check(*given, pattern)


def strided(x, how):
    """The same numbers, lying otherwise in memory."""
    order = {"transposed": (0, 2, 1, 3), "features first": (3, 0, 1, 2), "batch last": (1, 2, 3, 0)}[how]
    return x.permute(order).contiguous().permute([order.index(axis) for axis in range(4)])


@pytest.mark.parametrize("how", ["transposed", "features first", "batch last", "repeated", "negated"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_opcheck_of_other_tensors(how, dtype):
    """Grouped heads, other lengths and another width of v; results lie in memory as the graph expects."""
    q, k, v = (torch.from_numpy(x).to(getattr(torch, dtype)) for x in inputs(2, 4, 2, 20, 30, 8, head_dim_v=5))
    dout, dlse = torch.randn(2, 4, 20, 5).to(q.dtype), torch.randn(2, 4, 20)
    if how == "repeated":
        given = [x[:1].expand(2, -1, -1, -1) for x in (q, k, v, dout)]
    elif how == "negated":
        given = [torch._neg_view(x) for x in (q, k, v, dout)]
    else:
        given = [strided(x, how) for x in (q, k, v, dout)]
    check(*given, WINDOW, dlse=dlse)
    out, lse = torch.ops.spattn.attention(*given[:3], text_of(WINDOW), *OPTIONS, None)
    want = spattn.attention(*given[:3], WINDOW, return_lse=True)
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1])


@pytest.mark.parametrize("sizes", [(0, 2, 2, 5, 5), (1, 2, 2, 0, 5), (1, 2, 2, 5, 0), (1, 0, 0, 5, 5)])
def test_opcheck_of_nothing(sizes):
    q, k, v = map(torch.from_numpy, inputs(*sizes, 8))
    check(q, k, v, torch.ones(q.shape), p.Causal())


MASK = np.random.default_rng(0).random((2, 1, 20, 30)) < 0.4
VALID = np.arange(30) < np.array([[30], [11]])


@pytest.mark.parametrize("kind", ["mask", "padding", "additive padding"])
def test_tensors_that_say_what_is_allowed(kind):
    """A mask of pairs, and padding in the two forms in which layers are given it, are joined to the text's pattern."""
    q, k, v = (torch.from_numpy(x) for x in inputs(2, 4, 2, 20, 30, 8))
    allowed = {
        "mask": torch.from_numpy(MASK),
        "padding": torch.from_numpy(VALID),
        "additive padding": torch.zeros(2, 30).masked_fill(torch.from_numpy(~VALID), -torch.inf),
    }[kind]
    other = p.Mask(MASK) if kind == "mask" else p.KeyPadding(VALID)
    for pattern, same in ((WINDOW, WINDOW & other), (p.Full(), other)):
        check(q, k, v, torch.ones_like(q), pattern, allowed)
        got = torch.ops.spattn.attention(q, k, v, text_of(pattern), allowed, None, "auto", None)
        assert all(map(torch.equal, got, spattn.attention(q, k, v, same, return_lse=True)))


@pytest.mark.filterwarnings("ignore:.*cells are evaluated")
@pytest.mark.parametrize("name", p.registry.names())
def test_finite_differences(name):
    """Of out and, where a row has keys, of lse."""
    pattern, (*given, _) = example(name)

    def both(q, k, v):
        out, lse = torch.ops.spattn.attention(q, k, v, text_of(pattern), None, 0.7, "auto", None)
        return out, torch.where(lse == -torch.inf, 0, lse)

    assert torch.autograd.gradcheck(both, [x.requires_grad_() for x in given], fast_mode=True)


@pytest.mark.parametrize("used", ["out", "lse", "both"])
def test_gradients_are_those_of_plain_calls(used):
    """Whatever the loss is made of, to the bit."""
    leaves = [torch.from_numpy(x).requires_grad_() for x in inputs(1, 4, 2, 20, 30, 8)]

    def gradients(out, lse):
        loss = (out.sum() if used != "lse" else 0) + (lse.square().sum() if used != "out" else 0)
        return torch.autograd.grad(loss, leaves)

    found = torch.ops.spattn.attention(*leaves, text_of(WINDOW), None, 0.3, "auto", None)
    want = gradients(*spattn.attention(*leaves, WINDOW, scale=0.3, return_lse=True))
    assert all(map(torch.equal, gradients(*found), want))


def test_a_second_derivative_is_an_error():
    leaves = [torch.from_numpy(x).requires_grad_() for x in inputs(1, 4, 2, 20, 30, 8)]
    out, _ = torch.ops.spattn.attention(*leaves, text_of(WINDOW), *OPTIONS, None)
    (first,) = torch.autograd.grad(out.square().sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="spattn.attention_backward.default but no autograd formula"):
        first.sum().backward()


def test_options_arrive(monkeypatch):
    """Scale, backend and precision of both passes."""
    from spattn import reference

    q, k, v = (torch.from_numpy(x) for x in inputs(1, 2, 2, 9, 9, 8))
    asked = []
    for name in ("prepare", "prepare_backward"):
        own = getattr(reference, name)
        monkeypatch.setattr(reference, name, lambda call, plan, own=own: asked.append(call.scale) or own(call, plan))
    spattn.clear_plan_cache()
    out, lse = torch.ops.spattn.attention(q, k, v, text_of("causal"), None, 0.3, "reference", None)
    torch.ops.spattn.attention_backward(out, None, q, k, v, out, lse, text_of("causal"), None, 0.4, "reference")
    assert asked == [0.3, 0.4]
    with pytest.raises(ValueError, match="^precision: 'tf32' is not supported by backend"):
        torch.ops.spattn.attention(q, k, v, text_of("causal"), None, None, "auto", "tf32")


# -- torch.func.vmap ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", [(0, 0, 0), (2, None, 1), (None, 4, None)])
def test_a_batch_of_calls(dims):
    """Over any axis of any operands, with gradients of those that all calls share."""
    given = [torch.from_numpy(x) for x in inputs(2, 4, 2, 20, 30, 8, dtype="float64")]
    given = [x if dim is None else torch.stack([x, 2 * x, x - 1], dim) for x, dim in zip(given, dims, strict=True)]
    leaves = [x.requires_grad_() for x in given]

    def attend(q, k, v):
        return spattn.attention(q, k, v, WINDOW, return_lse=True)

    got = torch.func.vmap(attend, dims)(*leaves)
    calls = [attend(*(x if d is None else x.select(d, n) for x, d in zip(leaves, dims, strict=True))) for n in range(3)]
    want = tuple(map(torch.stack, zip(*calls, strict=True)))
    assert all(map(torch.equal, got, want))
    gradients = [torch.autograd.grad((out * out).sum() + lse.sum(), leaves) for out, lse in (got, want)]
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_batch_of_calls_of_which_one_pattern_tells_the_batch_entries_apart():
    q, k, v = (torch.from_numpy(x) for x in inputs(2, 2, 2, 20, 30, 8))
    alike = torch.from_numpy(MASK[:1])
    got = torch.func.vmap(lambda q: spattn.attention(q, k, v, alike))(torch.stack([q, 2 * q]))
    assert torch.equal(got[1], spattn.attention(2 * q, k, v, alike))
    for pattern in (torch.from_numpy(MASK), p.Mask(MASK), p.KeyPadding(VALID)):
        with pytest.raises(ValueError, match="^pattern: must not differ between batch entries under torch.func"):
            torch.func.vmap(lambda q, one=pattern: spattn.attention(q, k, v, one))(q[None])


# -- patterns as text --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unregistered(p.Pattern):
    """Allows what Causal does."""

    def allows(self, q, k):
        return k <= q


class Sub(p.SlidingWindow):
    """Of a registered class, which it is not."""


COMPOSED = (p.SlidingWindow(3) & ~p.KeyPadding(VALID) | p.PerHead((p.Causal(), p.strided(4)))) - p.Mask(MASK[0])


@pytest.mark.parametrize(
    "pattern", [*(p.registry.example(name)[0] for name in p.registry.names()), COMPOSED], ids=lambda x: x.name
)
def test_a_text_says_all_of_a_pattern(pattern):
    """In any process: nothing but the text travels."""
    assert p.from_json(text_of(pattern)) == pattern
    assert json.loads(text_of(pattern)) == json.loads(pattern.to_json())


def test_a_text_is_read_in_another_process():
    program = "import sys; from spattn.patterns import from_json; sys.stdout.write(repr(from_json(sys.argv[1])))"
    done = subprocess.run(
        [sys.executable, "-c", program, text_of(COMPOSED)], capture_output=True, text=True, check=True
    )
    assert done.stdout == repr(COMPOSED)


def test_what_has_no_text():
    for pattern in (Unregistered(), Sub(3), p.Causal() & Unregistered(), p.PerHead((Unregistered(), p.Causal()))):
        assert text_of(pattern) is None
    assert text_of("causal") == text_of(p.Causal()) == text_of(spattn.plan(p.Causal(), 9)) == '{"pattern":"causal"}'
    plan = pickle.loads(pickle.dumps(spattn.plan(p.Causal(), 9)))
    assert text_of(plan) == '{"pattern":"causal"}'
    assert text_of("casual") is None and text_of(7) is None


def test_modes_that_see_operations_see_one():
    """A graph made from tensors with values would hold the values instead, and selective checkpoints keep nothing."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    q, k, v = (torch.from_numpy(x) for x in inputs(1, 2, 2, 20, 30, 8))
    arrays, want = [x.numpy() for x in (q, k, v)], spattn.attention(q, k, v, WINDOW)
    with Mode():
        got = spattn.attention(q, k, v, WINDOW)
        with pytest.raises(
            TypeError, match=r"^pattern: a PyTorch graph requires a serializable pattern, .*got Unregistered\(\)"
        ):
            spattn.attention(q, k, v, Unregistered())
        with pytest.raises(ValueError, match="^pattern: expected one of .*did you mean 'causal'"):
            spattn.attention(q, k, v, "casual")
        array = spattn.attention(*arrays, WINDOW)
    assert seen == ["spattn.attention.default"] and got.equal(want) and np.array_equal(array, want.numpy())
