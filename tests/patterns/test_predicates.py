"""What a predicate may return, wherever it is asked."""

import dataclasses
import math
import sys
import warnings

import numpy as np
import pytest

import spattn
from spattn import patterns as p
from spattn.patterns.base import predicate as _evaluate
from spattn.patterns.base.predicate import member
from spattn.planning.symbolic.symbols import combine
from spattn.testing import check_plan, inputs


def mine(allows):
    body = {"allows": lambda self, q, k: allows(q, k)}
    return dataclasses.dataclass(frozen=True)(type("Mine", (p.Pattern,), body))()


USES = {
    "index_set": lambda pattern: pattern.index_set(150, 150),
    "plan": lambda pattern: spattn.plan(pattern, 150),
    "plan of one tile": lambda pattern: spattn.plan(pattern, 20),
    "attention": lambda pattern: spattn.attention(*inputs(1, 1, q_len=150, head_dim=8), pattern),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    "result, got",
    [
        (lambda x: None, "NoneType"),
        (lambda x: x * 1, "ndarray of int64"),
        (lambda x: x * 1.0, "ndarray of float64"),
        (lambda x: 1, "int"),
        (lambda x: "yes", "str"),
        (lambda x: NotImplemented, "NotImplementedType"),
        (lambda x: np.ma.masked_array(x), "MaskedArray of bool"),
        (lambda x: np.asarray(x, object), "ndarray of object"),
        (lambda x: [True], "list"),
        (lambda x: np.float32(1), "float32 of float32"),
        (lambda x: np.ones((2, 3, 4, 5), bool), r"shape \(2, 3, 4, 5\)"),
        (lambda x: np.ones(7, bool), r"shape \(7,\)"),
    ],
)
def test_anything_but_truth_is_refused(use, result, got):
    for pattern in (mine(lambda q, k: result(k <= q)), p.SlidingWindow(40) & mine(lambda q, k: result(k <= q))):
        with warnings.catch_warnings(), pytest.raises(TypeError, match=rf"^allows\(\): .* from Mine\(\), got {got}"):
            warnings.simplefilter("error")
            USES[use](pattern)


def test_integers_that_tiles_know_are_no_truth_value():
    """A difference of positions has a rule on tiles, but 0 and 1 are not what it takes."""
    with pytest.raises(TypeError, match=r"^allows\(\): expected a bool array from Mine\(\), got ndarray of int64"):
        spattn.plan(mine(lambda q, k: k - q), 150)


@pytest.mark.parametrize("n", [20, 150])
@pytest.mark.parametrize("value", [True, False, np.True_, np.False_])
def test_one_truth_value_for_all(value, n):
    pattern = mine(lambda q, k: value)
    assert pattern.index_set(n, n).nnz == spattn.plan(pattern, n).nnz == n * n * bool(value)


def test_truth_of_one_side():
    pattern = mine(lambda q, k: k % 3 == 0)
    assert pattern.index_set(150, 150).nnz == spattn.plan(pattern, 150).nnz == 150 * 50


def test_errors_of_a_predicate_are_its_own():
    def allows(q, k):
        raise TypeError("my own words")

    for use in USES.values():
        with warnings.catch_warnings(), pytest.raises(TypeError, match="^my own words"):
            warnings.simplefilter("error")
            use(mine(allows))


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    "allows",
    [
        lambda q, k: k <= q and q - 9 <= k,
        lambda q, k: not k <= q,
        lambda q, k: (k if k <= q else q) == 3,
        lambda q, k: min(q, k) == 3,
    ],
)
def test_single_truth_values_are_refused_in_words(use, allows):
    with warnings.catch_warnings(), pytest.raises(TypeError, match=r"^allows\(\): expected &, \|, ~, .* got 'and'"):
        warnings.simplefilter("error")
        USES[use](mine(allows))


@pytest.mark.parametrize(
    "allows",
    [
        lambda q, k: (q - k).clip(0, 5) == 3,
        lambda q, k: np.clip(q - k, None, 5) == 3,
        lambda q, k: q.clip(30) - 7 <= k.clip(max=60),
        lambda q, k: np.clip(k, 3, 90) <= q,
    ],
)
def test_clipped_positions_are_planned_without_a_warning(allows):
    pattern = mine(allows)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = spattn.plan(pattern, 400, tiling=spattn.Tiling(tile=(16, 64)))
    check_plan(made, [pattern.index_set(400, 400)])
    assert 0 < made.nnz < 400 * 400


@pytest.mark.unfollowed
@pytest.mark.usefixtures("slow_plans", "no_plans")
def test_predicate_that_tiles_cannot_follow_is_planned_with_a_warning():
    pattern = mine(lambda q, k: np.gcd(q, k) == 1)
    with pytest.warns(spattn.PlanningWarning, match="cannot be evaluated on whole tiles"):
        planned = spattn.plan(pattern, 150)
    assert planned.nnz == pattern.index_set(150, 150).nnz


DISTANCES = np.arange(400) % 7 < 2


