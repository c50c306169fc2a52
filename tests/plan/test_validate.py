"""The check of plans that the planner did not make: it accepts every sound plan and refuses whatever a kernel relies on.

The single numbers of ``tests/test_faults_plans.py`` point outside of something; here a plan is wrong although every
number is in range.
"""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import spattn
from spattn import patterns as p
from spattn.plan import validate
from spattn.plan._parts import repeats
from spattn.testing.strategies import cases, compositions

N = 300


def good_plan():
    """Two families, one of several components; several variants; slots, merges, full, partial and ragged tiles."""
    window = p.Longformer(20, global_tokens=(0, 150))
    return spattn.plan(p.PerHead((window, p.Strided(7), window)), N, tile=(64, 64), workers=64)


def spoiled(plan, **changes):
    """`plan` with fields changed: ``field=function of a copy of it``, which returns the new one or changes the copy."""
    made = {}
    for name, change in changes.items():
        old = getattr(plan, name)
        new = old.copy() if isinstance(old, np.ndarray) else old
        result = change(new)
        made[name] = new if result is None else result
    return dataclasses.replace(plan, **made)


def put(field, at, value):
    """A change of ``array[field][at]``."""
    return lambda array: array[field].__setitem__(at, value)


def drop(at):
    return lambda array: np.delete(array, at, axis=0)


def test_good_plan_has_it_all():
    plan = good_plan()
    assert plan.variants == 2 and len(plan.components) > 7 and len(plan.merge_rows)
    assert (plan.mask < 0).any() and (plan.mask >= 0).any() and {-1, 0} <= set(plan.work["slot"])
    assert len(np.unique(plan.components["first_row"])) < len(plan.components)
    assert validate(dataclasses.replace(plan)) is not plan


@pytest.mark.parametrize("tile", [(16, 64), (48, 64), (64, 128)], ids=str)
@given(case=st.one_of(cases(), compositions()), workers=st.sampled_from([1, 64]))
def test_every_plan_of_the_planner_is_sound(case, tile, workers):
    sizes = case.sizes
    made = spattn.plan(case.pattern, sizes.q_len, sizes.kv_len, batch=sizes.batch, heads=sizes.heads_q, tile=tile,
                       workers=workers)  # fmt: skip
    validate(dataclasses.replace(made))


def _double(array):
    """Every element twice."""
    return np.repeat(array, 2, axis=0)


def _swap(array):
    array[[0, -1]] = array[[-1, 0]]


def _turned(views):
    """The lattice of view 0 runs backwards, outside of the sequence."""
    views["stride"][0] *= -1


