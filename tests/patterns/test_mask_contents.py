"""What boolean arrays are planned as: regular patterns, listed pairs, or the arrays; always the same pairs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import spattn
from spattn import patterns as p
from spattn.index_set import AffineRows
from spattn.patterns.discovery import of_mask
from spattn.patterns.discovery.of_mask import contents
from spattn.testing import check_plan


@pytest.fixture(autouse=True, scope="module")
def small_masks():
    """Look at masks of any size."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(of_mask, "_LEAST_CELLS", 0)
        yield


def grid(q_len, kv_len):
    return np.arange(q_len)[:, None] + (kv_len - q_len), np.arange(kv_len)


TERMS = {
    "window": lambda i, j, n: (j <= i) & (i - j < n),
    "dilated": lambda i, j, n: ((i - j) % n == 0) & (abs(i - j) <= 20),
    "strided": lambda i, j, n: (j <= i) & ((i - j) % (3 * n) == 0),
    "columns": lambda i, j, n: j % (4 * n) == 1,
    "sinks": lambda i, j, n: (j < 3) & (i >= 0),
    "blocks": lambda i, j, n: (i // (2 * n) + j // (2 * n)) % 5 == 0,
    "documents": lambda i, j, n: i // (5 * n) == j // (5 * n),
    "noise": lambda i, j, n: (i * 7919 + j * 104729) % 997 < n,
    "classes": lambda i, j, n: i * i % (11 * n) == j * j % (11 * n),
    "nothing": lambda i, j, n: (i < 0) & (j < 0),
    "everything": lambda i, j, n: (i >= -999) & (j >= 0),
}
masks = st.builds(
    lambda q_len, kv_len, terms: np.logical_or.reduce(
        [np.broadcast_to(TERMS[name](*grid(q_len, kv_len), n), (q_len, kv_len)) for name, n in terms]
    ),
    st.integers(1, 150),
    st.integers(1, 150),
    st.lists(st.tuples(st.sampled_from(list(TERMS)), st.integers(1, 9)), min_size=1, max_size=3),
)


def dense(name, tokens, n):
    return np.array(np.broadcast_to(TERMS[name](*grid(tokens, tokens), n), (tokens, tokens)))


def planned(pattern, q_len, kv_len):
    like = [np.broadcast_to(np.float32(0), (1, 1, length, 8)) for length in (q_len, kv_len, kv_len)]
    return [
        spattn.plan(pattern, q_len, kv_len),
        spattn.plan(pattern, q_len, kv_len, tiling=spattn.Tiling(tile=(24, 64))),
        spattn.plan_for(pattern, *like, backend="cpu"),
    ]


@given(masks)
def test_plans_have_the_pairs_of_the_mask(mask):
    pattern, rows = p.Mask(mask), AffineRows.from_dense(mask)
    assert pattern.index_set(*mask.shape) == rows
    for plan in planned(pattern, *mask.shape):
        check_plan(plan, [rows])


@given(masks, st.integers(0, 9))
def test_compositions_have_the_pairs_of_the_mask(mask, reach):
    i, j = grid(*mask.shape)
    window = abs(i - j) <= reach
    for pattern, allowed in (
        (p.Mask(mask) & p.SlidingWindow(reach), mask & window),
        (p.Mask(mask) | p.SlidingWindow(reach), mask | window),
        (p.SlidingWindow(reach) - p.Mask(mask), window & ~mask),
    ):
        check_plan(spattn.plan(pattern, *mask.shape), [AffineRows.from_dense(allowed)])


@given(masks, masks)
def test_heads_and_entries_have_their_own(one, other):
    shape = np.maximum(one.shape, other.shape)
    both = np.zeros((2, *shape), bool)
    both[0, : one.shape[0], : one.shape[1]], both[1, : other.shape[0], : other.shape[1]] = one, other
    for pattern, sizes in ((p.Mask(both), {"heads": 2}), (p.Mask(both[:, None]), {"batch": 2})):
        plan = spattn.plan(pattern, *shape, **sizes)
        expected = [AffineRows.from_dense(mask) for mask in both]
        check_plan(plan, expected if plan.variants == 2 else expected[:1])
        assert plan.variants == 2 or np.array_equal(*both)


@pytest.mark.parametrize("name", ["window", "dilated", "strided", "columns", "blocks", "documents"])
def test_regular_masks_are_patterns(name):
    mask = dense(name, 300, 4)
    structure, pairs = contents(mask)
    assert structure is not None and pairs is None
    assert np.array_equal(structure.index_set(300, 300).to_dense(), mask)


@pytest.mark.parametrize("share, lists", [(0.004, True), (0.5, False)])
def test_random_masks_are_listed_if_they_are_sparse(share, lists):
    structure, pairs = contents(np.random.default_rng(0).random((300, 300)) < share)
    assert structure is None and (pairs is not None) == lists


def test_a_found_pattern_is_compared_with_the_mask(monkeypatch):
    """A discovery that errs is not planned."""
    mask = dense("window", 300, 4)
    for wrong in (p.SlidingWindow(2, 0), p.SlidingWindow(4, 0), p.SlidingWindow(3, 1) | p.Stride(300)):
        monkeypatch.setattr(of_mask, "discovered", lambda pairs, wrong=wrong: wrong)
        structure, pairs = contents(mask)
        assert structure is None and pairs is not None


def test_heads_of_equal_addresses_are_told_apart():
    """Masks that are made and freed while plans are made, whose memory is used again."""
    from spattn._util.making import making

    i, j = grid(300, 300)
    with making():
        for reach in range(1, 20):
            mask = abs(i - j) < reach
            assert p.Mask(mask).index_set(300, 300) == AffineRows.from_dense(mask)
