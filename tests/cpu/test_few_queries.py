"""Few query rows against many keys, as in decoding: the path that reads K and V once."""

from __future__ import annotations

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

import spattn
from spattn import Tiling, cpu, patterns, plan
from spattn.testing import DTYPES, LAYOUTS, Expectation, at_protected_page, inputs

ISAS = cpu.instruction_sets()


def check(q, k, v, pattern, scale=None):
    """Every instruction set gives the oracle's result."""
    expectation = Expectation(pattern, q, k, v, scale)
    made = spattn.plan_for(pattern, q, k, v, backend="cpu")
    for isa in ISAS:
        expectation.check(*cpu.forward(q, k, v, made, q.shape[3] ** -0.5 if scale is None else scale, isa=isa), isa)


@pytest.mark.parametrize("q_len", range(1, 18))
@pytest.mark.parametrize("dtype", DTYPES)
def test_lengths(dtype, q_len):
    for heads_kv in (1, 3):
        arrays = inputs(1, 6, heads_kv, q_len=q_len, kv_len=333, head_dim=64, head_dim_v=96, dtype=dtype)
        check(*arrays, patterns.Full())


@pytest.mark.parametrize("head_dim", [1, 7, 16, 33, 80, 128, 256, 576])
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_dims(dtype, head_dim):
    check(
        *inputs(2, 4, 2, q_len=3, kv_len=200, head_dim=head_dim, head_dim_v=abs(257 - head_dim), dtype=dtype),
        patterns.Causal(),
    )


@pytest.mark.parametrize(
    "pattern",
    [
        patterns.SlidingWindow(150, 0),
        patterns.DilatedWindow(40, 0, dilation=3),
        patterns.strided(16),
        patterns.Causal() & patterns.GlobalTokens(5),
    ],
    ids=repr,
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_patterns(dtype, pattern):
    check(*inputs(1, 4, 2, q_len=5, kv_len=400, head_dim=32, dtype=dtype), pattern)


@pytest.mark.parametrize("scale", [0.0, -0.7, 30.0])
def test_scales(scale):
    check(*inputs(1, 4, 2, q_len=4, kv_len=300, head_dim=32, dtype="float64"), patterns.Causal(), scale)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts(dtype, layout):
    check(*inputs(2, 4, 2, q_len=2, kv_len=192, head_dim=64, dtype=dtype, layout=layout), patterns.Full())


@pytest.mark.parametrize("dtype", DTYPES)
def test_reads_nothing_beyond_the_arrays(dtype):
    for kv_len, head_dim in ((64, 64), (130, 64), (63, 20), (1, 1)):
        arrays = inputs(1, 4, 2, q_len=3, kv_len=kv_len, head_dim=head_dim, dtype=dtype)
        check(*map(at_protected_page, arrays), patterns.Full())
        check(*(at_protected_page(x[:, :, ::-1, ::-1])[:, :, ::-1, ::-1] for x in arrays), patterns.Full())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_together_are_as_if_alone(dtype, isa):
    """A group whose heads share their pattern, one whose heads do not, and every head by itself: the same bits."""
    q, k, v = inputs(2, 8, 2, q_len=2, kv_len=700, head_dim=64, dtype=dtype)
    window = patterns.SlidingWindow(500, 0)
    mixed = patterns.PerHead([window] * 7 + [patterns.Causal()])
    together = cpu.forward(q, k, v, plan(window, 2, 700, tiling=Tiling(tile=cpu.TILE), heads=8), 0.2, isa=isa)
    apart = cpu.forward(q, k, v, plan(mixed, 2, 700, tiling=Tiling(tile=cpu.TILE), heads=8), 0.2, isa=isa)
    alone = plan(window, 2, 700, tiling=Tiling(tile=cpu.TILE), heads=1)
    for head in range(7):
        keys = slice(head // 4, head // 4 + 1)
        one = cpu.forward(q[:, head : head + 1], k[:, keys], v[:, keys], alone, 0.2, isa=isa)
        for x, y, z in zip(together, apart, one, strict=True):
            np.testing.assert_array_equal(x[:, head], z[:, 0])
            np.testing.assert_array_equal(y[:, head], z[:, 0])


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_that_are_not_allowed_have_no_influence(dtype, value):
    """In exactly the rows that attend to a key of NaN the result is NaN."""
    q, k, v = inputs(1, 4, 2, q_len=6, kv_len=200, head_dim=32, dtype=dtype)
    made = spattn.plan_for(patterns.Causal(), q, k, v, backend="cpu")
    clean = {isa: cpu.forward(q, k, v, made, 0.2, isa=isa) for isa in ISAS}
    v[:, 0, 197], k[:, 0, 197] = value, np.nan  # the last three queries may see it
    for isa in ISAS:
        out, lse = cpu.forward(q, k, v, made, 0.2, isa=isa)
        assert np.isnan(lse[:, :2, 3:]).all() and np.isnan(out[:, :2, 3:].astype(float)).all()
        np.testing.assert_allclose(out[:, :, :3].astype(float), clean[isa][0][:, :, :3].astype(float), atol=1e-2)
        np.testing.assert_allclose(lse[:, :, :3], clean[isa][1][:, :, :3], atol=1e-5)
        np.testing.assert_array_equal(out[:, 2:], clean[isa][0][:, 2:])


@pytest.mark.skipif(not cpu._core.OPENMP, reason="built without OpenMP")
@pytest.mark.parametrize("dtype", DTYPES)
def test_thread_count_does_not_change_the_result(dtype):
    q, k, v = inputs(1, 8, 2, q_len=4, kv_len=5000, head_dim=64, dtype=dtype)
    made = spattn.plan_for(patterns.Full(), q, k, v, backend="cpu")
    results = []
    for threads in (1, 2, 3):
        with threadpool_limits(threads, user_api="openmp"):
            results.append(cpu.forward(q, k, v, made, 0.1))
    for out, lse in results[1:]:
        np.testing.assert_array_equal(out, results[0][0])
        np.testing.assert_array_equal(lse, results[0][1])