def _twice(views):
    """A lattice of as many points that meet: the last axis in two rows that are one position apart."""
    views["extent"][0], views["box"][0], views["grid"][0] = (1, 2, N // 2), (1, 1, 64), (1, 2, 3)
    views["stride"][0], views["tiles"][0] = (0, 1, 1), 6


def _beyond_int64(views):
    """Reaches 2⁶⁴, which int64 takes for 0."""
    views["extent"][0], views["box"][0], views["grid"][0] = (1, 5, 60), (1, 1, 64), (1, 5, 1)
    views["stride"][0] = (0, 2**62, 1)


def _another_shape(views):
    """One view of a family is a query shorter than the others."""
    components = good_plan().components
    _, first, family = np.unique(components["first_row"], return_index=True, return_inverse=True)
    second = next(number for number, own in enumerate(family) if number != first[own])
    views["extent"][components["query_view"][second], 2] -= 1


WRONG = {
    "no work": dict(work=lambda w: w[:0], work_indptr=np.zeros_like),
    "an item less": dict(work=drop(0), work_indptr=lambda e: np.maximum(e - 1, 0)),
    "an item twice": dict(work=_double, work_indptr=lambda e: 2 * e),
    "a piece shorter": dict(work=lambda w: put("end", 0, w["end"][0] - 1)(w)),
    "an empty piece": dict(work=lambda w: put("end", 0, w["begin"][0])(w)),
    "an item of another variant": dict(work_indptr=put(..., 1, 1)),
    "a component of another variant": dict(components=put("variant", 0, 1)),
    "items that share a slot": dict(work=lambda w: put("slot", w["slot"] >= 0, 0)(w)),
    "a slot for a row that an item writes": dict(work=put("slot", slice(None), -1)),
    "slots that do not count from 0": dict(work=lambda w: put("slot", w["slot"] == 0, 10**6)(w)),
    "more slots": dict(slots=lambda n: n + 1),
    "fewer slots": dict(slots=lambda n: n - 1),
    "slots beyond int64": dict(slots=lambda n: 2**63),
    "a merge less": dict(merge_rows=drop(0), merge_indptr=drop(0), merge_variants=lambda e: np.maximum(e - 1, 0)),
    "a row merged twice": dict(merge_rows=lambda r: put(..., 0, r[1])(r)),
    "merges of other rows": dict(merge_rows=_swap),
    "sources of other rows": dict(merge_sources=_swap),
    "a source twice": dict(merge_sources=lambda s: put(..., 0, s[1])(s)),
    "merges of another variant": dict(merge_variants=put(..., 1, 0)),
    "nnz": dict(nnz=lambda n: n + 1),
    "a bit more": dict(masks=lambda m: put(..., (0, 0, 0), m[0, 0, 0] ^ np.uint64(1))(m)),
    "a lattice outside": dict(views=_turned),
    "a position twice": dict(views=_twice),
    "an offset at the end of int64": dict(views=put("offset", 0, 2**63 - 1)),
    "a lattice beyond int64": dict(views=_beyond_int64),
    "a key view for queries": dict(views=lambda v: put("box", 0, v["box"][0][::-1])(v)),
    "lengths": dict(q_len=lambda n: n - 1),
    "a length beyond int32": dict(kv_len=lambda n: 2**31),
    "a fraction": dict(q_len=float),
    "a negative number": dict(nnz=lambda n: -n),
    "tile": dict(block_q=lambda n: n // 2),
    "tile of no keys": dict(block_kv=lambda n: 0),
    "a tile beyond all masks": dict(block_q=lambda n: 2**31 - 64),
    "no variant of any head": dict(variant=lambda v: v[:, :0]),
    "one variant more": dict(work_indptr=lambda e: np.append(e, e[-1])),
    "rows that no component has": dict(indptr=lambda e: np.append(e, e[-1])),
    "families that overlap": dict(components=lambda c: put("first_row", -1, c["first_row"][-1] - 1)(c)),
    "a family of different views": dict(views=_another_shape),
    "a list that is not sorted": dict(indices=lambda i: i[::-1]),
    "key views in another order": dict(key_view=lambda k: 1 - np.minimum(k, 1)),
    "key views beyond int32": dict(key_view=lambda k: np.full_like(k, 2**31 - 1)),
}


@pytest.mark.parametrize("what", WRONG)
def test_refused(what):
    with pytest.raises(ValueError, match="^plan: expected .*, got another in "):
        validate(spoiled(good_plan(), **WRONG[what]))


@pytest.mark.parametrize(
    "name, value",
    [("q_len", "300"), ("slots", None), ("nnz", 1.0), ("nnz", True), ("views", None), ("work", []), ("mask", "mask")],
)
def test_refused_types(name, value):
    with pytest.raises(ValueError, match=rf"^plan: expected .*, got another in {name}$"):
        validate(dataclasses.replace(good_plan(), **{name: value}))


def test_message_has_the_first_number():
    with pytest.raises(ValueError, match=r"^plan: expected -1 or numbers of bitmasks, got another in mask\[3\]$"):
        validate(spoiled(good_plan(), mask=put(..., slice(3, 5), 10**6)))


def test_not_a_plan():
    with pytest.raises(TypeError, match="^plan: expected a Plan, got Causal"):
        validate(p.Causal())


@given(
    st.lists(st.tuples(st.integers(-9, 9), st.integers(1, 5)), min_size=1, max_size=3),
)
def test_lattices_that_repeat_a_position(axes):
    """Against the positions themselves."""
    strides, extents = zip(*axes, strict=True)
    found = sum(stride * at for stride, at in zip(strides, np.indices(extents), strict=True))
    assert repeats(strides, extents) == (len(np.unique(found)) < np.prod(extents))


@pytest.mark.parametrize("pattern", [p.SlidingWindow(256), p.Strided(128), p.Neighborhood((128, 128), 13)], ids=repr)
def test_takes_less_than_a_second(pattern):
    made = dataclasses.replace(spattn.plan(pattern, 16384, tile=(48, 64), workers=16))
    start = time.process_time()
    validate(made)
    assert time.process_time() - start < 1
