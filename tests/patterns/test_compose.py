"""Operators: any number of operands, bool arrays beside patterns, and how deep they nest."""

import copy
import functools
import json
import operator
import pickle
import time

import numpy as np
import pytest

import spattn
from spattn import patterns as p


def from_data(data):
    return p.from_json(json.dumps(data))


N = 64
TERMS = [p.Stride(7 + t, 3) & p.Causal() for t in range(1000)]
MASK = np.random.default_rng(0).random((N, N)) < 0.5


def union(terms):
    return functools.reduce(operator.or_, terms)


def test_operands_are_flattened_and_kept_once():
    a, b, c = p.Causal(), p.Sinks(2), p.BlockLocal(8)
    assert (a | b | c).operands == (a | (b | c)).operands == ((a | b) | (b | c)).operands == (a, b, c)
    assert (a & b & c).operands == (a & (b & c)).operands == (a, b, c)
    assert (a | a) is a and (a & a) is a and ~~a is a and (a - ~b) == a & b
    assert ((a | b) & c).operands == (a | b, c)
    assert a | b != b | a and a | b != a & b


def test_repr_reads_back():
    a, b, c = p.Causal(), p.Sinks(2), p.BlockLocal(8)
    for pattern in (a | b | c, a & b - c, a - b - c, ~(a | b) & c, (~a | b) - (c & a)):
        assert eval(repr(pattern), vars(p)) == pattern


def test_union_of_a_thousand():
    """Nothing recurses, and everything takes less than a second."""
    i, j = np.ogrid[:N, :N]
    want = functools.reduce(np.logical_or, [((i - j) % (7 + t) == 3) & (j <= i) for t in range(1000)])
    pattern = union(TERMS)
    start = time.process_time()
    assert spattn.plan(pattern, N).nnz == want.sum()
    assert time.process_time() - start < 1
    start = time.process_time()
    assert np.array_equal(pattern.index_set(N, N).to_dense(), want)
    assert time.process_time() - start < 1
    assert pattern == union(TERMS) and hash(pattern) == hash(union(TERMS)) and len(repr(pattern)) > 1000
    assert p.from_json(pattern.to_json()) == pattern
    assert pickle.loads(pickle.dumps(pattern)) == copy.deepcopy(pattern) == pattern
    assert (pattern & p.PerHead((p.Causal(), p.Full()))).at(0, 1) == pattern & p.Full()


def test_union_of_many_views_is_planned_whole():
    few, many = union(TERMS[:3]), union(TERMS[:40])
    assert len(few.parts(N, N)) > 1 and many.parts(N, N) == (p.authoring.Part(many),)


def test_doubling_costs_nothing():
    pattern = p.Causal()
    for _ in range(1000):
        pattern = pattern | pattern
    assert pattern is not None and pattern == p.Causal()


def nested(depth):
    pattern = p.Causal()
    for level in range(depth):
        pattern = (pattern & p.Stride(level + 2)) if level % 2 else (pattern | p.Sinks(level + 1))
    return pattern


def test_nesting_has_an_end():
    deep = nested(64)
    dense = deep.index_set(20, 20).to_dense()
    q, k = np.ogrid[:20, :20]
    assert np.array_equal(deep.allows(q, k), dense) and spattn.plan(deep, 20).nnz == dense.sum()
    assert p.from_json(deep.to_json()) == pickle.loads(pickle.dumps(deep)) == copy.deepcopy(deep) == deep
    with pytest.raises(ValueError, match="^pattern: expected operators nested at most 64 deep, got 65"):
        nested(65)
    with pytest.raises(ValueError, match="nested at most 64 deep"):
        p.PerHead((deep, deep))
    with pytest.raises(ValueError, match="^pattern: .* nested at most 64 deep"):
        from_data(
            {
                "pattern": "|",
                "operands": [
                    json.loads(deep.to_json()),
                    {"pattern": "full"},
                    {"pattern": "&", "operands": [json.loads(deep.to_json()), {"pattern": "full"}]},
                ],
            }
        )


def test_heads_nest_as_operators_do():
    pattern = p.Causal()
    for _ in range(64):
        pattern = p.PerHead((pattern,))
    assert p.from_json(pattern.to_json()) == pattern
    with pytest.raises(ValueError, match="nested at most 64 deep"):
        p.PerHead((pattern,))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda data: {"pattern": "~", "operands": [data]},
        lambda data: {"pattern": "per_head", "patterns": [data]},
        lambda data: {"pattern": "documents", "lengths": data},
        lambda data: [data],
    ],
    ids=["operator", "heads", "field", "list"],
)
def test_deep_data_is_refused(wrap):
    before, after = json.dumps(wrap("DATA")).split('"DATA"')
    text = before * 900 + '{"pattern":"causal"}' + after * 900
    with pytest.raises(ValueError, match="^data: expected lists and dicts nested"):
        p.from_json(f'{{"pattern":"per_head","patterns":{text}}}')


