"""Tracing: what a score function may refer to, values of each call, and keys of caches."""

import functools
import sys
import threading
import types

import numpy as np
import pytest

import spattn
from spattn.score import captured, show, take
from spattn.score.evaluate import evaluate
from spattn.score.program import program_of
from spattn.score.tracing import trace

AT = {"score": 2.0, "b": 1, "h": 1, "q": 2, "k": 0, "offset": 0}
TABLE = np.arange(6.0).reshape(2, 3)
SCALE = 2.0


def run(function):
    traced = trace(function)
    return float(evaluate(traced.graph, AT, traced.parameters, traced.tables)[0])


def of_global(score, b, h, q, k):
    return score * SCALE + TABLE[h, q]


def helper(h, q):
    return TABLE[h, q]


def of_helper(score, b, h, q, k):
    return score * SCALE + helper(h, q)


class Plain:
    factor = 1.0

    def __init__(self, table):
        self.table, self.scale, self.tables = table, 2.0, {"one": [0, table][1]}

    def __call__(self, score, b, h, q, k):
        return score * self.scale + self.part(h)[q] * self.factor

    def part(self, h):
        return self.table[h]

    def bound(self, score, b, h, q, k):
        return score * self.scale + self.tables["one"][h, q]


class Derived(Plain):
    def part(self, h):
        return super().part(h)


class Slots:
    __slots__ = ("table",)

    def __init__(self, table):
        self.table = table

    def __call__(self, score, b, h, q, k):
        return score * 2.0 + take(self.table, h, q)


class Slotted(Slots):
    def __call__(self, score, b, h, q, k):
        return score * 2.0 + self.table[h, q]


class OfClass:
    table = TABLE

    def __call__(self, score, b, h, q, k):
        return score * 2.0 + self.table[h, q]


def of_closure():
    table, scale = TABLE, 2.0
    return lambda score, b, h, q, k: score * scale + table[h, q]


def of_inner_function(score, b, h, q, k):
    def inner(x):
        return TABLE[x, q]

    return score * SCALE + inner(h)


def of_defaults(score, b, h, q, k, table=TABLE, *, scale=2.0, other=TABLE):
    return score * scale + (table[h, q] + other[h, q]) / 2


def of_five(table, scale, score, b, h, q, k, more):
    return score * scale + table[h, q] + more[0, 0]


MODULE = types.ModuleType("constants_of_a_model")
MODULE.TABLE = TABLE


def of_module(score, b, h, q, k):
    return score * 2.0 + MODULE.TABLE[h][q]


def of_list():
    tables = [np.zeros((2, 3)), TABLE]
    return lambda score, b, h, q, k: score * 2.0 + tables[1][h, q] + tables[0][h, k]


def recursive(score, b, h, q, k, depth=3):
    return score * 2.0 + TABLE[h, q] if depth == 0 else recursive(score, b, h, q, k, depth - 1)


def of_two_ways_to_a_helper(score, b, h, q, k):
    return score * 2.0 + (helper(h, q) + other_helper(h, q)) / 2


def other_helper(h, q):
    return helper(h, q)


def of_long_list(count):
    tables = [TABLE] * count
    return lambda score, b, h, q, k: score * 2.0 + tables[5][h, q]


@pytest.mark.parametrize(
    "function",
    [
        of_global,
        of_helper,
        of_two_ways_to_a_helper,
        of_long_list(64),
        of_closure(),
        of_inner_function,
        of_defaults,
        of_module,
        of_list(),
        recursive,
        functools.partial(of_five, TABLE, 2.0, more=np.zeros((1, 1))),
        functools.partial(functools.partial(of_five, TABLE), 2.0, more=np.zeros((1, 1))),
        Plain(TABLE),
        Derived(TABLE),
        Plain(TABLE).bound,
        Slots(TABLE),
        Slotted(TABLE),
        OfClass(),
        types.MethodType(lambda self, score, b, h, q, k: score * 2.0 + self.table[h, q], Plain(TABLE)),
    ],
)
def test_captured_arrays_are_seen_wherever_they_are(function):
    assert run(function) == 2.0 * 2 + TABLE[1, 2]
    assert any(x is TABLE for x in captured(function))


def test_long_lists_are_not_searched():
    with pytest.raises(TypeError, match=r"write spattn.score.take\(array, index\)"):
        trace(of_long_list(65))


def test_the_function_itself_is_not_changed():
    function = of_closure()
    before = function.__closure__[0].cell_contents, dict(function.__globals__)
    run(function)
    assert function.__closure__[0].cell_contents is before[0] and function.__globals__ == before[1]


# Values are those of each call


def test_values_are_read_at_every_trace():
    cap = 50.0

    def function(score, b, h, q, k):
        return cap * np.tanh(score / cap) + 1.0

    first = trace(function)
    cap = 30.0
    second = trace(function)
    assert program_of(first.graph) is program_of(second.graph)
    assert (first.parameters, second.parameters) == ((50.0,), (30.0,))


