"""The library's score functions against their formulas, written out for all pairs."""

import copy
import math
import pickle

import numpy as np
import pytest

import spattn
from spattn.score import (
    alibi,
    alibi_slopes,
    bias,
    captured,
    compose,
    from_score_mod,
    natten_rpb,
    relative_bias,
    softcap,
    swin_bias,
    t5_bias,
    temperature,
)
from spattn.score.evaluate import evaluate
from spattn.score.graph import INPUTS
from spattn.score.program import DIAGONAL, program_of, scopes
from spattn.score.recorder import Sizes
from spattn.score.tracing import trace

RANDOM = np.random.default_rng(43)


def scores(batch=1, heads=2, q_len=6, kv_len=9):
    return RANDOM.normal(size=(batch, heads, q_len, kv_len))


def applied(function, s):
    """The modified scores of all pairs, by the traced graph; the last query has the position of the last key."""
    sizes = Sizes(*s.shape)
    traced = trace(function, sizes)
    b, h, q, k = np.ogrid[tuple(map(slice, s.shape))]
    offset = sizes.kv_len - sizes.q_len
    at = {"score": s, "b": b, "h": h, "q": q + offset, "k": k, "offset": offset}
    found = evaluate(traced.graph, at, traced.parameters, traced.tables)[0]
    return np.broadcast_to(found, s.shape)


def positions(s):
    q_len, kv_len = s.shape[2:]
    return np.arange(kv_len - q_len, kv_len)[:, None], np.arange(kv_len)


# ALiBi


@pytest.mark.parametrize("heads", [*range(1, 20), 32, 40, 71, 112])
def test_slopes_are_the_papers(heads):
    """A copy of the paper's get_slopes()."""

    def of_power_of_two(n):
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    n = 2 ** math.floor(math.log2(heads))
    expected = of_power_of_two(n) + of_power_of_two(2 * n)[0::2][: heads - n]
    np.testing.assert_allclose(alibi_slopes(heads), expected, rtol=1e-6)
    assert alibi_slopes(heads).dtype == np.float32


@pytest.mark.parametrize("heads", [1, 3, 8, 12])
def test_slopes_of_mpt_and_of_attention_gym(heads):
    n = 2 ** math.ceil(math.log2(heads))
    mpt = 1 / 2 ** (np.arange(1, n + 1) * 8 / n)
    mpt = mpt if n == heads else np.concatenate([mpt[1::2], mpt[::2]])[:heads]
    np.testing.assert_allclose(alibi_slopes(heads), mpt, rtol=1e-6)
    np.testing.assert_allclose(
        alibi_slopes(heads, "geometric"), [2 ** (-((h + 1) * 8.0 / heads)) for h in range(heads)], rtol=1e-6
    )


def test_alibi():
    s, slopes = scores(heads=3), RANDOM.normal(size=3)
    q, k = positions(s)
    np.testing.assert_array_equal(applied(alibi(slopes), s), s + slopes[:, None, None] * (k - q))
    np.testing.assert_array_equal(applied(alibi(slopes, symmetric=True), s), s - slopes[:, None, None] * np.abs(q - k))
    expected = s + alibi_slopes(3).astype(np.float64)[:, None, None] * (k - q)
    np.testing.assert_array_equal(applied(alibi(), s), expected)


def test_alibi_of_each_number_of_heads_is_one_array():
    one, other = (trace(alibi(), Sizes(1, 8, n, n)) for n in (4, 5))
    assert one.graph == other.graph and one.tables[0] is other.tables[0]


# Soft-cap, temperature, bias


def test_softcap():
    s = 30 * scores(heads=2)
    np.testing.assert_array_equal(applied(softcap(50.0), s), 50 * np.tanh(s / 50))
    caps = np.array([5.0, 20.0])
    np.testing.assert_array_equal(applied(softcap(caps), s), caps[:, None, None] * np.tanh(s / caps[:, None, None]))
    np.testing.assert_array_equal(applied(softcap(np.array(7.0)), s), 7 * np.tanh(s / 7))


def test_temperature():
    s = scores(batch=3, heads=2, q_len=4)
    of_head, of_query, of_batch = (1 + RANDOM.random(n) for n in (2, 4, 3))
    np.testing.assert_array_equal(applied(temperature(2.5), s), s / 2.5)
    np.testing.assert_array_equal(applied(temperature(of_head), s), s / of_head[:, None, None])
    np.testing.assert_array_equal(applied(temperature(of_query, per="query"), s), s / of_query[:, None])
    np.testing.assert_array_equal(applied(temperature(of_batch, per="batch"), s), s / of_batch[:, None, None, None])


