"""The judges themselves: what they must notice, they notice."""

import contextlib
import dataclasses
from typing import Annotated, Literal

import numpy as np
import pytest
from hypothesis import find, settings
from hypothesis.errors import NoSuchExample

import spattn
from spattn import patterns as p
from spattn import reference
from spattn.testing import (
    Expectation,
    assert_within_bound,
    check,
    check_pattern,
    check_plan,
    dense_mask,
    eps,
    error_bound,
    execute,
    inputs,
    naive,
    naive_orders,
    plan_pairs,
)
from spattn.testing.strategies import cases

WINDOW = p.longformer(20, global_tokens=(0, 150))


def plan_of_many_pieces():
    made = spattn.plan(WINDOW, 300, tiling=spattn.Tiling(tile=(64, 64), workers=64))
    assert len(made.merge_rows) and len(made.masks)
    return made


def spoilt(field, change):
    made = plan_of_many_pieces()
    array = getattr(made, field).copy()
    change(array)
    return dataclasses.replace(made, **{field: array})


def clear_one_bit(masks):
    m, r, w = np.argwhere(masks)[0]
    masks[m, r, w] &= masks[m, r, w] - np.uint64(1)


def set_all_bits(masks):
    masks[0] = ~np.uint64(0)


def shorten_last_item(work):
    work["end"][0] -= 1


def share_a_slot(work):
    slotted = np.nonzero(work["slot"] >= 0)[0]
    work["slot"][slotted[0]] = work["slot"][slotted[1]]


def write_past_the_merge(work):
    work["slot"][np.nonzero(work["slot"] >= 0)[0][0]] = -1


def unsort(work):
    work[:] = work[::-1].copy()


def other_source(sources):
    sources[0] = sources[1]


def make_full(mask):
    mask[np.nonzero(mask >= 0)[0][0]] = -1


@pytest.mark.parametrize(
    "field, change",
    [
        ("masks", clear_one_bit),
        ("masks", set_all_bits),
        ("mask", make_full),
        ("work", shorten_last_item),
        ("work", share_a_slot),
        ("work", write_past_the_merge),
        ("work", unsort),
        ("merge_sources", other_source),
    ],
)
def test_check_plan_notices(field, change):
    index_sets = [WINDOW.index_set(300, 300)]
    check_plan(plan_of_many_pieces(), index_sets)
    with pytest.raises(AssertionError):
        check_plan(spoilt(field, change), index_sets)


def test_check_plan_notices_another_pattern_and_another_count():
    with pytest.raises(AssertionError, match="times"):
        check_plan(plan_of_many_pieces(), [p.longformer(22, global_tokens=(0, 150)).index_set(300, 300)])
    with pytest.raises(AssertionError, match="nnz"):
        made = plan_of_many_pieces()
        check_plan(dataclasses.replace(made, nnz=made.nnz + 1), [WINDOW.index_set(300, 300)])


def test_plan_pairs_counts_repeats():
    made = plan_of_many_pieces()
    doubled = dataclasses.replace(
        made, work=np.concatenate([made.work, made.work[:1]]), work_indptr=made.work_indptr + np.array([0, 1], np.int32)
    )
    assert len(plan_pairs(made)[0]) == made.nnz < len(plan_pairs(doubled)[0])


def test_execute_leaves_rows_that_nobody_writes():
    made = plan_of_many_pieces()
    fewer = dataclasses.replace(made, merge_variants=np.array([0, 0], np.int32))
    q, k, v = inputs(1, 1, 1, 300, 300, 4)
    out, lse = execute(fewer, q, k, v, 0.5)
    assert np.isnan(lse[0, 0, made.merge_rows]).all() and np.isnan(out[0, 0, made.merge_rows]).all()


def test_budget_is_the_formula():
    reference64 = np.array([1.0, -4.0, -np.inf, np.nan])
    low = np.array([1.25, -4.0, 7.0, 7.0], np.float16)
    assert error_bound(reference64, low, np.float16) == 2 * 0.25 + 2.0**-10 * 4
    assert error_bound(reference64, [low, low + np.float16(0.5)], np.float16) == 2 * 0.75 + 2.0**-10 * 4
    assert error_bound(np.zeros((0, 3)), np.zeros((0, 3)), np.float32) == 0
    with pytest.raises(ValueError, match="naive_lowprec"):
        error_bound(np.ones(2), np.array([1, np.inf]), np.float32)
    assert eps("bfloat16") == 2.0**-7 and eps(np.float64) == 2.0**-52


