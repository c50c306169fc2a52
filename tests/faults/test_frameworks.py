"""docs/faults.rst, "Frameworks" 41-44: each test is named by its number there. spattn registers itself nowhere and
knows of no other process: what follows from that is tested here."""

import numpy as np
import pytest

import spattn
from spattn import cpu
from spattn import patterns as p
from spattn.testing import DTYPES, Expectation, inputs, random

ARRAYS = ("dout", "q", "k", "v", "out", "lse")


@pytest.fixture
def tensors():
    """The tensors of a backward call by name, causal."""
    torch = pytest.importorskip("torch")
    q, k, v = map(torch.from_numpy, inputs(1, 4, 2, q_len=30, kv_len=40, head_dim=16))
    out, lse = spattn.attention(q, k, v, "causal", return_lse=True)
    return dict(zip(ARRAYS, (torch.from_numpy(random(out.shape, seed=5)), q, k, v, out, lse), strict=True))


def forward(dout, q, k, v, out, lse):
    return spattn.attention(q, k, v, "causal", return_lse=True)


def backward(dout, q, k, v, out, lse):
    return spattn.attention_backward(dout, q, k, v, out, lse, "causal")


def same(got, expected):
    return all(type(a) is type(b) and a.dtype == b.dtype and a.equal(b) for a, b in zip(got, expected, strict=True))


# -- 41: gradients -----------------------------------------------------------------------------------------------------

CARRYING = [*((forward, name) for name in "qkv"), *((backward, name) for name in ARRAYS)]


@pytest.mark.parametrize("leaf", [True, False], ids=["leaf", "result"])
@pytest.mark.parametrize("name", ARRAYS)
def test_fault_41_tensor_that_requires_a_second_gradient(tensors, name, leaf):
    """It is named before anything runs; under no_grad nobody expects a gradient, and the bits are the same."""
    import torch

    expected = backward(**tensors)
    wanting = tensors[name].clone().requires_grad_()
    given = tensors | {name: wanting if leaf else wanting * 1}
    message = rf"^{name}: \w+\(\) does not record gradients; use torch.no_grad\(\) or detach\(\)"
    with pytest.raises(RuntimeError, match=message):
        backward(**given)
    with torch.no_grad():
        assert same(backward(**given), expected)
        with torch.enable_grad(), pytest.raises(RuntimeError, match=message):
            backward(**given)
    assert same(backward(**{n: x.detach() for n, x in given.items()}), expected)


@pytest.mark.parametrize("leaf", [True, False], ids=["leaf", "result"])
@pytest.mark.parametrize("name", "qkv")
def test_fault_41_tensor_that_requires_a_gradient(tensors, name, leaf):
    """It gets its gradient, and no other tensor does; the bits are the same, and under no_grad nothing is recorded."""
    import torch

    expected = forward(**tensors)
    wanting = tensors[name].clone().requires_grad_()
    given = tensors | {name: wanting if leaf else wanting * 1}
    out, lse = forward(**given)
    assert same((out.detach(), lse.detach()), expected) and out.requires_grad and lse.requires_grad
    out.backward(tensors["dout"])
    assert torch.equal(wanting.grad, backward(**tensors)["qkv".index(name)])
    assert all(x.grad is None for n, x in tensors.items() if n != name)
    with torch.no_grad():
        assert same(forward(**given), expected)
        assert not any(x.requires_grad for x in forward(**given))


def test_fault_41_every_tensor_is_named(tensors):
    with pytest.raises(RuntimeError, match=r"^dout, k, lse: \w+\(\) does not record gradients"):
        backward(**{n: x.clone().requires_grad_(n in ("dout", "k", "lse")) for n, x in tensors.items()})


@pytest.mark.parametrize("call, name", CARRYING)
def test_fault_41_tensor_that_carries_a_tangent(tensors, call, name):
    """Forward-mode differentiation needs no requires_grad, and goes on under no_grad."""
    import torch
    from torch.autograd import forward_ad

    expected = call(**tensors)
    with forward_ad.dual_level():
        given = tensors | {name: forward_ad.make_dual(tensors[name], torch.ones_like(tensors[name]))}
        with torch.no_grad(), pytest.raises(RuntimeError, match=rf"^{name}: \w+\(\) does not record gradients"):
            call(**given)
        assert same(call(**{n: x.detach() for n, x in given.items()}), expected)


