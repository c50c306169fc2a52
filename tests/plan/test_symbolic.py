"""The rules that evaluate a predicate on whole tiles: right in every cell, and decided where the interval decides."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spattn import Tiling, plan
from spattn import patterns as p
from spattn.patterns.authoring import apply, member
from spattn.patterns.base.predicate import rank
from spattn.planning.symbolic import tile_pairs
from spattn.planning.symbolic.cells import Cells
from spattn.testing import check_plan

TABLE = np.array([-9, -4, 0, 1, 2, 3, 7, 20, 21, 22, 23, 40])

# Truth values of q and k by every rule; together they meet every operator that has one.
RULES = {
    "less": lambda q, k: q < k,
    "less equal": lambda q, k: q - 3 <= k,
    "greater": lambda q, k: q > k + 2,
    "greater equal": lambda q, k: k >= q,
    "equal": lambda q, k: q == k,
    "not equal": lambda q, k: q != k + 5,
    "sum": lambda q, k: q + k > 60,
    "negative": lambda q, k: -(q - k) > 3,
    "product": lambda q, k: (q - 40) * (k - 30) > 99,
    "product of differences": lambda q, k: (q - k) * (k - 2 * q) < -50,
    "product by a number": lambda q, k: 3 * (q - k) % 6 == 3,
    "square": lambda q, k: (q - k) * (q - k) <= 30,
    "remainder of a product": lambda q, k: (q * k) % 7 < 3,
    "remainder of a product of three": lambda q, k: q * k * (q - k) % 5 == 2,
    "remainder": lambda q, k: (q - k) % 7 < 3,
    "remainder of blocks": lambda q, k: (q // 8 - k // 8) % 3 == 1,
    "floor division": lambda q, k: (q - k) // 5 == 1,
    "absolute": lambda q, k: np.abs(q - k) < 6,
    "far": lambda q, k: np.abs(q - k) > 9,
    "minimum": lambda q, k: np.minimum(q - k, 4) == 4,
    "maximum": lambda q, k: np.maximum(q - k, k - q) <= 4,
    "clip": lambda q, k: (q - k).clip(-3, 4) == 4,
    "clip of one side": lambda q, k: np.clip(q, 20, None) - 9 <= k.clip(max=60),
    "and": lambda q, k: (q - k <= 9) & (k - q <= 9),
    "or": lambda q, k: (q - k > 9) | (k - q > 9),
    "not": lambda q, k: ~((q >= k) & (q - k < 5)),
    "logical": lambda q, k: np.logical_or(np.logical_not(q > k), np.logical_and(q > k + 4, q % 2 == k % 2)),
    "member": lambda q, k: member(TABLE, q - k),
    "both sides apart": lambda q, k: (q % 3 == 0) & (k % 3 == 0),
    "remainder of a sum": lambda q, k: (3 * q + 5 * k + 1) % 7 < 3,
    "remainder of squares": lambda q, k: (q * q + k * k) % 5 == 0,
    "power": lambda q, k: (q - k) ** 2 <= 30,
    "odd power": lambda q, k: (q - k) ** 3 > -400,
    "square by name": lambda q, k: np.square(q - k) % 3 == 1,
    "lowest bit": lambda q, k: ((q - k) & 1) == 0,
    "bits of a mask": lambda q, k: (k - q) & 12 == 4,
    "bits of both": lambda q, k: (q & k) > 5,
    "bits of either": lambda q, k: (q | k) < 40,
    "bits that differ": lambda q, k: (q ^ k) < 8,
    "bits of differences": lambda q, k: ((q - k) ^ (k - 20)) < 3,
    "remainder of bits": lambda q, k: (q ^ k) % 8 == 3,
    "complement of an integer": lambda q, k: ~(q - k) > 3,
    "shifts": lambda q, k: (q - k) >> 3 == 1,
    "shift to the left": lambda q, k: ((q - k) << 2) > 30,
    "exactly one": lambda q, k: (q < k + 3) ^ (k < q + 3),
}

# The same of fractions, and of functions that are no ufuncs.
RULES_OF_FRACTIONS = {
    "a fraction": lambda q, k: q / 3 > k,
    "a number that is none": lambda q, k: q - k > 0.5,
    "a share": lambda q, k: np.abs(q - k) <= 0.1 * q,
    "a quotient": lambda q, k: q / (k + 1) < 1.5,
    "a quotient by a difference": lambda q, k: 1 / (q - k) > 0.2,
    "root": lambda q, k: np.sqrt(np.abs(q - k)) < 4,
    "root of what may be negative": lambda q, k: np.sqrt(q - k) < 4,
    "what is cut out of a root": lambda q, k: np.minimum(np.maximum(np.sqrt(q - k), 0), 4) <= 4,
    "squares": lambda q, k: np.floor(np.sqrt(np.abs(q - k))) ** 2 == np.abs(q - k),
    "no squares": lambda q, k: np.sqrt(np.abs(q - k)) != np.rint(np.sqrt(np.abs(q - k))),
    "sign of what may be negative's root": lambda q, k: np.sign(np.sqrt(q - k)) <= 1,
    "square of a fraction": lambda q, k: np.square((q - k) / 7) < 2,
    "power of a fraction": lambda q, k: ((q - k) / 7) ** 2 < 2,
    "any power": lambda q, k: np.abs(q - k) ** 0.75 > 6,
    "power of a number": lambda q, k: 0.9 ** np.abs(q - k) > 0.5,
    "absolute fraction": lambda q, k: np.abs((q - k) / 4) <= 2.5,
    "exponential": lambda q, k: np.exp(-np.abs(q - k) / 10) > 0.25,
    "logarithm": lambda q, k: np.log2(np.maximum(q - k, 1)) < 3,
    "logarithm of zero": lambda q, k: np.log(np.abs(q - k)) < 2,
    "precision": lambda q, k: (q - k).astype(np.float32) / np.float32(3) < 4,
    "conversion": lambda q, k: ((q - k) / 5).astype(int) == 2,
    "truth as a number": lambda q, k: (q > k).astype(int) + (q > k + 9) == 1,
    "extrema of fractions": lambda q, k: np.minimum((q - k) / 2, k / 3) > np.maximum(1.5, q * 0.1),
    "member of fractions": lambda q, k: member(TABLE, (q - k) / 2),
    "rank of fractions": lambda q, k: rank(TABLE, (q - k) / 2) == 5,
    "sign": lambda q, k: np.sign(q - k - 0.5) > 0,
    "where": lambda q, k: np.where(q > k, q - k, k) > 20,
    "where of truths": lambda q, k: np.where(q % 2 == 0, q - k < 10, q - k < 20),
    "where of one side": lambda q, k: np.where(q % 2 == 0, q, -q) > k,
    "where of fractions": lambda q, k: np.where(q > k, (q - k) / 2, 7) < 5,
    "in": lambda q, k: np.isin(q - k, [1, 2, 3, 5, 8, 13]),
    "not in": lambda q, k: np.isin(k, [1, 2, 3, 5], invert=True) & (k <= q),
    "clip by name": lambda q, k: np.clip((q - k) / 2, -3, 4) == 4,
}


NARROW = [np.bool_, np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64]

# Truth values of numbers a and b of a table's dtype, whose results may wrap.
ARITHMETIC = {
    "difference": lambda a, b: a - b > 3,
    "sum": lambda a, b: a + b == 1,
    "sum of three": lambda a, b: a + b + b >= 100,
    "negative": lambda a, b: -(a + b) > 3,
    "product": lambda a, b: a * b > 9,
    "remainder of a product": lambda a, b: a * b % 7 < 3,
    "absolute": lambda a, b: np.abs(a - b) < 6,
    "remainder": lambda a, b: (a - b) % 7 < 3,
    "floor division": lambda a, b: (a + b) // 5 == 1,
    "extrema": lambda a, b: np.maximum(a, b) - np.minimum(a, b) < 4,
    "number": lambda a, b: np.minimum(a, b) + 100 > 120,
    "number of a dtype": lambda a, b: np.minimum(a, b) + np.int8(100) > 120,
    "comparison": lambda a, b: a >= b,
}


class Predicate:
    """What tile pairs evaluate of a pattern."""

    def __init__(self, allows):
        self.allows = allows


def evaluate(allows, query, key, with_keys=True):
    """Every pair of boxes of positions, (boxes, cells) each: what the rules say, and the truth in every cell."""
    query, key = np.asarray(query), np.asarray(key)
    q_box, k_box = (a.reshape(-1) for a in np.indices((len(query), len(key))))
    found = tile_pairs(Cells.listed(query), Cells.listed(key), q_box, k_box, with_keys=with_keys).evaluate(
        Predicate(allows)
    )
    return found, np.array(allows(query[q_box][:, :, None], key[k_box][:, None, :]))


def boxes(first, cells, step):
    """As many boxes as `first` has numbers, of evenly spaced positions."""
    return np.asarray(first)[:, None] + step * np.arange(cells)


positions = st.builds(
    boxes, st.lists(st.integers(0, 90), min_size=1, max_size=6), st.integers(1, 9), st.sampled_from([1, 1, 2, 7, 8])
)


@pytest.mark.filterwarnings("ignore:(divide by zero|invalid value)")
@pytest.mark.parametrize("name", RULES | RULES_OF_FRACTIONS)
@given(query=positions, key=positions)
def test_rules_hold_in_every_cell(name, query, key):
    """An interval contains every value, and tiles with equal keys are equal cell by cell."""
    found, truth = evaluate((RULES | RULES_OF_FRACTIONS)[name], query, key)
    assert not found.pairs.unfollowed
    assert (found.lo <= truth.min(axis=(1, 2))).all() and (found.hi >= truth.max(axis=(1, 2))).all()
    for number in np.unique(found.key):
        same = truth[found.key == number]
        assert (same == same[0]).all()


@pytest.mark.parametrize("name", ARITHMETIC)
@given(dtype=st.sampled_from(NARROW), query=positions, key=positions, seed=st.integers(0, 99))
def test_numbers_of_few_bits_are_followed_or_refused(name, dtype, query, key, seed):
    """NumPy's sums of narrow integers wrap, and those of truth values are truth values: no interval follows that."""
    info = (0, 2) if dtype is np.bool_ else (max(np.iinfo(dtype).min, -300), min(np.iinfo(dtype).max, 300))
    table = np.random.default_rng(seed).integers(*info, 400).astype(dtype)

    def look_up(x):
        return apply(lambda positions: table[positions % 400], x)

    try:
        found, truth = evaluate(lambda q, k: ARITHMETIC[name](look_up(q), look_up(k)), query, key)
    except (TypeError, OverflowError):
        return  # refused, so the planner looks at every pair, and NumPy may refuse it too
    assert (found.lo <= truth.min(axis=(1, 2))).all() and (found.hi >= truth.max(axis=(1, 2))).all()