@pytest.mark.parametrize(
    "shape",
    [(9,), (1,), (6, 9), (6, 1), (1, 9), (2, 6, 9), (2, 1, 9), (3, 1, 6, 9), (3, 2, 6, 9), (1, 2, 1, 1), (1, 1, 1, 1)],
)
def test_bias_broadcasts(shape):
    s, array = scores(batch=3), RANDOM.normal(size=shape)
    np.testing.assert_array_equal(applied(bias(array), s), s + array)
    assert captured(bias(array))[0] is array


def test_bias_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"array of shape \(2, 6, 8\) does not broadcast to \(3, 2, 6, 9\)"):
        applied(bias(np.zeros((2, 6, 8))), scores(batch=3))
    with pytest.raises(ValueError, match="at most 4 axes"):
        bias(np.zeros((1, 1, 1, 1, 1)))


# Tables of relative positions


def test_relative_bias_along_one_axis():
    s, table = scores(), RANDOM.normal(size=(2, 7))
    q, k = positions(s)
    np.testing.assert_array_equal(applied(relative_bias(table), s), s + table[:, np.clip(k - q, -3, 3) + 3])
    graph = trace(relative_bias(table)).graph
    assert scopes(graph)[next(n for n, op in enumerate(graph.operations) if op.name == "look_up")] == DIAGONAL