def test_fault_41_backward_inside_of_a_users_own_function(tensors):
    """What PyTorch hands to a Function's methods comes without grad mode, and nothing is recorded twice."""
    import torch

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            out, lse = spattn.attention(q, k, v, "causal", return_lse=True)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx, dout):
            return spattn.attention_backward(dout, *ctx.saved_tensors, "causal")

    leaves = [tensors[name].clone().requires_grad_() for name in "qkv"]
    Attention.apply(*leaves).backward(tensors["dout"])
    assert same([x.grad for x in leaves], backward(**tensors))


# -- 42: modes and transformations -------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [forward, backward])
def test_fault_42_inference_mode(tensors, call):
    import torch

    expected = call(**tensors)
    with torch.inference_mode():
        assert same(call(**tensors), expected)
        made_there = {name: x.clone() for name, x in tensors.items()}
        assert all(x.is_inference() for x in made_there.values()) and same(call(**made_there), expected)
    assert same(call(**made_there), expected)


@pytest.mark.parametrize("low", ["bfloat16", "float16"])
def test_fault_42_autocast(tensors, low):
    """q, k and v are cast as PyTorch casts those of its own attention; a backward takes its inputs as they are."""
    import torch

    low = getattr(torch, low)
    rounded = {name: x if name == "lse" else x.to(low) for name, x in tensors.items()}
    expected = [call(**given) for given in (rounded, tensors, rounded) for call in (forward, backward)]
    expected = [expected[0], expected[3], *expected[4:]]
    with torch.autocast("cpu", low):
        assert (tensors["q"][0, 0] @ tensors["q"][0, 0].T).dtype == low, "autocast is on"
        got = [call(**given) for given in (tensors, rounded) for call in (forward, backward)]
        assert all(map(same, got, expected))
        assert same(forward(**tensors | {"k": rounded["k"]}), expected[0])
    assert [x[0].dtype for x in got] == [low, torch.float32, low, low]
    with pytest.raises(TypeError, match="^k: expected dtype float32 like q, got "):
        forward(**tensors | {"k": rounded["k"]})


COMPILE = """
import torch
import spattn
from spattn.testing import inputs, random

def attend(q, k, v):
    out, lse = spattn.attention(2 * q, k, v, "causal", return_lse=True)
    return out + 1, lse.exp()

def both(q, k, v, dout):
    out, lse = spattn.attention(q, k, v, "causal", return_lse=True)
    return [x * 2 for x in spattn.attention_backward(dout + 1, q, k, v, out, lse, "causal")]

compiled, compiled_both = (torch.compile(f, backend="eager") for f in (attend, both))
for length, dtype in ((20, "float32"), (33, "float32"), (20, "bfloat16")):
    q, k, v = map(torch.from_numpy, inputs(1, 4, 2, q_len=length, head_dim=16)) if dtype == "float32" else (q, k, v)
    q, k, v = (x.to(getattr(torch, dtype)) for x in (q, k, v))
    with torch.no_grad():
        for got, want in zip(compiled(q, k, v), attend(q, k, v), strict=True):
            assert got.dtype == want.dtype and torch.equal(got, want)
        for got, want in zip(compiled_both(q, k, v, q), both(q, k, v, q), strict=True):
            assert got.dtype == want.dtype and torch.equal(got, want)
for n in range(3):
    given = [x.clone().requires_grad_(m == n) for m, x in enumerate((q, k, v))]
    gradients = []
    for f in (compiled, attend):
        out, lse = f(*given)
        gradients.append(torch.autograd.grad((out * out).sum() + lse.sum(), given[n])[0])
    assert torch.equal(*gradients) and gradients[0].abs().sum() > 0
with torch.no_grad():
    for got, want in zip(torch.compile(attend, backend="eager", fullgraph=True)(q, k, v), attend(q, k, v), strict=True):
        assert torch.equal(got, want)
    compiled = torch.compile(lambda q: attend(q, k, k[:, :, 1:]), backend="eager")
    for run in (compiled, lambda q: attend(q, k, k[:, :, 1:])):
        try:
            run(q)
        except ValueError as error:
            print(error)
"""


