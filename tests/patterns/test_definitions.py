"""Every pattern is what docs/patterns-definitions.rst says, and its hints say the same as its predicate."""

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from spattn import patterns as p
from spattn.patterns.base.recipe import Recipe
from spattn.patterns.base.rows import AskedRows
from spattn.patterns.papers.layouts import LengthLayout
from spattn.testing.strategies import Draw, cases, sizes

from . import oracle

SETTINGS = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


def predicate(bound, q_len, kv_len):
    q, k = np.arange(kv_len - q_len, kv_len)[:, None], np.arange(kv_len)[None, :]
    result = bound.allows(q, k)
    assert result.shape == (q_len, kv_len)
    assert result.dtype == bool
    return result


def positions(lattice, length_from, length_to, shift):
    if lattice is None:
        return np.arange(length_from, length_to) + shift
    points = np.array([lattice.offset + shift])
    assert len(lattice.strides) == len(lattice.extents) <= 3
    for stride, extent in zip(lattice.strides, lattice.extents, strict=True):
        points = (points[:, None] + stride * np.arange(extent)).reshape(-1)
    return points


def how_often(bound, q_len, kv_len):
    """How many parts have each pair; checks that lattices stay inside and that shifted pieces are alike."""
    times = np.zeros((q_len, kv_len), dtype=int)
    for part in bound.parts(q_len, kv_len):
        pieces = []
        for shift_q, shift_k in part.shifts:
            q = positions(part.query, kv_len - q_len, kv_len, shift_q)
            k = positions(part.key, 0, kv_len, shift_k)
            assert not len(q) or (kv_len - q_len <= q.min() and q.max() < kv_len)
            assert not len(k) or (k.min() >= 0 and k.max() < kv_len)
            pieces.append(np.broadcast_to(part.pattern.allows(q[:, None], k[None, :]), (len(q), len(k))))
            np.add.at(times, (q[:, None] - (kv_len - q_len), k[None, :]), pieces[-1].astype(int))
        assert all(np.array_equal(piece, pieces[0]) for piece in pieces)
    return times


def bits(words, kv_len):
    """Of rows of words, as bools."""
    return np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little")[..., :kv_len] > 0


def check(pattern, q_len, kv_len, expected):
    bound = pattern.at(0, 0).bind(q_len, kv_len)
    assert np.array_equal(predicate(bound, q_len, kv_len), expected)
    assert np.array_equal(pattern.index_set(q_len, kv_len).to_dense(), expected)
    assert np.array_equal(how_often(bound, q_len, kv_len), expected.astype(int))
    asked = AskedRows(np.arange(kv_len - q_len, kv_len)[None, None], q_len, kv_len, 1, 1)
    if q_len and kv_len:
        assert np.array_equal(bits(asked.of(pattern.at(0, 0)), kv_len)[0, 0], expected)
    assert bound.bind(q_len, kv_len) == bound


def check_runs(pattern, q_len, kv_len):
    """Runs are disjoint and lie inside."""
    bound = pattern.at(0, 0).bind(q_len, kv_len)
    runs = bound.runs(np.arange(kv_len - q_len, kv_len), kv_len)
    if runs is None:
        return
    for row in zip(runs.start, runs.step, runs.count, strict=True):
        keys = [key for s, d, n in zip(*row, strict=True) for key in range(s, s + d * n, d)]
        assert len(set(keys)) == len(keys)
        assert not keys or (min(keys) >= 0 and max(keys) < kv_len)


@st.composite
def of_one_head(draw, name):
    """(pattern of one batch entry and head, q_len, kv_len)"""
    pattern, drawn = draw(cases(name, max_len=40, min_len=0))
    batch, head = (draw(st.integers(0, (own or 4) - 1)) for own in pattern.sizes())
    kept = isinstance(pattern, Recipe) and pattern.sizes() == (1, 1)  # a recipe's at() is its composition
    one = pattern if kept else pattern.at(batch, head)
    return one, drawn.q_len, drawn.kv_len


@pytest.mark.parametrize("name", sorted(cls.name for cls in oracle.RULES))
@SETTINGS
@given(data=st.data())
def test_definition(name, data):
    pattern, q_len, kv_len = data.draw(of_one_head(name))
    assume(oracle.has_rule(pattern))
    check(pattern, q_len, kv_len, oracle.mask(pattern, q_len, kv_len))


@pytest.mark.parametrize("name", p.registry.names())
@SETTINGS
@given(data=st.data())
def test_hints_agree(name, data):
    pattern, q_len, kv_len = data.draw(of_one_head(name))
    check(pattern, q_len, kv_len, predicate(pattern.bind(q_len, kv_len), q_len, kv_len))
    check_runs(pattern, q_len, kv_len)
    if isinstance(pattern, LengthLayout):
        return  # one head of a recipe has no name of its own
    again = p.from_json(pattern.to_json())
    assert again == pattern
    assert hash(again) == hash(pattern)


