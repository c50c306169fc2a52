"""What index sets are made of, at the edges: runs that nearly meet, and do."""

import numpy as np
import pytest

from spattn.index_set import AffineRows, Runs


def runs(*triples):
    return Runs(*np.array(triples, dtype=np.int64).T[:, None])


@pytest.mark.parametrize(
    "one, other", [((0, 1, 3), (2, 1, 2)), ((0, 3, 4), (9, 1, 1)), ((1, 2, 3), (5, 2, 2)), ((4, 1, 1), (4, 1, 1))]
)
def test_runs_that_meet_in_one_key(one, other):
    """In the last key of the one and the first of the other."""
    with pytest.raises(ValueError, match="^runs: expected disjoint runs in each row"):
        AffineRows.from_runs(runs(one, other), 20)
    start, step, count = one
    shorter = (start, step, count - 1)
    keys = sorted(s + d * t for s, d, n in (shorter, other) for t in range(n))
    assert AffineRows.from_runs(runs(shorter, other), 20).row(0).tolist() == keys