@pytest.mark.slow
def test_fault_42_compile(python):
    """One graph, in which spattn is an operator: eager's bits, and eager's errors when it runs."""
    pytest.importorskip("torch")
    error, same = python(COMPILE).splitlines()
    assert error == same and error.startswith("v: expected shape ")


@pytest.mark.parametrize("transform", ["grad", "jacrev", "jacfwd"])
def test_fault_42_transformations_of_torch_func(tensors, transform):
    """The tensors of a derivative hold something else than it seems, or nothing."""
    import torch

    def attend(q):
        return spattn.attention(q, tensors["k"], tensors["v"], "causal").sum()

    run = getattr(torch.func, transform)(attend)
    with pytest.raises(TypeError, match="^q: expected a plain array, got a tensor inside a transformation of torch"):
        run(tensors["q"])


@pytest.mark.parametrize("call", [forward, backward])
@pytest.mark.parametrize("transform", ["vmap", "functionalize"])
def test_fault_42_transformations_that_operators_follow(tensors, transform, call):
    """The bits of the calls one by one."""
    import torch

    def attend(q):
        return call(**tensors | {"q": q})

    q, several = tensors["q"], transform == "vmap"
    got = getattr(torch.func, transform)(attend)(torch.stack([q, 2 * q]) if several else q)
    for n, scale in enumerate((1, 2) if several else (1,)):
        assert same([x[n] for x in got] if several else got, attend(scale * q))


# -- 43: Hugging Face --------------------------------------------------------------------------------------------------


def test_fault_43_nothing_is_registered(python):
    """Transformers is not imported nor, where it is there already, touched: no backend without its mask function."""
    source = """
import sys, types

class Untouched(types.ModuleType):
    def __getattr__(self, name):
        if not name.startswith("__"):  # which inspect and warnings ask of all modules
            raise AssertionError(f"transformers.{name} is looked at")
        raise AttributeError(name)

if PRESENT:
    sys.modules["transformers"] = Untouched("transformers")
import spattn, spattn.cpu, spattn.reference, spattn.testing, spattn.cli
spattn.attention(*spattn.testing.inputs())
print(sorted(name for name in sys.modules if name.partition(".")[0] == "transformers"))
"""
    assert python(source.replace("PRESENT", "False")) == "[]\n"
    assert python(source.replace("PRESENT", "True")) == "['transformers']\n"


PADDED = (0, 7, 29)  # tokens of padding on the left of each batch entry


def left_padded(kv_len, q_len):
    """The patterns in which a batch of left-padded sequences may be said: for the last q_len queries of kv_len."""
    i, j = np.ogrid[kv_len - q_len : kv_len, :kv_len]
    padding = np.array(PADDED)[:, None, None]
    yield p.Mask(((j <= i) & (j >= padding) & (i >= padding))[:, None])
    yield p.Documents(tuple((n, kv_len - n) for n in PADDED)) & p.Causal()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("q_len", [1, 40], ids=["decoding", "prefill"])
def test_fault_43_left_padding_equals_eager_attention(forward, dtype, q_len):
    """Each sequence as if alone, whatever stands in the padding; queries in the padding harm nobody."""
    q, k, v = inputs(3, 4, 2, q_len, 40, 16, dtype=dtype)
    for pattern in left_padded(40, q_len):
        poisoned = [x.copy() for x in (k, v)]
        for entry, padding in enumerate(PADDED):
            for x in poisoned:
                x[entry, :, :padding] = np.nan
        out, lse = forward(q, *poisoned, pattern)
        for entry, padding in enumerate(PADDED):
            rows = slice(max(0, padding - (40 - q_len)), None)
            alone = q[entry : entry + 1, :, rows], *(x[entry : entry + 1, :, padding:] for x in (k, v))
            got = out[entry : entry + 1, :, rows], lse[entry : entry + 1, :, rows]
            Expectation(p.Causal(), *alone).check(*got, f"entry {entry} of {pattern!r:.40}")


