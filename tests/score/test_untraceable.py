"""Functions that cannot be traced: each error names the operation and the line."""

import inspect
import math

import numpy as np
import pytest

from spattn.score import captured, show, take
from spattn.score.tracing import trace

TABLE = np.ones((2, 3))
HIDDEN = type("Hidden", (), {"table": property(lambda self: TABLE)})()
COUNT = 0
STORED = []


def branch(score, b, h, q, k):
    return score if q > k else 0.0  # here


def both(score, b, h, q, k):
    return score * (q > 2 and k > 2)  # here


def chained(score, b, h, q, k):
    return score * (0 < q < 3)  # here


def python_math(score, b, h, q, k):
    return math.exp(score)  # here


def python_list(score, b, h, q, k):
    return score + [1.0, 2.0][h]  # here


def python_range(score, b, h, q, k):
    return score + sum(range(q))  # here


def sine(score, b, h, q, k):
    return np.sin(score)  # here


def total(score, b, h, q, k):
    return np.sum(score)  # here


def reduced(score, b, h, q, k):
    return np.add.reduce(score)  # here


def bits(score, b, h, q, k):
    return score * (q & 1)  # here


def shifted(score, b, h, q, k):
    return score * (q << 1)  # here


def method(score, b, h, q, k):
    return score.mean()  # here


def text(score, b, h, q, k):
    return score + "1"  # here


def array(score, b, h, q, k):
    return score + TABLE  # here


def row(score, b, h, q, k):
    return score + TABLE[h]  # here


def too_many(score, b, h, q, k):
    return score + TABLE[b, h, q]  # here


def sliced(score, b, h, q, k):
    return score + TABLE[h, :]  # here


def of_float(score, b, h, q, k):
    return score + TABLE[h, q / 2]  # here


def hidden(score, b, h, q, k):
    return score + HIDDEN.table[h, q]  # here


def no_array(score, b, h, q, k):
    return score + take([1.0, 2.0], h)  # here


def typed(score, b, h, q, k):
    return np.minimum(score, 1.0, dtype=np.float32)  # here


def clipped_into(score, b, h, q, k):
    return np.clip(score, 0, 1, out=TABLE)  # here


def clipped_twice(score, b, h, q, k):
    return np.clip(score, 0, 1, min=1)  # here


def rounded(score, b, h, q, k):
    return score.pow(2, out=TABLE)  # here


def too_few(score, b, h, q, k):
    return score.minimum()  # here


def too_many_numbers(score, b, h, q, k):
    return score.exp(2)  # here


def assigned(score, b, h, q, k):
    TABLE[0, 0] = 2.0  # here
    return score


def in_place(score, b, h, q, k):
    return score + np.add(TABLE, 1, out=TABLE)[h, q]  # here


def complex_table(score, b, h, q, k, table=TABLE * 1j):
    return score + table[h, q]  # here


def huge(score, b, h, q, k):
    return score * (q + 2**40)  # here


def converted(score, b, h, q, k):
    return score.to("complex64")  # here


def unpacked(score, b, h, q, k):
    a, b = score  # here
    return a


LINES = [
    (branch, "'if', 'and', 'or' and 'not' need a number"),
    (both, "'if', 'and', 'or' and 'not' need a number"),
    (chained, "'if', 'and', 'or' and 'not' need a number"),
    (python_math, "not of math"),
    (python_list, "arrays, not lists"),
    (python_range, "no numbers when it is traced"),
    (sine, "numpy.sin is not supported"),
    (total, "numpy.sum is not supported"),
    (reduced, "numpy.add.reduce is not supported"),
    (typed, "numpy.minimum: dtype= is not supported"),
    (clipped_into, "numpy.clip: out= is not supported"),
    (clipped_twice, "numpy.clip: min= is not supported"),
    (rounded, ".pow: out= is not supported"),
    (too_few, ".minimum: expected input, other"),
    (too_many_numbers, ".exp: expected input"),
    (bits, "no operations on bits"),
    (shifted, "unsupported operand type"),
    (method, ".mean is not supported"),
    (text, "unsupported operand type"),
    (array, "an array was used as a number; index it"),
    (row, "an array of shape (3,) was used as a number; index it"),
    (too_many, "expected one index for each of 2 axes, got 3"),
    (sliced, "None, ... and slices cannot index an array with symbols"),
    (of_float, "expected integer indices"),
    (hidden, "spattn.score.take(array, index)"),
    (no_array, "take: table: expected an array, got list"),
    (assigned, "must not change arrays"),
    (in_place, "must not change arrays"),
    (complex_table, "expected arrays of floats, integers or bools, got complex128"),
    (huge, "integers have 32 bits, got 1099511627776"),
    (converted, "conversion to complex64 is not supported"),
    (unpacked, "a number per pair has no elements"),
]


