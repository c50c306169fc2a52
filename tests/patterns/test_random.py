"""Random blocks: NumPy's own Philox, one row at a time."""

import numpy as np
import pytest

from spattn import patterns as p
from spattn.patterns.papers.layouts import draw_ranks, random_words


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**64 - 1])
@pytest.mark.parametrize("count", [0, 1, 4, 7])
def test_words_are_numpys(seed, count):
    rows = np.array([0, 1, 7, 2**31])
    ours = random_words(seed, 3, rows, count)
    theirs = [np.random.Philox(key=seed, counter=[0, 0, 3, int(row)]).random_raw(count) for row in rows]
    assert np.array_equal(ours, np.array(theirs, dtype=np.uint64).reshape(len(rows), count))


def test_row_alone_equals_the_table():
    for causal in (False, True):
        pattern = p.BigBird(4, 3, 1, 5, seed=9, causal=causal, head=2)
        table = pattern.draw(np.arange(50), 50)
        assert all(np.array_equal(pattern.draw(np.array([a]), 50)[0], table[a]) for a in range(50))


def test_draws_are_distinct_fresh_and_complete():
    pattern = p.BigBird(1, 3, 2, 4, seed=1, head=0)
    for a, row in enumerate(pattern.draw(np.arange(30), 30)):
        drawn = row[row >= 0].tolist()
        assert len(set(drawn)) == len(drawn) == (0 if a < 2 else 4)
        assert all(abs(a - b) > 1 and b >= 2 for b in drawn)


def test_few_candidates_are_all_taken():
    ranks = draw_ranks(0, 0, np.arange(4), np.array([0, 1, 2, 3]), 3)
    assert [sorted(r[r >= 0].tolist()) for r in ranks] == [[], [0], [0, 1], [0, 1, 2]]


def test_draws_are_fair():
    ranks = draw_ranks(5, 0, np.arange(20000), np.full(20000, 10), 3)
    assert np.abs(np.bincount(ranks.reshape(-1)) / 6000 - 1).max() < 0.05


def test_pinned():
    """The same on every machine and in every version: a plan's pattern is part of a model."""
    drawn = p.BigBird(1, random_blocks=3, seed=7, head=1).draw(np.array([10, 20]), 64)
    assert drawn.tolist() == [[41, 20, 60], [26, 28, 30]]
