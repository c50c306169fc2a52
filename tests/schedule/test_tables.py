"""The checks of tables (``tests/tables.py``) see a table that says something else than its plan."""

import dataclasses
import os

import numpy as np
import pytest

import spattn
from spattn import patterns as p
from spattn._util import checks as _checks
from spattn.schedule.gradients import units
from spattn.schedule.reductions import find_reductions, find_sum_reductions
from spattn.schedule.subtiles import EMPTY, FULL, Cut, by_keys, by_queries
from spattn.schedule.tasks import order_tasks

from ..tables import check_table

HEADS = 2, 4, 2  # batch entries, query heads, key-value heads


@pytest.fixture
def plan():
    return spattn.plan(
        p.DilatedWindow(3, 3, 4) | p.strided(10), 200, 230, tiling=spattn.Tiling(tile=(32, 64), workers=4)
    )


def changed(array, at, value):
    array = array.copy()
    array[at] = value
    return array


def test_every_plan_of_the_tests_is_checked():
    assert os.environ["SPATTN_CHECK_PLANS"] == "1" and _checks.observers == [check_table]


def test_plans_that_allow_a_pair_twice(no_plans):
    """Parts that overlap are the pattern's fault, and no test may plan one without being told."""

    @dataclasses.dataclass(frozen=True)
    class Twice(p.Pattern):
        def allows(self, q, k):
            return q == q

        def parts(self, q_len, kv_len):
            return p.authoring.Part(p.Full()), p.authoring.Part(p.Causal())

    with pytest.raises(ValueError, match="^plan: expected each pair to be allowed once"):
        spattn.plan(Twice(), 50)


def test_plans_of_other_pairs_than_the_predicate(no_plans):
    @dataclasses.dataclass(frozen=True)
    class Fewer(p.Pattern):
        def allows(self, q, k):
            return q == q

        def parts(self, q_len, kv_len):
            return (p.authoring.Part(p.Causal()),)

    with pytest.raises(ValueError, match="^plan: expected the pairs of the pattern's predicate"):
        spattn.plan(Fewer(), 50)


def test_reductions():
    half = p.RowIntervals(np.zeros(512, int), np.where(np.arange(512) < 256, 0, 512))  # whose rows have three sources
    plan = spattn.plan(p.strided(8) | p.DilatedWindow(30, 0, 4) & half, 512, tiling=spattn.Tiling(tile=(32, 64)))
    found = find_reductions(plan)
    assert (found.slots <= -2).any() and len(found.merges.rows)
    reduction = np.nonzero(found.slots <= -2)[0]
    for slots in (changed(found.slots, reduction[0], 0), changed(found.slots, reduction[0], -1)):
        with pytest.raises(AssertionError):
            check_table("reductions", plan=plan, found=found._replace(slots=slots))
    with pytest.raises(AssertionError):
        check_table("reductions", plan=plan, found=found._replace(priors=changed(found.priors, (0, 0), 1)))
    merges = found.merges._replace(rows=changed(found.merges.rows, 0, found.merges.rows[1]))
    with pytest.raises(AssertionError):
        check_table("reductions", plan=plan, found=found._replace(merges=merges))
    # A merge without sources, of a row that is written already.
    ends, last = np.append(found.merges.indptr, found.merges.indptr[-1]), found.merges.variants[-1]
    merges = found.merges._replace(rows=np.append(found.merges.rows, 0), indptr=ends)
    with pytest.raises(AssertionError, match="a row is not written exactly once"):
        merges = merges._replace(variants=changed(merges.variants, -1, last + 1))
        check_table("reductions", plan=plan, found=found._replace(merges=merges))


