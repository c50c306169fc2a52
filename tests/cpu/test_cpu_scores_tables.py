"""Traced score functions on the CPU: random expressions, and gradients of captured arrays."""

from __future__ import annotations

import zlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

from spattn import cpu, patterns
from spattn.cpu import _core, _score
from spattn.planning.contract.validated import validated_for
from spattn.request.call import Call
from spattn.schedule import compiler
from spattn.score import functions, take
from spattn.testing import DTYPES, assert_within_bound, dense_mask, inputs, random

from .traced import assert_table_gradients, dense, sum_terms, traced


def apply(name, *operands):
    """The function of spattn.score with this name."""
    return getattr(functions, name)(*operands)


ISAS = cpu.instruction_sets()
BATCH, HEADS, HEADS_KV, Q_LEN, KV_LEN = 2, 4, 2, 37, 70
OFFSET = KV_LEN - Q_LEN
NAMES = ("out", "lse", "dq", "dk", "dv")
TILES = [(48, 64), (64, 128), (8, 64), (1, 64)]
PATTERNS = {
    "window": patterns.SlidingWindow(20, 5),
    "strided": patterns.strided(8),
    "clusters": patterns.Clusters(np.random.default_rng(0).integers(-1, 4, (HEADS, KV_LEN))),
    "empty rows": patterns.SlidingWindow(6, 0) & ~patterns.Sinks(50),
}
each_tile = pytest.mark.parametrize("tile", TILES, ids=["vectors", "AMX", "decode", "pairs"])


def problem(dtype, seed=0, batch=BATCH, q_len=Q_LEN, kv_len=KV_LEN):
    q, k, v = inputs(batch, HEADS, HEADS_KV, q_len=q_len, kv_len=kv_len, head_dim=16, head_dim_v=24, dtype=dtype)
    dout = random((batch, HEADS, q_len, 24), dtype, seed=seed + 99)
    lse_dtype = "float64" if dtype == "float64" else "float32"
    return q, k, v, dout, random((batch, HEADS, q_len), lse_dtype, seed=seed + 98)


def planned(pattern, tile, workers=4, q_len=Q_LEN, kv_len=KV_LEN):
    ordered = isinstance(pattern, patterns.Clusters)
    return compiler.plan(pattern, q_len, kv_len, heads=HEADS, tile=tile, workers=workers, ordered=ordered)


def run(score, q, k, v, dout, dlse, plan, isa=None, backward=True):
    """Out, lse, dq, dk, dv and the gradients of tables."""
    call = replace(Call.of(q, k, v, scale=0.4), score=score)
    out, lse = cpu.prepare(call, plan, isa=isa)(q, k, v, 0.4, score)
    if not backward:
        return out, lse
    *gradients, tables, sinks = cpu.prepare_backward(call, plan, isa=isa)(dout, q, k, v, out, lse, dlse, 0.4, score)
    assert sinks is None
    return out, lse, *gradients, *tables


def check(score, pattern, arrays, plan, isas, backward=True):
    """Every instruction set within the bound."""
    q, k, v, dout, dlse = arrays
    exact = np.dtype(np.longdouble if q.dtype == np.float64 else np.float64)
    mask = dense_mask(pattern, q.shape[0], HEADS, q.shape[2], k.shape[2])
    args = score, q, k, v, mask, 0.4, dout, dlse
    expected = dense(exact, *args)
    low = [dense(q.dtype, *args, order=order, ulps=(None, -1, 0, 1)[order % 4]) for order in range(6)]
    for isa in isas:
        got = run(score, *arrays, plan, isa, backward)
        for name, x, want, *lossy in zip(NAMES, got, expected, *low, strict=False):
            assert_within_bound(x, want, lossy, q.dtype, f"{isa} {name}")
        if backward:
            assert_table_gradients(
                got[5:], score, expected[5], [x[5] for x in low], q.dtype, f"{isa} gradient of table"
            )


