"""Edges of the CPU backend: plans for several calls, views that run backwards, padding, merges, workspaces, threads."""

from __future__ import annotations

import dataclasses
import itertools
import os

import numpy as np
import pytest

import spattn
from spattn import Tiling, cpu, patterns, plan
from spattn.cpu import _workspace
from spattn.planning import positions
from spattn.testing import DTYPES, Expectation, at_protected_page, inputs, random

from .test_backward import assert_same, problem
from .test_backward import check as check_gradients

ISAS = cpu.instruction_sets()
every_kernel = pytest.mark.parametrize(
    "isa, dtype", [pytest.param(*both, id="-".join(both)) for both in itertools.product(ISAS, DTYPES)]
)


def test_one_plan_for_several_numbers_of_heads():
    """What is kept with a plan is kept for the numbers of heads that it was made for."""
    pattern = patterns.SlidingWindow(30, 5)
    made = plan(pattern, 100, tiling=Tiling(tile=cpu.TILE), heads=1)
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
    count = np.diff(made.tile_indptr)
    for begin, end in zip(made.indptr[:-1], made.indptr[1:], strict=True):
        indices[begin:end] = (view["tiles"] - indices[begin:end] - count[begin:end])[::-1]
        count[begin:end] = count[begin:end][::-1]
    starts = np.append(0, np.cumsum(count))
    return dataclasses.replace(made, views=views, indices=indices, tile_indptr=starts, pattern=None)


