"""Layouts with periodic global columns: the same pairs as the layout, in tiles of their own."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import spattn
from spattn import patterns as p
from spattn.patterns import deepspeed
from spattn.patterns.papers.layouts import LengthLayout
from spattn.testing import inputs


def layout_of(n, size, width, one_way, horizontal, first):
    """DeepSpeed's rules for FixedSparsityConfig, block by block."""
    found = np.zeros((n, n), bool)
    for row in range(n):
        start = row // size * size
        found[row, start : (row + 1 if one_way else min(n, start + size))] = True
    complete = n - n % size
    columns = list(range(first, complete, size))
    if n % size:
        columns.append(max(min(complete + first, n - width), 0))
    for start in columns:
        found[start if one_way else 0 :, start : start + width] = True
        if horizontal:
            found[start : start + width] = True
    return found


@st.composite
def fixed_layouts(draw):
    width, times = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    one_way, block, n = draw(st.booleans()), draw(st.sampled_from((1, 2, 3, 16))), draw(st.integers(1, 40))
    version, horizontal = draw(st.integers(0, times - 1)), not one_way and draw(st.booleans())
    attention = "unidirectional" if one_way else "bidirectional"
    pattern = deepspeed.fixed(block, width * times, width, attention, horizontal, times, version)
    layout = layout_of(n, width * times, width, one_way, horizontal, width * times - (1 + version) * width)
    q_len = draw(st.integers(1, n * block + 5))
    return pattern, np.kron(layout, np.ones((block, block), bool)), q_len


def at_the_end(mask, q_len):
    """The rows of the last `q_len` queries; those before position 0 attend to no key."""
    before = max(0, q_len - len(mask))
    return np.concatenate([np.zeros((before, len(mask)), bool), mask[len(mask) - (q_len - before) :]])


def pairs(pattern, q_len, kv_len):
    """The pairs that a plan computes: the weights of equal scores are positive at these."""
    q, k = np.zeros((1, 1, q_len, 8), np.float32), np.zeros((1, 1, kv_len, 8), np.float32)
    return spattn.attention(q, k, np.eye(kv_len, dtype=np.float32)[None, None], pattern)[0, 0] > 0


@given(fixed_layouts())
def test_same_pairs(case):
    pattern, mask, q_len = case
    np.testing.assert_array_equal(pairs(pattern, q_len, len(mask)), at_the_end(mask, q_len))


@given(fixed_layouts(), st.integers(0, 2))
def test_same_pairs_in_compositions(case, which):
    pattern, mask, q_len = case
    n = len(mask)
    k = np.arange(n)
    q = k[:, None]
    other, more = (
        p.SlidingWindow(9, 4) - p.Columns(5, 1, 3),
        (q - k <= 9) & (k - q <= 4) & ~((k % 5 >= 1) & (k % 5 < 3)),
    )
    made = (pattern | other, pattern & other, other - pattern)[which]
    want = (mask | more, mask & more, more & ~mask)[which]
    q_len = min(q_len, n)
    np.testing.assert_array_equal(pairs(made, q_len, n), at_the_end(want, q_len))


@pytest.mark.parametrize("attention", ["bidirectional", "unidirectional"])
@pytest.mark.parametrize("versions", [1, 4])
def test_columns_fill_tiles(attention, versions):
    """A block of 16 keys in every 64: without tiles of their own, three quarters of the products are wasted."""
    q, k, v = inputs(1, 4, q_len=4096, head_dim=16)
    plan = spattn.plan_for(deepspeed.fixed(16, 4, 1, attention, num_different_global_patterns=versions), q, k, v)
    assert plan.efficiency > 0.5


def test_steps_look_for_no_columns():
    """They are planned by rows; looking would take longer than making the layout."""
    layout = LengthLayout(16, lambda n, head: layout_of(n, 4, 1, True, False, 3))
    assert isinstance(layout.bind(8, 1024), p.BlockLayout)
    assert not isinstance(layout.bind(64, 1024), p.BlockLayout)