def test_passes():
    plan = spattn.plan(p.SlidingWindow(90) | p.strided(10), 200, 230, tiling=spattn.Tiling(tile=(32, 64), workers=4))
    cut = Cut.consecutive(plan, 16)
    queries = by_queries(plan, cut)
    keys = by_keys(plan, *HEADS, cut, 2, 4)
    own = {"heads": HEADS, "together": 2}
    for table, made, more in (("pass by queries", queries, {}), ("pass by keys", keys, own)):
        check_table(table, plan=plan, made=made, cut=cut, **more)
        full, bits = np.argwhere(made.masks == FULL), np.argwhere(made.masks >= 0)
        for at, value in ((full[0], EMPTY), (bits[0], EMPTY), (bits[-1], FULL)):
            other = dataclasses.replace(made, masks=changed(made.masks, tuple(at), value))
            with pytest.raises(AssertionError, match="pairs differ from the plan"):
                check_table(table, plan=plan, made=other, cut=cut, **more)
        at = bits[0, 0]
        other = changed(made.entries, at, made.entries[np.argmax(made.entries != made.entries[at])])
        other = dataclasses.replace(made, entries=other)
        with pytest.raises(AssertionError, match="pairs differ from the plan"):
            check_table(table, plan=plan, made=other, cut=cut, **more)


def test_a_pass_by_queries_of_other_slots(plan):
    cut = Cut.consecutive(plan, 16)
    made = by_queries(plan, cut)
    work = made.work.copy()
    work["slot"] = np.where(work["slot"] < 0, -1, work["slot"][::-1])
    for other in (dataclasses.replace(made, slots=made.slots + 1), dataclasses.replace(made, work=work)):
        with pytest.raises(AssertionError):
            check_table("pass by queries", plan=plan, made=other, cut=cut)


def test_sum_reductions():
    plan = spattn.plan(p.Full(), 5000, 200, tiling=spattn.Tiling(tile=(32, 64), workers=1))
    keys = by_keys(plan, 1, 1, 1, Cut.consecutive(plan, 16), 1, 16)
    arguments = keys.work["slot"], keys.work_indptr, keys.merges, 64, plan.kv_len
    found = find_sum_reductions(*arguments)
    assert (found.slots <= -2).any()
    given = dict(zip(("slots", "work_indptr", "merges", "rows"), arguments, strict=False))
    check_table("sum reductions", **given, found=found)
    for other in (
        found._replace(rest_sources=changed(found.rest_sources, 0, found.rest_sources[1])),
        found._replace(slots=changed(found.slots, np.nonzero(found.slots <= -2)[0][0], 0)),
    ):
        with pytest.raises(AssertionError):
            check_table("sum reductions", **given, found=other)


def test_units(plan):
    split = units(plan, *HEADS)
    for field, by in (("first", 1), ("end", -5), ("begin", 3)):
        number = np.argmax(split.units["end"] - split.units["begin"])
        own = split.units.copy()
        own[field][number] += by
        with pytest.raises(AssertionError):
            check_table("units", plan=plan, split=dataclasses.replace(split, units=own), heads=HEADS)
    own = split.units.copy()
    own["begin"] += 1
    own["end"] += 1
    with pytest.raises(AssertionError, match="keys outside a unit"):
        check_table("units", plan=plan, split=dataclasses.replace(split, units=own), heads=HEADS)
    own = split.units.copy()
    own["offset"][1] -= 1
    with pytest.raises(AssertionError, match="units share rows of the workspace"):
        check_table("units", plan=plan, split=dataclasses.replace(split, units=own), heads=HEADS)


def test_tasks(plan):
    chosen = np.ones(len(plan.work), bool)
    tasks = order_tasks(plan, chosen, *HEADS, 1000)
    own = {"plan": plan, "chosen": chosen, "batch": 2, "heads_q": 4, "heads_kv": 2}
    check_table("tasks", **own, tasks=tasks)
    for other in (tasks[1:], np.append(tasks, tasks[:1]), changed(tasks, 0, tasks[1])):
        with pytest.raises(AssertionError):
            check_table("tasks", **own, tasks=other)
    other = order_tasks(plan, changed(chosen, 1, False), *HEADS, 1000)
    with pytest.raises(AssertionError):
        check_table("tasks", **own | {"chosen": changed(chosen, 0, False)}, tasks=other)
    other = tasks.copy()
    other["head_kv"] ^= 1
    with pytest.raises(AssertionError):
        check_table("tasks", **own, tasks=other)
