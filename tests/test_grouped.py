"""Several problems in one call, where no backend runs them together: what attention() gives, one after another."""

from __future__ import annotations

import re

import numpy as np
import pytest

import spattn
from spattn import patterns
from spattn.testing import inputs


@pytest.fixture
def problems():
    """Different lengths, heads, batch entries, patterns and dtypes."""
    made = spattn.plan(patterns.SlidingWindow(9), 70, heads=3)
    mask = np.random.default_rng(0).random((40, 50)) < 0.3
    return [
        (*inputs(1, 4, 2, 100, 120, 16, dtype="float32"), patterns.Causal()),
        (*inputs(2, 3, 3, 70, 70, 8, dtype="float64"), made),
        (*inputs(1, 2, 1, 40, 50, 32, dtype="float16"), mask),
        (*inputs(3, 1, 1, 30, 30, 16, dtype="bfloat16"), "full"),
    ]


@pytest.mark.parametrize("options", [{}, {"scale": 0.3}, {"backend": "reference"}], ids=repr)
def test_results_are_those_of_every_problem(problems, options):
    """In their order, with the lse and without."""
    outs = spattn.grouped_attention(problems, **options)
    pairs = spattn.grouped_attention(tuple(map(list, problems)), return_lse=True, **options)
    for problem, out, pair in zip(problems, outs, pairs, strict=True):
        expected = spattn.attention(*problem, return_lse=True, **options)
        np.testing.assert_array_equal(out, expected[0])
        for a, b in zip(pair, expected, strict=True):
            np.testing.assert_array_equal(a, b)
            assert a.dtype == b.dtype


def test_few_problems(problems):
    assert spattn.grouped_attention([]) == []
    (out,) = spattn.grouped_attention(iter(problems[:1]))
    np.testing.assert_array_equal(out, spattn.attention(*problems[0]))


def test_layouts():
    q, k, v = inputs(2, 4, 2, 60, 60, 16, dtype="float32")
    swapped = [x.swapaxes(1, 2) for x in (q, k, v)]
    expected = spattn.attention(q, k, v, "causal")
    for out in spattn.grouped_attention([(*swapped, "causal")] * 2, layout="bshd"):
        np.testing.assert_array_equal(out.swapaxes(1, 2), expected)


WRONG = {
    "short k": (lambda q, k, v: (q, k, v[:, :, :9], "causal"), ValueError, r"v: expected shape \(1, 2, 50, 16\), got"),
    "name": (lambda q, k, v: (q, k, v, "nope"), ValueError, "pattern: expected one of .*; got 'nope'"),
    "pattern": (lambda q, k, v: (q, k, v, 3), TypeError, "pattern: expected a Pattern, .* got int"),
    "no array": (lambda q, k, v: (q, [1], v, "full"), TypeError, "k: expected a NumPy, .* array, got list"),
    "three": (lambda q, k, v: (q, k, v), TypeError, r"expected \(q, k, v, pattern\), got 3 items"),
    "an array": (lambda q, k, v: q, TypeError, r"expected \(q, k, v, pattern\), got ndarray"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_problem(problems, name):
    make, error, message = WRONG[name]
    wrong = make(*inputs(1, 2, 2, 50, 50, 16, dtype="float32"))
    with pytest.raises(error, match=rf"^problems\[3\]{re.escape(': ')}{message}"):
        spattn.grouped_attention([*problems[:3], wrong])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"scale": "1"}, TypeError, "scale must be an int or float"),
        ({"scale": float("nan")}, ValueError, "scale must be finite"),
        ({"backend": 3}, TypeError, "backend: expected a name"),
        ({"return_lse": 1}, TypeError, "return_lse: expected a bool"),
        ({"precision": 1}, TypeError, "precision: expected None"),
        ({"layout": 1}, TypeError, "layout: expected a name"),
    ],
)
def test_errors_of_the_call(problems, options, error, message):
    """What is wrong with all problems is said of none."""
    with pytest.raises(error, match=f"^{message}"):
        spattn.grouped_attention(problems, **options)
    with pytest.raises(TypeError, match=r"^problems: expected a sequence of \(q, k, v, pattern\), got int"):
        spattn.grouped_attention(3)


def test_gradients_of_every_problem():
    """PyTorch records each result by itself."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    given = [(*torch.randn(3, 1, heads, 40, 8), patterns.SlidingWindow(5)) for heads in (2, 3)]
    leaves = [x.requires_grad_() for x in given[1][:3]]
    first, second = spattn.grouped_attention(given)
    assert not first.requires_grad and second.requires_grad
    found = torch.autograd.grad(second.square().sum(), leaves)
    expected = torch.autograd.grad(spattn.attention(*given[1]).square().sum(), leaves)
    assert all(map(torch.equal, found, expected))


def test_in_a_graph():
    """torch.compile holds one operator for each problem."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    window, causal = patterns.SlidingWindow(5), patterns.Causal()
    x, y = torch.randn(3, 1, 2, 40, 8), torch.randn(3, 1, 3, 20, 8)

    def both(x, y):
        return spattn.grouped_attention([(x[0], x[1], x[2], window), (y[0], y[1], y[2], causal)])

    compiled = torch.compile(both, fullgraph=True, backend="eager")
    assert all(map(torch.equal, compiled(x, y), both(x, y)))


def test_under_vmap():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    x = torch.randn(4, 3, 1, 2, 20, 8)

    def both(x):
        return tuple(spattn.grouped_attention([(*x, patterns.Causal()), (*x, patterns.SlidingWindow(3))]))

    for found, number in zip(torch.func.vmap(both)(x), range(2), strict=True):
        assert torch.equal(found, torch.stack([both(one)[number] for one in x]))


def test_tracers_of_jax():
    """Are refused as attention() refuses them, with their problem."""
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    x = jax.numpy.ones((1, 2, 20, 8))
    with pytest.raises(TypeError, match=r"^problems\[1\]: q: expected a plain array, got a tracer"):
        jax.jit(lambda y: spattn.grouped_attention([(x, x, x, "causal"), (y, x, x, "full")]))(x)
