"""Positions of tiles: what predicates compute of them is what they compute of plain arrays."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spattn.patterns.base import predicate as _positions
from spattn.patterns.base.predicate import Positions


def tiles(first, length):
    """Consecutive positions, (tiles, length)."""
    return np.asarray(first)[:, None] + np.arange(length)


FIRST = st.lists(st.tuples(st.integers(-300, 3000), st.integers(-1400, 1400)), min_size=1, max_size=4)


@given(first=FIRST, rows=st.sampled_from([1, 2, 16, 128]), columns=st.sampled_from([2, 64]), padding=st.booleans())
def test_the_gcd_of_tiles_is_that_of_each_pair(first, rows, columns, padding):
    q = tiles([q for q, _ in first], rows)
    k = tiles([max(0, q + apart) for q, apart in first], columns)
    if padding:
        k[0, -1] = k[0, -2]
    for a, b in ((q[:, :, None], k[:, None]), (k[:, None], q[:, :, None])):
        found = np.gcd(a.view(Positions), b.view(Positions))
        assert type(found) is np.ndarray and found.dtype == np.int64
        assert np.array_equal(found, np.gcd(a, b))


def test_the_gcd_of_near_tiles_is_looked_up(monkeypatch):
    """Nothing but far tiles is left to Euclid's algorithm."""
    seen = []
    monkeypatch.setattr(_positions, "_gcd_of_near", lambda q, k: seen.append(len(q)) or np.gcd(q, k))
    q, k = tiles([0, 5000, 9000], 16)[:, :, None].view(Positions), tiles([100, 5000, 20], 64)[:, None].view(Positions)
    np.gcd(q, k)
    assert seen == [2]


@pytest.mark.parametrize("operation", [np.subtract, np.less, np.multiply, np.maximum])
def test_other_results_are_plain_arrays(operation):
    q, k = tiles([3, 70], 16)[:, :, None], tiles([0, 64], 64)[:, None]
    found = operation(q.view(Positions), k.view(Positions))
    assert type(found) is np.ndarray and np.array_equal(found, operation(q, k))
