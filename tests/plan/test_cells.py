"""Values of one side's boxes: each kind stored once, and in every cell what NumPy has."""

import operator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spattn.patterns.authoring import Lattice
from spattn.planning.contract.types import positions
from spattn.planning.symbolic.cells import Cells, distinct, evaluate
from spattn.planning.tiles.tiling import make_view

numbers = st.integers(-70, 70)
lattices = st.builds(
    lambda offset, strides, extents: Lattice(offset, strides[: len(extents)], tuple(extents)),
    st.integers(-500, 500),
    st.tuples(*[st.sampled_from([1, -1, 3, 7, 64, -80, 1000])] * 3),
    st.lists(st.integers(1, 40), min_size=1, max_size=3),
)
views = st.builds(make_view, lattices, st.sampled_from([4, 16, 64]))
UFUNCS = {
    np.add: numbers,
    np.subtract: numbers,
    np.multiply: numbers,
    np.remainder: st.integers(1, 90),
    np.floor_divide: st.integers(1, 90),
    np.minimum: numbers,
    np.maximum: numbers,
    np.bitwise_and: numbers,
}
COMPARISONS = (np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal)
steps = st.lists(st.sampled_from(list(UFUNCS)).flatmap(lambda f: st.tuples(st.just(f), UFUNCS[f])), max_size=4)


def made(view, chain):
    """Cells of a view after some steps, and their values as NumPy has them."""
    cells = Cells.of_view(view, 3)
    values = positions(view, np.arange(view["tiles"]))[0] + 3
    for ufunc, number in chain:
        cells, values = evaluate(ufunc, (cells, number)), ufunc(values, number)
    return cells, values


@given(views, steps, steps, st.sampled_from([*UFUNCS, *COMPARISONS]), st.booleans())
def test_operators_agree_with_numpy(view, one, other, ufunc, swapped):
    (a, a_values), (b, b_values) = made(view, one), made(view, other)
    if ufunc in (np.remainder, np.floor_divide):
        b, b_values = evaluate(np.bitwise_or, (evaluate(np.absolute, (b,)), 1)), np.abs(b_values) | 1
    inputs = ((b, a), (b_values, a_values)) if swapped and ufunc in COMPARISONS else ((a, b), (a_values, b_values))
    found, expected = evaluate(ufunc, inputs[0]), ufunc(*inputs[1])
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found.values, expected)


@given(views, steps, st.lists(st.integers(-300, 300), unique=True).map(sorted))
def test_what_is_known_of_boxes(view, chain, table):
    """Their bounds, steps and shapes, and look-ups in tables."""
    cells, values = made(view, chain)
    table = np.array(table, np.int64)
    for bound, expected in zip(cells.bounds, (values.min(axis=1), values.max(axis=1)), strict=True):
        np.testing.assert_array_equal(bound, expected)
    shape, base = cells.shape_and_base
    np.testing.assert_array_equal(base, values[:, 0])
    for number in np.unique(shape):
        own = (values - values[:, :1])[shape == number]
        assert (own == own[0]).all()
    assert (np.diff(values, axis=1) % cells.step == 0).all() if cells.step else (values == values[:, :1]).all()
    np.testing.assert_array_equal(cells.rank(table).values, np.searchsorted(table, values, side="right"))
    np.testing.assert_array_equal(cells.member(table).values, np.isin(values, table))
    some = np.arange(0, len(values), 2)
    np.testing.assert_array_equal(cells.take(some).values, values[some])
    np.testing.assert_array_equal(cells.map(lambda x: x * x % 7 == 2).values, values * values % 7 == 2)


@given(st.lists(st.integers(-(2**62), 2**62) | st.integers(-5, 20)))
def test_distinct_numbers(codes):
    codes = np.array(codes, np.int64)
    place, which = distinct(codes)
    assert np.array_equal(codes[place], np.unique(codes)) and np.array_equal(codes[place][which], codes)


def test_boxes_of_a_long_sequence_are_of_few_kinds():
    """However long: a predicate costs so much a box, not a token."""
    cells = Cells.of_view(make_view(Lattice(5, (1,), (10**7 + 1,)), 128))
    assert cells.table.shape == (2, 128) and len(cells) == 78126
    block, within = evaluate(np.floor_divide, (cells, 1000)), evaluate(np.less, (cells, 5 * 10**6))
    assert len(block.table) <= 2 * 1000 and len(within.table) <= 5


@pytest.mark.parametrize("ufunc", [np.remainder, np.floor_divide])
def test_boxes_within_a_period_are_of_one_kind(ufunc):
    """Of coordinates in a grid there is one kind of box, and one more for each way to carry."""
    for period, carried in ((1024, 1), (1000, 8)):
        cells = Cells.of_view(make_view(Lattice(1, (1,), (1 << 20,)), 64))
        found = evaluate(ufunc, (cells, period))
        assert len(found.table) == 1 + carried
        assert np.array_equal(found.values, ufunc(cells.values, period))


def test_numbers_that_would_wrap_are_evaluated_as_they_are():
    cells = Cells.of_view(make_view(Lattice(0, (1,), (100,)), 16))
    huge = evaluate(np.multiply, (cells, 2**60))
    for step in (operator.mul, operator.add):
        values = step(cells.values * 2**60, 2**60)
        ufunc = {operator.mul: np.multiply, operator.add: np.add}[step]
        np.testing.assert_array_equal(evaluate(ufunc, (huge, 2**60)).values, values)


@pytest.mark.parametrize("dtype", [np.bool_, np.float32, np.uint64, np.int8])
def test_values_of_other_dtypes(dtype):
    cells = Cells.of_view(make_view(Lattice(0, (1,), (100,)), 16)).map(lambda x: (x % 3).astype(dtype))
    found = evaluate(np.logical_or, (cells, False))
    assert cells.dtype == dtype and np.array_equal(found.values, cells.values.astype(bool))
