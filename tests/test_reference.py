"""The oracle itself: against the formula on a dense mask, against torch in float64, against numerical derivatives."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

import spattn
from spattn import patterns as p
from spattn import reference
from spattn.request.call import Call
from spattn.testing import dense_mask, inputs, naive, naive_gradients, random
from spattn.testing.strategies import cases, compositions

half = settings(max_examples=settings.default.max_examples // 2)


def float64_inputs(case, head_dim=8, head_dim_v=5):
    return inputs(*case.sizes, head_dim, head_dim_v, dtype="float64")


@half
@given(cases(max_len=90) | compositions(max_len=90))
def test_equals_formula_on_dense_mask(case):
    q, k, v = float64_inputs(case)
    mask = dense_mask(case.pattern, *q.shape[:3], k.shape[2])
    for got, want in zip(reference.attend(q, k, v, case.pattern), naive(q, k, v, mask), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-13)
    dout = random((*q.shape[:3], v.shape[3]), "float64", seed=7)
    low = naive_gradients(dout, q, k, v, mask)
    for got, want in zip(reference.gradients(dout, q, k, v, case.pattern), low, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)


@half
@given(cases(max_len=60))
def test_equals_torch_in_float64(case):
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x).requires_grad_() for x in float64_inputs(case))
    mask = dense_mask(case.pattern, case.sizes.batch, case.sizes.heads_q, case.sizes.q_len, case.sizes.kv_len)
    group = case.sizes.heads_q // case.sizes.heads_kv
    scores = (q @ k.repeat_interleave(group, 1).mT) * 0.3
    scores = scores.masked_fill(~torch.from_numpy(mask), -torch.inf)
    rows = torch.from_numpy(mask.any(axis=-1))
    weights = torch.where(rows[..., None], torch.softmax(torch.where(rows[..., None], scores, 0.0), -1), 0.0)
    out = weights @ v.repeat_interleave(group, 1)
    arrays = [x.detach().numpy() for x in (q, k, v)]
    got, lse = reference.attend(*arrays, case.pattern, 0.3)
    np.testing.assert_allclose(got, out.detach().numpy(), rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(lse, torch.logsumexp(scores, -1).detach().numpy(), rtol=1e-12, atol=1e-13)
    dout = random(got.shape, "float64", seed=3)
    out.backward(torch.from_numpy(dout))
    for mine, tensor in zip(reference.gradients(dout, *arrays, case.pattern, 0.3), (q, k, v), strict=True):
        np.testing.assert_allclose(mine, tensor.grad.numpy(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("pattern", [p.Causal(), p.strided(3), p.Documents((4, 3))], ids=repr)
def test_gradients_are_derivatives(pattern):
    arrays = list(inputs(1, 2, 1, 7, 9, 4, 3, dtype="float64"))
    dout = random((1, 2, 7, 3), "float64", seed=11)
    gradients = reference.gradients(dout, *arrays, pattern, 0.7)
    step = 1e-6
    for n, gradient in enumerate(gradients):
        direction = random(arrays[n].shape, "float64", seed=n)
        ends = []
        for sign in (1, -1):
            moved = list(arrays)
            moved[n] = arrays[n] + sign * step * direction
            ends.append((reference.attend(*moved, pattern, 0.7)[0] * dout).sum())
        np.testing.assert_allclose((ends[0] - ends[1]) / (2 * step), (gradient * direction).sum(), rtol=1e-7)


def test_boolean_arrays_of_any_rank():
    q, k, v = inputs(2, 3, 3, 20, 24, 8)
    mask = np.random.default_rng(0).random((2, 3, 20, 24)) < 0.3
    for array in (mask, mask[0], mask[0, 0], mask[:, :1]):
        for got, want in zip(reference.attend(q, k, v, array), naive(*float64(q, k, v), array), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-13)


def float64(*arrays):
    return [x.astype(np.float64) for x in arrays]


def test_gradients_ignore_keys_that_nobody_may_see():
    q, k, v = inputs(1, 1, 1, 10, 20, 8)
    dout = random(q.shape)
    before = reference.gradients(dout, q, k, v, p.Sinks(5))
    k[:, :, 5:], v[:, :, 5:] = np.nan, np.inf
    for a, b in zip(reference.gradients(dout, q, k, v, p.Sinks(5)), before, strict=True):
        assert np.array_equal(a, b)


def test_row_whose_logits_are_all_minus_infinity():
    q, k, v = inputs(1, 1, 1, 4, 4, 8)
    q[..., 1:], k[..., 1:], q[..., 0], k[..., 0] = 0, 0, 1, -np.inf
    out, lse = reference.attend(q, k, v, p.Full())
    assert (out == 0).all() and (lse == -np.inf).all()
    assert all((x == 0).all() for x in reference.gradients(random(q.shape), q, k, v, p.Full()))


def test_backward_through_the_public_function():
    q, k, v = inputs(1, 2, 1, 20, 30, 8, dtype="float16")
    dout = random(q.shape, "float16", seed=2)
    out, lse = spattn.attention(q, k, v, "causal", return_lse=True, backend="reference")
    got = spattn.attention_backward(dout, q, k, v, out, lse, "causal", backend="reference")
    for mine, want in zip(got, reference.gradients(dout, q, k, v, p.Causal()), strict=True):
        assert np.array_equal(mine, want.astype(np.float16))


def test_strips_do_not_change_the_result(monkeypatch):
    q, k, v = inputs(3, 4, 2, 30, 40, 8)
    before = reference.attend(q, k, v, p.Causal())
    monkeypatch.setattr(reference, "_ELEMENTS_AT_ONCE", 1)
    for a, b in zip(reference.attend(q, k, v, p.Causal()), before, strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("prepare", [reference.prepare, reference.prepare_backward])
def test_plans_without_a_pattern_are_refused(prepare):
    q, k, v = inputs(q_len=8)
    made = replace(spattn.plan(p.Causal(), 8), pattern=None)
    with pytest.raises(ValueError, match="plan: the reference backend needs plan.pattern"):
        prepare(Call.of(q, k, v), made)
    with pytest.raises(ValueError, match="pattern: expected a plan with a pattern"):
        dense_mask(made, 1, 1, 8, 8)
