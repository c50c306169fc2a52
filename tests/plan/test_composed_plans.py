"""Compositions of patterns whose pieces repeat, and of patterns with different numbers of heads."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spattn import PlanningWarning, Tiling, plan
from spattn import patterns as p
from spattn.planning.tiles import tiling as _tiling
from spattn.testing import check_plan, dense_mask

REPEATING = [p.DilatedWindow(9, 9, 5), p.Stride(7, 2), p.strided(16), p.fixed(16, 3)]
OTHERS = [p.SlidingWindow(40, 3), p.BlockLocal(24), p.Columns(9, 2, 5), p.GlobalTokens((3, 60, 117)), p.Causal()]


@pytest.mark.parametrize("other", OTHERS, ids=repr)
@pytest.mark.parametrize("repeating", REPEATING, ids=repr)
def test_pieces_that_repeat(repeating, other):
    """Where the other pattern tells the pieces apart each is one of its own; where they overlap, pairs count once."""
    for pattern in (repeating & other, repeating | other, other | repeating, repeating - other, other - repeating):
        for q_len in (130, 77):
            check_plan(plan(pattern, q_len, 130, tiling=Tiling(tile=(16, 64))), [pattern.index_set(q_len, 130)])


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


# What no rule follows, and what cannot even be called with symbols.
UNKNOWN = {
    "gcd": lambda q, k: np.gcd(q, k) == 1,
    "product": lambda q, k: (q * k) % 17 == 0,
    "root": lambda q, k: np.sqrt(np.abs(q - k)) % 1 == 0,
    "no symbols": lambda q, k: np.select([q > k], [q - k], k) % 5 == 0,
}


@dataclass(frozen=True)
class Unknown(p.Pattern):
    """A predicate of UNKNOWN, which counts the cells that it is evaluated in."""

    form: str
    cells: list = None

    def __hash__(self):
        return hash(self.form)

    def allows(self, q, k):
        if self.cells is not None and isinstance(q, np.ndarray):
            self.cells.append(np.broadcast(q, k).size)
        return UNKNOWN[self.form](q, k)


@pytest.mark.unfollowed
@pytest.mark.parametrize("form", UNKNOWN)
def test_a_predicate_of_unknown_form_is_evaluated_where_the_others_leave_something(form):
    """4096 × 4096 cells, of which a window and one query block leave a few tiles."""
    near, q = p.SlidingWindow(63), np.arange(1000, 1128)
    for joined in (lambda x: near & x, lambda x: x & near, lambda x: x - ~near, lambda x: ~(~near | ~x)):
        cells = []
        made = plan(joined(Unknown(form, cells)), 4096, tiling=Tiling(tile=(64, 64)))
        assert sum(cells) < 4096 * 400
        of_rows = UNKNOWN[form](q[:, None], np.arange(4096)) & (np.abs(q[:, None] - np.arange(4096)) <= 63)
        assert np.array_equal(made.pattern.allows(q[:, None], np.arange(4096)), of_rows)
        assert made.tiles == plan(near, 4096, tiling=Tiling(tile=(64, 64))).tiles
    check_plan(plan(near & Unknown(form), 300), [(near & Unknown(form)).index_set(300, 300)])


@pytest.mark.unfollowed
@pytest.mark.usefixtures("slow_plans", "no_plans")
def test_the_warning_says_how_many_tiles_are_evaluated():
    with pytest.warns(
        PlanningWarning, match=r"778240 pairs in 190 tiles .*whole tiles \(gcd of values .*\); intersect"
    ):
        plan(p.SlidingWindow(63) & Unknown("gcd"), 4096, tiling=Tiling(tile=(64, 64)))


@pytest.mark.unfollowed
def test_a_predicate_that_is_unknown_nearly_everywhere_is_refused_before_it_is_evaluated():
    cells, refused = [], r"^pattern: expected at most 1073741824 pairs .*, got 42\d{8} .*; intersect it \(&\)"
    with pytest.raises(ValueError, match=refused):
        plan(Unknown("gcd", cells) - p.SlidingWindow(63), 1 << 16, tiling=Tiling(tile=(64, 64)))
    assert not cells


KNOWN = st.sampled_from([p.SlidingWindow(40, 3), p.Causal(), p.Sinks(5), p.Stride(7, 2), p.DilatedWindow(9, 9, 5)])
COMPOSED = st.recursive(
    KNOWN | st.sampled_from(list(UNKNOWN)).map(Unknown),
    lambda x: st.builds(lambda a, b: a & b, x, x) | st.builds(lambda a, b: a | b, x, x) | x.map(lambda a: ~a),
    max_leaves=5,
)


@pytest.mark.unfollowed
@given(pattern=COMPOSED, q_len=st.integers(1, 200), kv_len=st.integers(1, 200))
def test_plans_of_any_composition_are_its_pairs(pattern, q_len, kv_len):
    check_plan(plan(pattern, q_len, kv_len, tiling=Tiling(tile=(16, 64))), [pattern.index_set(q_len, kv_len)])


CLOSED = {
    "strided and dilated": p.strided(64) & p.DilatedWindow(300, 300, 48),
    "columns and stride": p.Columns(512, 500, 512) & p.strided(1024) & p.SlidingWindow(4096),
    "outside of a window": ~p.SlidingWindow(100) & p.BlockLocal(256),
    "difference": p.SlidingWindow(300) - p.Stride(7) - p.Columns(64, 0, 8),
}


@pytest.mark.parametrize("name", CLOSED)
def test_joined_closed_forms_are_decided_without_looking_at_pairs(name, monkeypatch):
    """Of a million tokens only tiles that differ are evaluated, as many as they have bitmasks or a few more."""
    cells, evaluate = [], _tiling.allowed_pairs
    monkeypatch.setattr(
        _tiling, "allowed_pairs", lambda x, q, k: cells.append(q.size * k.shape[2]) or evaluate(x, q, k)
    )
    assert plan(CLOSED[name], 1 << 20).nnz > 1 << 20
    assert sum(cells) < 2**24
