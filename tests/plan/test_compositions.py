"""Compositions of patterns whose pieces repeat, and of patterns with different numbers of heads."""

import numpy as np
import pytest

from spattn import patterns as p
from spattn import plan
from spattn.testing import check_plan, dense_mask

REPEATING = [p.DilatedWindow(9, 9, 5), p.Stride(7, 2), p.Strided(16), p.Fixed(16, 3)]
OTHERS = [p.SlidingWindow(40, 3), p.BlockLocal(24), p.Columns(9, 2, 5), p.GlobalTokens((3, 60, 117)), p.Causal()]


@pytest.mark.parametrize("other", OTHERS, ids=repr)
@pytest.mark.parametrize("repeating", REPEATING, ids=repr)
def test_pieces_that_repeat(repeating, other):
    """Where the other pattern tells the pieces apart each is one of its own; where they overlap, pairs count once."""
    for pattern in (repeating & other, repeating | other, other | repeating, repeating - other, other - repeating):
        for q_len in (130, 77):
            check_plan(plan(pattern, q_len, 130, tile=(16, 64)), [pattern.index_set(q_len, 130)])


def test_heads_of_operands_with_different_numbers():
    """A pattern of two heads beside one of four: neighbouring heads share the former's."""
    two = p.PerHead((p.SlidingWindow(3), p.SlidingWindow(9)))
    four = p.PerHead((p.Causal(), p.Columns(2, 0, 1), p.Columns(3, 1, 2), p.BlockLocal(5)))
    joined = (two & four).variants(1, 8)
    q, k = np.arange(20)[:, None], np.arange(20)[None, :]
    for head in range(8):
        expected = two.at(0, head // 4).allows(q, k) & four.at(0, head // 2).allows(q, k)
        assert np.array_equal(joined[0][joined[1][0, head]].allows(q, k), expected)
        assert np.array_equal(dense_mask(two & four, 1, 8, 20, 20)[0, head], expected)