def test_one_object_used_again_and_again_is_counted():
    pattern = p.Causal()
    with pytest.raises(ValueError, match="^pattern: expected at most 65536 patterns joined, got"):
        for level in range(30):
            pattern = (pattern & p.Sinks(level + 1)) | (pattern & p.Stride(level + 2))
    assert level == 14  # 3 · 2^15 - 2 patterns


def test_kept_hash_is_not_pickled():
    assert b"_hash" not in pickle.dumps(p.Causal() | p.Sinks(3))


def test_reads_two_operands_at_a_time():
    """As spattn 0.1 wrote them."""
    causal, sinks, full = ({"pattern": "causal"}, {"pattern": "sinks", "count": 2}, {"pattern": "full"})
    old = {"pattern": "|", "operands": [{"pattern": "|", "operands": [causal, sinks]}, full]}
    assert from_data(old) == p.Causal() | p.Sinks(2) | p.Full()
    for bad in ([], [causal], "causal", None):
        with pytest.raises(ValueError, match="^data: expected .*operands of '&'"):
            from_data({"pattern": "&", "operands": bad})
    with pytest.raises(ValueError, match="^data: expected .*operands of '~'"):
        from_data({"pattern": "~", "operands": [causal, sinks]})


@pytest.mark.parametrize("convert", ["numpy", "torch", "jax"])
def test_bool_arrays_are_masks(convert):
    if convert == "numpy":
        array = MASK
    elif convert == "torch":
        array = pytest.importorskip("torch").from_numpy(MASK)
    else:
        array = pytest.importorskip("jax.numpy").asarray(MASK)
    causal, mask = p.Causal(), p.Mask(MASK)
    assert causal & array == causal & mask and array & causal == mask & causal
    assert causal | array == causal | mask and array | causal == mask | causal
    assert causal - array == causal - mask and array - causal == mask - causal


@pytest.mark.parametrize("join", [operator.and_, operator.or_, operator.sub])
def test_other_operands_are_refused(join):
    numbers = r"^operand: got an array of (int|float)64"
    for array in (MASK * 1, MASK * 1.0, np.ones(3)):
        for pair in ((p.Causal(), array), (array, p.Causal())):
            with pytest.raises(TypeError, match=numbers):
                join(*pair)
    for pair in ((p.Causal(), np.ma.masked_array(MASK, ~MASK)), (np.ma.masked_array(MASK, ~MASK), p.Causal())):
        with pytest.raises(TypeError, match=r"^operand: expected a plain array, got a masked array.*\.filled\("):
            join(*pair)
    for other in ([[True]], None, 3, np.True_):
        with pytest.raises(TypeError, match="^operand: expected a Pattern"):
            join(p.Causal(), other)
        with pytest.raises(TypeError, match="^operand: expected a Pattern|does not support"):
            join(other, p.Causal())


def test_masked_fields_are_refused():
    def hidden(x):
        return np.ma.masked_array(x, np.zeros(np.shape(x), bool))

    for name, make in {
        "mask": lambda: p.Mask(hidden(MASK)),
        "layout": lambda: p.BlockLayout(hidden(MASK), 4),
        "blocks": lambda: p.KeyBlocks(hidden([[0, 1]]), 4, 4),
        "start": lambda: p.ColumnIntervals(hidden([0]), [1]),
        "cu_seqlens": lambda: p.Documents.from_cu_seqlens(hidden([0, 5])),
    }.items():
        with pytest.raises(TypeError, match=f"^{name}: expected a plain array, got a masked array"):
            make()


def test_and_of_spans_is_a_span():
    """Of consecutive keys alone: what has steps is evaluated, and so is what has no closed form."""
    span = p.Causal() & p.SlidingWindow(5) & p.Documents((20, 30))
    found = span.runs(np.arange(N), N)
    assert found.start.shape == (N, 1) and (found.step == 1).all()
    for pattern in (
        span,
        p.Causal() & p.Stride(3),
        p.Causal() & p.DilatedWindow(4, dilation=3),
        p.Causal() & ~p.Sinks(2),
    ):
        q, k = np.ogrid[:N, :N]
        assert np.array_equal(pattern.index_set(N, N).to_dense(), np.broadcast_to(pattern.allows(q, k), (N, N)))
        assert (pattern.runs(np.arange(N), N) is None) == (pattern is not span)
