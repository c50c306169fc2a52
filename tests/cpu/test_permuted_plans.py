"""Plans of tokens in another order: against the oracle, forward and backward, on every instruction set."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

import spattn
from spattn import cpu, patterns
from spattn.schedule import compiler
from spattn.testing import DTYPES, LAYOUTS, Expectation, GradientExpectation, at_protected_page, inputs

ISAS = cpu.instruction_sets()
Q_LEN, KV_LEN = 90, 131
LABELS = np.random.default_rng(0).integers(-1, 4, (4, KV_LEN))
CLUSTERS = patterns.Clusters(LABELS)  # others for each of four heads, two of which share K and V
TILES = [(48, 64), (64, 128), (4, 64), (1, 64)]


def planned(pattern, tile=(48, 64), workers=1, q_len=Q_LEN):
    made = compiler.plan(pattern, q_len, KV_LEN, heads=4, tile=tile, workers=workers, ordered=True)
    assert made.ordered
    return made


def problem(dtype="float32", q_len=Q_LEN, **sizes):
    return inputs(1, 4, 2, q_len=q_len, kv_len=KV_LEN, dtype=dtype, **sizes)


def check(pattern, q, k, v, made, scale=0.2):
    """Output, lse and gradients of every instruction set within their budgets."""
    expectation = Expectation(pattern, q, k, v, scale)
    gradients = GradientExpectation(pattern, q, k, v, scale)
    for isa in ISAS:
        results = cpu.forward(q, k, v, made, scale, isa=isa)
        expectation.check(*results, isa)
        gradients.check(cpu.backward(gradients.dout, q, k, v, *results, made, scale, isa=isa), isa)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles(dtype, tile):
    """Items in pieces, which are merged, and rows that attend to nothing."""
    q, k, v = problem(dtype, head_dim=32)
    check(CLUSTERS, q, k, v, planned(CLUSTERS, tile, workers=8))


@pytest.mark.parametrize("head_dim, head_dim_v", [(1, 7), (40, 24), (64, 64)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_dims(dtype, head_dim, head_dim_v):
    q, k, v = problem(dtype, head_dim=head_dim, head_dim_v=head_dim_v)
    check(patterns.Causal() & CLUSTERS, q, k, v, planned(patterns.Causal() & CLUSTERS))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts(dtype, layout):
    check(CLUSTERS, *problem(dtype, head_dim=32, layout=layout), planned(CLUSTERS))


@pytest.mark.parametrize("q_len", [1, 3, 131])
def test_lengths(q_len):
    """Few queries are computed by another kernel."""
    check(CLUSTERS, *problem(q_len=q_len, head_dim=16), planned(CLUSTERS, q_len=q_len))


def test_heads_with_and_without_an_order():
    """What has none is computed in the order of the rows, beside others."""
    pattern = patterns.PerHead((patterns.longformer(10, global_tokens=3), patterns.Clusters(LABELS[0])))
    made = planned(pattern, workers=4)
    assert (made.q_order[0] == np.arange(Q_LEN)).all() and (made.q_order[1] != np.arange(Q_LEN)).any()
    check(pattern, *problem(head_dim=24), made)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reads_nothing_beyond_the_arrays(dtype):
    arrays = problem(dtype, head_dim=64)
    for tile in TILES:
        check(CLUSTERS, *map(at_protected_page, arrays), planned(CLUSTERS, tile))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_hidden_values_reach_no_row(isa, tile):
    """What is NaN reaches the rows that may attend to it, wherever these are taken."""
    q, k, v = problem(head_dim=32)
    made = planned(CLUSTERS, tile)
    clean = cpu.forward(q, k, v, made, 0.2, isa=isa)
    for key in (0, 64, KV_LEN - 1):
        poisoned = v.copy()
        poisoned[:, :, key] = np.nan
        out, lse = cpu.forward(q, k, poisoned, made, 0.2, isa=isa)
        for head, labels in enumerate(LABELS):
            sees = (labels[KV_LEN - Q_LEN :] == labels[key]) & (labels[key] >= 0)
            assert np.isnan(out[0, head, sees]).all()
            for found, expected in zip((out, lse), clean, strict=True):
                assert np.array_equal(found[0, head, ~sees], expected[0, head, ~sees])


@settings(deadline=None)
@given(st.data())
def test_any_order(data):
    """Of any plan's rows and keys: results are those of the permuted arrays."""
    q_len, kv_len = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 150))
    several = patterns.Causal(), patterns.longformer(10, global_tokens=3), patterns.strided(7), patterns.Stride(3)
    pattern = data.draw(st.sampled_from(several))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    tile = data.draw(st.sampled_from([*TILES, (3, 64)]))
    plain = spattn.plan(
        pattern, q_len, kv_len, tiling=spattn.Tiling(tile=tile, workers=data.draw(st.integers(1, 9))), heads=2
    )
    q_order, kv_order = rng.permutation(q_len), rng.permutation(kv_len)
    ordered = dataclasses.replace(
        plain,
        pattern=None,
        q_order=np.int32(q_order)[None],
        kv_order=np.int32(kv_order)[None],
        merge_rows=np.int32(q_order)[plain.merge_rows],
    )
    q, k, v = inputs(1, 2, q_len=q_len, kv_len=kv_len, head_dim=data.draw(st.sampled_from([16, 20])))
    out, lse = cpu.forward(q, k, v, ordered, 0.3)
    of_places = q[:, :, q_order], k[:, :, kv_order], v[:, :, kv_order]
    expected = cpu.forward(*of_places, plain, 0.3)
    np.testing.assert_allclose(out[:, :, q_order], expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse[:, :, q_order], expected[1], rtol=1e-5, atol=1e-6)
    dq, dk, dv = cpu.backward(q[..., : v.shape[-1]], q, k, v, out, lse, ordered, 0.3)
    of_q, of_k, of_v = cpu.backward(of_places[0], *of_places, *expected, plain, 0.3)
    for found, order, wanted in ((dq, q_order, of_q), (dk, kv_order, of_k), (dv, kv_order, of_v)):
        np.testing.assert_allclose(found[:, :, order], wanted, rtol=1e-4, atol=1e-5)