@pytest.mark.unfollowed
def test_a_predicate_over_a_narrow_table_is_planned_as_it_is_evaluated():
    table = (np.arange(300) * 7).astype(np.uint8)

    @dataclass(frozen=True)
    class Near(p.Pattern):
        def allows(self, q, k):
            return apply(lambda x: table[x], q) - apply(lambda x: table[x], k) < 100

    made = plan(Near(), 300)
    check_plan(made, [Near().index_set(300, 300)])


EXACT = ["less", "less equal", "greater", "greater equal", "equal", "not equal", "sum", "negative", "absolute", "far"]


@pytest.mark.parametrize("name", EXACT)
@given(query=positions.filter(lambda x: x.shape[1] > 1), key=positions.filter(lambda x: x.shape[1] > 1))
def test_comparisons_of_contiguous_boxes_are_decided(name, query, key):
    """Where a predicate is the same in all cells of tiles without gaps, the rules know it."""
    query, key = (boxes(x[:, 0], x.shape[1], 1) for x in (query, key))
    found, truth = evaluate(RULES[name], query, key, with_keys=False)
    assert (found.lo == truth.min(axis=(1, 2))).all() and (found.hi == truth.max(axis=(1, 2))).all()


@given(st.lists(st.integers(-50, 50), min_size=1, max_size=8), st.integers(1, 6), st.integers(1, 6))
def test_membership_is_decided_by_the_interval(first, cells_q, cells_k):
    """Of differences, whose values are all integers of an interval: any in the table, all in the table."""
    query, key = boxes(np.add(first, 100), cells_q, 1), boxes([100], cells_k, 1)
    found, truth = evaluate(RULES["member"], query, key)
    assert (found.lo == truth.all(axis=(1, 2))).all() and (found.hi == truth.any(axis=(1, 2))).all()


