"""Traces that are kept: what library functions refer to is read at every call, and graphs are those of a new trace."""

import gc
import threading
import types
import weakref

import numpy as np
import pytest

import spattn
from spattn import score as s
from spattn._util.cached import BoundedCache
from spattn.score import kept_traces, shared_builder
from spattn.score.kept_traces import find_or_trace
from spattn.score.recorder import Sizes
from spattn.score.tracing import trace
from spattn.testing import inputs

from .trees import Tree

SIZES = Sizes(2, 4, 9, 9)
SCALE = 2.0
RANDOM = np.random.default_rng(0)
FUNCTIONS = {
    "alibi": lambda: s.alibi(RANDOM.random(4)),
    "alibi of the call's heads": lambda: s.alibi(symmetric=True),
    "bias": lambda: s.bias(RANDOM.random((4, 9, 1))),
    "natten_rpb": lambda: s.natten_rpb(RANDOM.random((4, 9, 5)), (5, 3), 2, (3, 3)),
    "relative_bias": lambda: s.relative_bias(RANDOM.random((4, 9))),
    "softcap": lambda: s.softcap(30.0),
    "softcap of an array without axes": lambda: s.softcap(np.array(30.0)),
    "swin_bias": lambda: s.swin_bias(RANDOM.random((25, 4)), (3, 3)),
    "t5_bias": lambda: s.t5_bias(RANDOM.random((32, 4))),
    "temperature": lambda: s.temperature(RANDOM.random(9), "query"),
    "composition": lambda: s.softcap(np.float32(3.0)) | s.alibi(RANDOM.random(4)) | s.temperature(2.0),
}


def same(found, expected):
    """Equal graphs and numbers (signs of zeros included), and the same tables."""
    assert found.graph == expected.graph and list(map(repr, found.parameters)) == list(map(repr, expected.parameters))
    assert [id(x) for x in found.tables] == [id(x) for x in expected.tables]


@pytest.fixture
def traces(monkeypatch):
    """The functions that were traced, with nothing kept from before."""
    found = []

    def traced(function, sizes):
        found.append(function)
        return trace(function, sizes)

    monkeypatch.setattr(kept_traces, "trace", traced)
    monkeypatch.setattr(kept_traces, "_traces", BoundedCache(256))
    return found


def test_every_function_of_the_library_is_here():
    classes = {x for x in (getattr(s, name) for name in s.__all__) if isinstance(x, type)}
    assert classes - {s.ScoreFunction, s.from_score_mod} <= {type(make()) for make in FUNCTIONS.values()}


@pytest.mark.parametrize("make", FUNCTIONS.values(), ids=FUNCTIONS)
def test_functions_of_the_library_are_traced_once(traces, make):
    """For all objects of a kind, and for any size that the function does not ask for."""
    one, other = make(), make()
    for function in (one, one, other):
        same(find_or_trace(function, SIZES), trace(function, SIZES))
    same(find_or_trace(one, SIZES._replace(kv_len=30)), trace(one, SIZES._replace(kv_len=30)))
    assert traces == [one]


def test_arrays_are_those_of_the_call(traces):
    torch = pytest.importorskip("torch")
    for table in (RANDOM.random(4), torch.rand(4), np.array(2.0), torch.tensor(2.0), torch.nn.Parameter(torch.rand(4))):
        function = s.softcap(table)
        find_or_trace(function, SIZES)
        assert find_or_trace(function, SIZES).tables == (table,)
        assert find_or_trace(s.softcap(table), SIZES).tables[0] is table
    assert len(traces) == 5  # each is of another type or shape


def test_other_sizes_that_a_function_asks_for(traces):
    function = s.alibi()
    for heads in (4, 8, 8, 8, 4):
        assert find_or_trace(function, SIZES._replace(heads=heads)).tables[0].tolist() == s.alibi_slopes(heads).tolist()
    assert len(traces) == 3
    bias = s.bias(np.ones((4, 9, 1)))
    find_or_trace(bias, SIZES)
    with pytest.raises(ValueError, match=r"bias: array of shape \(4, 9, 1\) does not broadcast to \(2, 4, 8, 9\)"):
        find_or_trace(bias, SIZES._replace(q_len=8))
    with pytest.raises(ValueError, match="expected an entry for each of 5 query heads, got 4"):
        find_or_trace(s.relative_bias(np.ones((4, 9))), SIZES._replace(heads=5))