@st.composite
def with_a_rule(draw, drawn):
    """(pattern of one head, its rule)"""
    pattern = Draw(draw).pattern(drawn).at(0, 0)
    assume(oracle.has_rule(pattern))
    return pattern, lambda *cell: oracle.allowed(pattern, *cell)


def composed(depth, drawn):
    leaf = with_a_rule(drawn)
    if depth == 0:
        return leaf
    inner = composed(depth - 1, drawn)
    return st.one_of(
        leaf,
        st.tuples(inner, inner).map(lambda x: (x[0][0] & x[1][0], lambda *c: x[0][1](*c) and x[1][1](*c))),
        st.tuples(inner, inner).map(lambda x: (x[0][0] | x[1][0], lambda *c: x[0][1](*c) or x[1][1](*c))),
        st.tuples(inner, inner).map(lambda x: (x[0][0] - x[1][0], lambda *c: x[0][1](*c) and not x[1][1](*c))),
        inner.map(lambda x: (~x[0], lambda *c: not x[1](*c))),
    )


@settings(SETTINGS, max_examples=80)
@given(st.data())
def test_composition(data):
    drawn = data.draw(sizes(max_len=40, max_batch=1, max_heads=1, min_len=0))
    (pattern, rule), q_len, kv_len = data.draw(composed(2, drawn)), drawn.q_len, drawn.kv_len
    cells = [[rule(i, j, q_len, kv_len) for j in range(kv_len)] for i in range(q_len)]
    check(pattern, q_len, kv_len, np.array(cells, dtype=bool).reshape(q_len, kv_len))
    assert p.from_json(pattern.to_json()) == pattern


@pytest.mark.parametrize("name", p.registry.names())
def test_example(name):
    pattern, q_len, kv_len = p.registry.example(name)
    assert p.registry.get(name, **{f.name: getattr(pattern, f.name) for f in dataclasses.fields(pattern)}) == pattern
    bound = pattern.at(0, 0).bind(q_len, kv_len)
    rows = pattern.index_set(q_len, kv_len)
    assert np.array_equal(rows.to_dense(), predicate(bound, q_len, kv_len))
    assert name in ("full", "deepspeed_dense") or 0 < rows.density < 1


@pytest.mark.parametrize("name", sorted(p.show.gallery()))
def test_gallery(name):
    pattern, length = p.show.gallery()[name]
    check(pattern, length, length, predicate(pattern, length, length))


@pytest.mark.parametrize(
    "pattern, counts",
    [
        (p.Causal(), [0, 0, 0, 0]),
        (p.SlidingWindow(3, 2), [0, 0, 1, 2]),
        (p.SlidingWindow(-1, -1), [8, 8, 8, 8]),
        (p.DilatedWindow(1, 2, 2), [1, 1, 2, 2]),
        (p.Full(), [8, 8, 8, 8]),
        (p.Sinks(2), [2, 2, 2, 2]),
        (p.GlobalTokens(2), [2, 2, 2, 2]),
        (p.BigBird(4, 1, 1, 0), [4, 4, 4, 4]),  # global keys, but no global rows
        (p.BigBird(4, 1, 0, 0), [0, 0, 0, 0]),
        (p.BlockLayout(np.ones((2, 2), bool), 4), [0, 0, 0, 0]),
        (p.KeyBlocks(np.zeros((2, 1), np.int64), 4, 4), [0, 0, 0, 0]),
        (p.Documents((8,)), [0, 0, 0, 0]),
        (p.Clusters(np.zeros(8, np.int64)), [0, 0, 0, 0]),
        (p.deepspeed.dense(4), [0, 0, 0, 0]),
        (p.deepspeed.fixed(4, 1), [0, 0, 0, 0]),
        (p.deepspeed.variable(4), [0, 0, 0, 0]),
        (p.deepspeed.bigbird(4, 0), [0, 0, 0, 0]),
        (p.deepspeed.bslongformer(4), [0, 0, 0, 0]),
        (p.deepspeed.local_sliding_window(4), [0, 0, 0, 0]),
    ],
    ids=str,
)
def test_queries_before_position_0(pattern, counts):
    """Formulas go on to the left of the sequence; layouts, labels and documents have nothing there."""
    rows = pattern.index_set(12, 8)
    assert [len(rows.row(row)) for row in range(4)] == counts and rows.row(11).size


def test_python_integers():
    for pattern in (p.Causal(), ~p.Causal(), p.Full() - p.SlidingWindow(2), p.longformer(4, global_tokens=(1, 9))):
        dense = pattern.index_set(12, 12).to_dense()
        assert all(bool(pattern.allows(i, j)) == dense[i, j] for i in range(12) for j in range(12))


@pytest.mark.parametrize("name", p.registry.names())
@settings(SETTINGS, max_examples=10)
@given(data=st.data())
def test_translation_invariance_is_true(name, data):
    pattern = data.draw(of_one_head(name))[0]
    if pattern.translation_invariant:
        q, k = np.arange(20)[:, None], np.arange(20)[None, :]
        assert all(np.array_equal(pattern.allows(q, k), pattern.allows(q + t, k + t)) for t in (-7, 1, 5, 100))
