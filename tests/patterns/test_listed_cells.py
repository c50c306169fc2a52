"""A table of which few cells are set: what it says of cells and of rectangles."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from spattn.patterns.hints import table as _table
from spattn.patterns.hints.table import ListedCells


@given(
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.integers(0, 2**32),
    st.sampled_from([0, 0.02, 0.5, 1]),
    st.sampled_from([7, 1 << 26]),
)
def test_it_agrees_with_the_table(shape, seed, share, most):
    rng = np.random.default_rng(seed)
    table = rng.random(shape) < share
    before, _table._MOST_BITS = _table._MOST_BITS, most
    try:
        cells = ListedCells(*np.nonzero(table), shape)
        a_lo, b_lo = (rng.integers(-3, n + 3, 50) for n in shape)
        a_hi, b_hi = a_lo + rng.integers(-1, 5, 50), b_lo + rng.integers(-1, 9, 50)
        found, every = cells.any_in(a_lo, a_hi, b_lo, b_hi), cells.all_in(a_lo, a_hi, b_lo, b_hi)
    finally:
        _table._MOST_BITS = before
    for n, (a, b, c, d) in enumerate(zip(a_lo, a_hi, b_lo, b_hi, strict=True)):
        inside = table[max(a, 0) : max(b + 1, 0), max(c, 0) : max(d + 1, 0)]
        assert found[n] or not inside.any()
        whole = inside.size == max(b - a + 1, 0) * max(d - c + 1, 0) and inside.all()
        assert whole or not every[n]
    a, b = np.indices((shape[0] + 2, shape[1] + 2)) - 1
    assert np.array_equal(cells.contains(a, b), np.pad(table, 1))


def test_rectangles_that_are_whole_blocks_are_known_exactly():
    table = np.random.default_rng(0).random((64, 64)) < 0.05
    cells = ListedCells(*np.nonzero(table), (64, 64))
    a, b = (side.ravel() for side in np.indices((16, 32)))
    found = cells.any_in(4 * a, 4 * a + 3, 2 * b, 2 * b + 1)
    assert np.array_equal(found.reshape(16, 32), table.reshape(16, 4, 32, 2).any(axis=(1, 3)))


def test_a_rectangle_across_blocks_meets_what_lies_behind_their_ends():
    cells = ListedCells(np.array([8]), np.array([16]), (32, 32))
    ends = np.array([7]), np.array([8]), np.array([15]), np.array([16])
    assert cells.any_in(*ends).all() and not cells.any_in(ends[0], ends[0], ends[2], ends[2]).any()
