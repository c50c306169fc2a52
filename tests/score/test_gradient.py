"""Derivatives of score functions: finite differences of random expressions, and the rules at kinks."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spattn.score import maximum, minimum, where
from spattn.score.evaluate import evaluate
from spattn.score.program import program_of
from spattn.score.tracing import trace

from .trees import Tree, points

STEP = 1e-5
EXAMPLES = max(500, settings().max_examples)


def value(function, at):
    with np.errstate(all="ignore"):
        return np.asarray(function(**at), np.float64) + np.zeros(at["score"].shape)


def difference(f):
    """The derivative of f(x) at 0, and a bound of its error by two steps; infinite where f has a step or a kink."""
    with np.errstate(all="ignore"):
        middle, right, left = (f(x) for x in (0.0, STEP, -STEP))
        wide, narrow = (right - left) / (2 * STEP), (f(STEP / 2) - f(-STEP / 2)) / STEP
        kink = np.abs(right - 2 * middle + left) / STEP > 1e-2 * (1 + np.abs(wide))
        # Truncation is of the order of the steps' difference; each value is exact to some units of rounding.
        error = 4 * np.abs(wide - narrow) + 2**-45 * (1 + np.nanmax(np.abs(middle), initial=1)) / STEP
        return wide, np.where(kink | ~np.isfinite(wide + narrow), np.inf, error)


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_value_and_derivatives_of_random_trees(seed):
    tree, at = Tree(seed), points(seed)
    traced = trace(tree.function)
    program = program_of(traced.graph)
    found, of_score, *of_uses = evaluate(program.graph, at, traced.parameters, traced.tables)
    np.testing.assert_array_equal(found + np.zeros(40), value(tree.function, at), err_msg=tree.text)
    expected, error = difference(lambda x: value(tree.function, at | {"score": at["score"] + x}))
    close(of_score, expected, error, tree.text)
    whole = evaluate(program.graph._replace(results=tuple(range(len(program.graph.operations)))), at, *traced[1:])
    directions = {name: np.random.default_rng(seed).normal(size=np.shape(x)) for name, x in tree.variables.items()}
    slope = np.zeros(40)
    with np.errstate(all="ignore"):
        for use, derivative in zip(program.captured, of_uses, strict=True):
            if use.name == "look_up":
                name = next(name for name, x in tree.variables.items() if x is traced.tables[use.number])
                slope = slope + directions[name][tuple(whole[x] for x in use.indices)] * derivative
    arrays = {name: x for name, x in tree.variables.items() if isinstance(x, np.ndarray) and x.dtype.kind == "f"}
    expected, error = difference(
        lambda x: value(tree.with_variables({name: y + x * directions[name] for name, y in arrays.items()}), at)
    )
    close(slope, expected, error, f"arrays of {tree.text}")


def close(found, expected, error, text):
    """Within the bound, except for slopes so steep that a step may pass several kinks."""
    with np.errstate(all="ignore"):
        wrong = (np.abs(found - expected) > error) & (np.maximum(np.abs(found), np.abs(expected)) < 100)
    assert not wrong.any(), (text, np.broadcast_to(found, wrong.shape)[wrong], expected[wrong])


def test_most_points_are_tested_tightly():
    tight = []
    for seed in range(50):
        function, at = Tree(seed).function, points(seed)
        expected, error = difference(lambda x, f=function, at=at: value(f, at | {"score": at["score"] + x}))
        tight += (error < 1e-3 * (1 + np.abs(expected))).tolist()
    assert np.mean(tight) > 0.8


def derivative(function, at):
    traced = trace(function)
    program = program_of(traced.graph)
    _, of_score, *rest = evaluate(program.graph, at, traced.parameters, traced.tables)
    return float(of_score), [float(x) for x in rest]


AT = {"score": 2.0, "b": 0, "h": 0, "q": 5, "k": 3}


def test_ties_split_evenly():
    weight = np.array(2.0)
    assert derivative(lambda score, b, h, q, k: minimum(score, weight), AT) == (0.5, [0.5])
    assert derivative(lambda score, b, h, q, k: maximum(weight, score), AT) == (0.5, [0.5])
    assert derivative(lambda score, b, h, q, k: minimum(score, weight + 1), AT) == (1.0, [0.0])
    assert derivative(lambda score, b, h, q, k: maximum(score, weight + 1), AT) == (0.0, [1.0])


def test_absolute_value_has_derivative_0_at_0():
    for at, expected in ((3.0, 1.0), (2.0, 0.0), (1.0, -1.0)):
        assert derivative(lambda score, b, h, q, k: abs(score - 2.0), AT | {"score": at})[0] == expected


@pytest.mark.parametrize(
    "function, expected",
    [
        (lambda score, b, h, q, k: where(q > k, score, np.sqrt(score - 2.0)), 1.0),  # sqrt'(0) is infinite
        (lambda score, b, h, q, k: where(q > k, score, 1.0 / (score - 2.0)), 1.0),
        (lambda score, b, h, q, k: where(q > k, score, np.exp(1e4 * score)), 1.0),
        (lambda score, b, h, q, k: where(q > k, score, np.log(score - 2.0)), 1.0),
        (lambda score, b, h, q, k: where(q > k, 1.0, np.log(score - 3.0)), 0.0),
        (lambda score, b, h, q, k: minimum(score, 1e3) + 0.0 * maximum(score, 3.0), 1.0),
        (lambda score, b, h, q, k: (score - 2.0) ** (q - 5.0), 0.0),
        (lambda score, b, h, q, k: score % 0.75, 1.0),
        (lambda score, b, h, q, k: 5.0 % (score - 1.0), -5.0),
        (lambda score, b, h, q, k: score // 0.75, 0.0),
        (lambda score, b, h, q, k: np.sign(score), 0.0),
        (lambda score, b, h, q, k: score.int() * 1.0, 0.0),
        (lambda score, b, h, q, k: 3.0, 0.0),
        (lambda score, b, h, q, k: score**3, 12.0),
        (lambda score, b, h, q, k: score**-2, -0.25),
        (lambda score, b, h, q, k: score**0, 0.0),
        (lambda score, b, h, q, k: score**2.5, 2.5 * 2.0**1.5),
        (lambda score, b, h, q, k: 3.0**score, 9.0 * math.log(3.0)),
    ],
)
def test_derivatives_at_a_point(function, expected):
    assert derivative(function, AT)[0] == pytest.approx(expected, rel=1e-15)


def test_powers_of_zero():
    exponent = np.array(2.5)
    at = AT | {"score": 0.0}
    assert derivative(lambda score, b, h, q, k: score**exponent, at) == (0.0, [0.0])