def test_steps_rule_equality_out():
    """Positions in steps of 8 never meet those of another residue, though their intervals overlap."""
    found, truth = evaluate(RULES["equal"], boxes([0, 64], 9, 8), boxes([3, 4, 5], 9, 8))
    assert not truth.any() and not found.hi.any()


def test_large_excerpts_of_a_table_are_told_apart():
    """A tile of 64 × 64 tokens sees 16 × 16 blocks, more than a word has bits; four tiles differ in their first one."""
    layout = np.tile(np.random.default_rng(0).random((16, 16)) < 0.5, (2, 2))
    layout[0, ::16], layout[16, ::16] = (True, False), (False, True)
    layout[1, ::16], layout[17, ::16] = (True, True), (False, False)
    pattern = p.BlockLayout(layout, 4)
    made = plan(pattern, 128, tiling=Tiling(tile=(64, 64)))
    assert len(made.masks) == 4
    check_plan(made, [pattern.index_set(128, 128)])


# Operations without an interval, of which the key alone is followed, and gcd, which has little of one.
UNFOLLOWED = {
    "gcd": lambda q, k: np.gcd(q, k) >= 4,
    "gcd of differences": lambda q, k: np.gcd(q - 40, k - 40) == 0,
    "remainder of a fraction": lambda q, k: (q - k) % 2.5 < 2,
    "remainder by a key": lambda q, k: q % (k + 1) == 0,
    "least common multiple": lambda q, k: np.lcm(q, k) < 90,
    "sine": lambda q, k: np.sin(q - k) > 0.5,
    "remainder of a root": lambda q, k: np.sqrt(np.abs(q - k)) % 1 == 0,
    "remainder in a union": lambda q, k: (np.sqrt(np.abs(q - k)) % 3 < 1) | (q < k - 20),
    "truth of a fraction": lambda q, k: ~np.isfinite(np.log(np.maximum(q - k, 0) * 1.0)),
    "number of bits": lambda q, k: np.bitwise_count(q ^ k) < 2,
    "member of remainders": lambda q, k: member(TABLE, q % (k + 1)),
    "a product that wraps": lambda q, k: ((q + 1) * 2**40) * ((k + 1) * 2**40) % 7 < 3,
    "a power that wraps": lambda q, k: (q - k + 200) ** 40 > 99,
    "a power of a key": lambda q, k: 2 ** (q % 20) == 2 ** (k % 8) + (q - k) ** (q % 2),
}


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("name", UNFOLLOWED)
@given(query=positions, key=positions)
def test_what_no_rule_follows_is_undecided(name, query, key):
    """Never decided wrongly, and of tiles with equal keys still equal in every cell."""
    for with_keys in (False, True):
        found, truth = evaluate(UNFOLLOWED[name], query, key, with_keys)
        assert found.pairs.unfollowed
        assert (found.lo <= truth.min(axis=(1, 2))).all() and (found.hi >= truth.max(axis=(1, 2))).all()
    for number in np.unique(found.key):
        same = truth[found.key == number]
        assert (same == same[0]).all()