def test_fault_43_decoding_step_by_step_equals_prefill():
    """One query against a growing cache: the rows of one causal call, within the budget."""
    q, k, v = inputs(1, 4, 2, 50, 50, 16)
    expectation = Expectation(p.Causal(), q, k, v)
    steps = [
        spattn.attention(q[:, :, n : n + 1], k[:, :, : n + 1], v[:, :, : n + 1], "causal", return_lse=True)
        for n in range(50)
    ]
    expectation.check(*(np.concatenate(parts, axis=2) for parts in zip(*steps, strict=True)))


# -- 44: tensor parallel -----------------------------------------------------------------------------------------------

HEADS = tuple(p.SlidingWindow(3 * n, n % 3) & p.Causal() if n % 2 else p.strided(n + 4) for n in range(16))


def shard(x, rank, ranks):
    """A rank's share of the heads."""
    own = x.shape[1] // ranks
    return x[:, rank * own : (rank + 1) * own]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("shared", [1, 2], ids=["one key head each", "grouped"])
def test_fault_44_heads_split_over_ranks(ranks, shared):
    """Every rank computes its heads alone, with its share of the patterns or of the mask, to the bits of the whole.

    Heads that share keys add up their dk and dv, in as many partial sums as the number of all heads suggests: those
    agree but for rounding.
    """
    q, k, v = inputs(1, 16, 16 // shared, 90, 90, 16)
    dout = random(q.shape, seed=3)
    mask = np.random.default_rng(0).random((16, 90, 90)) < 0.3

    def both(arrays, pattern):
        out, lse = spattn.attention(*arrays[1:], pattern, return_lse=True)
        return out, lse, *spattn.attention_backward(*arrays, out, lse, pattern)

    for whole, of_rank in (
        (p.PerHead(HEADS), lambda own: p.PerHead(HEADS[own])),
        (mask, lambda own: mask[own]),
        (p.Causal(), lambda own: p.Causal()),
    ):
        expected = both((dout, q, k, v), whole)
        for rank in range(ranks):
            own = slice(rank * 16 // ranks, (rank + 1) * 16 // ranks)
            got = both([shard(x, rank, ranks) for x in (dout, q, k, v)], of_rank(own))
            want = [shard(x, rank, ranks) for x in expected]
            alike = len(want) if shared == 1 else 3
            assert all(np.array_equal(a, b) for a, b in zip(got[:alike], want[:alike], strict=True))
            for a, b in zip(got[alike:], want[alike:], strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize(
    "heads, heads_kv, pattern, message",
    [
        (6, 4, p.Causal(), "^k: expected a number of heads that divides q's 6, got 4"),
        (2, 4, p.Causal(), "^k: expected a number of heads that divides q's 2, got 4"),
        (4, 4, p.PerHead(HEADS[:3]), "heads"),
        (4, 2, p.PerHead(HEADS), "heads"),
        (4, 4, np.ones((3, 20, 20), bool), "heads"),
        (4, 2, np.ones((8, 20, 20), bool), "heads"),
        (4, 4, p.PerHead(HEADS[:2]) & p.PerHead(HEADS[:3]), "heads"),
    ],
    ids=lambda x: None if isinstance(x, (np.ndarray, p.Pattern)) else str(x),
)
def test_fault_44_heads_that_do_not_divide(monkeypatch, heads, heads_kv, pattern, message):
    """Refused on every rank alike, from shapes alone: no kernel has run."""
    q, k, v = inputs(1, heads, heads_kv, 20, 20, 8)
    out, lse = q.copy(), np.zeros(q.shape[:3], np.float32)
    for name in ("forward", "backward"):
        monkeypatch.setattr(cpu, name, lambda *args: pytest.fail("a kernel ran"))
    with pytest.raises(ValueError, match=message):
        spattn.attention(q, k, v, pattern)
    with pytest.raises(ValueError, match=message):
        spattn.attention_backward(out, q, k, v, out, lse, pattern)


def test_fault_44_patterns_of_different_numbers_of_heads_are_refused_at_construction():
    with pytest.raises(ValueError, match="^patterns: expected patterns for one head or 3, got one for 2"):
        p.PerHead((p.Causal(), p.Full(), p.Mask(np.ones((2, 9, 9), bool))))
