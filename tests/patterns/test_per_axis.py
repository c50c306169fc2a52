"""A pattern for each axis of a grid."""

import numpy as np
import pytest

from spattn import patterns as p
from spattn import plan

GRID = (12, 20)
DILATED = p.PerAxis(GRID, (p.DilatedWindow(2, dilation=3), p.SlidingWindow(2)))


def dense(pattern, tokens):
    return pattern.index_set(tokens, tokens).to_dense()


def test_product_of_its_axes():
    """By NumPy's own product of matrices."""
    axes = p.Causal() & p.SlidingWindow(3), p.Stride(4) | p.Sinks(2), p.Documents((2, 3))
    expected = np.kron(np.kron(dense(axes[0], 6), dense(axes[1], 8)), dense(axes[2], 5))
    assert np.array_equal(dense(p.PerAxis((6, 8, 5), axes), 240), expected)


def test_grid_patterns_are_products():
    assert dense(p.PerAxis(GRID, (p.Full(), p.SlidingWindow(0))), 240).tolist() == dense(p.axial(GRID, 0), 240).tolist()
    two = p.PerAxis(GRID, (p.Neighborhood(12, 5), p.Neighborhood(20, 3, 2)))
    assert two.index_set(240, 240) == p.Neighborhood(GRID, (5, 3), (1, 2)).index_set(240, 240)


def test_views_are_those_of_its_axes():
    """Three residue classes of lines, which share their shifts, and the grid's own distances of neighbours."""
    (part,) = DILATED.bind(240, 240).parts(240, 240)
    assert part.query == part.key == p.authoring.Lattice(0, (60, 1), (4, 20))
    assert part.shifts == ((0, 0), (20, 20), (40, 40))
    pattern = p.PerAxis((64, 64), (p.DilatedWindow(6, dilation=4), p.SlidingWindow(6)))
    assert plan(pattern, 4096).tiles < 0.7 * plan(p.Mask(dense(pattern, 4096)), 4096).tiles


def test_more_axes_than_views_have():
    pattern = p.PerAxis((4, 3, 4, 5), (p.SlidingWindow(1),) * 4)
    assert plan(pattern, 240).nnz == pattern.index_set(240, 240).nnz
    pattern = p.PerAxis((8, 8, 16), (p.SlidingWindow(1), p.SlidingWindow(1), p.PeriodicWindow(4, 1)))
    assert plan(pattern, 1024).nnz == pattern.index_set(1024, 1024).nnz


def test_closed_form_of_large_boxes():
    """Too many runs for one array are none: the index set comes from the predicate."""
    pattern = p.PerAxis((60, 60), (p.Full(), p.DilatedWindow(29, dilation=2)))
    assert pattern.runs(np.arange(3600), 3600) is not None
    pattern = p.PerAxis((5000, 1), (p.Causal(), p.Full()))
    assert pattern.runs(np.arange(5000), 5000) is None
    assert pattern.index_set(5000, 5000) == p.Causal().index_set(5000, 5000)


ERRORS = [
    (lambda: p.PerAxis((4, 4), p.Causal()), TypeError, r"^patterns: expected a sequence of patterns, got Causal\(\)"),
    (lambda: p.PerAxis((4, 4), 5), TypeError, "^patterns: expected a sequence of patterns, got 5"),
    (lambda: p.PerAxis((4, 4), (p.Causal(), 3)), TypeError, "^patterns: expected patterns, got 3"),
    (lambda: p.PerAxis((4, 4), (p.Causal(),)), ValueError, r"^patterns: expected 2 \(one per axis\), got 1"),
    (lambda: p.PerAxis((), ()), ValueError, r"^grid: expected at least one axis, got \(\)"),
    (lambda: p.PerAxis((0, 4), (p.Causal(),) * 2), ValueError, "^grid: expected an integer >= 1, got 0"),
    (lambda: p.PerAxis((4,), (p.BigBird(2),)), ValueError, "^patterns: expected patterns of one batch entry and head"),
    (
        lambda: p.PerAxis((4, 4), (p.Causal(),) * 2).index_set(17, 17),
        ValueError,
        r"^kv_len: expected 16 \(a grid of 4 × 4",
    ),
    (
        lambda: p.PerAxis((4, 4), (p.Mask(np.ones((3, 3), bool)), p.Full())).index_set(16, 16),
        ValueError,
        "^mask: expected",
    ),
]


@pytest.mark.parametrize("make, error, message", ERRORS)
def test_errors(make, error, message):
    with pytest.raises(error, match=message):
        make()


# -- runs of keys, row by row -----------------------------------------------------------------------------------------


def test_runs_of_rows():
    rows = p.strided(7).index_set(40, 50)
    pattern = p.authoring.RowRuns.from_index_set(rows)
    assert pattern.index_set(40, 50) == rows and plan(pattern, 40, 50).nnz == rows.nnz
    assert p.discover(pattern.index_set(40, 50)) == p.discover(rows)
    heads = p.authoring.RowRuns(
        *(np.stack([each, each[::-1]]) for each in (pattern.start, pattern.step, pattern.count))
    )
    assert heads.sizes() == (1, 2) and heads.index_set(40, 50, head=0) == rows
    assert np.array_equal(heads.index_set(40, 50, head=1).to_dense(), rows.to_dense()[::-1])


def test_runs_take_less_than_their_pairs():
    rows = p.strided(64).index_set(4096, 4096)
    pattern = p.authoring.RowRuns.from_index_set(rows)
    assert sum(each.nbytes for each in (pattern.start, pattern.step, pattern.count)) < rows.nnz


@pytest.mark.parametrize(
    "start, step, count, message",
    [
        ([[0]], [[1, 1]], [[1]], r"^step: expected shape \(1, 1\), got \(1, 2\)"),
        ([0], [1], [1], "^start: expected 2-D or 3-D or 4-D, got shape"),
        ([[0]], [[0]], [[2]], "^step: expected numbers >= 1, got 0"),
        ([[0]], [[1]], [[-1]], "^count: expected numbers >= 0, got -1"),
        ([[0]], [[3]], [[3]], r"^count: expected keys in \[0, 5\), got 3 keys from 0 in steps of 3"),
        ([[0, 2]], [[1, 1]], [[3, 1]], "^runs: expected disjoint runs in each row"),
        ([[0], [0]], [[1], [1]], [[1], [1]], r"^start: expected shape \(..., 1, runs\), got \(2, 1\)"),
    ],
)
def test_runs_that_are_none(start, step, count, message):
    with pytest.raises(ValueError, match=message):
        p.authoring.RowRuns(start, step, count).index_set(1, 5)


def test_rows_of_runs_depend_on_lengths():
    with pytest.raises(ValueError, match="^RowRuns: its rows depend on the lengths"):
        p.authoring.RowRuns([[0]], [[1]], [[1]]).allows(0, 0)
