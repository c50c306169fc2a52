"""Attacks on numbers: huge logits and non-finite values at hidden keys, on every instruction set."""

import functools

import numpy as np
import pytest

import spattn
from spattn import cpu

from .oracle import arrays, dense


@pytest.fixture(params=cpu.instruction_sets())
def isa(request, monkeypatch):
    """Plans and calls on the CPU use one instruction set after the other, as SPATTN_ISA says it for a process."""
    monkeypatch.setenv("SPATTN_ISA", request.param)
    _forget()
    yield request.param
    monkeypatch.undo()
    _forget()


def _forget():
    cpu._default_isa.cache_clear()
    spattn.clear_plan_cache()


@functools.cache
def huge_problems():
    """((dtype, scale, exponent), q, k, v, dense attention, lse of the reference) of finite logits up to 1e37."""
    found = []
    for case in [(t, s, e) for t in ("f4", "f8") for s in (None, 1 / 3, -0.7) for e in range(3, 38)]:
        dtype, scale, exponent = case
        q, k, v = np.zeros((3, 1, 1, 9, 128), dtype)
        q[..., 0], k[0, 0, :, 0] = 10 ** (exponent / 2), np.linspace(-1, 1, 9) * 10 ** (exponent / 2)
        v[:] = np.random.default_rng(exponent).standard_normal(v.shape)
        out, lse = spattn.attention(q, k, v, "full", scale=scale, backend="reference", return_lse=True)
        expected = dense(q, k, v, True, scale)
        assert abs(out - expected).max() < 1e-3, f"the reference backend itself: {case}"
        found.append((case, q, k, v, expected, lse))
    return found


def test_huge_logits(isa):
    """Finite logits up to 1e37, with scales that are no power of two: the backends agree with dense attention."""
    wrong = []
    for case, q, k, v, expected, expected_lse in huge_problems():
        out, lse = spattn.attention(q, k, v, "full", scale=case[1], backend="cpu", return_lse=True)
        if not (abs(out - expected).max() < 1e-3 and np.allclose(lse, expected_lse, rtol=1e-5)):
            wrong.append(case)
    assert not wrong


def test_values_nobody_sees(isa):
    """NaN and infinity at keys that no query may attend to: out, lse, dq, dk and dv keep every bit."""
    rng, changed = np.random.default_rng(0), dict.fromkeys(("out", "lse", "dq", "dk", "dv"), 0)
    for dtype in ("f4", "f8", "f2") * 25:
        tokens, head_dim = int(rng.integers(2, 150)), int(rng.choice([1, 8, 31, 64]))
        q, k, v, dout = arrays(tokens, dtype, 2, head_dim, 4)
        allowed = rng.random((2, tokens, tokens)) < rng.choice([0.05, 0.3, 0.8])
        hidden = rng.choice(tokens, 1 + tokens // 4, False)
        allowed[:, :, hidden] = False
        plain = results(q, k, v, dout, allowed)
        assert abs(plain[0] - dense(q, k, v, allowed)).max() < 0.02
        for value in (np.nan, np.inf):
            k2, v2 = k.copy(), v.copy()
            k2[:, :, hidden] = v2[:, :, hidden] = value
            for name, before, after in zip(changed, plain, results(q, k2, v2, dout, allowed), strict=True):
                changed[name] += before.tobytes() != after.tobytes()
    assert not any(changed.values()), changed


def results(q, k, v, dout, allowed):
    """Forward and backward: out, lse, dq, dk, dv."""
    out, lse = spattn.attention(q, k, v, allowed, return_lse=True)
    return out, lse, *spattn.attention_backward(dout, q, k, v, out, lse, allowed)
