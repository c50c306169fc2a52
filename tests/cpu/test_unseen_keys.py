"""What stands at keys that a row may not attend to changes no bit of its results, whatever else is there."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import spattn
from spattn import Tiling, cpu, patterns, plan
from spattn.testing import DTYPES, inputs, random

ISAS = cpu.instruction_sets()
NAMES = ("out", "lse", "dq", "dk", "dv")
STRANGE = [np.nan, np.inf, -np.inf, 3e38, -3e38]


def results(dout, q, k, v, made, scale, isa):
    """Bytes of out, lse and the gradients."""
    with np.errstate(all="ignore"):  # NumPy warns of NaN when it casts bfloat16
        out, lse = cpu.forward(q, k, v, made, scale, isa=isa)
        found = out, lse, *cpu.backward(dout, q, k, v, out, lse, made, scale, isa=isa)
    return [x.tobytes() for x in found]


def put(x, keys, value):
    """A copy with `value`, as far as the dtype can hold it, in one feature of some keys."""
    copy = x.copy()
    with np.errstate(over="ignore"):
        copy[:, :, keys, 0] = value
    return copy


@st.composite
def problems(draw, dtype):
    """(dout, q, k, v, plan, scale, hidden): random pairs, keys that nobody sees, strange numbers at some others."""
    heads_kv, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    q_len, kv_len = draw(st.sampled_from([1, 3, 8, 17, 65, 150])), draw(st.sampled_from([5, 64, 130, 700]))
    q, k, v = inputs(
        1,
        heads_kv * group,
        heads_kv,
        q_len,
        kv_len,
        draw(st.sampled_from([1, 8, 31, 32, 64])),
        draw(st.sampled_from([1, 16, 31, 64])),
        dtype=dtype,
        seed=draw(st.integers(0, 2**32 - 1)),
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    hidden = rng.permutation(kv_len)[: 1 + kv_len // 4]
    allowed = rng.random((q_len, kv_len)) < draw(st.sampled_from([0.05, 0.3, 0.8]))
    allowed[:, hidden] = False
    seen = np.setdiff1d(np.arange(kv_len), hidden)
    k, v = (put(x, rng.permutation(seen)[: draw(st.integers(0, 3))], draw(st.sampled_from(STRANGE))) for x in (k, v))
    q[..., 0] = draw(st.sampled_from([1, -1]))  # so that an infinite key gives infinite logits of one sign
    with np.errstate(invalid="ignore"):
        v *= v.dtype.type(draw(st.sampled_from([1, 1e-5, 1e-38])))  # the last one lets sums underflow
    made = plan(
        patterns.Mask(allowed),
        q_len,
        kv_len,
        tiling=Tiling(workers=draw(st.sampled_from([1, 8])), tile=draw(st.sampled_from([(48, 64), (64, 64)]))),
        heads=heads_kv * group,
    )
    scale = draw(st.sampled_from([0.3, -0.7, 0.0]))
    return random((*q.shape[:3], v.shape[3]), dtype, seed=9), q, k, v, made, scale, hidden


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=max(10, settings.default.max_examples // 4))
@given(data=st.data())
def test_any_numbers_at_any_hidden_keys(isa, dtype, data):
    dout, q, k, v, made, scale, hidden = data.draw(problems(dtype))
    expected = results(dout, q, k, v, made, scale, isa)
    value, where = data.draw(st.sampled_from([*STRANGE, -1.0])), data.draw(st.sampled_from(["k", "v", "both"]))
    k2, v2 = (put(x, hidden, value) if where in (name, "both") else x for name, x in (("k", k), ("v", v)))
    for name, got, want in zip(NAMES, results(dout, q, k2, v2, made, scale, isa), expected, strict=True):
        assert got == want, name


FAMILIES = {  # pattern, queries, keys
    "windows": (patterns.SlidingWindow(20, 10), 90, 90),
    "merges": (patterns.strided(9), 90, 90),
    "long lists": (patterns.SlidingWindow(2000, 0), 70, 2100),
    "decode": (patterns.Causal() & patterns.GlobalTokens(5) | patterns.SlidingWindow(30, 0), 3, 300),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_rows_that_do_not_see_a_key_keep_their_bits(isa, dtype, family):
    """NaN and infinities at a key that some rows see, others of the same tiles do not, concern exactly the former."""
    pattern, q_len, kv_len = FAMILIES[family]
    q, k, v = inputs(1, 4, 2, q_len, kv_len, 24, 16, dtype=dtype)
    made = spattn.plan_for(pattern, q, k, v, backend="cpu")

    def run(k, v):
        with np.errstate(all="ignore"):
            out, lse = cpu.forward(q, k, v, made, 0.3, isa=isa)
            return out, lse[..., None], cpu.backward(q[..., :16], q, k, v, out, lse, made, 0.3, isa=isa)[0]

    clean = run(k, v)
    mask = pattern.bind(q_len, kv_len).allows(np.arange(kv_len - q_len, kv_len)[:, None], np.arange(kv_len))
    for key in (kv_len - q_len // 2, kv_len - 1):
        rows = mask[:, key]
        assert rows.any() and not rows.all()
        for strange_k, strange_v, touched in ((np.nan, 1, (0, 1, 2)), (1, np.nan, (0, 2)), (1, np.inf, (0, 2))):
            found = run(put(k, key, strange_k), put(v, key, strange_v))
            for x, before in zip(found, clean, strict=True):
                assert x[:, :, ~rows].tobytes() == before[:, :, ~rows].tobytes()
            for at in touched:
                assert not np.isfinite(found[at][:, :, rows, 0].astype(float)).any()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("isa", ISAS)
def test_signs_at_hidden_keys_do_not_reach_a_zero(isa, dtype):
    """A sum whose terms all underflow below 0 is -0, which 0 · 1 turns to 0 and 0 · -1 does not."""
    tiny, hidden, even = np.finfo(dtype).smallest_subnormal, 59, np.arange(60) % 2 == 0  # the last key
    q, k, v = (np.zeros((1, 1, 60, 8), dtype) for _ in range(3))
    allowed = np.ones((60, 60), bool)
    allowed[even, hidden] = False  # odd rows, next to them, see it
    made = spattn.plan_for(patterns.Mask(allowed), q, k, v, backend="cpu")
    q[..., 0], k[:, :, 0, 0] = 1, 8  # key 0 has nearly all of the weight
    v[...], v[:, :, 0] = -tiny, -0.0
    found = []
    for sign in (1, -1):
        v[:, :, hidden] = sign
        found.append(cpu.forward(q, k, v, made, 1.0, isa=isa)[0][:, :, even].tobytes())
    assert found[0] == found[1]