@pytest.mark.parametrize("shape, sizes", [((3, 4), (3, 7)), ((2, 3, 2), (3, 3, 5))])
def test_relative_bias_of_grids(shape, sizes):
    n = math.prod(shape)
    s, table = scores(q_len=n, kv_len=n), RANDOM.normal(size=(2, *sizes))
    at = np.stack(np.unravel_index(np.arange(n), shape))
    distance = at[:, None, :] - at[:, :, None]  # key - query
    index = [np.clip(d, -(m // 2), m // 2) + m // 2 for d, m in zip(distance, sizes, strict=True)]
    np.testing.assert_array_equal(applied(relative_bias(table, shape), s), s + table[(slice(None), *index)])


def t5_bucket(relative_position, bidirectional, num_buckets, max_distance):
    """The published formula (T5, `_relative_position_bucket`), in float32 as there."""
    buckets = np.zeros_like(relative_position)
    if bidirectional:
        num_buckets //= 2
        buckets = buckets + (relative_position > 0) * num_buckets
        relative_position = np.abs(relative_position)
    else:
        relative_position = -np.minimum(relative_position, 0)
    max_exact = num_buckets // 2
    is_small = relative_position < max_exact
    with np.errstate(divide="ignore"):
        logarithm = np.log(relative_position.astype(np.float32) / np.float32(max_exact))
    scaled = logarithm / np.float32(math.log(max_distance / max_exact)) * np.float32(num_buckets - max_exact)
    large = max_exact + np.where(is_small, 0, scaled).astype(np.int64)
    return buckets + np.where(is_small, relative_position, np.minimum(large, num_buckets - 1))


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("count, farthest", [(32, 128), (8, 20), (9, 1000), (4, 5)])
def test_t5(bidirectional, count, farthest):
    s, table = np.zeros((1, 2, 300, 300)), RANDOM.normal(size=(count, 2))
    q, k = positions(s)
    buckets = t5_bucket(k - q, bidirectional, count, farthest)
    function = t5_bias(table, bidirectional=bidirectional, max_distance=farthest)
    np.testing.assert_array_equal(applied(function, s)[0], np.moveaxis(table[buckets], -1, 0))
    graph = trace(function).graph
    assert scopes(graph)[max(n for n, op in enumerate(graph.operations) if op.name == "look_up")] == DIAGONAL


@pytest.mark.parametrize("window", [(7, 7), (3, 5), (2, 3, 4)])
def test_swin(window):
    """The published index of Swin Transformer: a flattened grid of relative coordinates, query minus key."""
    n, count = math.prod(window), math.prod(2 * m - 1 for m in window)
    table = RANDOM.normal(size=(count, 2))
    coordinates = np.stack(np.meshgrid(*map(np.arange, window), indexing="ij")).reshape(len(window), -1)
    relative = (coordinates[:, :, None] - coordinates[:, None, :]).transpose(1, 2, 0) + np.array(window) - 1
    for axis in range(len(window) - 1):
        relative[..., axis] *= math.prod(2 * m - 1 for m in window[axis + 1 :])
    expected = np.moveaxis(table[relative.sum(-1)], -1, 0)
    s = scores(q_len=n, kv_len=n)
    np.testing.assert_array_equal(applied(swin_bias(table, window), s), s + expected)
    several = scores(q_len=3 * n, kv_len=3 * n)  # windows one after the other
    found = applied(swin_bias(table, window), several)
    np.testing.assert_array_equal(found[..., n : 2 * n, n : 2 * n], (several[..., n : 2 * n, n : 2 * n] + expected))


def test_swin_in_the_order_of_the_grid():
    window, shape = (2, 3), (4, 6)
    table = RANDOM.normal(size=(15, 2))
    s = scores(q_len=24, kv_len=24)
    tokens = np.arange(24).reshape(shape)[2:4, 3:6].ravel()  # one window
    found = applied(swin_bias(table, window, shape), s)[..., tokens[:, None], tokens]
    expected = applied(swin_bias(table, window), s[..., tokens[:, None], tokens])
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("length, kernel, dilation", [(12, 5, 1), (17, 5, 3), (9, 7, 1), (21, 3, 4)])
def test_natten(length, kernel, dilation):
    """NATTEN 0.17: the window's first key and the first entry of the table for each query."""

    def window_start(i):
        if dilation == 1:
            return max(i - kernel // 2, 0) + (i + kernel // 2 >= length) * (length - i - kernel // 2 - 1)
        first = i - kernel // 2 * dilation
        if first < 0:
            return i % dilation
        if i + kernel // 2 * dilation >= length:
            rest, last = i % dilation, length // dilation * dilation
            extra = length - last
            return (last + rest - kernel * dilation) + dilation * (rest < extra)
        return first

    def table_start(i):
        if i < kernel // 2 * dilation:
            return kernel - 1 - i // dilation
        if i + kernel // 2 * dilation >= length:
            return (length - i - 1) // dilation
        return kernel // 2

    table = RANDOM.normal(size=(2, 2 * kernel - 1))
    s = scores(q_len=length, kv_len=length)
    found = applied(natten_rpb(table, kernel, dilation), s)
    for i in range(length):
        for j in range(kernel):
            key = window_start(i) + j * dilation
            assert 0 <= key < length
            np.testing.assert_array_equal(found[0, :, i, key], s[0, :, i, key] + table[:, table_start(i) + j])


def test_natten_of_grids_is_the_rule_along_each_axis():
    shape, kernel, dilation = (5, 6), (3, 5), (1, 1)
    table = RANDOM.normal(size=(2, 5, 9))
    s = scores(q_len=30, kv_len=30)
    found = applied(natten_rpb(table, kernel, dilation, shape), s)
    allowed = spattn.patterns.Neighborhood(shape, kernel).index_set(30, 30).to_dense()
    at = np.stack(np.unravel_index(np.arange(30), shape))
    index = [d + n - 1 for d, n in zip(at[:, None, :] - at[:, :, None], kernel, strict=True)]
    inside = (index[0][allowed], index[1][allowed])
    np.testing.assert_array_equal(found[0][:, allowed], s[0][:, allowed] + table[:, inside[0], inside[1]])


# Composition, and all of them


def test_composition_is_in_the_order_written():
    s, slopes = 30 * scores(heads=2), np.array([0.5, 2.0])
    q, k = positions(s)
    distance = slopes[:, None, None] * (k - q)
    np.testing.assert_array_equal(applied(softcap(5.0) | alibi(slopes), s), 5 * np.tanh(s / 5) + distance)
    np.testing.assert_array_equal(applied(alibi(slopes) | softcap(5.0), s), 5 * np.tanh((s + distance) / 5))

    def double(score, b, h, q, k):
        return 2 * score

    np.testing.assert_array_equal(applied(softcap(5.0) | double, s), 2 * (5 * np.tanh(s / 5)))
    np.testing.assert_array_equal(applied(double | softcap(5.0), s), 5 * np.tanh(2 * s / 5))
    np.testing.assert_array_equal(applied(compose(double, double, softcap(5.0)), s), 5 * np.tanh(4 * s / 5))
    assert repr(softcap(5.0) | alibi(slopes)) == "softcap(cap=5.0) | alibi(slopes=<float64 array of shape (2,)>)"


def test_a_composition_captures_what_its_parts_do():
    cap, table, other = np.array(9.0), RANDOM.normal(size=(2, 3)), RANDOM.normal(size=4)

    def shifted(score, b, h, q, k):
        return score + other[h]

    found = captured(softcap(cap) | relative_bias(table) | shifted)
    assert [x is y for x, y in zip(found, (cap, table, other), strict=True)] == [True] * 3
    assert captured(t5_bias(np.zeros((32, 2), np.float16)))[0].shape == (32, 2)


ALL = [
    alibi(np.ones(3)),
    softcap(50.0),
    softcap(np.ones(3)),
    temperature(np.ones(3)),
    bias(np.ones((3, 1, 4))),
    relative_bias(np.ones((3, 5))),
    t5_bias(np.ones((32, 3))),
    swin_bias(np.ones((9, 3)), (2, 2)),
    natten_rpb(np.ones((3, 5)), 3),
    from_score_mod(alibi(np.ones(3))),
    softcap(50.0) | alibi(np.ones(3)),
]


@pytest.mark.parametrize("function", ALL, ids=repr)
def test_every_function_can_be_differentiated_copied_and_pickled(function):
    program = program_of(trace(function).graph)
    for other in (copy.deepcopy(function), pickle.loads(pickle.dumps(function)), copy.copy(function)):
        assert program_of(trace(other).graph) == program and repr(other) == repr(function)
    assert {op.name for op in program.graph.operations if not op.operands} <= {
        "constant",
        "parameter",
        *INPUTS,
        "look_up",
    }


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: softcap(0.0), "cap: expected a positive number, got 0.0"),
        (lambda: softcap("50"), "cap: expected an array, got str"),
        (lambda: softcap(np.ones((2, 2))), "cap: expected a number or one per head"),
        (lambda: temperature(1.0, per="key"), "per: expected 'head', 'query' or 'batch', got 'key'"),
        (lambda: alibi([1.0, 2.0]), "slopes: expected an array, got list"),
        (lambda: alibi(np.ones((2, 2))), r"slopes: expected 1 axes, got shape \(2, 2\)"),
        (lambda: alibi(np.ones(2, int)), "slopes: expected an array of floats, got int64"),
        (lambda: applied(alibi(np.ones(3)), scores()), "alibi: expected 2 slopes, got 3"),
        (lambda: trace(alibi()), r"needs the number of heads: use alibi\(alibi_slopes\(num_heads\)\)"),
        (lambda: alibi_slopes(0), "num_heads: expected a positive integer, got 0"),
        (lambda: alibi_slopes(2.0), "num_heads: expected an integer, got float"),
        (lambda: alibi_slopes(2, "mpt"), "rule: expected 'paper' or 'geometric', got 'mpt'"),
        (lambda: relative_bias(np.ones((2, 4))), "one to three axes of distances"),
        (lambda: relative_bias(np.ones((2, 3, 3))), "shape: expected a tuple of integers, got None"),
        (lambda: relative_bias(np.ones((2, 3, 3)), (4,)), "shape: expected 2 positive integers"),
        (lambda: t5_bias(np.ones((2, 2))), "at least 4 buckets"),
        (lambda: t5_bias(np.ones((32, 2)), max_distance=8), "max_distance: expected more than 8, got 8"),
        (lambda: swin_bias(np.ones((8, 2)), (2, 2)), r"table: expected shape \(9, heads_q\), got \(8, 2\)"),
        (lambda: swin_bias(np.ones((9, 2)), 2), "window: expected a tuple of integers, got 2"),
        (lambda: natten_rpb(np.ones((2, 7)), 4), "kernel_size: expected odd integers, got 4"),
        (lambda: natten_rpb(np.ones((2, 7)), 3), r"table: expected shape \(heads_q, 5\), got \(2, 7\)"),
        (lambda: natten_rpb([[1.0] * 5] * 2, 3), "table: expected an array, got list"),
        (lambda: natten_rpb(np.ones((2, 5)), 3, 0), "dilation: expected 1 positive integers, got"),
        (lambda: natten_rpb(np.ones((2, 5)), 3, 1.5), "dilation: expected a tuple of integers"),
        (lambda: natten_rpb(np.ones((2, 5, 5)), 3), "shape: expected a tuple of integers, got None"),
        (lambda: compose(), "at least one function"),
        (lambda: compose(softcap(1.0), 3), "expected functions of .* got int"),
        (lambda: softcap(1.0) | 3, "unsupported operand"),
        (lambda: from_score_mod(3), "score_mod: expected a function, got int"),
        (lambda: from_score_mod(softcap(1.0))(1.0, 0, 0, 0, 0), "depends on the lengths of a call"),
    ],
)
def test_errors(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()
