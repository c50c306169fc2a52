"""AffineRows and Runs of integers of any kind: exact, or refused by name."""

import numpy as np
import pytest

from spattn.index_set import AffineRows, Runs


def runs(start, step, count, dtype):
    return Runs(*(np.array([[x]], dtype) for x in (start, step, count)))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32, np.uint64, object])
def test_runs_of_any_integers(dtype):
    assert AffineRows.from_runs(runs(100, 100, 5, dtype), 1000).row(0).tolist() == [100, 200, 300, 400, 500]


@pytest.mark.parametrize("values", [(2**63, 1, 1), (1, 2**63, 1), (1, 1, 2**63)])
@pytest.mark.parametrize("dtype", [np.uint64, object])
def test_runs_beyond_int64(values, dtype):
    with pytest.raises(ValueError, match="^(start|step|count): expected integers in "):
        AffineRows.from_runs(runs(*values, dtype), 1000)


def test_absent_runs_may_start_anywhere():
    assert AffineRows.from_runs(runs(-(2**63), 2**63 - 1, 0, np.int64), 1000).nnz == 0


@pytest.mark.parametrize("dtype", [np.int8, np.uint64, object])
def test_csr_of_any_integers(dtype):
    made = AffineRows.from_csr(np.array([0, 2, 3], dtype), np.array([1, 100, 7], dtype), 120)
    assert made.row(0).tolist() == [1, 100] and made.row(1).tolist() == [7]


@pytest.mark.parametrize(
    "indptr, indices, error, message",
    [
        ([0, 1], [1.5], TypeError, "^indices: expected an array of integers"),
        ([0.0, 1.0], [1], TypeError, "^indptr: expected an array of integers"),
        ([0, 1], [True], TypeError, "^indices: expected an array of integers"),
        ([0, 1], np.ma.masked_array([1], [True]), TypeError, "^indices: expected a plain array"),
        ([0, 1], [2**64], ValueError, "^indices: expected integers in"),
        ([0, 1], np.array([2**63 + 3], np.uint64), ValueError, "^indices: expected integers in"),
        ([0, 2**63 - 1, -(2**63), -1, 0], [], ValueError, "^indptr: expected a non-decreasing"),
        ([0, 1], [[1]], ValueError, "^indices: expected a 1-D array"),
    ],
)
def test_csr_that_is_refused(indptr, indices, error, message):
    with pytest.raises(error, match=message):
        AffineRows.from_csr(indptr, indices, 10)


def test_masked_dense_is_refused():
    with pytest.raises(TypeError, match="^mask: expected a plain array"):
        AffineRows.from_dense(np.ma.masked_array(np.ones((2, 2), bool), np.eye(2, dtype=bool)))


def test_spans_beyond_every_sequence():
    far = np.array([-(2**63), 2**63 - 1])
    assert AffineRows.from_runs(Runs.span(far[:1], far[1:], 10), 10).row(0).tolist() == list(range(10))
    assert AffineRows.from_runs(Runs.span(far[1:], far[:1], 10), 10).nnz == 0
    for bad in (2**63, np.array([2**63], np.uint64), np.array([-(2**70)])):
        with pytest.raises(ValueError, match="^(start|stop): expected integers in"):
            Runs.span(0, bad, 10) if np.max(bad) > 0 else Runs.span(bad, 0, 10)
    with pytest.raises(TypeError, match="^stop: expected an array of integers"):
        Runs.span(0, 2.5, 10)
