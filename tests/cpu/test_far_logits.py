"""Logits of any size: huge, tiny and mixed ones, in every kernel family, forward and backward.

Features are few-digit binary numbers, so that every product and sum of a score is exact and only the scale rounds.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from threadpoolctl import threadpool_limits

import spattn
from spattn import cpu, patterns, reference
from spattn.testing import (
    DTYPES,
    Expectation,
    assert_within_bound,
    dense_mask,
    eps,
    error_bound,
    inputs,
    naive_orders,
    random,
)

from .test_backward import NAMES, assert_same
from .test_backward import naive_orders as naive_gradient_orders

ISAS = cpu.instruction_sets()
FAMILIES = {  # pattern, queries, keys, heads of queries and of keys
    "tiles": (patterns.SlidingWindow(20, 10), 70, 90, 2, 1),
    "few queries": (patterns.Full(), 3, 130, 4, 2),
    "merges": (patterns.strided(9), 70, 70, 2, 2),
    "few queries, merges": (patterns.strided(9), 3, 90, 4, 2),
}
TINY = {"float16": -20}  # powers of 2
FAR = {"float64": 47}  # as high as scores of the dtype can be and still differ by 1/16


@pytest.fixture(params=FAMILIES)
def family(request):
    """Each family's problem in turn."""
    return FAMILIES[request.param]


def small_numbers(family, dtype, head_dim=8):
    """dout, q, k, v; of q and k feature 0 is zero and the next three are multiples of 1/4."""
    _, q_len, kv_len, heads_q, heads_kv = family
    q, k, v = inputs(1, heads_q, heads_kv, q_len, kv_len, head_dim, 12, dtype=dtype)
    for x in (q, k):
        x[...] = np.round(np.clip(4 * x.astype(float), -8, 8)) / 4
        x[..., 0], x[..., 4:] = 0, 0
    return random((*q.shape[:3], 12), dtype, seed=9), q, k, v