def test_the_gcd_is_no_larger_than_the_numbers_and_their_difference():
    """Distances of boxes of 4 are at most 3, 7 and 11 where they are neighbours, and the first numbers at most 3."""
    found, _ = evaluate(lambda q, k: np.gcd(q, k) > 7, boxes(range(0, 40, 4), 4, 1), boxes(range(0, 40, 4), 4, 1))
    apart = np.abs(found.pairs.query_box - found.pairs.key_box)
    first = np.minimum(found.pairs.query_box, found.pairs.key_box)
    assert not found.hi[(apart == 1) | (first == 1) & (apart > 0)].any() and found.hi[(apart > 1) & (first > 1)].all()


def test_a_function_of_the_distance_has_one_key_a_distance():
    found, _ = evaluate(UNFOLLOWED["remainder of a root"], boxes(range(0, 80, 8), 8, 1), boxes(range(0, 80, 8), 8, 1))
    assert len(np.unique(found.key)) == 19


def test_a_remainder_of_a_product_has_a_key_for_each_two_remainders():
    found, _ = evaluate(RULES["remainder of a product"], boxes(range(0, 80, 4), 4, 1), boxes(range(0, 80, 4), 4, 1))
    assert not found.pairs.unfollowed and len(np.unique(found.key)) <= 7 * 7


def test_a_predicate_that_takes_no_symbols_is_undecided_and_each_tile_of_it_another():
    found, _ = evaluate(lambda q, k: np.select([q > k], [q - k], k) % 5 == 0, boxes([0, 8], 4, 1), boxes([0, 8], 4, 1))
    assert found.lo.tolist() == [0] * 4 and found.hi.tolist() == [1] * 4 and len(np.unique(found.key)) == 4