def test_threads_change_no_bit():
    q, k, v = problem(head_dim=32)
    made = planned(CLUSTERS, workers=8)

    def run(threads):
        with threadpool_limits(threads):
            out, lse = cpu.forward(q, k, v, made, 0.2)
            return out, lse, *cpu.backward(out, q, k, v, out, lse, made, 0.2)

    for one, other in zip(run(1), run(3), strict=True):
        assert one.tobytes() == other.tobytes()


def test_copies_and_pickles_are_checked_and_run():
    q, k, v = problem(head_dim=32)
    made = planned(CLUSTERS)
    out = cpu.forward(q, k, v, made, 0.2)[0]
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made)), dataclasses.replace(made)):
        assert cpu.forward(q, k, v, other, 0.2)[0].tobytes() == out.tobytes()


def test_calls_take_them_where_a_pattern_has_an_order():
    """And show them; plans that nobody asks the CPU for are of tokens in a row."""
    labels = np.random.default_rng(0).integers(0, 16, 1024)
    pattern = patterns.Causal() & patterns.Clusters(labels)
    arrays = inputs(1, 2, q_len=1024, kv_len=1024, head_dim=32)
    made = spattn.plan_for(pattern, *arrays, backend="cpu")
    assert (
        made.ordered
        and made.efficiency > 3 * spattn.plan(pattern, 1024, tiling=spattn.Tiling(tile=made.tile)).efficiency
    )
    assert not spattn.plan(pattern, 1024).ordered and made.pattern == pattern
    own, lse = spattn.attention(*arrays, pattern, backend="cpu", return_lse=True)
    Expectation(pattern, *arrays).check(own, lse)
    assert own.tobytes() == spattn.attention(*arrays, made, backend="cpu").tobytes()


def test_clusters_that_lie_in_a_row_need_no_order():
    labels = np.repeat(np.arange(8), 64)
    arrays = inputs(1, 2, q_len=512, kv_len=512, head_dim=32)
    assert not spattn.plan_for(patterns.Clusters(labels), *arrays, backend="cpu").ordered


@pytest.mark.parametrize("block", [16, 64])
def test_listed_pairs_that_lie_together_in_another_order(block):
    """Whoever lists the pairs of clusters gets the plan of clusters."""
    labels = np.random.default_rng(0).permutation(1024) // block
    pairs = np.nonzero(labels[:, None] == labels)
    pattern = patterns.interop.from_pairs(*pairs, 1024, 1024)
    arrays = inputs(1, 2, q_len=1024, kv_len=1024, head_dim=32)
    made = spattn.plan_for(pattern, *arrays, backend="cpu")
    assert made.ordered and made.tiles <= spattn.plan(pattern, 1024, tiling=spattn.Tiling(tile=made.tile)).tiles / 10
    Expectation(pattern, *arrays).check(*spattn.attention(*arrays, pattern, backend="cpu", return_lse=True))


def test_scattered_pairs_are_left_alone():
    rng = np.random.default_rng(0)
    pattern = patterns.interop.from_pairs(*np.nonzero(rng.random((1024, 1024)) < 0.01), 1024, 1024)
    arrays = inputs(1, 2, q_len=1024, kv_len=1024, head_dim=32)
    assert not spattn.plan_for(pattern, *arrays, backend="cpu").ordered