@pytest.mark.parametrize("wrong", [np.nan, np.inf, 1e-3])
def test_one_wrong_value_is_noticed(wrong):
    q, k, v = inputs(1, 2, 1, 50, 50, 16)
    expectation = Expectation(p.Causal(), q, k, v)
    out, lse = spattn.attention(q, k, v, "causal", return_lse=True)
    expectation.check(out, lse)
    for result in (out, lse):
        before = result.flat[60]
        result.flat[60] += np.float32(wrong)
        with pytest.raises(AssertionError, match="out|lse"):
            expectation.check(out, lse)
        result.flat[60] = before


def test_missing_nan_or_infinity_is_noticed():
    low = np.zeros(2)
    for want, got in ((np.nan, 0), (-np.inf, 0), (-np.inf, np.inf), (np.nan, np.inf)):
        with pytest.raises(AssertionError, match="at \\(0,\\)"):
            assert_within_bound(np.array([got, 0.0]), np.array([want, 0.0]), low)


def test_wrong_dtype_is_noticed():
    q, k, v = inputs()
    out, lse = reference.attend(q, k, v, p.Causal())
    with pytest.raises(AssertionError, match="expected float32, got float64"):
        Expectation(p.Causal(), q, k, v).check(out, lse.astype(np.float32))


@pytest.mark.parametrize("order", range(8))
def test_naive_orders_are_the_same_formula(order):
    q, k, v = inputs(2, 4, 2, 30, 40, 24, 8, dtype="float64")
    mask = dense_mask(p.strided(5), 2, 4, 30, 40)
    for got, want in zip(naive(q, k, v, mask, order=order), reference.attend(q, k, v, p.strided(5)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-13)


def test_naive_orders_round_differently():
    q, k, v = inputs(1, 1, 1, 30, 30, 64)
    outs, lses = naive_orders(q, k, v, dense_mask(p.Causal(), 1, 1, 30, 30))
    assert len({out.tobytes() for out in outs}) == len(outs) == 32 and len({lse.tobytes() for lse in lses}) == 32


def test_naive_orders_are_many_where_few_products_show_an_error():
    """However many pairs there are beside them that are not allowed, and rows of one key."""
    q, k, v = inputs(1, 1, 1, 1000, 1000, 16)
    for rows, orders in ((4, 32), (16, 8), (1000, 2)):
        mask = np.eye(1000, dtype=bool)
        mask[:rows] = True
        assert len(naive_orders(q, k, v, mask)[0]) == orders


def test_naive_rounds_every_step():
    q, k, v = inputs(1, 1, 1, 30, 30, 64, dtype="bfloat16")
    mask = dense_mask(p.Full(), 1, 1, 30, 30)
    low, wide = naive(q, k, v, mask)[0], naive(*(x.astype(np.float32) for x in (q, k, v)), mask)[0]
    exact = reference.attend(q, k, v, p.Full())[0]
    assert low.dtype == q.dtype
    assert np.abs(low.astype(float) - exact).max() > 100 * np.abs(wide - exact).max()


# -- patterns that break their promises --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class WrongRuns(p.SlidingWindow):
    """Its closed form leaves out the query's own key."""

    name = "wrong_runs"

    def runs(self, q, kv_len):
        from spattn.index_set import Runs

        return Runs.span(q - self.left, q, kv_len)


@dataclasses.dataclass(frozen=True)
class WrongParts(p.SlidingWindow):
    """Its parts overlap."""

    name = "wrong_parts"

    def parts(self, q_len, kv_len):
        return (p.authoring.Part(p.Causal() & self), p.authoring.Part(self))


@dataclasses.dataclass(frozen=True)
class FewParts(p.SlidingWindow):
    """Its parts leave pairs out."""

    name = "few_parts"

    def parts(self, q_len, kv_len):
        return (p.authoring.Part(p.Causal() & self),)


def test_wrong_closed_form_is_noticed():
    with pytest.raises(AssertionError, match="index set and predicate differ"):
        check.check_index_set(WrongRuns(5), 1, 1, 40, 40)


@pytest.mark.parametrize("pattern", [WrongParts(5), FewParts(5)], ids=["overlapping", "missing"])
@pytest.mark.usefixtures("unchecked_plans")
def test_wrong_parts_are_noticed(pattern):
    with pytest.raises(AssertionError, match="times, expected"):
        check.check_planned(pattern, 1, 1, 40, 40)


def test_pattern_that_forgets_a_field_is_noticed():
    @p.authoring.register("forgetful")
    @dataclasses.dataclass(frozen=True)
    class Forgetful(p.Pattern):
        width: int

        def allows(self, q, k):
            return abs(q - k) <= self.width

        def _description(self):
            return {"pattern": "forgetful", "width": 1}

    try:
        with pytest.raises(AssertionError, match="reads back as"):
            check_pattern(Forgetful(3), 30)
        check.check_index_set(Forgetful(3), 1, 1, 30, 30)
    finally:
        del p.base.class_registry._REGISTRY["forgetful"]


def test_leak_of_unseen_keys_is_noticed():
    def leaking(q, k, v, pattern):
        return naive(q, k, v, dense_mask(pattern, *q.shape[:3], k.shape[2]))

    with pytest.raises(AssertionError, match="change the result"):
        check.check_unseen_keys(p.Sinks(3), 1, 1, 20, 20, leaking)
    check.check_unseen_keys(p.Sinks(3), 1, 1, 20, 20)


@contextlib.contextmanager
def registered(name, cls):
    """A class that is registered for as long."""
    try:
        made = cls if "__dataclass_fields__" in vars(cls) else dataclasses.dataclass(frozen=True)(cls)
        yield p.authoring.register(name)(made)
    finally:
        del p.base.class_registry._REGISTRY[name]


@dataclasses.dataclass(frozen=True)
class Comb(p.Pattern):
    """Keys at distances below `width` modulo `period`."""

    width: int
    period: Annotated[int, p.authoring.Range(2, 9)]
    both: bool = False
    side: Literal["near", "far"] = "near"
    ends: tuple[Annotated[int, p.authoring.Range(0)], ...] | None = None

    def allows(self, q, k):
        allowed = (q - k) % self.period < self.width
        return allowed if self.both else allowed & (k <= q)


@pytest.mark.slow
def test_parameters_are_checked_and_drawn_as_their_annotations_declare():
    with registered("comb", Comb) as cls:
        for wrong, error, message in [
            ({"period": 1}, ValueError, r"^period: expected an integer in \[2, 9\], got 1"),
            ({"both": 1}, TypeError, "^both: expected True or False, got 1"),
            ({"side": "left"}, ValueError, "^side: expected one of 'near', 'far'; got 'left'"),
            ({"ends": (1, -1)}, ValueError, "^ends: expected an integer >= 0, got -1"),
            ({"ends": "no"}, TypeError, "^ends: expected a sequence of integers, got 'no'"),
        ]:
            with pytest.raises(error, match=message):
                cls(**({"width": 2, "period": 3} | wrong))
        assert cls(2, np.int64(3), ends=[1, np.int32(2)]) == cls(2, 3, ends=(1, 2))
        assert cls.example() == (cls(4, 4), 32) and cls.typical() == (cls(4, 4), 2048)
        for wanted in (
            lambda x: x.period == 9,
            lambda x: x.both,
            lambda x: x.side == "far",
            lambda x: x.ends is None,
            lambda x: x.ends == (),
            lambda x: len(x.ends or ()) > 2 and x.ends[2] > 2**40,
            lambda x: x.width == 4,
        ):
            # Hypothesis also draws constants of imported modules, so more of them make a wide integer rarer.
            many = settings(max_examples=20_000, deadline=None)
            drawn = find(cases("comb"), lambda case, wanted=wanted: wanted(case.pattern), settings=many)
            assert wanted(drawn.pattern) and 1 <= drawn.pattern.width <= 4 and 2 <= drawn.pattern.period <= 9
        with pytest.raises(NoSuchExample):
            find(cases("comb"), lambda case: not 1 <= case.pattern.width <= 4, settings=settings(max_examples=50))


def test_pattern_that_refuses_lengths_comes_with_those_of_its_example():
    class Even(Comb):
        def bind(self, q_len, kv_len):
            if kv_len % 2 or q_len != kv_len:
                raise ValueError("kv_len: expected an even number")
            return self

        @classmethod
        def example(cls):
            return cls(1, 3), 40

    with registered("even", Even):
        assert Even.typical() == (p.registry.get("even", width=1, period=3), 2560)
        case = find(cases("even"), lambda case: case.sizes.kv_len % 2 == 0 and case.sizes.kv_len == 40)
        assert case.sizes.q_len == 40
        with pytest.raises(NoSuchExample):
            find(cases("even"), lambda case: case.sizes.kv_len % 2 == 1, settings=settings(max_examples=50))


def test_example_needs_annotations_that_tell_values():
    class Vague(p.Pattern):
        table: "np.ndarray"

    with registered("vague", Vague), pytest.raises(TypeError, match=r"^table: expected a default.* Vague.example\(\)"):
        p.registry.example("vague")


def test_annotations_that_only_type_checkers_know_declare_nothing():
    class Local(p.Pattern):
        width: "NoSuchName" = 3  # noqa: F821

    with registered("local", Local):
        assert Local("anything").width == "anything" and find(cases("local"), lambda case: True).pattern == Local()
