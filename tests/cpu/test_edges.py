"""Where the CPU backend's own bookkeeping ends: plans for several calls, views that run backwards, workspaces, threads."""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import pytest

from spattn import cpu, patterns
from spattn.cpu import _workspace
from spattn.plan import plan
from spattn.testing import Expectation, inputs, random

from .test_backward import assert_same, problem
from .test_backward import check as check_gradients


def test_one_plan_for_several_numbers_of_heads():
    """What is kept with a plan is kept for the numbers of heads that it was made for."""
    pattern = patterns.SlidingWindow(30, 5)
    made = plan(pattern, 100, heads=1, tile=cpu.TILE)
    for batch, heads_q, heads_kv in ((1, 4, 4), (1, 4, 2), (1, 4, 1), (2, 4, 1), (1, 8, 2), (1, 4, 4)):
        arrays = problem(batch, heads_q, heads_kv, q_len=100, head_dim=16)
        check_gradients(*arrays, pattern, made)


def backwards(made):
    """The plan with its only key view turned round: tile t of the view has the keys of tile tiles - 1 - t."""
    (number,) = np.unique(made.components["key_view"])
    views, indices = made.views.copy(), made.indices.copy()
    view = views[number]
    assert len(np.unique(made.key_view)) == 1 and (made.mask < 0).all() and view["extent"][2] % view["box"][2] == 0
    view["offset"] += view["stride"][2] * (view["extent"][2] - 1)
    view["stride"][2] *= -1
    views[number] = view
    for begin, end in zip(made.indptr[:-1], made.indptr[1:], strict=True):
        indices[begin:end] = (view["tiles"] - 1 - indices[begin:end])[::-1]
    return dataclasses.replace(made, views=views, indices=indices, pattern=None)


@pytest.mark.parametrize("isa", cpu.instruction_sets())
def test_key_views_that_run_backwards(isa):
    """Strides of either sign: full tiles, so that the keys of a tile may come in any order."""
    layout = np.random.default_rng(0).random((4, 6)) < 0.6
    layout[0] = False
    pattern = patterns.Mask(np.repeat(np.repeat(layout, 64, axis=0), 64, axis=1))
    made = plan(pattern, 256, 384, tile=(64, 64))
    turned = backwards(made)
    dout, q, k, v = problem(1, 1, q_len=256, kv_len=384, head_dim=16)
    results = []
    for each in (made, turned):
        out, lse = cpu.forward(q, k, v, each, 0.25, isa=isa)
        Expectation(pattern, q, k, v, 0.25).check(out, lse)
        results.append(cpu.backward(dout, q, k, v, out, lse, each, 0.25, isa=isa))
    for x, y in zip(*results, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_forked_child_has_one_thread(python):
    """OpenMP's threads do not survive a fork."""
    told = python(
        "import os, spattn.cpu\n"
        "before = spattn.cpu.num_threads()\n"
        "read, write = os.pipe()\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    os.write(write, str(spattn.cpu.num_threads()).encode())\n"
        "    os._exit(0)\n"
        "os.waitpid(child, 0)\n"
        "print(before, os.read(read, 9).decode())\n",
        OMP_NUM_THREADS="2",
    )
    assert told.split() == ["2" if cpu._core.OPENMP else "1", "1"]


def test_small_workspaces_are_not_kept():
    """There are as many sizes as shapes, and each is cheap to get."""
    cpu.free_workspaces()
    small, large = (np.empty(size, np.uint8) for size in (_workspace._LEAST_KEPT - 1, _workspace._LEAST_KEPT))
    _workspace.give_back([small, large])
    assert list(_workspace._kept) == [len(large)]
    assert _workspace.take(len(large)) is large
    cpu.free_workspaces()


def test_direct_calls_with_v_of_another_length():
    q, k, v = inputs(1, 2, q_len=10, head_dim=8)
    made = cpu.plan_for(patterns.Full(), q, k, v)
    for wrong in (v[:, :, :9], v[:, :1], np.concatenate([v, v])):
        with pytest.raises(ValueError, match="^v: expected shape"):
            cpu.forward(q, k, wrong, made, 1.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_many_merges_at_the_end_of_a_task(dtype):
    """More merged rows than a task takes, and a number of them that is no multiple of it."""
    pattern = patterns.Full()
    for q_len in (63, 64, 65, 129):
        q, k, v = inputs(1, 2, q_len=q_len, kv_len=2000, head_dim=16, dtype=dtype)
        made = plan(pattern, q_len, 2000, tile=(16, 64), workers=64)
        assert len(made.merge_rows) == q_len
        for isa in cpu.instruction_sets():
            Expectation(pattern, q, k, v).check(*cpu.forward(q, k, v, made, 0.25, isa=isa), isa)


def test_gradients_of_the_same_call_in_units_and_in_one():
    """Many heads are one unit each, few heads are cut: the sums are the same up to rounding, each to the bit repeatable."""
    pattern = patterns.SlidingWindow(40, 10)
    q, k, v = inputs(1, 1, q_len=300, head_dim=16)
    dout = random(q.shape, seed=5)
    made = plan(pattern, 300, heads=1, tile=cpu.TILE)
    out, lse = cpu.forward(q, k, v, made, 0.25)
    one = cpu.backward(dout, q, k, v, out, lse, made, 0.25)
    many = [np.repeat(x, 9, axis=1) for x in (dout, q, k, v, out, lse)]
    each = cpu.backward(*many, made, 0.25)
    for x, y in zip(one, each, strict=True):
        np.testing.assert_allclose(np.broadcast_to(x, y.shape), y, rtol=1e-5, atol=1e-6)
    assert_same(cpu.backward(*many, made, 0.25), each)
