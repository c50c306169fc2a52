"""A plan is a value: whoever made it, nobody can change it, and no change of its objects reaches a kernel."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import numpy as np
import pytest

import spattn
from spattn import cpu
from spattn import patterns as p
from spattn.schedule.gradients import units
from spattn.schedule.item_order import by_rows, neighbours_together
from spattn.testing import inputs

N = 300
COPIES = {
    "planned": lambda plan: plan,
    "replaced": lambda plan: dataclasses.replace(plan, **arrays(plan, np.copy)),
    "by hand": lambda plan: spattn.Plan(
        **{f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)} | arrays(plan, np.copy)
    ),
    "not contiguous": lambda plan: dataclasses.replace(plan, **arrays(plan, lambda a: np.repeat(a, 2, axis=0)[::2])),
    "unpickled": lambda plan: pickle.loads(pickle.dumps(plan)),
    "unpickled by an old protocol": lambda plan: pickle.loads(pickle.dumps(plan, protocol=2)),
    "copied": copy.copy,
    "deeply copied": copy.deepcopy,
}


def good_plan():
    """A plan with two components, merges, and full, partial and ragged tiles."""
    return spattn.plan(p.longformer(20, global_tokens=(0, 150)), N, tiling=spattn.Tiling(tile=(64, 64), workers=64))


def arrays(plan, change=lambda array: array):
    return {name: change(value) for name, value in vars(plan).items() if isinstance(value, np.ndarray)}


@pytest.fixture(params=COPIES)
def plan(request):
    return COPIES[request.param](good_plan())


@pytest.fixture(params=[name for name in COPIES if name != "planned"])
def own_plan(request):
    """A plan that is not everybody's."""
    return COPIES[request.param](good_plan())


def test_arrays_cannot_be_written(plan):
    found = arrays(plan)
    assert len(found) == 17
    for name, array in found.items():
        assert np.array_equal(array, getattr(good_plan(), name)), name
        for view in (array, array[:0], array.reshape(-1)):
            with pytest.raises(ValueError, match="read-only"):
                view[...] = array
            with pytest.raises(ValueError, match="WRITEABLE"):
                view.flags.writeable = True


def test_executes_with_the_same_bits(plan):
    assert np.array_equal(*(spattn.attention(*inputs(q_len=N), made) for made in (good_plan(), plan)))
    assert plan.tiles == good_plan().tiles and repr(plan) == repr(good_plan())


def test_an_array_that_is_frozen_is_not_copied_again():
    good = good_plan()
    same = dataclasses.replace(good, nnz=good.nnz)
    assert all(getattr(same, name).base is array.base for name, array in arrays(good).items())


@pytest.mark.filterwarnings("ignore:Setting the:DeprecationWarning")
@pytest.mark.parametrize("how", ["dtype", "shape"])
@pytest.mark.parametrize("name", ["variant", "work", "views", "indptr", "merge_sources"])
def test_array_objects_can_be_bent_but_nobody_looks(own_plan, name, how):
    """NumPy lets anybody set the dtype and the shape of a read-only array: backends hold other array objects."""
    expected = spattn.attention(*inputs(q_len=N), own_plan)
    array = getattr(own_plan, name)
    if how == "dtype":
        array.dtype = array.dtype.newbyteorder(">") if array.dtype.names is None else np.dtype("V4")
    else:
        array.shape = (1, 1, *array.shape)
    assert np.array_equal(spattn.attention(*inputs(q_len=N), own_plan), expected)


def test_another_field_after_the_check_changes_nothing(own_plan):
    expected = spattn.attention(*inputs(q_len=N), own_plan)
    object.__setattr__(own_plan, "mask", np.full_like(own_plan.mask, 10**8))
    assert np.array_equal(spattn.attention(*inputs(q_len=N), own_plan), expected)


def test_what_the_cpu_derives_cannot_be_written_either():
    plan = good_plan()
    split = units(plan, 1, 2, 1)
    for array in (by_rows(plan), neighbours_together(plan), split.work, split.units):
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
    with pytest.raises(dataclasses.FrozenInstanceError):
        split.rows = 0


def test_public_backends_check_for_themselves():
    q, k, v = inputs(1, 1, 1, N)
    good = good_plan()
    bad = dataclasses.replace(good, mask=good.mask + len(good.masks))
    out, lse = cpu.forward(q, k, v, good, 1.0)
    for call in (
        lambda plan: cpu.forward(q, k, v, plan, 1.0),
        lambda plan: cpu.backward(out, q, k, v, out, lse, plan, 1.0),
    ):
        with pytest.raises(ValueError, match="^plan: expected"):
            call(bad)
        with pytest.raises(ValueError, match="^plan: expected lengths 300 and 300, got 64 and 64"):
            call(spattn.plan(p.Causal(), 64))
        with pytest.raises(ValueError, match="^plan: expected 1 batch entries and 1 heads, got 1 and 2"):
            call(spattn.plan(p.PerHead((p.Full(), p.Causal())), N))
        with pytest.raises(ValueError, match="^plan: expected 1 batch entries and 1 heads, got 2 and 1"):
            call(spattn.plan(p.Documents(((N,), (9, N - 9))), N, batch=2))
        with pytest.raises(TypeError, match="^plan: expected a Plan, got SlidingWindow"):
            call(p.SlidingWindow(3))


def test_sizes_of_numpy_become_integers():
    good = good_plan()
    small = dataclasses.replace(good, slots=np.int8(good.slots), block_q=np.int8(64))
    assert type(small.slots) is int and np.array_equal(*(spattn.attention(*inputs(q_len=N), x) for x in (good, small)))