def test_a_captured_number_may_equal_a_literal():
    scale = 2.0

    def function(score, b, h, q, k):
        return 2.0 * score + scale

    assert run(function) == 6.0
    for value in (3.0, 2.0, 2, True, 0.0, -0.0, float("inf"), 2.0):
        scale = value
        assert run(function) == 4.0 + value


def test_zeros_keep_their_signs():
    one, other = 0.0, -0.0
    assert run(lambda score, b, h, q, k: np.abs(score / one - score / other)) == float("inf")


def test_other_arrays_give_the_same_program():
    def of(table):
        return lambda score, b, h, q, k: score + table[h, q]

    first, second = trace(of(TABLE)), trace(of(TABLE + 1))
    assert first.graph == second.graph and hash(first.graph) == hash(second.graph)
    assert program_of(first.graph) is program_of(second.graph)
    assert (first.tables[0] is TABLE, second.tables[0] is TABLE) == (True, False)


def test_equal_functions_have_equal_programs_and_others_do_not():
    functions = [
        lambda score, b, h, q, k: score * 2.0,
        lambda score, b, h, q, k: score * 2,
        lambda score, b, h, q, k: 2.0 * score + 0.0,
        lambda score, b, h, q, k: score + score,
        lambda score, b, h, q, k: score * 3.0,
        lambda score, b, h, q, k: (score > 1.0) * 1.0,
        lambda score, b, h, q, k: (score > True) * 1.0,
        lambda score, b, h, q, k: score * (q // 2),
        lambda score, b, h, q, k: score * (q // 2.0),
        lambda score, b, h, q, k: score + (1e400 - 1e400),
        lambda score, b, h, q, k: score + (1e400 - 1e400),
    ]
    graphs = [trace(f).graph for f in functions]
    assert [graphs.index(x) for x in graphs] == [0, 0, 0, 3, 4, 5, 5, 7, 8, 9, 9]


@pytest.mark.parametrize(
    "function",
    [
        lambda score, b, h, q, k: 0.0 + score,
        lambda score, b, h, q, k: score + 0,
        lambda score, b, h, q, k: score - 0.0,
        lambda score, b, h, q, k: 1.0 * score,
        lambda score, b, h, q, k: score * True,
        lambda score, b, h, q, k: score / 1,
        lambda score, b, h, q, k: score**1,
        lambda score, b, h, q, k: np.where(True, score, q),
        lambda score, b, h, q, k: np.where(False, q, score),
        lambda score, b, h, q, k: np.where(q < k, score, score),
        lambda score, b, h, q, k: np.minimum(score, np.maximum(score, score)),
        lambda score, b, h, q, k: score + (h**0 - 1),
        lambda score, b, h, q, k: score * (h**0 / 2 + 0.5),
    ],
)
def test_neutral_operations_are_dropped(function):
    assert [op.name for op in trace(function).graph.operations] == ["score"]


@pytest.mark.parametrize(
    "function, value",
    [
        (lambda score, b, h, q, k: 0.0 - score, -2.0),
        (lambda score, b, h, q, k: 1.0 / score, 0.5),
        (lambda score, b, h, q, k: score * 0.0, 0.0),
        (lambda score, b, h, q, k: score - 1.0, 1.0),
        (lambda score, b, h, q, k: (q**0 + 2) % 2 * score, 2.0),
        (lambda score, b, h, q, k: np.where(q**0 < 1, 3.0, 4.0), 4.0),
        (lambda score, b, h, q, k: (q**0 // 2 + 0.25) * 4, 1.0),
        (lambda score, b, h, q, k: (q**0 // (q**0 - 1)) + 5.0, 5.0),
        (lambda score, b, h, q, k: (q**0 * 2.75).int() * 1.0, 2.0),
    ],
)
def test_constants_are_computed(function, value):
    assert run(function) == value


def test_one_table_at_many_places_is_one():
    traced = trace(lambda score, b, h, q, k: score + TABLE[h, q] * TABLE[0, 1] - TABLE[h][q] + TABLE[h, k])
    assert len(traced.tables) == 1
    assert sum(op.name == "look_up" for op in traced.graph.operations) == 3


def test_elements_and_arrays_without_axes_have_gradients():
    weights, cap = np.array([3.0, 5.0]), np.array(7.0)
    function = lambda score, b, h, q, k: weights[0] * score + weights[-1] * cap**2 + np.exp(-cap)  # noqa: E731
    assert run(function) == 6 + 5 * 49 + np.exp(-7)
    traced = trace(function)
    program = program_of(traced.graph)
    assert [x is y for x, y in zip(captured(function), (weights, cap), strict=True)] == [True, True]
    _, _, *of_uses = evaluate(program.graph, AT, traced.parameters, traced.tables)
    found = sorted(float(x) for use, x in zip(program.captured, of_uses, strict=True) if use.name == "look_up")
    assert found == sorted([2.0, 49.0, 70 - np.exp(-7)])


def test_integers_of_arrays_are_numbers():
    sizes = np.array([3, 4])
    assert run(lambda score, b, h, q, k: score + sum(range(sizes[0])) + TABLE[h, q % sizes[0]]) == 2 + 3 + TABLE[1, 2]


def test_arrays_computed_by_the_function():
    assert run(lambda score, b, h, q, k: score + np.exp(TABLE)[h, q]) == 2 + np.exp(TABLE[1, 2])
    assert run(lambda score, b, h, q, k: score + (2 * TABLE - 1).T[q, h]) == 2 + 2 * TABLE[1, 2] - 1
    assert run(lambda score, b, h, q, k: score + TABLE.astype(np.float32).reshape(6)[3 * h + q]) == 2 + TABLE[1, 2]
    assert run(lambda score, b, h, q, k: score + len(TABLE) + TABLE.shape[1]) == 2 + 2 + 3


def test_jax_arrays():
    jnp = pytest.importorskip("jax.numpy")
    table = jnp.asarray(TABLE)
    traced = trace(lambda score, b, h, q, k: score + table[h, q] * jnp.sqrt(4.0))
    assert traced.tables[0] is table and traced.graph.operations[-1].name == "add"


def test_arrays_that_jax_traces():
    jax = pytest.importorskip("jax")

    def total(table, scale):
        traced = trace(lambda score, b, h, q, k: score * scale + table[h][q])
        assert [x is y for x, y in zip(traced.tables, (scale, table), strict=True)] == [True, True]
        return traced.tables[1].sum() * scale

    found = jax.jit(jax.grad(total))(jax.numpy.asarray(TABLE), jax.numpy.asarray(2.0))
    assert found.tolist() == [[2.0] * 3] * 2


def test_tensors():
    torch = pytest.importorskip("torch")
    table, scale = torch.tensor(TABLE, requires_grad=True), torch.nn.Parameter(torch.tensor(2.0))
    for function in (
        lambda score, b, h, q, k: torch.where(q >= k, score * scale + table[h, q], -float("inf")),
        lambda score, b, h, q, k: scale * score + table[h][q],
        lambda score, b, h, q, k: torch.add(table[h, q], score.mul(scale) if hasattr(score, "mul") else score * scale),
    ):
        found = captured(function)
        assert {id(x) for x in found} == {id(table), id(scale)}


def test_modules_of_torch():
    torch = pytest.importorskip("torch")

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.table = torch.nn.Parameter(torch.tensor(2.0)), TABLE

        def forward(self, score, b, h, q, k):
            return score * self.scale + self.table[h, q]

    module = Module()
    assert [x is y for x, y in zip(captured(module), (module.scale, TABLE), strict=True)] == [True, True]
    assert captured(module.forward)[1] is TABLE


def test_methods_of_tensors():
    function = lambda score, b, h, q, k: (  # noqa: E731
        score.tanh().abs().exp().log().sqrt().sigmoid().pow(2).clamp(min=0.0, max=9.0).to("float32").float()
        + q.long().int().square().relu().type("torch.int64")
        + score.exp2().rsqrt().reciprocal().minimum(score).maximum(0.0).sign()
    )
    x = 1 / (1 + np.exp(-np.sqrt(np.tanh(2.0))))
    assert run(function) == pytest.approx(x**2 + 4 + 1, rel=1e-15)


def test_traces_in_threads_and_inside_of_each_other():
    inner = []

    def function(score, b, h, q, k):
        inner.append(run(of_global))
        return score + TABLE[h, q]

    found = []
    threads = [threading.Thread(target=lambda: found.append(run(function))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {2 + TABLE[1, 2]} and set(inner) == {4 + TABLE[1, 2]} and len(inner) == 8


# show() and names


def test_show_says_what_is_hoisted_and_what_is_generated(capsys):
    reach = 1
    show(lambda score, b, h, q, k: 30.0 * np.tanh(score / 30.0) + TABLE[h, k - q + reach] * np.exp(TABLE[h, 0]))
    text = capsys.readouterr().out
    assert "parameter 0: 1\n" in text and "table 0: float64, shape (2, 3), with gradient\n" in text
    sections = dict(x.split("\n", 1) for x in text.strip().split("\n\n")[1:] if "\n" in x)
    assert "exp(" in sections["once per head"] and "exp(" not in sections["for each pair"]
    assert "table0[" in sections["once per diagonal"] and "tanh(" in sections["for each pair"]
    assert "score_tanh(" in text.partition("C++ of GPU kernels")[2]
    assert text.count("d value / d table0[") == 2


def test_names():
    assert set(spattn.score.__all__) <= set(dir(spattn.score))
    assert {"alibi", "softcap", "where", "take", "captured", "show", "compose"} <= set(spattn.score.__all__)
    with pytest.raises(AttributeError, match="module 'spattn.score' has no attribute 'alibis'"):
        spattn.score.alibis  # noqa: B018
    space = {}
    exec("from spattn.score import *", space)
    assert space["alibi"] is spattn.score.alibi and sys.modules["spattn.score"] is spattn.score