@pytest.mark.parametrize("function, message", LINES, ids=lambda x: getattr(x, "__name__", ""))
@pytest.mark.parametrize("use", [trace, captured, show], ids=lambda x: x.__name__)
def test_errors_name_the_operation_and_the_line(function, message, use):
    with pytest.raises((TypeError, ValueError)) as raised:
        use(function)
    source, first = inspect.getsourcelines(function)
    at = first + next(n for n, text in enumerate(source) if "# here" in text)
    assert str(raised.value).startswith("score: ") and message in str(raised.value)
    assert f"({__file__}, line {at})" in str(raised.value)
    assert TABLE.tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.fill(2),
        lambda table: table.sort(),
        lambda table: np.put(table, 0, 2),
        lambda table: np.add.at(table, 0, 2),
        lambda table: np.add(table, 1, table),
        lambda table: np.clip(table, 2, 3, out=table),
        lambda table: table.cumsum(0, out=table),
    ],
)
def test_arrays_do_not_change(change):
    with pytest.raises(TypeError, match=r"score: a score function must not change arrays .*line \d+"):
        trace(lambda score, b, h, q, k: (change(TABLE), score + TABLE[h, q])[1])
    assert TABLE.tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize(
    "result, got",
    [(None, "None"), (TABLE, r"ndarray of shape \(2, 3\)"), ((1.0, 2.0), "tuple"), ("1", "str"), ([], "list")],
)
def test_the_result_must_be_a_number(result, got):
    with pytest.raises(
        TypeError, match=f"score: expected a function that returns the modified score, got {got} .*line"
    ):
        trace(lambda score, b, h, q, k: result)


def of_too_few(score, b, h):
    return score


def counts(score, b, h, q, k):
    global COUNT
    COUNT += 1
    return score


def nonlocal_counts():
    count = 0

    def function(score, b, h, q, k):
        nonlocal count
        count += 1
        return score

    return function


def stores(score, b, h, q, k):
    STORED.append(score)
    return score


class Changing:
    def __init__(self):
        self.table = TABLE

    def __call__(self, score, b, h, q, k):
        self.last = score
        return score


@pytest.mark.parametrize(
    "function, message",
    [
        (None, "expected a function of .* got NoneType"),
        (of_too_few, "takes 3 positional arguments but 5 were given"),
        (counts, "must not assign outer variables, here COUNT"),
        (nonlocal_counts(), "must not assign outer variables, here count"),
        (Changing(), "must not set attributes, here .last"),
    ],
)
def test_functions_must_be_functions_of_their_arguments(function, message):
    with pytest.raises(TypeError, match=f"score: .*{message}"):
        trace(function)
    assert COUNT == 0


def test_constants_that_overflow():
    with pytest.raises(ValueError, match="score: integers have 32 bits, got 4294967296"):
        trace(lambda score, b, h, q, k: score * (q**0 * 2**30 * 4))


def test_stored_arguments_are_no_values_of_another_call():
    trace(stores)
    with pytest.raises(TypeError, match="a value of another call was used"):
        trace(lambda score, b, h, q, k: score + STORED[0])


def test_errors_of_the_function_itself_are_its_own():
    def function(score, b, h, q, k):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        trace(function)
    with pytest.raises(IndexError, match="list index out of range"):
        trace(lambda score, b, h, q, k: [score][1])


def test_errors_of_tensors():
    torch = pytest.importorskip("torch")
    table = torch.ones(2, 3)
    for function, message in (
        (lambda score, b, h, q, k: torch.sin(score), "torch.sin is not supported"),
        (lambda score, b, h, q, k: score + table, r"an array of shape \(2, 3\) was used as a number"),
        (lambda score, b, h, q, k: score + table[h], r"an array of shape \(3,\) was used as a number; index it"),
        (lambda score, b, h, q, k: score + table.add_(1)[h, q], "must not change arrays"),
        (lambda score, b, h, q, k: score + torch.add(table, 1, out=table)[h, q], "must not change arrays"),
        (
            lambda score, b, h, q, k: score + torch.nn.functional.threshold(table, 2, 5, inplace=True)[h, q],
            "must not change arrays, got aten.threshold_",
        ),
        (lambda score, b, h, q, k: torch.exp(score, out=table), "must not change arrays"),
        (lambda score, b, h, q, k: torch.add(score, q, alpha=2), "torch.add: alpha= is not supported"),
        (lambda score, b, h, q, k: torch.div(score, 2, rounding_mode="trunc"), "torch.div: rounding_mode= is not"),
        (lambda score, b, h, q, k: torch.nn.functional.relu(score, inplace=True), "torch.relu: inplace= is not"),
        (lambda score, b, h, q, k: torch.where(score > 0), "torch.where: expected condition, input, other"),
    ):
        with pytest.raises(TypeError, match=f"score: .*{message}.*line"):
            trace(function)
    assert table.sum() == 6


def test_errors_of_jax():
    jnp = pytest.importorskip("jax.numpy")
    with pytest.raises(TypeError, match="score: .*line .*NumPy, torch and spattn.score"):
        trace(lambda score, b, h, q, k: jnp.tanh(score))