@pytest.mark.parametrize("isa", cpu.instruction_sets())
def test_key_views_that_run_backwards(isa):
    """Strides of either sign: full tiles, so that the keys of a tile may come in any order."""
    layout = np.random.default_rng(0).random((4, 6)) < 0.6
    layout[0] = False
    pattern = patterns.Mask(np.repeat(np.repeat(layout, 64, axis=0), 64, axis=1))
    made = plan(pattern, 256, 384, tiling=Tiling(tile=(64, 64)))
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
    made = spattn.plan_for(patterns.Full(), q, k, v, backend="cpu")
    for wrong in (v[:, :, :9], v[:, :1], np.concatenate([v, v])):
        with pytest.raises(ValueError, match="^v: expected shape"):
            cpu.forward(q, k, wrong, made, 1.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_many_merges_at_the_end_of_a_task(dtype):
    """More merged rows than a task takes, and a number of them that is no multiple of it."""
    pattern = patterns.Full()
    for q_len in (63, 64, 65, 129):
        q, k, v = inputs(1, 2, q_len=q_len, kv_len=2000, head_dim=16, head_dim_v=24, dtype=dtype)
        made = plan(pattern, q_len, 2000, tiling=Tiling(tile=(16, 64), workers=64))
        assert len(made.merge_rows) == q_len
        expectation = Expectation(pattern, q, k, v)
        for isa in cpu.instruction_sets():
            expectation.check(*cpu.forward(q, k, v, made, 0.25, isa=isa), isa)


def test_gradients_of_the_same_call_in_units_and_in_one():
    """Many heads are one unit each, few heads are cut: the sums are the same up to rounding, each repeats its bits."""
    pattern = patterns.SlidingWindow(40, 10)
    q, k, v = inputs(1, 1, q_len=300, head_dim=16)
    dout = random(q.shape, seed=5)
    made = plan(pattern, 300, tiling=Tiling(tile=cpu.TILE), heads=1)
    out, lse = cpu.forward(q, k, v, made, 0.25)
    one = cpu.backward(dout, q, k, v, out, lse, made, 0.25)
    many = [np.repeat(x, 9, axis=1) for x in (dout, q, k, v, out, lse)]
    each = cpu.backward(*many, made, 0.25)
    for x, y in zip(one, each, strict=True):
        np.testing.assert_allclose(np.broadcast_to(x, y.shape), y, rtol=1e-5, atol=1e-6)
    assert_same(cpu.backward(*many, made, 0.25), each)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_sums_of_any_width_where_each_head_is_a_unit(dtype):
    """dK and dV serve as sums only where their rows are whole blocks of 64 bytes."""
    for head_dim, head_dim_v in ((24, 24), (16, 40), (8, 16), (32, 33)):
        arrays = problem(1, 8, q_len=70, head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype)
        check_gradients(*arrays, patterns.SlidingWindow(20, 9))


GRIDS = [
    patterns.Neighborhood((9, 11), (5, 3)),
    patterns.Neighborhood((4, 5, 5), 3),
    patterns.windowed((6, 10), (3, 5)),
]


@pytest.mark.parametrize("isa", ISAS)
def test_boxes_with_padding_on_every_axis(isa):
    """Cells of padding lie between real ones; nothing is read where they would be."""
    for pattern, tile, dtype in itertools.product(GRIDS, ((16, 64), (64, 64), (60, 128)), ("float32", "bfloat16")):
        tokens = int(np.prod(pattern.grid))
        q, k, v = map(at_protected_page, inputs(1, 2, q_len=tokens, head_dim=32, dtype=dtype))
        made = plan(pattern, tokens, tiling=Tiling(tile=tile), heads=2)
        Expectation(pattern, q, k, v).check(*cpu.forward(q, k, v, made, 32**-0.5, isa=isa), f"{isa} {tile}")


def anything_in_padding(made):
    """The plan with every bit set in those rows of its masks that are padding wherever the mask is used."""
    padding = np.ones((len(made.masks), made.block_q), dtype=bool)
    for component in made.components:
        rows = made.indptr[component["first_row"] :][: component["query_tiles"] + 1]
        tile = np.repeat(np.arange(component["query_tiles"]), np.diff(rows))
        _, real = positions(made.views[component["query_view"]], tile)
        for number, cells in zip(made.mask[rows[0] : rows[-1]], real, strict=True):
            if number >= 0:
                padding[number] &= ~cells
    assert padding.any()
    return dataclasses.replace(made, masks=np.where(padding[:, :, None], ~np.uint64(0), made.masks))


@every_kernel
def test_rows_of_padding_hold_anything(isa, dtype):
    """The contract's word: bits of rows that are padding have no meaning, those of keys that are padding included."""
    for pattern, tile in ((GRIDS[0], (64, 64)), (GRIDS[1], (64, 64)), (patterns.SlidingWindow(30), (64, 64))):
        dout, q, k, v = problem(1, 2, q_len=int(np.prod(getattr(pattern, "grid", 100))), head_dim=32, dtype=dtype)
        q, k, v = map(at_protected_page, (q, k, v))
        made = plan(pattern, q.shape[2], tiling=Tiling(tile=tile), heads=2)
        results = []
        for each in (made, anything_in_padding(made)):
            out, lse = cpu.forward(q, k, v, each, 0.2, isa=isa)
            results.append((out, lse, *cpu.backward(dout, q, k, v, out, lse, each, 0.2, isa=isa)))
        assert_same(*results)


@every_kernel
def test_scores_that_are_not_allowed_move_nothing(isa, dtype):
    """Not even the point that a row's exponents refer to: rows that do not see a key are the same to the bit."""
    q, k, v = inputs(1, 2, q_len=100, head_dim=32, dtype=dtype)
    made = plan(patterns.SlidingWindow(20, 0), 100, tiling=Tiling(tile=(64, 64)), heads=2)
    before = cpu.forward(q, k, v, made, 0.2, isa=isa)
    k[:, :, 50] *= k.dtype.type(100)
    after = cpu.forward(q, k, v, made, 0.2, isa=isa)
    blind = np.r_[0:50, 71:100]
    for x, y in zip(before, after, strict=True):
        np.testing.assert_array_equal(x[:, :, blind], y[:, :, blind])
        assert not np.array_equal(x, y)


@every_kernel
def test_merged_rows_that_attend_to_nothing(isa, dtype):
    """In none of their parts, or in some."""
    mask = np.random.default_rng(0).random((20, 3000)) < 0.5
    mask[3], mask[7, 100:], mask[9, :2900] = False, False, False
    q, k, v = inputs(1, 1, q_len=20, kv_len=3000, head_dim=16, dtype=dtype)
    made = plan(patterns.Mask(mask), 20, 3000, tiling=Tiling(tile=(16, 64), workers=64))
    assert (np.diff(made.merge_indptr) > 1).all()
    out, lse = cpu.forward(q, k, v, made, 0.25, isa=isa)
    Expectation(patterns.Mask(mask), q, k, v, 0.25).check(out, lse)
    assert (out[:, :, 3] == 0).all() and (lse[:, :, 3] == -np.inf).all()


def test_gradients_of_keys_in_two_words_of_a_mask():
    """A block of key rows that begins in one word of a mask and ends in the next."""
    mask = np.zeros((16, 128), dtype=bool)
    mask[3, 60:64] = mask[10, 64:66] = mask[15, 126:] = True
    arrays = problem(1, 1, q_len=16, kv_len=128, head_dim=16)
    check_gradients(*arrays, patterns.Mask(mask), plan(patterns.Mask(mask), 16, 128, tiling=Tiling(tile=(16, 128))))


@pytest.mark.parametrize("isa", ISAS)
def test_odd_features_are_not_read_from_the_next_row(isa):
    """Of rows that are longer than what belongs to the array."""
    q, k, v = inputs(1, 2, q_len=70, kv_len=128, head_dim=32, dtype="bfloat16")
    made = plan(patterns.Full(), 70, 128, tiling=Tiling(tile=(64, 64)), heads=2)
    q, v = q[..., :15], v[..., :16]
    plain = cpu.forward(q, np.ascontiguousarray(k[..., :15]), v, made, 0.25, isa=isa)
    k[..., 15:] = np.nan
    assert_same(cpu.forward(q, k[..., :15], v, made, 0.25, isa=isa), plain)


@every_kernel
def test_negative_scale_of_every_dtype(isa, dtype):
    for q_len, head_dim in ((3, 32), (60, 17), (60, 32)):
        q, k, v = inputs(1, 2, q_len=q_len, kv_len=90, head_dim=head_dim, dtype=dtype)
        made = plan(patterns.Causal(), q_len, 90, tiling=Tiling(tile=(64, 64)), heads=2)
        Expectation(patterns.Causal(), q, k, v, -0.7).check(*cpu.forward(q, k, v, made, -0.7, isa=isa), isa)


@every_kernel
def test_ragged_ends_beside_a_protected_page(isa, dtype):
    """Rows as wide as a step of the products, but fewer than one."""
    for q_len, kv_len in ((65, 130), (20, 63), (70, 97)):
        arrays = map(at_protected_page, inputs(1, 1, q_len=q_len, kv_len=kv_len, head_dim=64, dtype=dtype))
        q, k, v = arrays
        made = plan(patterns.Full(), q_len, kv_len, tiling=Tiling(tile=(64, 64)))
        Expectation(patterns.Full(), q, k, v).check(*cpu.forward(q, k, v, made, 0.125, isa=isa), isa)


@every_kernel
def test_diagonals_at_any_place(isa, dtype):
    """The keys that neighbouring queries reach end in one step of the products, in the next or in another tile."""
    for ahead in range(0, 72, 8):
        q, k, v = inputs(1, 1, q_len=64, kv_len=64 + ahead, head_dim=32, dtype=dtype)
        made = plan(patterns.Causal(), 64, 64 + ahead, tiling=Tiling(tile=(64, 64)))
        out, lse = cpu.forward(q, k, v, made, 32**-0.5, isa=isa)
        Expectation(patterns.Causal(), q, k, v).check(out, lse, f"{isa} {ahead}")


@every_kernel
def test_scores_that_grow_from_tile_to_tile(isa, dtype):
    """By some tens of bits in all: what was summed up before is worth less each time, but not nothing."""
    q, k, v = inputs(1, 1, q_len=40, kv_len=320, head_dim=32, dtype=dtype)
    q[...], k[...] = 1, 0
    k[..., 0] = np.repeat([0, 9, 13, 22, 27], 64)
    made = plan(patterns.Full(), 40, 320, tiling=Tiling(tile=(64, 64)))
    Expectation(patterns.Full(), q, k, v, 1.0).check(*cpu.forward(q, k, v, made, 1.0, isa=isa), isa)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_queries_that_rest_in_some_tiles(dtype):
    """After two full tiles each sixteen queries have a tile of their own: nothing of the others' is left there."""
    mask = np.zeros((64, 384), dtype=bool)
    mask[:, :128] = True
    for number in range(4):
        own = np.s_[16 * number : 16 * number + 16, 128 + 64 * number : 192 + 64 * number]
        mask[own] = np.random.default_rng(number).random((16, 64)) < 0.5
    arrays = problem(1, 1, q_len=64, kv_len=384, head_dim=32, dtype=dtype)
    check_gradients(*arrays, patterns.Mask(mask), plan(patterns.Mask(mask), 64, 384, tiling=Tiling(tile=(64, 64))))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_merged_rows(dtype):
    """Rows whose keys several items share: dQ is the sum of their parts."""
    pattern = patterns.Causal()
    made = plan(pattern, 37, 1200, tiling=Tiling(tile=(16, 64), workers=64), heads=2)
    assert (np.diff(made.merge_indptr) > 1).all() and len(made.merge_rows) == 37
    check_gradients(*problem(1, 2, q_len=37, kv_len=1200, head_dim=16, head_dim_v=24, dtype=dtype), pattern, made)


@pytest.mark.parametrize("isa", ISAS)
def test_few_queries_of_heads_with_different_patterns(isa):
    """Heads of a group share K and V, but not the keys that they attend to: no task takes them together."""
    own = patterns.Full(), patterns.SlidingWindow(40, 0), patterns.Sinks(9), patterns.Causal()
    for last in (own, own[::-1]):
        pattern = patterns.PerHead(last)
        q, k, v = inputs(1, 4, 1, q_len=3, kv_len=200, head_dim=16)
        made = plan(pattern, 3, 200, tiling=Tiling(tile=cpu.TILE), heads=4)
        Expectation(pattern, q, k, v).check(*cpu.forward(q, k, v, made, 0.25, isa=isa), isa)


@pytest.mark.parametrize("kv_len", [1, 3, 4, 6, 7, 8, 12, 23, 31, 32, 47, 55, 56, 63, 64])
def test_gradients_of_any_number_of_keys(kv_len):
    """Rows of dK and dV are added in blocks of six, then of what is left."""
    arrays = problem(1, 1, q_len=20, kv_len=kv_len, head_dim=16)
    check_gradients(*arrays, patterns.Full(), plan(patterns.Full(), 20, kv_len, tiling=Tiling(tile=(16, 64))))


@every_kernel
def test_gradients_where_every_logit_is_minus_infinity(isa, dtype):
    """Such rows attend to nothing, whatever their mask says: no key gets a gradient, NaN included."""
    dout, q, k, v = problem(1, 2, q_len=40, kv_len=70, head_dim=16, dtype=dtype)
    q[..., 0], k[..., 0] = 1, -np.inf
    for pattern in (patterns.Full(), patterns.SlidingWindow(30, 9)):
        made = plan(pattern, 40, 70, tiling=Tiling(tile=(64, 64)), heads=2)
        out, lse = cpu.forward(q, k, v, made, 0.25, isa=isa)
        assert (out == 0).all() and (lse == -np.inf).all()
        assert all((x == 0).all() for x in cpu.backward(dout, q, k, v, out, lse, made, 0.25, isa=isa))


@every_kernel
def test_gradients_beside_keys_that_nobody_sees(isa, dtype):
    """NaN and infinities at every third key, between keys that are seen: to the bit, they change nothing."""
    pattern = patterns.Mask(np.broadcast_to(np.arange(90) % 3 > 0, (90, 90)))  # in tiles of all keys
    dout, q, k, v = problem(1, 2, q_len=90, kv_len=90, head_dim=32, dtype=dtype)
    made = plan(pattern, 90, 90, tiling=Tiling(tile=(64, 64)), heads=2)
    out, lse = cpu.forward(q, k, v, made, 0.2, isa=isa)
    clean = cpu.backward(dout, q, k, v, out, lse, made, 0.2, isa=isa)
    for poison in (np.nan, np.inf):
        for x in (v, k):  # first V alone
            x[:, :, ::3] = poison
            assert_same(cpu.backward(dout, q, k, v, out, lse, made, 0.2, isa=isa), clean)


def test_swapped_bytes_are_refused():
    """Also where the backend is called by itself: the dtype's name says nothing of them."""
    q, made = np.ones((1, 1, 4, 8), np.float32), plan(patterns.Full(), 4)
    with pytest.raises(TypeError, match="^q: expected one of float32, .*, got >f4$"):
        cpu.forward(*[q.astype(">f4")] * 3, made, 1.0)
