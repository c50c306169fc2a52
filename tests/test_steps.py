"""Generation: calls that differ in the number of keys, and in where these lie, are computed by one prepared call."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import spattn
from spattn import cpu
from spattn import patterns as p
from spattn.planning.contract import cache as _cache
from spattn.testing import DTYPES, Expectation, at_protected_page, inputs

STREAMING = (p.Sinks(4) | p.SlidingWindow(150, 0)) & p.Causal()
LEFT_PADDED = p.PerBatch((p.SlidingWindow(90, 0), p.SlidingWindow(90, 0) - p.Sinks(170)))
BY_HEAD = p.PerHead((STREAMING, p.SlidingWindow(64, 0), STREAMING, p.Sinks(3)))
LENGTHS = 300, 301, 330, 299, 400, 401


@pytest.fixture(autouse=True)
def empty():
    spattn.clear_plan_cache()


@pytest.fixture
def prepared(monkeypatch):
    """The calls that the CPU backend is asked to prepare."""
    calls, own = [], cpu.prepare
    monkeypatch.setattr(cpu, "prepare", lambda call, plan: calls.append(call) or own(call, plan))
    return calls


def static(q_len=1, dtype="float32", heads_kv=2, **options):
    """q, and a cache that has room for more keys than there are: arrays of n keys are slices of it."""
    return inputs(2, 8, heads_kv, q_len=q_len, kv_len=LENGTHS[-1], head_dim=32, dtype=dtype, **options)


def step(q, k, v, kv_len, pattern, **options):
    return spattn.attention(q, k[:, :, :kv_len], v[:, :, :kv_len], pattern, return_lse=True, **options)


@pytest.mark.parametrize("q_len", [1, 4, 20])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", [STREAMING, LEFT_PADDED, BY_HEAD], ids=["streaming", "left padding", "by head"])
def test_steps(pattern, dtype, q_len, prepared):
    """Each is right, and has the bits that it would have if it were the first."""
    q, k, v = static(q_len, dtype)
    results = [step(q, k, v, kv_len, pattern) for kv_len in LENGTHS]
    assert len(prepared) == 1
    for kv_len, (out, lse) in zip(LENGTHS, results, strict=True):
        Expectation(pattern, q, k[:, :, :kv_len], v[:, :, :kv_len]).check(out, lse, f"{kv_len} keys:")
        spattn.clear_plan_cache()
        first = step(q, k, v, kv_len, pattern)
        assert first[0].tobytes() == out.tobytes() and first[1].tobytes() == lse.tobytes()


@pytest.mark.parametrize("heads_kv", [1, 8])
def test_keys_anywhere_in_memory(heads_kv, prepared):
    """A cache that is written anew in each step, one in another order, one that ends at a protected page, and one that
    is read backwards."""
    q, k, v = static(heads_kv=heads_kv)
    for kv_len in LENGTHS:
        expected = step(q, k, v, kv_len, STREAMING)
        own = k[:, :, :kv_len], v[:, :, :kv_len]
        for arrays in (
            map(np.ascontiguousarray, own),
            (np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for x in own),
            (at_protected_page(np.ascontiguousarray(x)) for x in own),
            (np.ascontiguousarray(x[:, :, ::-1, ::-1])[:, :, ::-1, ::-1] for x in own),
        ):
            out, lse = spattn.attention(q, *arrays, STREAMING, return_lse=True)
            assert np.array_equal(out, expected[0]) and np.array_equal(lse, expected[1])
    assert len(prepared) == 1


def test_tensors(prepared):
    torch = pytest.importorskip("torch")
    arrays = static(dtype="bfloat16")
    expected = [step(*arrays, kv_len, STREAMING) for kv_len in LENGTHS]
    q, k, v = (torch.from_numpy(x.astype(np.float32)).bfloat16() for x in arrays)
    for kv_len, (out, _) in zip(LENGTHS, expected, strict=True):
        assert np.array_equal(step(q, k, v, kv_len, STREAMING)[0].float().numpy(), out.astype(np.float32))
    assert len(prepared) == 2
    with torch.enable_grad():
        step(q.requires_grad_(), k, v, 320, STREAMING)[0].sum().backward()
    assert q.grad is not None


def test_a_thousand_steps_keep_one_call(prepared):
    q, k, v = (np.ones((1, 1, length, 4), np.float32) for length in (1, 2000, 2000))
    other = spattn.attention(q, k, v, p.SlidingWindow(9, 0))
    kept = len(_cache._calls)
    for kv_len in range(1000, 2000):
        step(q, k, v, kv_len, STREAMING)
    assert len(prepared) == 2 and len(_cache._calls) == kept + 1 and spattn.plan_cache_info().plans == 2
    assert np.array_equal(spattn.attention(q, k, v, p.SlidingWindow(9, 0)), other) and len(prepared) == 2


def test_short_sequences_have_calls_of_their_own(prepared):
    """Where both ends meet."""
    q, k, v = static()
    step(q, k, v, 300, STREAMING)
    for count, kv_len in enumerate((155, 154, 3), start=2):
        Expectation(STREAMING, q, k[:, :, :kv_len], v[:, :, :kv_len]).check(*step(q, k, v, kv_len, STREAMING))
        assert len(prepared) == count
    step(q, k, v, 156, STREAMING)
    assert len(prepared) == 4


def test_whatever_else_differs_is_prepared_for_itself(prepared):
    q, k, v = static()
    step(q, k, v, 300, STREAMING)
    others = [
        (q[:1], k[:1], v[:1]),
        (q[:, :6], k, v),
        (q, k[:, :1], v[:, :1]),
        (np.repeat(q, 2, axis=2), k, v),
        (q, k, v[..., :16]),
        tuple(x[..., :16] for x in (q, k, v)),
        tuple(x.astype(np.float64) for x in (q, k, v)),
        (q[:, ::-1], k, v),
    ]
    for number, arrays in enumerate(others, start=2):
        step(*arrays, 310, STREAMING)
        assert len(prepared) == number
    step(q, k, v, 311, STREAMING, backend="cpu")
    spattn.attention(q, k, v, STREAMING)
    step(q, k, v, 312, p.SlidingWindow(150, 0))
    assert len(prepared) == len(others) + 4


def test_arrays_that_do_not_fit_are_refused_as_ever():
    q, k, v = static()
    step(q, k, v, 300, STREAMING)
    with pytest.raises(ValueError, match=r"^v: expected shape \(2, 2, 301, 32\), got \(2, 2, 300, 32\)$"):
        spattn.attention(q, k[:, :, :301], v[:, :, :300], STREAMING, return_lse=True)
    with pytest.raises(ValueError, match=r"^k: expected shape \(batch, .*\) in layout 'bhsd', got \(2, 301, 32\)$"):
        spattn.attention(q, k[:, 0, :301], v[:, 0, :301], STREAMING, return_lse=True)
    with pytest.raises(TypeError, match="^v: expected dtype float32 like q, got float64$"):
        spattn.attention(q, k, v.astype(np.float64), STREAMING, return_lse=True)
    with pytest.raises(ValueError, match="^scale must be finite, got nan$"):
        step(q, k, v, 302, STREAMING, scale=float("nan"))


def test_more_keys_than_any_sequence_has():
    """No step computes what a first call refuses."""
    q, k = np.ones((1, 1, 1, 4), np.float32), np.broadcast_to(np.float32(1), (1, 1, 2**31, 4))
    step(q, k, k, 300, STREAMING)
    assert np.array_equal(step(q, k, k, 2**31 - 1, STREAMING)[0], q)
    with pytest.raises(ValueError, match=r"^kv_len: expected"):
        step(q, k, k, 2**31, STREAMING)


def test_threads_at_several_lengths(prepared):
    """They share what was prepared, and none sees another's length."""
    q, k, v = static()
    expected = [step(q, k, v, kv_len, STREAMING)[0] for kv_len in LENGTHS]
    wrong = []

    def work():
        for _ in range(50):
            for kv_len, out in zip(LENGTHS, expected, strict=True):
                if not np.array_equal(step(q, k, v, kv_len, STREAMING)[0], out):
                    wrong.append(kv_len)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(prepared) == 1


