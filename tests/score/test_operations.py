"""What operations mean: signs of // and %, division by zero, look-ups out of range, types."""

import ml_dtypes
import numpy as np
import pytest

import spattn.score
from spattn.score import clip, maximum, minimum, take, where
from spattn.score.evaluate import evaluate
from spattn.score.graph import BOOL, FLOAT, INT
from spattn.score.program import DIAGONAL, HEAD, KEY, PAIR, QUERY, scopes
from spattn.score.tracing import trace


def run(function, **at):
    traced = trace(function)
    of = {"score": 1.0, "b": 0, "h": 0, "q": 0, "k": 0} | at
    return evaluate(traced.graph, of, traced.parameters, traced.tables)[0]


@pytest.mark.parametrize("divisor", [3, -3, 2.5, -2.5])
def test_floor_division_and_remainder_are_pythons(divisor):
    numbers = np.arange(-7, 8)
    expected = [divmod(x, divisor) for x in numbers.tolist()]
    assert run(lambda score, b, h, q, k: q // divisor, q=numbers).tolist() == [x for x, _ in expected]
    assert run(lambda score, b, h, q, k: q % divisor, q=numbers).tolist() == [x for _, x in expected]
    found = run(lambda score, b, h, q, k: divmod(q, divisor)[0] * 100 + divmod(q, divisor)[1], q=numbers)
    assert found.tolist() == [x * 100 + y for x, y in expected]


def test_integers_divided_by_zero_give_zero():
    assert run(lambda score, b, h, q, k: q // k * 10 + q % k, q=np.array([5, -5]), k=0).tolist() == [0, 0]


def test_look_ups():
    table, flags = np.arange(4.0), np.ones(4, bool)
    index = np.array([-5, -4, -1, 0, 3, 4])
    found = run(lambda score, b, h, q, k: table[q], q=index)
    np.testing.assert_array_equal(found, [np.nan, 0, 3, 0, 3, np.nan])
    found = run(lambda score, b, h, q, k: table.astype(np.int32)[q], q=index)
    assert found.tolist() == [-(2**31), 0, 3, 0, 3, -(2**31)]
    found = run(lambda score, b, h, q, k: where(flags[q], 1.0, 0.0), q=index)
    assert found.tolist() == [0, 1, 1, 1, 1, 0]
    assert np.isnan(run(lambda score, b, h, q, k: table[:0][q]))


@pytest.mark.parametrize(
    "table, dtype",
    [
        (np.ones(3, np.float16), FLOAT),
        (np.ones(3, ml_dtypes.bfloat16), FLOAT),
        (np.ones(3, np.uint8), INT),
        (np.ones(3, np.int64), INT),
        (np.ones(3, bool), BOOL),
    ],
)
def test_types_of_arrays(table, dtype):
    graph = trace(lambda score, b, h, q, k: table[q]).graph
    assert next(op for op in graph.operations if op.name == "look_up").dtype == dtype
    assert run(lambda score, b, h, q, k: table[q] * 2.0) == 2


@pytest.mark.parametrize("number", [np.float16(2.5), ml_dtypes.bfloat16(2.5), np.float64(2.5), np.float32(2.5)])
def test_scalars_of_numpy_are_numbers(number):
    def function(score, b, h, q, k):
        return where(number < score, number * score, score * number) + (number - score) + number // score

    assert run(function) == 2.5 + 1.5 + 2
    assert trace(function)[1:] == ((2.5,), ())
    assert run(lambda score, b, h, q, k: np.int8(3) * q, q=5) == 15


@pytest.mark.parametrize("name", ["exp", "log", "tanh", "sigmoid", "sqrt"])
def test_functions_of_numbers_and_of_symbols_agree(name):
    function, numbers = getattr(spattn.score, name), np.array([-2.0, -0.5, 0.5, 2.0])
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(run(lambda score, b, h, q, k: function(score), score=numbers), function(numbers))


def test_functions_of_numbers():
    assert take(np.arange(6.0).reshape(2, 3), 1, 2) == 5.0 and where(True, 1.0, 2.0) == 1.0
    assert (minimum(1, 2), maximum(1, 2), clip(5, 0, 3), clip(-1, 0, 3)) == (1, 2, 3, 0)


def test_keywords_of_numpy():
    for function in (
        lambda score, b, h, q, k: np.clip(score, a_max=0.5, a_min=-1.0),
        lambda score, b, h, q, k: np.clip(a=score, a_min=-1.0, a_max=k),
        lambda score, b, h, q, k: np.clip(score, -1.0, a_max=0.5) + np.clip(score, None, 0.5),
        lambda score, b, h, q, k: np.clip(q, a_min=k, a_max=score),
    ):
        same_as_of_arrays(function, np.asarray)


def test_keywords_of_torch():
    torch = pytest.importorskip("torch")
    number = torch.tensor(0.25, dtype=torch.float64)
    for function in (
        lambda score, b, h, q, k: torch.where(condition=q > k, input=score, other=score * 2),
        lambda score, b, h, q, k: torch.where(q > k, input=score, other=number),
        lambda score, b, h, q, k: torch.where(other=score, condition=q > k, input=number),
        lambda score, b, h, q, k: number.where(q > k, score) + number.where(condition=q <= k, other=score),
        lambda score, b, h, q, k: torch.clamp(score, max=0.5) + torch.clamp(score, min=-1.0),
        lambda score, b, h, q, k: torch.clamp(input=score, max=score * 2, min=number) + score.clamp(max=0.5, min=-0.5),
        lambda score, b, h, q, k: torch.clip(score, -1.0, max=0.5),
        lambda score, b, h, q, k: torch.minimum(input=score, other=number) - torch.maximum(score, other=number),
        lambda score, b, h, q, k: torch.pow(input=score, exponent=2) + score.pow(exponent=3),
        lambda score, b, h, q, k: torch.pow(exponent=score, input=number),
        lambda score, b, h, q, k: torch.sub(score, other=q) * torch.rsub(input=score, other=number),
        lambda score, b, h, q, k: (
            torch.div(score, 0.3, rounding_mode="floor") + torch.div(score, k + 1, rounding_mode=None)
        ),
        lambda score, b, h, q, k: torch.nn.functional.relu(score) + torch.exp(input=score, out=None),
        lambda score, b, h, q, k: torch.remainder(input=score, other=0.3) + score.maximum(other=number),
    ):
        same_as_of_arrays(function, torch.as_tensor)


def same_as_of_arrays(function, array):
    """Symbols give what the library gives for arrays."""
    of = {"score": np.array([-2.0, -0.25, 0.125, 3.0]), "q": np.array([0, 3, 5, 1]), "k": np.array([2, 0, 5, 3])}
    expected = function(b=0, h=0, **{name: array(x) for name, x in of.items()})
    np.testing.assert_allclose(run(function, **of), np.asarray(expected), rtol=1e-15)


def test_scopes():
    table = np.ones((2, 9))
    reach = 4

    def scope(function):
        graph = trace(function).graph
        return scopes(graph)[graph.results[0]]

    for function, expected in [
        (lambda score, b, h, q, k: table[h, 0], HEAD),
        (lambda score, b, h, q, k: table[h, q % 9], QUERY),
        (lambda score, b, h, q, k: table[b, k // 2], KEY),
        (lambda score, b, h, q, k: table[h, k - q + reach] * 2, DIAGONAL),
        (lambda score, b, h, q, k: where(2 * q + 1 > 2 * k + h, 1.0, table[h, 0]), DIAGONAL),
        (lambda score, b, h, q, k: where(q == k + reach, 1.0, 2.0), DIAGONAL),
        (lambda score, b, h, q, k: where(q - h == b, 1.0, 2.0), QUERY),
        (lambda score, b, h, q, k: where(q > 2 * k, 1.0, 2.0), PAIR),
        (lambda score, b, h, q, k: (q + k) * 1.0, PAIR),
        (lambda score, b, h, q, k: score, PAIR),
    ]:
        assert scope(function) == expected
