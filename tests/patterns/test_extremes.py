"""Parameters at the end of the integers: what cannot matter is right, what cannot mean anything is refused."""

import json
import sys

import numpy as np
import pytest

import spattn
from spattn import patterns as p


def from_data(data):
    return p.from_json(json.dumps(data))


ds = p.deepspeed
N = 24
FAR = [2**31, 2**40, 2**40 + 1, 2**62, sys.maxsize, 2**63, 2**64, 10**30]
EQUAL = {  # a pattern with parameters out of reach, and one that allows the same pairs of 24 tokens
    "window": lambda far: (p.SlidingWindow(far, 0), p.SlidingWindow(99, 0)),
    "window on both sides": lambda far: (p.SlidingWindow(far), p.SlidingWindow(99)),
    "dilated window": lambda far: (p.DilatedWindow(far, far, 3), p.DilatedWindow(99, 99, 3)),
    "dilated window's dilation": lambda far: (p.DilatedWindow(2, dilation=far), p.DilatedWindow(2, dilation=99)),
    "dilated window's both": lambda far: (p.DilatedWindow(far, dilation=far), p.DilatedWindow(0)),
    "dilation that does not divide": lambda far: (p.DilatedWindow(far, dilation=5), p.DilatedWindow(99, dilation=5)),
    "block": lambda far: (p.BlockLocal(far), p.BlockLocal(99)),
    "sinks": lambda far: (p.Sinks(far), p.Sinks(99)),
    "prefix": lambda far: (p.prefix_lm(far), p.prefix_lm(99)),
    "stride": lambda far: (p.Stride(far), p.Stride(99)),
    "stride with an offset": lambda far: (p.Stride(far, 5), p.Stride(99, 5)),
    "stride that looks ahead": lambda far: (p.Stride(far, far - 5), p.Stride(99, 94)),
    "stride that sees nothing": lambda far: (p.Stride(far, far // 2), ~p.Full()),
    "columns' period": lambda far: (p.Columns(far, 2, 5), p.Columns(99, 2, 5)),
    "columns' stop": lambda far: (p.Columns(far, 2, far), p.Columns(99, 2, 99)),
    "columns' start": lambda far: (p.Columns(far, far - 2, far - 1), ~p.Full()),
    "strided": lambda far: (p.strided(far), p.strided(99)),
    "fixed": lambda far: (p.fixed(far, 2), p.fixed(99, 2)),
    "fixed summary": lambda far: (p.fixed(far, far), p.fixed(99, 99)),
    "number of global tokens": lambda far: (p.GlobalTokens(far), p.Full()),
    "global tokens": lambda far: (p.GlobalTokens((1, 4, far)), p.GlobalTokens((1, 4))),
    "columns and diagonals": lambda far: (p.VerticalSlash((1, far), (2, far)), p.VerticalSlash((1,), (2,))),
    "longformer": lambda far: (p.longformer(2 * far, 2, (3, far)), p.longformer(198, 2, (3,))),
    "longformer's dilation": lambda far: (p.longformer(4, far), p.longformer(4, 99)),
    "bigbird's block": lambda far: (p.BigBird(far, head=0), p.Full()),
    "bigbird's window": lambda far: (p.BigBird(4, far, 0, 0), p.Full()),
    "bigbird's global blocks": lambda far: (p.BigBird(4, 1, far, 0, causal=True), p.Causal()),
    "bigbird's random blocks": lambda far: (p.BigBird(4, 1, 0, far, head=0), ds.dense(4)),
    "bigbird's earlier blocks": lambda far: (p.BigBird(4, 1, 0, far, causal=True, head=3), p.Causal()),
    "layout": lambda far: (p.BlockLayout([[True]], far), p.BlockLayout([[True]], 99)),
    "key blocks": lambda far: (p.KeyBlocks([[0]], far, far), p.KeyBlocks([[0]], 99, 99)),
    "deepspeed fixed": lambda far: (ds.fixed(4, far, far), ds.dense(4)),
    "deepspeed random": lambda far: (ds.variable(4, far, head=0), ds.dense(4)),
    "deepspeed windows": lambda far: (ds.variable(4, 0, (2, far), ()), ds.variable(4, 0, (2, 99), ())),
    "deepspeed sum of windows": lambda far: (ds.variable(4, 0, (far, far, 2), ()), ds.dense(4)),
    "deepspeed global": lambda far: (ds.variable(4, 0, (1,), (1, far)), ds.variable(4, 0, (1,), (1,))),
    "deepspeed ranges": lambda far: (ds.bslongformer(4, 1, (0,), (far,)), ds.dense(4)),
    "deepspeed bigbird": lambda far: (ds.bigbird(4, far, 1, 0, head=0), ds.dense(4)),
    "deepspeed global blocks": lambda far: (ds.bigbird(4, 0, 1, far), ds.dense(4)),
    "deepspeed sliding": lambda far: (ds.local_sliding_window(4, far, "bidirectional"), ds.dense(4)),
}


@pytest.mark.parametrize("far", FAR)
@pytest.mark.parametrize("name", EQUAL)
def test_out_of_reach_is_right(name, far):
    pattern, expected = EQUAL[name](far)
    for q_len in (N, 7, N + 9):
        want = expected.index_set(q_len, N)
        assert pattern.index_set(q_len, N) == want
        assert spattn.plan(pattern, q_len, N, tiling=spattn.Tiling(tile=(8, 64))).nnz == want.nnz
        bound = pattern.at(0, 0).bind(q_len, N)
        q, k = np.arange(N - q_len, N)[:, None], np.arange(N)
        assert np.array_equal(np.broadcast_to(bound.allows(q, k), (q_len, N)), want.to_dense())


@pytest.mark.parametrize("far", FAR)
def test_what_was_given_is_kept(far):
    pattern = p.SlidingWindow(far, 0) & p.Stride(far, far - 1)
    assert pattern.operands[0].left == far and str(far) in repr(pattern)
    assert p.from_json(pattern.to_json()) == pattern
    assert p.SlidingWindow(far) != p.SlidingWindow(far + 1)


REFUSED = [
    (lambda: p.KeyBlocks(np.array([[2**32]]), 4, 4), r"^blocks: expected integers in \[-2147483648, 2147483647\]"),
    (lambda: p.KeyBlocks([[2**70]], 4, 4), "^blocks: expected integers in"),
    (lambda: p.ColumnIntervals(np.zeros(3, int), np.full(3, 2**63, np.uint64)), "^stop: expected integers in"),
    (lambda: p.Documents((3, 2**63 - 1)), "^lengths: expected at most 2147483647 tokens in all, got"),
    (lambda: p.Documents((2**62, 2**62)), "^lengths: expected at most"),
    (lambda: p.shared_prefix(2**40, (3,)), "^lengths: expected at most"),
    (lambda: p.Neighborhood((2**40, 2**40), 3), "^grid: expected at most 2147483647 tokens, got"),
    (lambda: p.axial((2**16, 2**15), 0), "^grid: expected at most 2147483647 tokens, got 2147483648"),
    (lambda: p.windowed(2**31, 3), "^grid: expected at most"),
    (lambda: p.BigBird(4, head=2**64), "^head: expected an integer in"),
    (lambda: p.BigBird(4).at(0, 2**64), "^head: expected an integer in"),
    (lambda: ds.variable(4, 1, head=2**64), "^head: expected an integer in"),
    (lambda: p.BigBird(4, seed=2**64), "^seed: expected an integer in"),
    (lambda: p.Causal().index_set(2**31, 5), r"^q_len: expected an integer in \[0, 2147483647\], got 2147483648"),
    (lambda: p.Causal().index_set(5, 2**40), "^kv_len: expected an integer in"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_meaningless_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_unsigned_lengths_do_not_wrap():
    assert p.Causal().index_set(np.uint8(10), np.uint8(5)) == p.Causal().index_set(10, 5)


def test_uint64_that_fits_is_taken():
    start, stop = np.zeros(3, np.uint64), np.full(3, 2**63 - 1, np.uint64)
    assert p.ColumnIntervals(start, stop).index_set(3, 3).nnz == 0


def test_strides_beyond_the_sequence_need_no_views():
    for pattern in (p.Stride(2**62), p.DilatedWindow(3, dilation=500), p.strided(10**30)):
        assert len(spattn.plan(pattern, 500).components) == 1


def test_tri_shape_lists_no_positions():
    pattern = p.tri_shape(2, 3, 2**30, 2**31)
    assert pattern.index_set(30, 30) == p.a_shape(2, 3).index_set(30, 30)


@pytest.mark.parametrize(
    "data",
    [
        {"pattern": "sinks", "count": float("inf")},
        {"pattern": "sinks", "count": float("nan")},
        {"pattern": "bigbird", "block": 4, "seed": 10**40},
        {"pattern": "documents", "lengths": [10**400]},
        {"pattern": "mask", "mask": {"array": "", "dtype": "bool", "shape": [float("inf"), 1]}},
        {"pattern": "mask", "mask": {"array": "", "dtype": "bool", "shape": [0, 10**30]}},
        {"pattern": "mask", "mask": {"array": "ff", "dtype": "bool", "shape": [1.0, 8]}},
        {"pattern": "mask", "mask": {"array": 5, "dtype": "bool", "shape": [1, 8]}},
    ],
)
def test_infinities_from_json_are_refused(data):
    with pytest.raises(ValueError, match=": expected|^data: "):
        from_data(data)
