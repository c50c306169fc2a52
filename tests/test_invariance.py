"""What a result does not depend on; docs/guarantees.rst names these tests and others."""

import ast
import re
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import spattn
from spattn.testing import GradientExpectation, inputs
from spattn.testing.strategies import cases, compositions, problems

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "guarantees.rst"
TEST = re.compile(r"``(tests/[\w/]+\.py)::(test_\w+)``")


def alone(arrays, batch, heads):
    """One batch entry, and some of its heads."""
    return [x[batch : batch + 1, heads] for x in arrays]


def same_bits(found, expected):
    return all(np.array_equal(a.view(np.uint8), b.view(np.uint8)) for a, b in zip(found, expected, strict=True))


def drawn(problem):
    q, k, v = inputs(*problem.shape, dtype=problem.dtype, seed=problem.seed)
    plan = spattn.plan_for(problem.case.pattern, q, k, v, backend="cpu")
    return plan, q, k, v


def tells_none_apart(problem):
    return problem.case.pattern.sizes() == (1, 1)


MANY = problems(st.one_of(cases(max_len=300), compositions(max_len=300))).filter(tells_none_apart)


@settings(max_examples=30)
@given(MANY, st.data())
def test_batch_and_heads_change_no_bit_of_the_forward(problem, data):
    """With one plan: an entry and a key head alone have the bits of the whole call."""
    plan, q, k, v = drawn(problem)
    entry, head = data.draw(st.integers(0, len(q) - 1)), data.draw(st.integers(0, k.shape[1] - 1))
    group = q.shape[1] // k.shape[1]
    of_queries, of_keys = slice(head * group, (head + 1) * group), slice(head, head + 1)
    whole = spattn.attention(q, k, v, plan, backend="cpu", return_lse=True)
    one = [*alone([q], entry, of_queries), *alone([k, v], entry, of_keys)]
    found = spattn.attention(*one, plan, backend="cpu", return_lse=True)
    assert same_bits(found, [np.ascontiguousarray(x) for x in alone(whole, entry, of_queries)])


def test_batch_changes_gradients_within_their_bound():
    """Gradients of an entry alone, against the float64 reference of that entry."""
    pattern = spattn.patterns.longformer(64, global_tokens=5)
    q, k, v = inputs(3, 4, 2, 300, 300, 32)
    one = alone((q, k, v), 1, slice(None))
    expected = GradientExpectation(pattern, *one)
    dout = np.resize(expected.dout, q.shape)
    out, lse = spattn.attention(q, k, v, pattern, backend="cpu", return_lse=True)
    gradients = spattn.attention_backward(dout, q, k, v, out, lse, pattern, backend="cpu")
    expected.check(tuple(alone(gradients, 1, slice(None))))


def rows_of_the_table():
    """The rows of the page's table, each a list of cells."""
    table = PAGE.read_text(encoding="utf-8").partition(".. list-table::")[2].partition("\n\nWhat this")[0]
    for row in re.split(r"^   \* - ", table, flags=re.MULTILINE)[2:]:
        yield [" ".join(cell.split()) for cell in re.split(r"^     - ", row, flags=re.MULTILINE)]


def test_every_cell_of_the_table_is_a_test():
    """A cell says what holds and names the test; a dash is a cell without meaning."""
    rows = list(rows_of_the_table())
    assert len(rows) >= 10
    for what, *cells in rows:
        assert len(cells) == 3, what
        for cell in cells:
            tests = TEST.findall(cell)
            assert (cell == "–") != bool(tests), f"{what}: {cell}"
            assert cell == "–" or re.match("same bits|error bound", cell), f"{what}: {cell}"
            for path, name in tests:
                functions = ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))
                assert name in {x.name for x in functions if isinstance(x, ast.FunctionDef)}, f"{path}::{name}"
