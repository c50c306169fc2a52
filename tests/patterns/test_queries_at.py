"""Queries that stand elsewhere than at the end of the keys."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import spattn
from spattn import patterns as p
from spattn.testing import inputs

LENGTHS = st.integers(0, 40)


def dense(pattern, q_len, kv_len, **which):
    return pattern.index_set(q_len, kv_len, **which).to_dense()


@given(LENGTHS, LENGTHS, st.integers(-45, 45))
def test_from_a_first_position(q_len, kv_len, first):
    i, j = np.ogrid[:q_len, :kv_len]
    assert np.array_equal(dense(p.QueriesAt(p.Causal(), first), q_len, kv_len), j <= i + first)
    assert np.array_equal(
        dense(p.QueriesAt(p.SlidingWindow(3, 1), first), q_len, kv_len), abs(2 * (i + first - j) - 2) <= 4
    )


@given(st.lists(st.integers(-10, 50), max_size=30), LENGTHS)
def test_each_at_its_own(positions, kv_len):
    found = dense(p.QueriesAt(p.strided(4), positions), len(positions), kv_len)
    for row, position in zip(found, positions, strict=True):
        assert row.tolist() == [j <= position and (position - j < 4 or (position - j) % 4 == 0) for j in range(kv_len)]


def test_at_the_end_is_what_patterns_do():
    for q_len, kv_len in ((5, 12), (12, 5)):
        assert p.QueriesAt(p.Causal(), kv_len - q_len).index_set(q_len, kv_len) == p.Causal().index_set(q_len, kv_len)


def test_rows_of_a_square():
    """What knows its lengths is made for the whole sequence; each query is a row of it."""
    mask = np.random.default_rng(0).random((12, 12)) < 0.5
    assert np.array_equal(dense(p.QueriesAt(p.Mask(mask), 4), 3, 12), mask[4:7])
    assert np.array_equal(dense(p.QueriesAt(p.Mask(mask), [9, 0, 4]), 3, 12), mask[[9, 0, 4]])
    assert np.array_equal(dense(p.QueriesAt(p.Mask(mask), 9), 3, 5), mask[9:, :5])
    with pytest.raises(ValueError, match=r"^mask: expected shape \(..., 12, 12\), got \(3, 12\)"):
        p.QueriesAt(p.Mask(mask[:3]), 0).index_set(3, 12)


def test_a_grid_of_more_tokens_than_keys():
    """Its closed form knows all of its tokens; those that are no keys do not come out."""
    whole = p.Neighborhood((4, 6), 3).index_set(24, 24).to_dense()
    assert np.array_equal(dense(p.QueriesAt(p.Neighborhood((4, 6), 3), 10), 14, 20), whole[10:, :20])


def test_a_cache_that_is_not_full():
    """Decoding into a cache of 64 keys, whose end nobody may see: the same bits as without that end."""
    q, k, v = inputs(1, 2, q_len=4, kv_len=64, head_dim=16)
    k[:, :, 24:], v[:, :, 24:] = np.nan, np.inf
    out = spattn.attention(q, k, v, p.QueriesAt(p.Causal(), 20))
    assert np.array_equal(out, spattn.attention(q, np.ascontiguousarray(k[:, :, :24]), v[:, :, :24], "causal"))


def test_heads_and_entries_of_their_own():
    pattern = p.QueriesAt(p.PerHead((p.Causal(), p.SlidingWindow(1, 0))), 2)
    assert pattern.sizes() == (1, 2)
    assert np.array_equal(dense(pattern, 2, 6, head=1), np.eye(2, 6, 2, bool) | np.eye(2, 6, 1, bool))
    assert pattern.bind(2, 6).at(0, 1) == pattern.at(0, 1).bind(2, 6) and pattern.bind(2, 6).sizes() == (1, 2)
    caches = p.PerBatch((p.QueriesAt(p.Causal(), 0), p.QueriesAt(p.Causal(), 3)))
    assert dense(caches, 1, 5, batch=1).sum() == 4 and dense(caches, 1, 5, batch=0).sum() == 1


def test_rows_without_a_position_stand_before_the_keys():
    assert dense(p.QueriesAt(p.QueriesAt(p.Causal(), [4, 4, 4, 4]), -2), 4, 4).sum(axis=1).tolist() == [0, 0, 4, 4]


def test_what_is_inside_decides():
    """Patterns within are compared by what they hold, arrays included."""
    mask = np.eye(4, dtype=bool)
    one, same, other = (p.QueriesAt(p.Mask(m), 0) for m in (mask, mask.copy(), ~mask))
    assert one == same and hash(one) == hash(same) and one != other
    assert one != p.QueriesAt(p.Mask(mask), 1) and one != p.QueriesAt(p.Mask(mask), [0, 1, 2, 3])
    assert np.array_equal(dense(other, 4, 4), ~mask) and np.array_equal(dense(one, 4, 4), mask)


def test_positions_are_copied():
    positions = np.arange(4)
    pattern = p.QueriesAt(p.Causal(), positions)
    positions[:] = 0
    assert dense(pattern, 4, 4).sum() == 10


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda: p.QueriesAt("causal", 0), TypeError, "^inner: expected a Pattern, got 'causal'"),
        (lambda: p.QueriesAt(p.Causal(), 1.0), TypeError, "^positions: expected an integer, got 1.0"),
        (lambda: p.QueriesAt(p.Causal(), True), TypeError, "^positions: expected an integer, got True"),
        (lambda: p.QueriesAt(p.Causal(), [0.5]), TypeError, "^positions: expected an array of integers"),
        (lambda: p.QueriesAt(p.Causal(), [[[0]]]), ValueError, "^positions: expected 1-D or 2-D"),
        (lambda: p.QueriesAt(p.Causal(), 2**31), ValueError, r"^positions: expected an integer in \["),
        (lambda: p.QueriesAt(p.Causal(), [0, -(2**31)]), ValueError, r"^positions: expected an integer in \["),
        (lambda: p.QueriesAt(p.Causal(), [0, 1]).bind(3, 9), ValueError, r"^positions: expected 3 \(q_len\), got 2"),
        (lambda: p.QueriesAt(p.Causal(), 2**31 - 2).bind(3, 9), ValueError, "^positions: expected the last one below"),
        (lambda: p.QueriesAt(p.Causal(), 0).allows(0, 0), ValueError, r"use \.bind\(q_len, kv_len\)"),
    ],
)
def test_errors(make, error, words):
    with pytest.raises(error, match=words):
        make()