def noise(*shape):
    """Numbers that depend on the shape alone."""
    return np.random.default_rng(zlib.crc32(repr(shape).encode())).uniform(-1, 1, shape).astype(np.float32)


BY_HEAD, BY_QUERY, BY_KEY, RELATIVE, GRID = (
    noise(HEADS),
    noise(KV_LEN),
    noise(KV_LEN + 1),
    noise(HEADS, 140),
    noise(9, 9),
)
FULL, BATCHED = noise(HEADS, Q_LEN, KV_LEN), noise(BATCH, HEADS, Q_LEN, KV_LEN)
BUCKETS = np.minimum(np.abs(np.arange(-KV_LEN, KV_LEN)), 9)
BROADCAST = np.broadcast_to(noise(Q_LEN, 1), (HEADS, Q_LEN, KV_LEN))
STRIDED_TABLE = noise(2 * KV_LEN, 3)[::-2, 1]
SHARE = 0.75

INDEXED = {
    "call": lambda score, b, h, q, k: score * BY_HEAD[1] + BY_HEAD[-1],
    "scalar table": lambda score, b, h, q, k: CAP_TABLE * np.tanh(score / CAP_TABLE),
    "head": lambda score, b, h, q, k: score + BY_HEAD[h] * (k - q) * SHARE,
    "batch and head": lambda score, b, h, q, k: score * BATCHED[b, h, 3, 4],
    "query": lambda score, b, h, q, k: score * BY_QUERY[q],
    "key": lambda score, b, h, q, k: score - BY_KEY[k] * BY_KEY[k],
    "diagonal": lambda score, b, h, q, k: score + RELATIVE[h, k - q + KV_LEN],
    "diagonal of products": lambda score, b, h, q, k: score * RELATIVE[h, (2 * k - q * 2) // 2 + KV_LEN],
    "buckets": lambda score, b, h, q, k: score + BY_QUERY[BUCKETS[k - q + KV_LEN] + h],
    "pair": lambda score, b, h, q, k: score + GRID[q // 10, k // 10],
    "image": lambda score, b, h, q, k: score + GRID[q // 10 - k // 10, q % 9 - k % 9],
    "full": lambda score, b, h, q, k: score + FULL[h, q - OFFSET, k],
    "full of batches": lambda score, b, h, q, k: score * BATCHED[b, h, q - OFFSET, k],
    "broadcast": lambda score, b, h, q, k: score + BROADCAST[h, q - OFFSET, k],
    "strided table": lambda score, b, h, q, k: score + STRIDED_TABLE[k] * STRIDED_TABLE[q],
    "negative indices": lambda score, b, h, q, k: score + BY_KEY[-1 - k] * RELATIVE[h, q - k],
    "several": lambda score, b, h, q, k: np.where(
        k % 3 == 0, BY_KEY[k] * score, SHARE * score + RELATIVE[h, abs(k - q)]
    ),
    "wide": lambda score, b, h, q, k: score + WIDE[h, k - q + KV_LEN],
    "half": lambda score, b, h, q, k: score + HALF[h] * SIGNS[k] + np.where(ALLOWED[q], 0.5, 0.0),
}
CAP_TABLE = np.full((), 3.0, np.float32)
WIDE, HALF = noise(HEADS, 140).astype(np.float64), noise(HEADS).astype(np.float16)
SIGNS, ALLOWED = np.where(noise(KV_LEN) > 0, 1, -1).astype(np.int8), noise(KV_LEN) > 0
each_index = pytest.mark.parametrize("name", INDEXED)


@each_tile
@each_index
def test_gradients_of_tables(name, tile):
    """Every class of indices, with partials, permuted tokens and rows without keys."""
    number = list(INDEXED).index(name) + TILES.index(tile)
    pattern = list(PATTERNS.values())[number % len(PATTERNS)]
    check(traced(INDEXED[name]), pattern, problem(list(DTYPES)[number % 4]), planned(pattern, tile), ISAS)


@each_index
def test_decoding(name):
    """One query and all heads of a group at once."""
    score = traced(INDEXED[name])
    arrays = [x[:, :, -1:] if at in (0, 3, 4) else x for at, x in enumerate(problem("float32"))]
    check(score, patterns.Full(), arrays, planned(patterns.Full(), (16, 64), q_len=1), ISAS[:1], backward=False)


@each_tile
@each_index
def test_bitwise(name, tile):
    """The same bits for one, two and three threads, and again."""
    score, arrays, found = traced(INDEXED[name]), problem("float32"), []
    plan = planned(PATTERNS["strided"], tile)
    for threads in (1, 2, 3, 2):
        with threadpool_limits(threads):
            found.append([x.tobytes() for x in run(score, *arrays, plan) if x is not None])
    assert all(x == found[0] for x in found)


@pytest.mark.parametrize("isa", ISAS)
@each_tile
def test_out_of_range(tile, isa):
    """NaN, the least int32 and False; nothing is read or added out of bounds, and hidden pairs do not matter."""
    q, k, v, dout, dlse = problem("float32")
    pattern = patterns.SlidingWindow(20, 5)
    short, integers, truths = noise(30), np.arange(30), np.ones(30, bool)
    score = traced(
        lambda score, b, h, q, k: np.where(
            (k >= 30) & (integers[k] == -(2**31)) & ~truths[k],
            score,
            score + short[k],
        )
    )
    longer = np.concatenate([short, np.zeros(KV_LEN, np.float32)])
    plan = planned(pattern, tile)
    got = run(score, q, k, v, dout, dlse, plan, isa)
    padded = traced(lambda score, b, h, q, k: np.where(k >= 30, score, score + longer[k]))
    expected = run(padded, q, k, v, dout, dlse, plan, isa)
    for x, y in zip(got[:5], expected[:5], strict=True):
        np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(got[-1], expected[-1][:30])
    reads = run(traced(lambda score, b, h, q, k: score + short[k - 20]), q, k, v, dout, dlse, plan, isa)
    seen = dense_mask(pattern, 1, 1, Q_LEN, KV_LEN)[0, 0]
    nan = (seen & (np.arange(KV_LEN) >= 50)).any(axis=1)
    assert (np.isnan(reads[1]) == nan).all() and nan.any() and not nan.all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@each_tile
def test_hidden_values(tile, bad, isa):
    """Non-finite tables, keys and derivatives at hidden pairs have no influence; their gradients are exactly 0."""
    arrays = problem("float32")
    plan = planned(patterns.Causal(), tile)
    table, own = noise(HEADS, 2 * KV_LEN), noise(KV_LEN)

    def function(score, b, h, q, k):
        return score * table[h, k - q + KV_LEN] + own[k]

    clean = run(traced(function), *arrays, plan, isa)
    table[:, KV_LEN + 1 :] = bad
    got = run(traced(function), *arrays, plan, isa)
    for x, y in zip(clean, got, strict=True):
        np.testing.assert_array_equal(x, y)
    assert (got[5][:, KV_LEN + 1 :] == 0).all()


@pytest.mark.parametrize("isa", ISAS)
@each_tile
def test_fallback(tile, isa):
    """Rows that take the float64 fallback, because their lse is far, add to tables' gradients as others do."""
    q, k, v, dout, dlse = problem("float32", batch=1)
    q[:, 1, 5:9] *= 3e5
    table = noise(HEADS, 140)
    pattern = patterns.SlidingWindow(20, 5)
    score = traced(lambda score, b, h, q, k: score + table[h, k - q + KV_LEN])
    *_, got = run(score, q, k, v, dout, dlse, planned(pattern, tile), isa)
    mask = dense_mask(pattern, 1, HEADS, Q_LEN, KV_LEN)
    number, terms, *index = dense(np.dtype(np.float64), score, q, k, v, mask, 0.4, dout, dlse)[5][0]
    scale = sum_terms(table.shape, np.abs(terms), index)
    assert number == 0 and (np.abs(got - sum_terms(table.shape, terms, index)) <= 1e-3 * scale + 1e-5).all()
    assert np.abs(terms[:, 1, 5:9]).max() > 0.1


def test_slices(monkeypatch):
    """Accumulators beyond the limit: the backward runs over slices of the table, with the same bits."""
    arrays, pattern = problem("float32"), PATTERNS["strided"]
    score = traced(lambda score, b, h, q, k: score + FULL[h, q - OFFSET, k] * BY_KEY[k] + FULL[h, q - OFFSET, k // 2])
    expected = run(score, *arrays, planned(pattern, (48, 64)))
    calls = []
    backward = _core.backward
    monkeypatch.setattr(_core, "backward", lambda *args, **options: calls.append(1) or backward(*args, **options))
    monkeypatch.setattr(_score, "_MOST_ELEMENTS", 4000)
    got = run(score, *arrays, planned(pattern, (48, 64)))
    assert len(calls) == -(-(FULL.size + BY_KEY.size) // 4000)
    for x, y in zip(expected, got, strict=True):
        np.testing.assert_array_equal(x, y)


def test_exact_sums():
    """Accumulators do not depend on the order, cancel exactly, and keep infinities and NaN."""
    rng = np.random.default_rng(0)
    words = np.zeros((4, _core.SUM_WORDS), np.int64)
    words[0, 5] = 7 << 20  # 7 * 2^20
    words[1, :9] = -rng.integers(0, 1 << 40, 9)
    words[2, -1], words[3, -1] = 1, 3
    found = _score.sums(words, None)
    assert found[0] == 7 * 2.0**20 and found[2] == np.inf and np.isnan(found[3])
    exact = sum(int(x) << 32 * at for at, x in enumerate(words[1, :9]))
    assert abs(found[1] - exact / 2**160) <= 4 * np.spacing(abs(exact / 2**160))


SMOOTH = {
    "tanh": lambda x, y: apply("tanh", x + y),
    "sigmoid": lambda x, y: apply("sigmoid", x) * y,
    "exp": lambda x, y: apply("exp", apply("tanh", x)) - y,
    "log": lambda x, y: apply("log", x * x + 1.5) + y,
    "sqrt": lambda x, y: apply("sqrt", x * x + 0.5) - y,
    "div": lambda x, y: x / (y * y + 1.25),
    "pow": lambda x, y: (x * x + 1.25) ** (0.5 * apply("tanh", y)),
    "mul": lambda x, y: apply("tanh", x) * y,
    "add": lambda x, y: x + y,
    "neg": lambda x, y: -x - 0.25 * y,
}
CONTINUOUS = {
    "abs": lambda x, y: abs(x) - y,
    "minimum": lambda x, y: apply("minimum", x, y),
    "maximum": lambda x, y: apply("maximum", x, y),
}
INTEGERS = {
    "floordiv": lambda i, j: i // 3 - j,
    "mod": lambda i, j: i % -5 + j,
    "by zero": lambda i, j: i // (j - j) + j % (i - i) + i,
    "mul": lambda i, j: (i * j) % 17,
    "abs": lambda i, j: abs(i - j),
    "neg": lambda i, j: -i + 2 * j,
    "maximum": lambda i, j: apply("maximum", i, j - 3),
}
TESTS = {
    "lt": lambda i, j: i < j,
    "eq": lambda i, j: (i % 3 == j % 3) ^ (i >= 4),
    "logic": lambda i, j: ((i != j) & (i <= 20)) | ~(j > 5),
}
WIDTH = 40  # more than random indices reach, modulo


def trees(smooth):
    """Random functions: (description, function)."""
    floats = SMOOTH if smooth else SMOOTH | CONTINUOUS
    index = st.recursive(
        st.sampled_from("hqkb"), lambda inner: st.tuples(st.sampled_from(list(INTEGERS)), inner, inner), max_leaves=4
    )
    leaf = st.one_of(
        st.just("score"),
        st.tuples(st.just("table"), index),
        st.tuples(st.just("to_float"), index),
        st.sampled_from([0.5, -1.25]),
    )
    test = st.tuples(st.sampled_from(list(TESTS)), index, index)
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.tuples(st.sampled_from(list(floats)), inner, inner), st.tuples(st.just("where"), test, inner, inner)
        ),
        max_leaves=7,
    )


def function_of(tree):
    """The score function of a tree; it adds the score, so that gradients are not all 0."""
    table = noise(WIDTH)

    def number(tree, at):
        if isinstance(tree, str):
            return at[tree]
        name, *operands = tree
        return INTEGERS[name](*(number(x, at) for x in operands))

    def value(tree, at):
        if tree == "score":
            return at["score"]
        if isinstance(tree, float):
            return tree
        name, *operands = tree
        if name == "table":
            return take(table, number(operands[0], at) % WIDTH)
        if name == "to_float":
            return number(operands[0], at) % 7 * 0.25
        if name == "where":
            (test, *indices), *values = operands
            of_test = TESTS[test](*(number(x, at) for x in indices))
            return apply("where", of_test, *(value(x, at) for x in values))
        return (SMOOTH | CONTINUOUS)[name](*(value(x, at) for x in operands))

    def function(score, b, h, q, k):
        return 0.5 * score + value(tree, {"score": score, "b": b, "h": h, "q": q, "k": k})

    return function


def check_tree(tree, pattern, tile, dtype, isa, backward):
    arrays = problem(dtype, batch=1)
    check(traced(function_of(tree)), PATTERNS[pattern], arrays, planned(PATTERNS[pattern], tile), [isa], backward)


cases = {
    "pattern": st.sampled_from(list(PATTERNS)),
    "tile": st.sampled_from(TILES),
    "dtype": st.sampled_from(list(DTYPES)),
    "isa": st.sampled_from(ISAS),
}


@settings(max_examples=300)
@given(tree=trees(smooth=False), **cases)
def test_random_functions(tree, pattern, tile, dtype, isa):
    check_tree(tree, pattern, tile, dtype, isa, backward=False)


@settings(max_examples=250)
@given(tree=trees(smooth=True), **cases)
def test_random_derivatives(tree, pattern, tile, dtype, isa):
    check_tree(tree, pattern, tile, dtype, isa, backward=True)


@pytest.mark.parametrize("pattern", [patterns.SlidingWindow(20, 0), patterns.Causal()], ids=["moves", "grows"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_growing_keys(dtype, pattern):
    """A cached dispatch that binds kv_len at run time has the positions of the call; parameters are the call's."""
    q, k, v, *_ = problem(dtype, batch=1, q_len=9, kv_len=200)
    slope = 0.25
    score = traced(lambda score, b, h, q, k: score + slope * (k - q) + BY_QUERY[q % 50] * slope)

    def prepared(kv_len):
        call = replace(Call.of(q, k[:, :, :kv_len], v[:, :, :kv_len], scale=0.4), score=score)
        plan = cpu.plan_for(pattern, call)
        return cpu.prepare(call, plan), plan

    own, plan = prepared(100)
    own_plan = validated_for(plan, 1, HEADS, 9, 100)
    assert own_plan.least or own_plan.growth is not None
    for kv_len, slopes in ((100, (0.25,)), (150, (0.25,)), (151, (-0.5,)), (200, (0.125,))):
        arrays = q, k[:, :, :kv_len], v[:, :, :kv_len], 0.4, score._replace(parameters=slopes)
        for x, y in zip(own(*arrays), prepared(kv_len)[0](*arrays), strict=True):
            np.testing.assert_array_equal(x, y)