def raised(q, k, power, scale):
    """q and k with 2^power times |scale| more in every logit."""
    q, k = q.copy(), k.copy()
    q[..., 0], k[..., 0] = np.sign(scale) * 2.0 ** (power // 2), 2.0 ** (power - power // 2)
    return q, k


@pytest.mark.parametrize("scale", [32**-0.5, 96**-0.5, 256**-0.5, 1 / 3, -0.7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_all_logits_of_a_row_have_in_common_changes_nothing(dtype, scale, family):
    """Near ties, at the height where the scores of the dtype just tell them apart."""
    dout, q, k, v = small_numbers(family, dtype)
    near, made = Expectation(family[0], q, k, v, scale), spattn.plan_for(family[0], q, k, v, backend="cpu")
    want = reference.gradients(dout, q, k, v, family[0], scale, near.reference[0].dtype)
    low = naive_gradient_orders(dout, q, k, v, dense_mask(family[0], *q.shape[:3], k.shape[2]), scale)
    for power in (TINY.get(dtype, -100), FAR.get(dtype, 19)):
        far = raised(q, k, power, scale)
        expectation = near if dtype != "float64" else Expectation(family[0], *far, v, scale)
        offset = abs(scale) * 2.0**power
        for isa in ISAS:
            out, lse = cpu.forward(*far, v, made, scale, isa=isa)
            assert_within_bound(out, expectation.reference[0], expectation.naive[0], dtype, isa)
            within = error_bound(near.reference[1], near.naive[1], dtype) + eps(lse.dtype) * offset
            np.testing.assert_allclose(lse.astype(float), near.reference[1].astype(float) + offset, rtol=0, atol=within)
            got = cpu.backward(dout, *far, v, out, lse, made, scale, isa=isa)
            for name, x, exact, lossy in zip(NAMES, got, want, low, strict=True):
                some = np.s_[...] if name == "dv" else np.s_[..., 1:]
                assert_within_bound(x[some], exact[some], [one[some] for one in lossy], dtype, f"{isa} {name}")


def mixed_numbers(family, dtype, head_dim):
    """dout, q, k, v whose logits reach from 1e-30 to 1e37 (1e-9 to 1e9 in float16), in one call and in one row."""
    _, q_len, kv_len, heads_q, heads_kv = family
    rng = np.random.default_rng(0)
    lowest, highest = (-14, 14) if dtype == "float16" else (-50, 60)
    q, k, v = inputs(1, heads_q, heads_kv, q_len, kv_len, head_dim, 12, dtype=dtype)
    q[...], k[...] = 0, 0
    feature = int(rng.integers(head_dim))
    q[..., feature] = 2.0 ** rng.integers(lowest, highest, q.shape[:3]) * rng.choice([1, -1], q.shape[:3])
    k[..., feature] = 2.0 ** rng.integers(lowest, highest, k.shape[:3]) * rng.integers(-7, 8, k.shape[:3]) / 4
    return random((*q.shape[:3], 12), dtype, seed=9), q, k, v


def terms_of_gradients(dout, q, k, v, mask, scale):
    """Sums of the sizes of all terms that dq, dk and dv consist of, which a relative error of the weights multiplies,
    and which rows have one key only that weighs anything."""
    shape = *k.shape[:2], q.shape[1] // k.shape[1], k.shape[2], -1
    dout, q, k, v = (x.astype(np.longdouble) for x in (dout, q, *(np.repeat(x, shape[2], axis=1) for x in (k, v))))
    logits = np.where(mask, q @ k.swapaxes(2, 3) * scale, -np.inf)
    p = np.exp(logits - logits.max(axis=3, keepdims=True))
    p /= p.sum(axis=3, keepdims=True)
    ds = p * abs(scale) * (abs(dout) @ abs(v).swapaxes(2, 3)).max(axis=3, keepdims=True)
    dk, dv = ds.swapaxes(2, 3) @ abs(q), p.swapaxes(2, 3) @ abs(dout)
    return (ds @ abs(k), dk.reshape(shape).sum(axis=2), dv.reshape(shape).sum(axis=2)), (p == 1).any(axis=3)


@pytest.mark.parametrize("scale", [32**-0.5, 64**-0.5, 96**-0.5, 256**-0.5, 1 / 3, -0.7, 0.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_huge_and_tiny_logits_in_one_row(dtype, scale, family):
    """The formula in long double. Weights of the backward may be 2^-11 off, which is the rounding of lse."""
    dout, q, k, v = mixed_numbers(family, dtype, round(scale**-2) if scale > 0 else 40)
    made, mask = spattn.plan_for(family[0], q, k, v, backend="cpu"), dense_mask(family[0], *q.shape[:3], k.shape[2])
    wide = [x.astype(np.float32) for x in (q, k, v)] if dtype == "float16" else (q, k, v)  # its logits overflow
    naive_out, naive_lse = naive_orders(*wide, mask, scale)
    want, lse_want = reference.attend(q, k, v, family[0], scale, np.longdouble)
    near = abs(lse_want) < 64
    gradients = reference.gradients(dout, q, k, v, family[0], scale, np.longdouble)
    terms, alone = terms_of_gradients(dout, q, k, v, mask, scale)
    settled = alone & (abs(lse_want) > (2.0**43 if dtype == "float64" else 2.0**14))
    for isa in ISAS:
        out, lse = cpu.forward(q, k, v, made, scale, isa=isa)
        assert_within_bound(out, want, naive_out, dtype, isa)
        within = error_bound(lse_want[near], [x[near] for x in naive_lse], dtype)
        np.testing.assert_allclose(lse.astype(float), lse_want.astype(float), rtol=eps(lse.dtype), atol=within)
        got = cpu.backward(dout, q, k, v, out, lse, made, scale, isa=isa)
        assert (got[0][settled] == 0).all() and (settled.any() or scale == 0)
        for name, x, exact, most in zip(NAMES, got, gradients, terms, strict=True):
            error, rounding = abs(x.astype(np.longdouble) - exact), 2.0**-11 + 4 * eps(dtype)
            assert (error <= rounding * most + float(ml_dtypes.finfo(q.dtype).tiny)).all(), (isa, name)


@pytest.mark.skipif(not cpu._core.OPENMP, reason="built without OpenMP")
def test_thread_count_does_not_change_far_rows():
    """Rows in several work items, whose sums in double precision are found before all else."""
    family = FAMILIES["merges"]
    dout, q, k, v = small_numbers(family, "float32")
    q, k = raised(q, k, 19, 0.3)
    made = spattn.plan_for(family[0], q, k, v, backend="cpu")
    assert made.slots > 0
    out, lse = cpu.forward(q, k, v, made, 0.3)
    results = []
    for threads in (1, 2, 3):
        with threadpool_limits(threads, user_api="openmp"):
            results.append(cpu.backward(dout, q, k, v, out, lse, made, 0.3))
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_an_infinite_logit_gives_nan(isa, dtype, family):
    """inf / inf in every term of its rows, as the reference has it; -inf is a weight of 0."""
    dout, q, k, v = small_numbers(family, dtype)
    made = spattn.plan_for(family[0], q, k, v, backend="cpu")
    q[..., 0] = 1
    for value in (np.inf, -np.inf):
        k[:, :, -2, 0] = value
        out, lse = (x.astype(float) for x in cpu.forward(q, k, v, made, 0.3, isa=isa))
        want, lse_want = reference.attend(q, k, v, family[0], 0.3)
        assert np.array_equal(np.isnan(out), np.isnan(want)) and np.array_equal(np.isnan(lse), np.isnan(lse_want))
        assert np.isnan(lse).any() == (value > 0) and (np.isfinite(lse).any() or family[0] == patterns.Full())
