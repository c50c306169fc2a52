"""The proof that each row is written once, on sound plans and on every kind of fault."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import spattn
from spattn import patterns as p
from spattn.planning.contract.validate import _check_merges
from spattn.schedule import compiler, items
from spattn.schedule.proof import Writers, prove
from spattn.schedule.subtiles import Cut, by_keys

# (pattern, q_len, kv_len, tile, workers): views of one, two and three axes, steps that have a common multiple and
# steps whose multiple is too long, pieces, padding, empty rows, several variants, permuted rows
CASES = {
    "one view": (p.SlidingWindow(5), 200, 200, (16, 64), 1),
    "pieces": (p.Full(), 3, 5000, (16, 64), 32),
    "residues": (p.DilatedWindow(4, 2, 7), 300, 300, (16, 64), 1),
    "strided": (p.strided(12), 500, 500, (16, 64), 1),
    "one period of many": (p.strided(8) | p.strided(64), 4000, 4000, (16, 64), 1),
    "three views": (p.DilatedWindow(6, 5, 7) | p.strided(5), 53, 55, (1, 64), 1),
    "odd tiles": (p.DilatedWindow(6, 5, 7) | p.strided(5), 300, 300, (7, 64), 1),
    "no period": (p.DilatedWindow(3, 0, 61) | p.DilatedWindow(3, 0, 67) | p.SlidingWindow(2), 300, 300, (8, 64), 1),
    "two axes": (p.Neighborhood((20, 24), 5, 2) | p.Columns(20, 2, 5), 480, 480, (12, 64), 1),
    "three axes": (p.Neighborhood((6, 8, 9), (3, 5, 5)) | p.strided(9), 432, 432, (8, 64), 1),
    "empty rows": (p.BlockLocal(50) & ~p.SlidingWindow(20, 90), 300, 300, (16, 64), 1),
    "variants": (p.PerHead((p.Causal(), p.SlidingWindow(3), p.strided(6))), 100, 100, (16, 64), 4),
    "nothing": (p.Full() - p.Full(), 40, 40, (16, 64), 1),
    "no query": (p.Full(), 0, 40, (16, 64), 1),
}


def made(name):
    pattern, q_len, kv_len, tile, workers = CASES[name]
    return spattn.plan(pattern, q_len, kv_len, tiling=spattn.Tiling(tile=tile, workers=workers))


def writers(plan, **changed):
    plan = dataclasses.replace(plan, **changed)
    return Writers(
        plan.views,
        np.ascontiguousarray(plan.components["query_view"]),
        plan.work["component"],
        plan.work["query_tile"],
        plan.work["slot"],
        plan.work_indptr,
        plan.slots,
        plan.merge_rows,
        plan.merge_indptr,
        plan.merge_sources,
        plan.merge_variants,
        plan.q_len,
        plan.block_q,
        order=plan.q_order,
    )


def is_sound(plan):
    """What the check of foreign plans says, which compares sorted rows and shares nothing with the proof."""
    try:
        _check_merges(plan)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("name", CASES)
def test_sound_plans(name):
    plan = made(name)
    assert is_sound(plan)
    prove(writers(plan))


def test_permuted_rows():
    plan = compiler.plan(p.Clusters(np.arange(100) % 7) & p.Causal(), 100, tile=(16, 64), ordered=True)
    assert plan.q_order.size
    prove(writers(plan))
    twice = plan.q_order.copy()
    twice[0, 3] = twice[0, 4]
    with pytest.raises(RuntimeError, match="is written twice|is never written|another row"):
        prove(writers(plan)._replace(order=twice))


def test_tiles_that_are_together():
    """Items of two key tiles each, as the backward has them: the last one has one tile."""
    view = made("one view").views[:1].copy()
    view["extent"][0], view["box"][0], view["grid"][0], view["tiles"] = (1, 1, 300), (1, 1, 64), (1, 1, 5), 5
    zero, tile = np.zeros(3, np.int32), np.array([0, 2, 4], np.int32)
    rows = np.arange(128, 256, dtype=np.int32)
    ends = np.arange(129, dtype=np.int32)
    own = Writers(
        view, zero[:1], zero, tile, np.array([-1, 0, -1]), np.array([0, 3], np.int32), 1, rows, ends, ends[:128],
        np.array([0, 128], np.int32), 300, 64, together=2,
    )  # fmt: skip
    prove(own)
    with pytest.raises(RuntimeError, match=r"^plan: combining row 128 reads"):
        prove(own._replace(merge_sources=ends[:128][::-1].copy()))
    with pytest.raises(RuntimeError, match=r"^plan: row 0 is never written"):
        prove(own._replace(tile=np.array([2, 4], np.int32), slot=np.array([0, -1]), owner=zero[:2],
                           work_indptr=np.array([0, 2], np.int32)))  # fmt: skip


@pytest.mark.parametrize("name", ["strided", "three views", "odd tiles", "pieces", "two axes", "variants", "no period"])
@given(st.data())
def test_whatever_is_changed_is_found(name, data):
    """The proof says what the check of foreign plans says, of a plan of which anything was changed."""
    plan = made(name)
    draw = data.draw
    work, sources = plan.work.copy(), plan.merge_sources.copy()
    rows, indptr = plan.merge_rows.copy(), plan.merge_indptr.copy()
    changes = ["slot", "query_tile", "component"] + ["source", "swap", "row", "end"] * (len(sources) > 1)
    change, changed = draw(st.sampled_from(changes)), {}
    if change in ("slot", "query_tile", "component"):
        number = draw(st.integers(0, len(work) - 1))
        limit = {"slot": plan.slots, "component": len(plan.components) - 1}.get(change)
        if limit is None:
            limit = int(plan.components["query_tiles"][work["component"][number]]) - 1
        value = draw(st.integers(-1 if change == "slot" else 0, limit))
        work[change][number] = value
        component = plan.components[work["component"][number]]
        own = int(np.searchsorted(plan.work_indptr, number, side="right")) - 1
        if work["query_tile"][number] >= component["query_tiles"] or component["variant"] != own:
            return  # what validate() refuses before it counts rows
        changed["work"] = work
    elif change == "source":
        sources[draw(st.integers(0, len(sources) - 1))] = draw(st.integers(0, plan.slots * plan.block_q - 1))
        changed["merge_sources"] = sources
    elif change == "swap":
        a, b = (draw(st.integers(0, len(sources) - 1)) for _ in range(2))
        sources[[a, b]] = sources[[b, a]]
        changed["merge_sources"] = sources
    elif change == "row":
        rows[draw(st.integers(0, len(rows) - 1))] = draw(st.integers(0, plan.q_len - 1))
        changed["merge_rows"] = rows
    else:
        number = draw(st.integers(0, len(indptr) - 1))
        low, high = (indptr[min(max(n, 0), len(indptr) - 1)] for n in (number - 1, number + 1))
        if 0 < number < len(indptr) - 1:
            indptr[number] = draw(st.integers(int(low), int(high)))
        changed["merge_indptr"] = indptr
    other = dataclasses.replace(plan, **changed)
    if is_sound(other):
        prove(writers(other))
    else:
        with pytest.raises(RuntimeError, match="^plan: .* this is a bug in spattn"):
            prove(writers(other))


def test_a_merge_that_reads_a_source_twice():
    """As many sources as there are partial results, of the right row each, but one is read twice and one never."""
    for name in ("strided", "three views", "two axes"):
        plan = made(name)
        merge = np.flatnonzero(np.diff(plan.merge_indptr) > 1)[-1]
        sources = plan.merge_sources.copy()
        sources[plan.merge_indptr[merge] + 1] = sources[plan.merge_indptr[merge]]
        with pytest.raises(RuntimeError, match=f"^plan: combining row {plan.merge_rows[merge]} reads"):
            prove(writers(plan, merge_sources=sources))


def test_a_partial_result_that_nobody_reads():
    """A merge without its last source: everything that is read is right."""
    plan = made("strided")
    merge = len(plan.merge_rows) // 2
    at = plan.merge_indptr[merge + 1] - 1
    indptr = plan.merge_indptr - (np.arange(len(plan.merge_indptr)) > merge).astype(np.int32)
    with pytest.raises(RuntimeError, match="^plan: 1 partial rows are not read"):
        prove(writers(plan, merge_indptr=indptr, merge_sources=np.delete(plan.merge_sources, at)))


def test_a_merge_that_reads_padding():
    """The cell behind the last one of a view has the number of the next row, which another merge writes."""
    view = made("one view").views[:1].copy()
    view["extent"][0], view["box"][0], view["grid"][0], view["tiles"] = (1, 1, 100), (1, 1, 64), (1, 1, 2), 2
    two = np.arange(2, dtype=np.int32)
    count = (np.arange(110) < 100).astype(np.int32)
    own = Writers(
        view, two[:1], 0 * two, two, two.astype(np.int64), 2 * two, 2, np.arange(110, dtype=np.int32),
        np.append(0, np.cumsum(count)).astype(np.int32), np.arange(100, dtype=np.int32),
        np.array([0, 110], np.int32), 110, 64,
    )  # fmt: skip
    prove(own)
    count[5], count[100] = 0, 1
    indptr, sources = np.append(0, np.cumsum(count)).astype(np.int32), np.delete(np.arange(101, dtype=np.int32), 5)
    with pytest.raises(RuntimeError, match="^plan: combining row 100 reads"):
        prove(own._replace(merge_indptr=indptr, merge_sources=sources))


def test_long_periods_are_checked_to_the_end():
    """A fault in the last of many equal periods, in each array that they repeat."""
    plan = made("one period of many")
    last = len(plan.merge_sources) - 40
    for change in (1, -1, 64):
        sources = plan.merge_sources.copy()
        sources[last] += change
        with pytest.raises(RuntimeError, match="^plan: combining row"):
            prove(writers(plan, merge_sources=sources))
    rows = plan.merge_rows.copy()
    rows[[-20, -21]] = rows[[-21, -20]]
    with pytest.raises(RuntimeError, match="^plan: combining row"):
        prove(writers(plan, merge_rows=rows))
    indptr = plan.merge_indptr.copy()
    indptr[-20] += 1
    with pytest.raises(RuntimeError, match="^plan: combining row"):
        prove(writers(plan, merge_indptr=indptr))


def test_the_planner_proves_its_plans(monkeypatch, no_plans):
    """A row that two lists write and a third view covers with an empty list: the fault of 15811d6."""

    def forgets(where, lists, q_len):
        return np.zeros(lists, bool)

    monkeypatch.setattr(items, "_meeting", forgets)
    with pytest.raises(RuntimeError, match=r"^plan: row \d+ is written twice \(variant 0\); this is a bug in spattn"):
        spattn.plan(p.DilatedWindow(6, 5, 7) | p.strided(5), 53, 55, tiling=spattn.Tiling(tile=(1, 64)))


def test_the_pass_by_keys_is_proved(monkeypatch):
    plan = spattn.plan(p.DilatedWindow(3, 3, 4) | p.strided(10), 200, 230, tiling=spattn.Tiling(tile=(32, 64)))
    monkeypatch.setattr(items, "_meeting", lambda where, lists, q_len: np.zeros(lists, bool))
    with pytest.raises(RuntimeError, match=r"^plan: row \d+ is written twice"):
        by_keys(plan, 1, 1, 1, Cut.consecutive(plan, 16), 2, 4)
