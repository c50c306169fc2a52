"""docs/faults.rst 17 and 18: plans and index sets that do not fit or are broken. Named by number."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import spattn
from spattn import patterns as p
from spattn.index_set import AffineRows, Runs
from spattn.planning.contract.validated import validated
from spattn.testing import Expectation, inputs


@pytest.mark.parametrize("q_len, kv_len", [(64, 65), (65, 64), (32, 32)])
def test_fault_17_plan_for_other_lengths(q_len, kv_len):
    plan = spattn.plan(p.Causal(), 64)
    with pytest.raises(ValueError, match=rf"lengths {q_len} × {kv_len}, got a plan for 64 × 64"):
        spattn.attention(*inputs(1, 1, 1, q_len, kv_len), plan)
    q, k, v = inputs(1, 1, 1, q_len, kv_len)
    out, lse = spattn.attention(q, k, v, return_lse=True)
    with pytest.raises(ValueError, match=rf"lengths {q_len} × {kv_len}, got a plan for 64 × 64"):
        spattn.attention_backward(out, q, k, v, out, lse, plan)


def test_fault_17_plan_for_another_number_of_heads():
    plan = spattn.plan(p.PerHead((p.Full(), p.Causal(), p.SlidingWindow(3))), 64, heads=3)
    with pytest.raises(ValueError, match="heads"):
        spattn.attention(*inputs(1, 2, 2, 64), plan)
    out, lse = spattn.attention(*inputs(1, 3, 3, 64), plan, return_lse=True)
    Expectation(plan.pattern, *inputs(1, 3, 3, 64)).check(out, lse)


def good_plan():
    """A plan with two components, merges, and full, partial and ragged tiles."""
    return spattn.plan(p.longformer(20, global_tokens=(0, 150)), 300, tiling=spattn.Tiling(tile=(64, 64), workers=64))


def broken_plans():
    """A good plan and every way to spoil one of its numbers: (name, field, index, value)."""
    plan = good_plan()
    assert len(plan.merge_rows) and len(plan.masks) and (plan.work["slot"] >= 0).any()
    far = 2**31 - 1
    yield "indptr not monotone", "indptr", 1, far
    yield "indptr negative", "indptr", 1, -1
    yield "indptr wrong end", "indptr", -1, 0
    yield "indptr wrong start", "indptr", 0, 1
    yield "indices out of range", "indices", 0, far
    yield "indices negative", "indices", 0, -1
    yield "indices repeated", "indices", 1, int(plan.indices[0])
    yield "key_view out of range", "key_view", 0, far
    yield "key_view negative", "key_view", 0, -1
    yield "mask out of range", "mask", 0, len(plan.masks)
    yield "mask below -1", "mask", 0, -2
    yield "merge_rows out of range", "merge_rows", 0, 300
    yield "merge_rows negative", "merge_rows", 0, -1
    yield "merge_sources out of range", "merge_sources", 0, plan.slots * plan.block_q
    yield "merge_sources negative", "merge_sources", 0, -1
    yield "merge_indptr wrong end", "merge_indptr", -1, far
    yield "merge_indptr not monotone", "merge_indptr", 1, far
    yield "merge_variants wrong end", "merge_variants", -1, 0
    yield "work_indptr wrong end", "work_indptr", -1, far
    yield "variant out of range", "variant", (0, 0), 1
    yield "variant negative", "variant", (0, 0), -1
    for field, value in (
        ("component", far),
        ("component", -1),
        ("query_tile", far),
        ("query_tile", -1),
        ("begin", -1),
        ("begin", far),
        ("end", far),
        ("end", -1),
        ("slot", plan.slots),
        ("slot", -2),
    ):
        yield f"work.{field} {value}", "work", (0, field), value
    for field in ("query_view", "key_view", "first_row", "query_tiles"):
        for value in (-1, far):
            yield f"components.{field} {value}", "components", (0, field), value
    for field, value in (
        ("offset", -1),
        ("offset", 300),
        ("offset", 2**62),
        ("stride", 2**40),
        ("stride", -(2**62)),
        ("extent", 0),
        ("extent", far),
        ("box", 0),
        ("box", far),
        ("grid", far),
        ("tiles", far),
    ):
        yield f"views.{field} {value}", "views", (0, field), value


@pytest.mark.parametrize("what, field, at, value", [pytest.param(*case, id=case[0]) for case in broken_plans()])
def test_fault_18_corrupt_plan(what, field, at, value):
    good = good_plan()
    array = getattr(good, field).copy()
    if isinstance(at, tuple) and isinstance(at[1], str):
        array[at[1]][at[0]] = value
    else:
        array[at] = value
    bad = dataclasses.replace(good, **{field: array})
    with pytest.raises(ValueError, match="^plan: "):
        spattn.attention(*inputs(q_len=300), bad)


@pytest.mark.parametrize("field", ["indptr", "indices", "mask", "masks", "merge_sources", "work", "views"])
def test_fault_18_plan_array_of_another_type_or_length(field):
    good = good_plan()
    array = getattr(good, field)
    for bad in (array[:-1], array.reshape(1, *array.shape), array.astype(object), array.tolist()):
        with pytest.raises(ValueError, match="^plan: "):
            spattn.attention(*inputs(q_len=300), dataclasses.replace(good, **{field: bad}))


def test_fault_18_plan_is_read_only():
    """Plans are shared through a cache and checked once: nobody may edit one in place."""
    plan = good_plan()
    for field in ("views", "indptr", "indices", "masks", "work", "merge_sources", "variant"):
        with pytest.raises(ValueError, match="read-only"):
            getattr(plan, field)[...] = 0


def test_fault_18_unpickled_plan_is_checked_again():
    good = spattn.plan(p.Causal(), 300)
    bad = dataclasses.replace(good, indices=good.indices + 1)
    vars(bad).update(_validated=validated(good), cache={"valid": True})  # it claims to be checked
    for copied in (pickle.loads(pickle.dumps(bad)), copy.copy(bad), copy.deepcopy(bad), dataclasses.replace(bad)):
        with pytest.raises(ValueError, match="^plan: "):
            spattn.attention(*inputs(q_len=300), copied)
    back = pickle.loads(pickle.dumps(good))
    assert np.array_equal(*(spattn.attention(*inputs(q_len=300), plan) for plan in (good, back)))


def test_fault_18_mask_that_allows_padding_keys():
    """The last key tile of 300 keys has 44 real cells: a full tile there would read beyond the arrays."""
    good = good_plan()
    mask = good.mask.copy()
    mask[good.indices == good.views["tiles"][good.components[0]["key_view"]] - 1] = -1
    with pytest.raises(ValueError, match="^plan: "):
        spattn.attention(*inputs(q_len=300), dataclasses.replace(good, mask=mask))


def test_fault_18_repeated_work_item_or_slot():
    good = good_plan()
    slotted = np.nonzero(good.work["slot"] >= 0)[0]
    work = good.work.copy()
    work["slot"][slotted[0]] = work["slot"][slotted[1]]
    with pytest.raises(ValueError, match="^plan: "):
        spattn.attention(*inputs(q_len=300), dataclasses.replace(good, work=work))


@pytest.mark.parametrize(
    "indptr, indices, message",
    [
        ([0, 2, 1], [0, 1], "indptr"),
        ([1, 2], [0, 1], "indptr"),
        ([0, 3], [0, 1], "indptr"),
        ([], [], "indptr"),
        ([0, 2], [1, 0], "sorted"),
        ([0, 2], [1, 1], "without duplicates"),
        ([0, 1], [5], "indices"),
        ([0, 1], [-1], "indices"),
        ([0, -1, 2], [0, 1], "indptr"),
    ],
)
def test_fault_18_corrupt_csr(indptr, indices, message):
    with pytest.raises(ValueError, match=message):
        AffineRows.from_csr(indptr, indices, 5)


def test_fault_18_sound_csr_is_accepted():
    assert AffineRows.from_csr([0, 2, 2, 3], [0, 4, 1], 5).to_dense().sum() == 3


@pytest.mark.parametrize(
    "start, step, count, message",
    [
        ([[0, 1]], [[1, 1]], [[5, 900]], r"^count: expected keys in \[0, 10\), got 900 keys from 1"),
        ([[-3]], [[1]], [[4]], r"^start: expected keys in \[0, 10\), got -3"),
        ([[10]], [[1]], [[1]], r"^start: expected keys in \[0, 10\), got 10"),
        ([[3]], [[0]], [[4]], "^step: expected numbers >= 1, got 0"),
        ([[3]], [[-1]], [[4]], "^step: "),
        ([[3]], [[1]], [[-1]], "^count: expected numbers >= 0, got -1"),
        ([[3]], [[2]], [[5]], "^count: "),
        ([[3]], [[2**62]], [[5]], "^count: "),  # 3 + 4 · 2⁶² wraps to 3
        ([[3]], [[1]], [[2**63 - 1]], "^count: "),
        ([[0, 4]], [[1, 1]], [[5, 2]], "^runs: "),
        ([[0, 0]], [[1, 1]], [[1, 1]], "^runs: "),
        ([[0, 6]], [[3, 2]], [[4, 2]], "^runs: "),
        ([[1, 0]], [[2, 3]], [[5, 4]], "^runs: "),
        ([[0, 1, 8]], [[2, 2, 1]], [[5, 2, 1]], "^runs: "),  # the first run and the last but one behind it
        ([[0]], [[1, 1]], [[1, 1]], r"^step: expected shape \(1, 1\), got \(1, 2\)"),
        ([0], [1], [1], r"^start: expected shape \(rows, runs\), got \(1,\)"),
    ],
)
def test_fault_18_corrupt_runs(start, step, count, message):
    with pytest.raises(ValueError, match=message):
        AffineRows.from_runs(Runs(*map(np.array, (start, step, count))), 10)


@pytest.mark.parametrize("bad", [np.zeros((1, 1)), np.zeros((1, 1), bool), [[0]], None])
def test_fault_18_runs_of_another_type(bad):
    good = np.ones((1, 1), int)
    for fields in ((bad, good, good), (good, bad, good), (good, good, bad)):
        with pytest.raises(TypeError, match="^(start|step|count): expected an array of integers, got "):
            AffineRows.from_runs(Runs(*fields), 10)


@example([(0, 2, 3), (1, 5, 2)])  # 6 is in step with the other run, but behind its end
@given(st.lists(st.tuples(st.integers(0, 11), st.integers(1, 5), st.integers(0, 5)), max_size=4))
def test_fault_18_runs_are_accepted_exactly_where_they_are_sound(runs):
    """Against the keys one by one, in a row between two that have every key."""
    keys = [start + step * t for start, step, count in runs for t in range(count)]
    rows = np.zeros((3, 3, len(runs) + 1), dtype=np.int64)  # start, step and count; row; run
    rows[:, 1, 1:] = np.array(runs, dtype=np.int64).reshape(-1, 3).T
    rows[:, [0, 2], 0] = [[0], [1], [12]]
    if max(keys, default=0) < 12 and len(set(keys)) == len(keys):
        assert AffineRows.from_runs(Runs(*rows), 12).row(1).tolist() == sorted(keys)
    else:
        with pytest.raises(ValueError, match="^(count|runs): "):
            AffineRows.from_runs(Runs(*rows), 12)