def test_numbers_that_are_equal_but_not_the_same(traces):
    numbers = 0.0, -0.0, 1, 1.0, np.float32(1), np.float64(1), np.int32(1), float("nan")
    for _ in range(2):
        for number in numbers:
            same(find_or_trace(s.temperature(number), SIZES), trace(s.temperature(number), SIZES))
    assert len(traces) == len(numbers)


def test_one_array_in_two_places_is_one_table(traces):
    one, other = RANDOM.random(4), RANDOM.random(4)
    for pair in ((one, other), (one, one), (other, one), (other, other)):
        function = s.alibi(pair[0]) | s.temperature(pair[1])
        same(find_or_trace(function, SIZES), trace(function, SIZES))
        assert len(find_or_trace(function, SIZES).tables) == len({id(x) for x in pair})


# Stale values


def read(function):
    """What a call reads, by the bits of its result."""
    q, k, v = inputs(*SIZES[:2], 2, *SIZES[2:], 8)
    return spattn.attention(q, k, v, score=function, backend="reference")


def changed(function, change):
    """Whether a call notices a change; calls before and after it are those of functions that nobody has traced."""
    before = read(function)
    np.testing.assert_array_equal(read(function), before)
    change()
    after = read(function)
    np.testing.assert_array_equal(after, read(lambda *pair: function(*pair)))
    return not np.array_equal(before, after)


def test_elements_that_change():
    slopes, cap = np.ones(4), np.array(2.0)
    assert changed(s.alibi(slopes), lambda: slopes.__setitem__(1, -1.0))
    assert changed(s.softcap(cap), lambda: cap.__setitem__((), 0.5))
    assert changed(s.softcap(cap) | s.alibi(slopes), lambda: cap.__setitem__((), 3.0))


def test_tensors_that_change():
    torch = pytest.importorskip("torch")
    cap, table = torch.tensor(2.0), torch.ones(4, 9)
    assert changed(s.softcap(cap), lambda: cap.fill_(0.5))
    assert changed(s.relative_bias(table), lambda: table[0, 3].fill_(5.0))
    whole = torch.ones(4, 1, 1)
    assert changed(s.bias(whole), lambda: whole[1].fill_(-torch.inf))
    one = torch.ones(1)  # the function reads an element of it
    assert changed(s.bias(one) | s.softcap(1.0), lambda: one.fill_(3.0))


def test_an_element_that_the_function_reads_has_the_gradient_of_each_call():
    torch = pytest.importorskip("torch")
    one = torch.ones(1, requires_grad=True)
    function = s.bias(one) | s.softcap(1.0)
    q, k, v = map(torch.from_numpy, inputs(1, 2, 2, 5, 5, 8))
    with torch.no_grad():
        spattn.attention(q, k, v, score=function)
    for _ in range(2):
        one.grad = None
        spattn.attention(q, k, v, score=function).square().sum().backward()
        assert one.grad.abs().sum() > 0


def test_arrays_that_change_their_shape_or_dtype():
    table = np.ones((4, 9))
    function = s.relative_bias(table)
    assert read(function).shape
    table.resize((4, 3), refcheck=False)
    same(find_or_trace(function, SIZES), trace(function, SIZES))
    table.resize((3, 3), refcheck=False)
    with pytest.raises(ValueError, match="expected an entry for each of 4 query heads, got 3"):
        read(function)
    torch = pytest.importorskip("torch")
    weights = torch.ones(4)
    function = s.temperature(weights)
    read(function)
    weights.data = torch.ones(4, dtype=torch.int64)
    same(find_or_trace(function, SIZES), trace(function, SIZES))
    weights.resize_(3)
    with pytest.raises(ValueError, match="expected an entry for each of 4 query heads, got 3"):
        read(function)


def test_attributes_that_change():
    """Frozen dataclasses refuse it, but not to those who insist; lists among the attributes may change."""
    function = s.softcap(2.0)
    assert changed(function, lambda: object.__setattr__(function, "cap", 0.5))
    assert changed(function | s.alibi(), lambda: object.__setattr__(function, "cap", 3.0))
    table, shape = RANDOM.random((4, 3, 3)), [3, 3]
    assert changed(s.relative_bias(table, shape), lambda: shape.__setitem__(slice(None), [1, 9]))


