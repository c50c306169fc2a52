"""Attacks on arguments: extreme integers, and calls that must be refused by name."""

import dataclasses
import json
import sys

import numpy as np
import pytest

import spattn
from spattn import patterns as p

from .oracle import arrays, dense


def from_data(data):
    return p.from_json(json.dumps(data))


N = 20  # tokens, where nothing else is said
QUERY, KEY = np.ogrid[:N, :N]
EVERY, NOBODY, CAUSAL = np.ones((N, N), bool), np.zeros((N, N), bool), KEY <= QUERY
REFUSAL = "expected", "needs", "must", "limit", "at most", "exceed"  # one of these is in each refusal


def predicate(allows):
    """A pattern of the caller's own."""
    body = {"allows": lambda self, q, k: allows(q, k)}
    return dataclasses.dataclass(frozen=True)(type("Mine", (p.Pattern,), body))()


def assert_exact(pattern, allowed):
    """A pattern allows the pairs of a mask in its index set, in its plan, and on both backends of the host."""
    q, k, v = arrays(N)
    allowed = np.broadcast_to(allowed, (N, N))
    np.testing.assert_array_equal(np.asarray(pattern.index_set(N, N).to_dense()), allowed)
    assert spattn.plan(pattern, N).nnz == allowed.sum()
    for backend in ("cpu", "reference"):
        assert abs(spattn.attention(q, k, v, pattern, backend=backend) - dense(q, k, v, allowed)).max() < 1e-5, backend


# -- ordinary uses, so that a package that refuses everything passes nothing -------------------------------------------