@pytest.mark.unfollowed
@pytest.mark.usefixtures("slow_plans", "no_plans")
@pytest.mark.parametrize(
    "allows",
    [
        lambda q, k: DISTANCES[abs(q - k)],
        lambda q, k: np.ones(q.shape, bool) & (k <= q),
        lambda q, k: (q - k).__abs__().view(np.int64) < 30,
        lambda q, k: np.select([q > k], [q - k], k) < 30,
    ],
    ids=["looked up", "shape", "method", "function"],
)
def test_what_symbols_cannot_do_is_planned_with_a_warning(allows):
    """An array that a distance is looked up in raises IndexError, what symbols have not an AttributeError."""
    pattern = mine(allows)
    with pytest.warns(spattn.PlanningWarning, match="cannot be evaluated on whole tiles"):
        made = spattn.plan(pattern, 400, tiling=spattn.Tiling(tile=(16, 64)))
    check_plan(made, [pattern.index_set(400, 400)])


def times(n, x):
    return x if n == 1 else times(n // 2, x) + times(n // 2, x)


@pytest.mark.unfollowed
@pytest.mark.parametrize(
    "allows",
    [
        lambda q, k: (q - sys.maxsize <= k) & (k <= q),  # q - k - maxsize wraps
        lambda q, k: (q - 2**62 <= k) & (k < q + 2**62),
        lambda q, k: k * 10**13 <= q * 10**13 - 10**14,  # the keys of tile pairs would wrap
        lambda q, k: abs(q - k) < math.inf,
        lambda q, k: times(8, q - k + 2**60) > 0,  # wraps where q >= k, as the predicate itself does
        lambda q, k: (q - k < 2**70) & (k <= q),
        lambda q, k: (p.authoring.apply(lambda t: t.astype(np.uint64) + (2**64 - 2**20), q) > k) & (k <= q),
    ],
)
def test_huge_values_in_a_predicate(allows):
    pattern = mine(allows)
    assert spattn.plan(pattern, 400, tiling=spattn.Tiling(tile=(16, 64))).nnz == pattern.index_set(400, 400).nnz > 0


def test_keys_of_pairs_do_not_wrap():
    one, other = np.array([0, 4, 4]), np.array([0, 0, 2**62 - 1])  # 4 · 2⁶² wraps to 0
    assert len(set(combine(one, other).tolist())) == 3


def test_union_with_a_predicate_that_has_no_closed_form():
    pattern = p.Sinks(1) | mine(lambda q, k: (q - k) % 7 == 3)
    assert np.array_equal(pattern.index_set(90, 90).to_dense(), pattern.allows(*np.ogrid[:90, :90]))


@pytest.mark.parametrize(
    "pattern",
    [
        p.SlidingWindow(3) & mine(lambda q, k: np.gcd(q, k) == 1),
        (p.Sinks(2) | p.SlidingWindow(2, 0)) - p.Stride(3),
        mine(lambda q, k: np.gcd(q, k) == 1) & (p.Sinks(3) | p.VerticalSlash((7,), (0, 5))),
    ],
    ids=["first", "union", "second"],
)
def test_closed_forms_select_what_is_evaluated(pattern, monkeypatch):
    q, k = np.ogrid[:300, :300]
    want, cells = pattern.allows(q, k), []
    monkeypatch.setattr(_evaluate, "allowed", lambda x, q, k: cells.append(np.broadcast(q, k).size) or x.allows(q, k))
    for at_once in (1 << 20, 1000):
        monkeypatch.setattr(_evaluate, "_PAIRS_AT_ONCE", at_once)
        cells.clear()
        assert np.array_equal(pattern.index_set(300, 300).to_dense(), want)
        assert sum(cells) < 300 * 300 / 8


def tiles_of(q, k):
    """Positions of tiles as predicates are given them: consecutive from each of `q` and of `k` on."""
    return np.add.outer(q, np.arange(5))[:, :, None], np.add.outer(k, np.arange(3))[:, None, :]


@pytest.mark.parametrize("table", [[], [3], [-4, 0, 1, 17]], ids=str)
@pytest.mark.parametrize(
    "values, looked_up",
    [
        (lambda q, k: q - k, 7),
        (lambda q, k: k - 2 * q, 15),
        (lambda q, k: np.where(k % 3 == 0, 3, q - k), 15),
        (lambda q, k: q, 5),
        (lambda q, k: q[:0] - k[:0], 0),
    ],
)
def test_members_among_differences_are_looked_up_once_a_diagonal(values, looked_up, table, monkeypatch):
    """And any other numbers of a tile one by one."""
    asked, isin = [], np.isin
    positions = values(*tiles_of([0, 7, 40], [0, 9, 20]))
    table = np.array(table, np.int64)
    monkeypatch.setattr(np, "isin", lambda x, y: asked.append(x.size // max(len(x), 1)) or isin(x, y))
    assert np.array_equal(member(table, positions), isin(positions, table))
    assert asked == [looked_up]
