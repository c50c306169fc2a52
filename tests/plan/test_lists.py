"""Lists of runs that grow into those of a plan."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spattn.planning.tiles._lists import RunLists


def columns(*numbers):
    return [np.array(own, np.int32) for own in numbers]


@given(
    several=st.lists(
        st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9), st.integers(-1, 9)), max_size=4), max_size=5),
        max_size=5,
    )
)
def test_lists_one_behind_the_other(several):
    """Also lists without runs, and none."""
    made = RunLists()
    for lists in several:
        number = np.repeat(np.arange(len(lists)), [len(own) for own in lists])
        made.add(len(lists), *columns(number, *(zip(*sum(lists, []), strict=True) if len(number) else ([],) * 3)))
    every = [own for lists in several for own in lists]
    runs = sum(every, [])
    indptr, tile_indptr, key_tile, mask = made.arrays()
    assert made.runs == len(runs)
    assert indptr.tolist() == np.cumsum([0, *map(len, every)]).tolist() and indptr.dtype == np.int32
    assert tile_indptr.tolist() == np.cumsum([0, *(length for _, length, _ in runs)]).tolist()
    assert key_tile.tolist() == [key for key, _, _ in runs] and mask.tolist() == [own for _, _, own in runs]
    assert tile_indptr.dtype == np.int64 and key_tile.dtype == mask.dtype == np.int32


def test_numbers_that_fall_are_refused():
    for numbers in ([1, 0], [0, 2], [-1]):
        with pytest.raises(ValueError, match="number: expected non-decreasing numbers below 2"):
            RunLists().add(2, *columns(numbers, *[[1] * len(numbers)] * 3))
    with pytest.raises(ValueError, match="number: expected four arrays of 2 runs"):
        RunLists().add(2, *columns([0, 1], [1], [1], [1]))


def test_arrays_stay_as_they_are():
    """What is added afterwards lies elsewhere; empty lists are taken back."""
    made = RunLists()
    made.add(2, *columns([0, 1], [5, 6], [1, 2], [-1, 0]))
    before = made.arrays()
    kept = [own.copy() for own in before]
    made.add(3, *columns([], [], [], []))
    made.drop_empty(3)
    made.add(1, *columns([0] * 9000, *[np.arange(9000)] * 3))
    for own, same, longer in zip(before, kept, made.arrays(), strict=True):
        assert np.array_equal(own, same) and np.array_equal(longer[: len(same)], same)
        assert isinstance(own.base, bytes) and len(own.base) == own.nbytes
        with pytest.raises(ValueError):
            own.flags.writeable = True
    assert made.arrays()[0].tolist() == [0, 1, 2, 9002]
