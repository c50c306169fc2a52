"""Hints are about the predicate that they came with."""

import copy

import numpy as np
import pytest

import spattn
from spattn import patterns as p
from spattn.index_set import Runs
from spattn.testing import check_plan


def even(pattern):
    """The same parameters in a class of its own, whose predicate leaves the pairs that add up to an even number."""

    def allows(self, q, k):
        return super(cls, self).allows(q, k) & ((q + k) % 2 == 0)

    cls = type("Even", (type(pattern),), {"allows": allows})
    own = copy.copy(pattern)
    object.__setattr__(own, "__class__", cls)
    return own


PATTERNS = [
    p.Causal(),
    p.Documents((30, 50, 40)),
    p.SlidingWindow(20, 3),
    p.DilatedWindow(8, dilation=4),
    p.Neighborhood((8, 15), 5),
    p.Sinks(7),
    p.VerticalSlash((0, 9), (0, 1, 30)),
    p.BlockLocal(16),
    p.KeyBlocks(np.arange(8)[:, None], 16, 16),
]


@pytest.mark.parametrize("around", [lambda x: x, lambda x: p.Causal() & x, lambda x: x | p.Sinks(3)], ids="x&|")
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda x: type(x).__name__)
def test_a_class_with_another_predicate_inherits_no_hint(pattern, around):
    q, k = np.ogrid[:120, :120]
    one = even(pattern).bind(120, 120)
    assert not one.translation_invariant and one.runs(q[:, 0], 120) is None and one.ends(1) is None
    expected = around(p.Mask(np.broadcast_to(one.allows(q, k), (120, 120)))).index_set(120, 120).to_dense()
    assert 0 < expected.sum() < 120 * 120
    assert np.array_equal(around(even(pattern)).index_set(120, 120).to_dense(), expected)
    plan = spattn.plan(around(even(pattern)), 120)
    check_plan(plan, [around(even(pattern)).index_set(120, 120)])
    assert plan.nnz == expected.sum()


def test_a_class_keeps_the_hints_that_it_defines():
    class Behind(p.Causal):
        translation_invariant = True

        def allows(self, q, k):
            return k >= q

        def runs(self, q, kv_len):
            return Runs.span(q, kv_len, kv_len)

    assert Behind.translation_invariant and Behind().runs(np.arange(3), 9).count.tolist() == [[9], [8], [7]]
    assert Behind().ends(1) is None
    check_plan(spattn.plan(Behind(), 99), [p.Mask(np.tri(99, dtype=bool).T).index_set(99, 99)])


def test_a_class_without_a_predicate_of_its_own_inherits_all():
    class Named(p.SlidingWindow):
        pass

    assert Named(9).translation_invariant and Named(9).ends(1) == p.SlidingWindow(9).ends(1)