ORDINARY = {
    "Causal": (lambda: p.Causal(), CAUSAL),
    "SlidingWindow": (lambda: p.SlidingWindow(3, 0), CAUSAL & (QUERY - KEY <= 3)),
    "Documents": (lambda: p.Documents((10, 7)), (QUERY // 10 == KEY // 10) & (QUERY < 17) & (KEY < 17)),
    "Mask": (lambda: p.Mask(CAUSAL), CAUSAL),
    "KeyBlocks": (lambda: p.KeyBlocks(np.array([[0]]), N, N), EVERY),
    "BigBird": (lambda: p.BigBird(4, 9, random_blocks=1), EVERY),
    "ColumnIntervals": (lambda: p.ColumnIntervals(np.zeros(N, int), np.full(N, 3)), QUERY >= 3),
    "Variable": (lambda: p.deepspeed.variable(4, 1, (5,)), EVERY),
    "DilatedWindow": (lambda: p.DilatedWindow(1, 1, 2), np.isin(QUERY - KEY, (-2, 0, 2))),
    "predicate": (lambda: predicate(lambda q, k: k <= q), CAUSAL),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_patterns_are_exact(name):
    make, allowed = ORDINARY[name]
    assert_exact(make(), allowed)


# -- the end of the integers -------------------------------------------------------------------------------------------


def u8(value):
    """A uint64 for each token."""
    return np.full(N, value, np.uint64)


EXTREMES = {
    "window-left-maxsize": (lambda: p.SlidingWindow(sys.maxsize, 0), CAUSAL),
    "window-both-maxsize": (lambda: p.SlidingWindow(2**63 - 1, 2**63 - 1), EVERY),
    "window-1e30": (lambda: p.SlidingWindow(10**30), EVERY),
    "dilated-product-2**63": (lambda: p.DilatedWindow(2**31, dilation=2**32), QUERY == KEY),
    "sinks-2**70": (lambda: p.Sinks(2**70), EVERY),
    "documents-maxsize": (lambda: p.Documents((3, 2**63 - 1)), (QUERY < 3) == (KEY < 3)),
    "documents-sum-wraps": (lambda: p.Documents((2**62,) * 2), EVERY),
    "key-blocks-wrap": (lambda: p.KeyBlocks(np.array([[2**32]]), N, N), NOBODY),
    "column-intervals-wrap": (lambda: p.ColumnIntervals(u8(0), u8(2**63 + 5)), NOBODY),
    "column-intervals-start-wraps": (lambda: p.ColumnIntervals(u8(2**63), u8(2**63 + 5)), EVERY),
    "bigbird-window-2**62": (lambda: p.BigBird(4, window_blocks=2**62), EVERY),
    "bigbird-random-2**20": (lambda: p.BigBird(4, random_blocks=2**20), EVERY),
    "variable-random-2**18": (lambda: p.deepspeed.variable(4, num_random_blocks=2**18), EVERY),
    "from-dict-random-2**20": (lambda: from_data({"pattern": "bigbird", "block": 4, "random_blocks": 2**20}), EVERY),
}


@pytest.mark.parametrize("name", EXTREMES)
def test_parameters_at_the_end_of_the_integers(name):
    """They are refused with a ValueError, or the pattern allows exactly what its definition says."""
    make, allowed = EXTREMES[name]
    try:
        assert_exact(make(), allowed)
    except ValueError as error:
        assert any(word in str(error) for word in REFUSAL), error


# -- what is refused ---------------------------------------------------------------------------------------------------

Q, K, V = arrays(N)
HIDDEN_PAIRS = np.ma.masked_array(EVERY, ~CAUSAL)


def masked(x):
    """A masked array without its positive numbers."""
    return np.ma.masked_array(x, x > 0)


REFUSED = {  # the call, and names of which the error has one
    "scale-1e400": (lambda: spattn.attention(Q, K, V, scale=10**400), "scale"),
    "documents-too-long": (lambda: spattn.plan(p.Documents((10, 200)), N), "length|documents"),
    "documents-of-cu-seqlens": (lambda: spattn.plan(p.Documents((0, 5, 10, 20)), N), "length|documents"),
    "workers-0": (lambda: spattn.plan(p.Causal(), N, tiling=spattn.Tiling(workers=0)), "workers"),
    "workers-negative": (lambda: spattn.plan(p.Causal(), N, tiling=spattn.Tiling(workers=-1)), "workers"),
    "workers-float": (lambda: spattn.plan(p.Causal(), N, tiling=spattn.Tiling(workers=1.5)), "workers"),
    "batch-negative": (lambda: spattn.plan(p.Causal(), N, batch=-1), "batch"),
    "tile-float": (lambda: spattn.plan(p.Causal(), N, tiling=spattn.Tiling(tile=(1.5, 64))), "tile"),
    "tile-of-three": (lambda: spattn.plan(p.Causal(), N, tiling=spattn.Tiling(tile=(16, 64, 3))), "tile"),
    "masked-array-q": (lambda: spattn.attention(masked(Q), K, V), "q"),
    "masked-array-v": (lambda: spattn.attention(Q, K, masked(V)), "v"),
    "masked-array-pattern": (lambda: spattn.attention(Q, K, V, HIDDEN_PAIRS), "pattern|mask"),
    "masked-array-mask": (lambda: p.Mask(HIDDEN_PAIRS), "mask"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_arguments_are_refused_by_name(name):
    call, names = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=names):
        call()


RESULTS = {"none": lambda x: None, "int": lambda x: x * 1, "float": lambda x: x * 1.0}


@pytest.mark.parametrize("kind", RESULTS)
def test_predicate_that_returns_no_truth_value(kind):
    """A TypeError names allows(); the integers 0 and 1 may also be taken as truth values."""
    pattern = predicate(lambda q, k: RESULTS[kind](k <= q))
    for use in (
        lambda: pattern.index_set(N, N),
        lambda: spattn.plan(pattern, N),
        lambda: spattn.attention(Q, K, V, pattern),
    ):
        try:
            use()
        except TypeError as error:
            assert "allows" in str(error)
        else:
            assert kind == "int"
            assert_exact(pattern, CAUSAL)


# -- PyTorch -----------------------------------------------------------------------------------------------------------


def test_torch_meta():
    """A meta tensor has a meta tensor as its result, or an error that names it and does not speak of CUDA."""
    torch = pytest.importorskip("torch")
    x = torch.empty(1, 2, N, 8, device="meta")
    try:
        out = spattn.attention(x, x, x)
    except (ValueError, TypeError, NotImplementedError, RuntimeError, spattn.BackendUnavailableError) as error:
        assert "meta" in str(error) and "cuda" not in str(error).lower()
    else:
        assert out.device.type == "meta" and out.shape == x.shape


@pytest.mark.parametrize("at", range(4), ids=["dout", "q", "k", "v"])
def test_backward_requires_grad(at):
    """attention_backward on tensors that require a gradient does not detach them silently."""
    torch = pytest.importorskip("torch")
    inputs = [torch.tensor(x) for x in (Q, K, V)]
    out, lse = spattn.attention(*inputs, return_lse=True)
    plain = spattn.attention_backward(out, *inputs, out, lse)
    given = [x.clone().requires_grad_(at == number) for number, x in enumerate((out, *inputs))]
    with torch.no_grad():  # as within autograd.Function.backward
        again = spattn.attention_backward(*given, out, lse)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    try:
        gradients = spattn.attention_backward(*given, out, lse)
    except RuntimeError as error:
        assert str(error)
    else:
        assert any(gradient.requires_grad for gradient in gradients)