@pytest.mark.parametrize("wrap", [s.from_score_mod, lambda f: s.softcap(9.0) | f, lambda f: s.compose(f) | s.alibi()])
def test_plain_functions_among_functions_of_the_library(wrap):
    scale, table = 2.0, np.ones(4)

    def function(score, b, h, q, k):
        return score * scale * table[h]

    def rebind():
        nonlocal scale
        scale = 3.0

    assert changed(wrap(function), rebind)
    assert changed(wrap(function), lambda: table.__setitem__(2, -1.0))


def test_what_plain_functions_refer_to():
    global SCALE
    SCALE, model, module, numbers = 2.0, types.SimpleNamespace(scale=2.0), types.ModuleType("module"), [2.0, 3.0]
    module.scale, default, attribute = 2.0, np.array(2.0), np.ones(4)
    model.table = attribute

    def of_default(score, b, h, q, k, scale=default):
        return score * scale

    def set_global():
        global SCALE
        SCALE = 3.0

    assert changed(lambda score, b, h, q, k: score * SCALE, set_global)
    assert changed(lambda score, b, h, q, k: score * model.scale, lambda: setattr(model, "scale", 3.0))
    assert changed(lambda score, b, h, q, k: score * model.table[h], lambda: setattr(model, "table", 3 * attribute))
    assert changed(lambda score, b, h, q, k: score * module.scale, lambda: setattr(module, "scale", 3.0))
    assert changed(lambda score, b, h, q, k: score * numbers[0], numbers.reverse)
    assert changed(of_default, lambda: default.fill(3.0))
    assert changed(of_default, lambda: setattr(of_default, "__defaults__", (4.0,)))


def test_subclasses_may_do_anything():
    class Scheduled(s.softcap):
        __module__ = None
        step = 1.0

        def __call__(self, score, b, h, q, k):
            return super().__call__(score, b, h, q, k) * Scheduled.step

    function = Scheduled(2.0)
    assert changed(function, lambda: setattr(Scheduled, "step", 3.0))
    assert changed(s.alibi() | function, lambda: setattr(Scheduled, "step", -1.0))


def test_no_array_is_kept():
    table = np.ones((4, 9))
    function, alive = s.relative_bias(table) | s.softcap(table[:, 0].copy()), weakref.ref(table)
    read(function)
    read(function)
    del function, table
    gc.collect()
    assert alive() is None


# Graphs of builders that share their steps


def test_functions_that_begin_alike():
    flag, number = True, 3

    def function(score, b, h, q, k):
        score = np.tanh(score) + q
        score = score * 2.0 if flag else score * 2
        for _ in range(number):
            score = score + k
        return score

    expected = {}
    for _ in range(2):
        for flag in (True, False):  # noqa: B007
            for number in (3, 1, 4):
                traced = trace(function)
                assert expected.setdefault((flag, number), traced) == traced
    assert len({traced.graph for traced in expected.values()}) == 3  # score is a float


@pytest.mark.parametrize("most", [1, 2, 5, 40])
def test_builders_whose_steps_are_forgotten(monkeypatch, most):
    expected = [trace(Tree(seed).function) for seed in range(40)]
    monkeypatch.setattr(shared_builder, "_steps", BoundedCache(most))
    monkeypatch.setattr(shared_builder, "_results", BoundedCache(most))
    for _ in range(2):
        assert [trace(Tree(seed).function).graph for seed in range(40)] == [x.graph for x in expected]
    assert len(shared_builder._steps) <= most and len(shared_builder._results) <= most


def test_builders_in_threads(monkeypatch):
    expected = [trace(Tree(seed).function).graph for seed in range(40)]
    for most in (1 << 14, 3):
        monkeypatch.setattr(shared_builder, "_steps", BoundedCache(most))
        monkeypatch.setattr(shared_builder, "_results", BoundedCache(most))
        found = [[] for _ in range(8)]

        def run(own):
            own += [trace(Tree(seed).function).graph for seed in range(40)]

        threads = [threading.Thread(target=run, args=(own,)) for own in found]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(own == expected for own in found)


def test_steps_that_fail_leave_the_builder_as_it_was():
    builder = shared_builder.SharedBuilder()
    one = builder.step("constant", 2**30, "int")
    for _ in range(2):
        with pytest.raises(ValueError, match="integers have 32 bits"):
            builder.step("apply", "mul", one, builder.step("constant", 4, "int"))
    assert builder.result(builder.step("to_float", one)).graph.operations[-1].number == 2.0**30
