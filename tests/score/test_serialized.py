"""Serialized score functions: every graph is restored, and nothing else is accepted."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spattn import score as f
from spattn.score.graph import Builder, Graph
from spattn.score.recorder import Sizes
from spattn.score.serialized import VERSION, from_json, restore, serialize, to_json
from spattn.score.tracing import trace

from .trees import HEADS, Tree

SIZES = Sizes(3, HEADS, 12, 12)


@given(st.integers(0, 10**6))
def test_random_functions_are_restored(seed):
    traced = trace(Tree(seed).function, SIZES)
    text, floats, integers, tables = serialize(traced)
    again = restore(text, floats, integers, tables)
    assert again.graph == traced.graph and again.parameters == traced.parameters
    assert list(map(type, again.parameters)) == list(map(type, traced.parameters))
    assert all(x is y for x, y in zip(again.tables, traced.tables, strict=True))
    assert json.loads(text)["score"] == VERSION


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 1e300, 0.1, -0.0, 3])
def test_constants_are_restored(value):
    """Also those that JSON does not have."""
    builder = Builder()
    operands = builder.input("score"), builder.constant(value, "float")
    result = builder.apply("maximum", *operands)
    graph = Graph(tuple(builder.operations), (result,))
    assert from_json(to_json(graph)) == graph
    json.loads(to_json(graph), parse_constant=pytest.fail)


def test_library_functions_are_restored():
    table = np.zeros((HEADS, 9))
    for function in (
        f.softcap(3.0) | f.alibi(),
        f.bias(np.zeros((1, 1, 12, 12))) | f.temperature(np.ones(HEADS)),
        f.t5_bias(np.zeros((32, HEADS)), bidirectional=False),
        f.relative_bias(table),
        f.swin_bias(np.zeros((25, HEADS)), (3, 3)),
        f.natten_rpb(table, 5),
        lambda s, b, h, q, k: np.where(k > q, -np.inf, s) ** 3,
    ):
        traced = trace(function, SIZES)
        assert restore(*serialize(traced))[:2] == traced[:2]


def changed(change):
    """The text of a function with three operations on five inputs, after a change of its JSON."""
    table = np.zeros((HEADS, 9))
    read = json.loads(serialize(trace(lambda s, b, h, q, k: s * 0.5 + table[h, k - q + 4])).text)
    change(read)
    return json.dumps(read)


def operation(name):
    return lambda read: next(step for step in read["operations"] if step[0] == name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda x: x.update(score=VERSION + 1),
            f"version {VERSION + 1} of serialized score functions is not supported",
        ),
        (lambda x: x.pop("score"), "expected a serialized score function"),
        (lambda x: x.pop("result"), "damaged"),
        (lambda x: x.update(result=len(x["operations"])), "damaged"),
        (lambda x: x.update(result=1), "damaged"),  # an integer, and operations that it does not need
        (lambda x: x["operations"].append(["score", [], "float", 0]), "damaged"),
        (lambda x: operation("sub")(x).__setitem__(0, "cosh"), "'cosh' of int is unknown"),
        (lambda x: operation("sub")(x).__setitem__(0, "neg"), "neg has 2 operands"),
        (lambda x: operation("sub")(x).__setitem__(1, [3, 99]), "damaged"),
        (lambda x: operation("sub")(x).__setitem__(2, "float"), "damaged"),
        (lambda x: operation("look_up")(x).__setitem__(1, [0, 0]), "an index is not an integer"),
        (lambda x: operation("look_up")(x).__setitem__(3, 1), "numbers of look_up operations"),
        (lambda x: operation("constant")(x).__setitem__(3, 2**40), "32 bits"),
        (lambda x: x.update(operations=None), "damaged"),
    ],
)
def test_other_texts_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        from_json(changed(change))


def test_text_that_is_no_json_is_refused():
    for text in ("", "3", "[]", "{}", '{"pattern":"causal"}'):
        with pytest.raises(ValueError, match="expected a serialized score function"):
            from_json(text)


def test_operands_that_do_not_fit_are_refused():
    """Kernels read arrays without checking indices against the number of axes."""
    table, cap, n = np.zeros((HEADS, 9)), 3.0, 2
    text, floats, integers, tables = serialize(trace(lambda s, b, h, q, k: cap * s + n * table[h, k]))
    assert (floats, integers) == ([3.0], [2])
    for given_ in ((), floats * 2):
        with pytest.raises(ValueError, match="expected 1 floats, 1 integers and 1 arrays"):
            restore(text, given_, integers, tables)
    for wrong in (table[0], table.astype(int), table[None]):
        with pytest.raises(TypeError, match="captured array 0: expected 2 axes of float"):
            restore(text, floats, integers, [wrong])