def test_hidden_values_have_no_influence():
    """Between the ends, where a step before has seen them; and at allowed keys they reach the result."""
    q, k, v = static()
    step(q, k, v, 300, STREAMING)
    expected = step(q, k, v, 350, STREAMING)
    k[:, :, 4:199], v[:, :, 4:199] = np.nan, np.inf
    assert all(map(np.array_equal, step(q, k, v, 350, STREAMING), expected))
    k[:, :, 4:199] = v[:, :, 4:199] = 0
    v[:, 0, 349] = np.nan
    out, _ = step(q, k, v, 350, STREAMING)
    assert np.isnan(out[:, :4]).all() and np.isfinite(out[:, 4:]).all()


def test_a_plan_is_for_one_length():
    q, k, v = static()
    plan = spattn.plan_for(STREAMING, q, k[:, :, :300], v[:, :, :300], backend="cpu")
    assert all(map(np.array_equal, step(q, k, v, 300, plan), step(q, k, v, 300, STREAMING)))
    with pytest.raises(ValueError, match="^pattern: expected a plan for lengths 1 × 301, got a plan for 1 × 300$"):
        step(q, k, v, 301, plan)


def test_gradients_at_several_lengths():
    """The backward is prepared for each length."""
    q, k, v = inputs(1, 4, 2, q_len=3, kv_len=400, head_dim=16, dtype="float64")
    for kv_len in (300, 301, 300):
        own = k[:, :, :kv_len], v[:, :, :kv_len]
        out, lse = spattn.attention(q, *own, STREAMING, return_lse=True)
        results = [
            spattn.attention_backward(out, q, *own, out, lse, STREAMING, backend=backend)
            for backend in ("cpu", "reference")
        ]
        for actual, expected in zip(*results, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-12)
