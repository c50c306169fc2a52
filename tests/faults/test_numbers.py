"""docs/faults.rst, "Numbers": each test is named by its number there."""

import numpy as np
import pytest

import spattn
from spattn import cpu, reference
from spattn import patterns as p
from spattn.testing import (
    DTYPES,
    Expectation,
    assert_within_bound,
    dense_mask,
    eps,
    inputs,
    naive,
    naive_gradients,
    random,
)

SOME_ROWS_EMPTY = [
    p.Sinks(0),
    p.Documents((30, 20)),
    p.Mask(np.arange(60)[:, None] * np.ones(60) % 3 == 1),
    p.Causal() - p.SlidingWindow(20),
    p.Columns(7, 2, 3) & p.SlidingWindow(2, 0),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", SOME_ROWS_EMPTY, ids=repr)
def test_fault_01_row_without_keys(forward, pattern, dtype):
    q, k, v = inputs(2, 2, 1, 60, 60, 16, dtype=dtype)
    out, lse = forward(q, k, v, pattern)
    empty = ~dense_mask(pattern, 2, 2, 60, 60).any(axis=-1)
    assert empty.any()
    assert (out[empty] == 0).all() and (lse[empty] == -np.inf).all()
    assert np.isfinite(lse[~empty]).all() and not np.isnan(out.astype(np.float64)).any()


def test_fault_01_row_without_keys_has_zero_gradients():
    q, k, v = inputs(1, 2, 1, 60, 60, 16)
    pattern = SOME_ROWS_EMPTY[2]
    dq, dk, dv = reference.gradients(random(q.shape, seed=9), q, k, v, pattern)
    assert (dq[:, :, ::3] == 0).all() and np.isfinite(dk).all() and np.isfinite(dv).all() and dk.any() and dv.any()


UNSEEN = [p.Causal(), p.DilatedWindow(3, 3, 5), p.strided(9), p.Documents((40, 20))]


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", UNSEEN, ids=repr)
def test_fault_02_values_at_keys_that_are_not_allowed(forward, pattern, dtype, poison):
    q, k, v = inputs(1, 2, 2, 71, 71, 16, dtype=dtype)
    expectation = Expectation(pattern, q, k, v)
    mask = dense_mask(pattern, 1, 1, 71, 71)[0, 0]
    for row in (0, 30, 70):
        poisoned = [np.where(mask[row][:, None], x, x.dtype.type(poison)) for x in (k, v)]
        out, lse = forward(q, *poisoned, pattern)
        seen = (slice(None), slice(None), mask[:, ~mask[row]].any(axis=1))  # rows that do attend to a poisoned key
        clean_out, clean_lse = (x.copy() for x in forward(q, k, v, pattern))
        out[seen], lse[seen] = clean_out[seen], clean_lse[seen]
        expectation.check(out, lse)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 47, 65, 100])
def test_fault_02_values_in_padding(forward, dtype, length):
    """What lies beyond the arrays' ends in memory: queries, keys and features."""
    q, k, v = inputs(1, 2, 1, length, length, 20, 12, dtype=dtype)
    framed = []
    for x in (q, k, v):
        frame = np.full((1, x.shape[1], length + 90, x.shape[3] + 50), np.nan, x.dtype)
        framed.append(frame[:, :, 5 : 5 + length, 3 : 3 + x.shape[3]])
        framed[-1][...] = x
    for a, b in zip(forward(*framed, p.Causal()), forward(q, k, v, p.Causal()), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", [p.Causal(), p.SlidingWindow(9, 4), p.strided(9), p.BigBird(8)], ids=repr)
def test_fault_03_nan_at_an_allowed_key(forward, pattern, dtype):
    q, k, v = inputs(1, 2, 2, 130, 130, 16, dtype=dtype)
    mask = dense_mask(pattern, 1, 2, 130, 130)[0]
    for key in (0, 64, 129):
        for which in (1, 2):
            poisoned = [x.copy() for x in (q, k, v)]
            poisoned[which][:, :, key] = np.nan
            out, lse = (x[0].astype(np.float64) for x in forward(*poisoned, pattern))
            assert np.array_equal(np.isnan(out).all(axis=-1), mask[:, :, key])
            assert np.array_equal(np.isnan(out).any(axis=-1), mask[:, :, key])
            assert np.array_equal(np.isnan(lse), mask[:, :, key] & (which == 1))


def test_fault_03_nan_in_one_feature_of_a_value(forward):
    q, k, v = inputs(q_len=70, head_dim=16)
    v[0, 0, 40, 3] = np.nan
    out, _ = forward(q, k, v, p.Causal())
    expected = np.zeros((70, 16), dtype=bool)
    expected[40:, 3] = True
    assert np.array_equal(np.isnan(out[0, 0]), expected)


NAN_QUERIES = [p.Full(), p.SlidingWindow(9, 4), p.strided(9), p.longformer(8, global_tokens=2)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", NAN_QUERIES, ids=repr)
def test_fault_03_nan_in_a_query(forward, pattern, dtype):
    """Exactly its row is NaN; the others keep their bits, those of the same tile too."""
    q, k, v = inputs(1, 4, 2, 130, 2100, 9, 7, dtype=dtype)  # long lists have pieces, which are merged
    clean = forward(q, k, v, pattern)
    for row in (0, 1, 64, 129):
        q_nan = q.copy()
        q_nan[0, 1, row, 5] = np.nan
        for got, expected in zip(forward(q_nan, k, v, pattern), clean, strict=True):
            assert np.isnan(got[0, 1, row].astype(np.float64)).all()
            got[0, 1, row] = expected[0, 1, row]
            assert np.array_equal(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", NAN_QUERIES, ids=repr)
@pytest.mark.parametrize("isa", cpu.instruction_sets())
def test_fault_03_gradients_of_a_nan_query(isa, pattern, dtype):
    """NaN: the whole of dq in that row, dk and dv of the keys that it attends to. All others keep their bits."""
    q, k, v = inputs(1, 4, 2, 130, 2100, 9, 7, dtype=dtype)
    dout = random((*q.shape[:3], 7), dtype, seed=9)
    plan = spattn.plan_for(pattern, q, k, v, backend="cpu")

    def gradients(q):
        return cpu.backward(dout, q, k, v, *cpu.forward(q, k, v, plan, 0.3, isa=isa), plan, 0.3, isa=isa)

    clean = gradients(q)
    for row in (0, 1, 64, 129):
        q_nan = q.copy()
        q_nan[0, 1, row, 5] = np.nan
        keys = dense_mask(pattern, 1, 4, 130, 2100)[0, 1, row]
        touched = (0, 1, np.arange(130) == row), (0, 0, keys), (0, 0, keys)  # heads 0 and 1 share keys and values
        for got, expected, where in zip(gradients(q_nan), clean, touched, strict=True):
            assert np.isnan(got[where].astype(np.float64)).all()
            got[where] = expected[where]
            assert np.array_equal(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fault_04_smallest_number_mixed_with_minus_infinity(forward, dtype):
    """Logits -inf and finfo.min: a row of the former alone is empty, one finite logit however small carries the row."""
    from ml_dtypes import finfo

    q, k, v = inputs(q_len=8, head_dim=8, dtype=dtype)
    q[...], k[...] = 0, 0
    q[..., 0] = 1
    k[..., 0] = -np.inf
    k[0, 0, 3, 0] = finfo(dtype if dtype != "bfloat16" else k.dtype).min
    out, lse = forward(q, k, v, p.Causal(), 1.0)
    assert not np.isnan(out.astype(np.float64)).any() and not np.isnan(lse).any()
    assert (out[0, 0, :3] == 0).all() and (lse[0, 0, :3] == -np.inf).all()
    assert np.array_equal(out[0, 0, 3:], np.broadcast_to(v[0, 0, 3], (5, 8)))
    np.testing.assert_allclose(lse[0, 0, 3:].astype(np.float64), float(k[0, 0, 3, 0]), rtol=1e-6)


@pytest.mark.parametrize("sign", [1, -1])
def test_fault_05_logits_of_ten_thousand_in_float16(forward, sign):
    q, k, v = inputs(1, 2, 1, 90, 90, 64, dtype="float16")
    q, k = q * np.float16(100 * sign), k * np.float16(100)
    out, lse = forward(q, k, v, p.Causal())
    assert np.abs(lse).max() > 1e4 and np.isfinite(out.astype(np.float32)).all()
    expectation = Expectation(p.Causal(), *(x.astype(np.float32) for x in (q, k, v)))
    for got, want, low in zip((out, lse), expectation.reference, expectation.naive, strict=True):
        assert_within_bound(got, want, low, np.float16)


LARGE = 9e4  # in size: beyond the largest float16, where neighbours in float32 are 2⁻⁷ apart


def close_race(dtype, head_dim, sign, seed=0):
    """dout, q, k, v with logits of ±LARGE that differ by what one feature of a normal size adds: no key wins alone."""
    q, k, v = inputs(1, 2, 1, 90, 90, head_dim, dtype=dtype, seed=seed)
    q[..., 1:], k[..., 1:] = sign * (LARGE / head_dim**0.5) ** 0.5, (LARGE / head_dim**0.5) ** 0.5
    q[..., 0] = head_dim**0.5
    return random(q.shape, dtype, seed=9), q, k, v


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fault_05_close_races_of_large_logits(forward, dtype, head_dim, sign):
    """The budget is that of float32 for all dtypes but float64: logits are never rounded to float16."""
    _, q, k, v = close_race(dtype, head_dim, sign)
    out, lse = forward(q, k, v, p.Causal())
    wide = np.promote_types(q.dtype, np.float32)
    expectation = Expectation(p.Causal(), *(x.astype(wide) for x in (q, k, v)))
    assert np.abs(expectation.reference[1]).min() > 8e4 and np.isfinite(out.astype(wide)).all()
    weights = naive(*(x.astype(np.float64) for x in (q, k, np.eye(90)[None, None])), np.tri(90, dtype=bool))[0]
    assert weights[..., 1:, :].max(axis=-1).mean() < 0.9, "a race"
    for got, want, low in zip((out, lse), expectation.reference, expectation.naive, strict=True):
        assert_within_bound(got, want, low, q.dtype)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", cpu.instruction_sets())
def test_fault_05_gradients_of_large_logits(isa, dtype, sign):
    """A weight is exp(logit - lse): it is as wrong as these two are rounded, and a gradient as its weights."""
    args = dout, q, k, v = close_race(dtype, 64, sign)
    plan, scale = spattn.plan_for(p.Causal(), q, k, v, backend="cpu"), 0.125
    got = cpu.backward(*args, *cpu.forward(q, k, v, plan, scale, isa=isa), plan, scale, isa=isa)
    exact = [x.astype(np.float64) for x in args]
    expected = naive_gradients(*exact, np.tri(90, dtype=bool))
    wide = np.promote_types(q.dtype, np.float32)
    off = np.expm1(4 * eps(wide) * LARGE)  # the sum, the scaled logit, lse and their difference are rounded
    bounds = largest_gradients(*exact, np.tri(90, dtype=bool), scale)
    for name, x, want, bound in zip(("dq", "dk", "dv"), got, expected, bounds, strict=True):
        error = np.abs(x.astype(np.float64) - want)
        assert (error <= (off + eps(q.dtype)) * bound).all(), f"{name}: {(error / bound).max():.3g}"


def largest_gradients(dout, q, k, v, mask, scale):
    """The formulas of the gradients with every term's size instead of the term: what its relative error adds up to."""
    do, qq, kk, vv = (np.abs(x) for x in (dout, q, k, v))
    weights = naive(q, k, np.broadcast_to(np.eye(k.shape[2]), (*k.shape[:3], k.shape[2])), mask, scale)[0]
    products = do @ vv.swapaxes(2, 3)
    ds = scale * weights * (products + (weights * products).sum(axis=3, keepdims=True))
    over_group = (x.sum(axis=1, keepdims=True) for x in (ds.swapaxes(2, 3) @ qq, weights.swapaxes(2, 3) @ do))
    return ds @ kk, *over_group


def test_fault_06_scale_zero_is_uniform(forward):
    q, k, v = inputs(1, 1, 1, 50, 50, 8)
    out, lse = forward(q, k, v, p.Causal(), 0.0)
    count = np.arange(1, 51)
    np.testing.assert_allclose(out[0, 0], v[0, 0].cumsum(axis=0) / count[:, None], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse[0, 0], np.log(count), rtol=1e-6)


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf])
def test_fault_06_scale_must_be_finite(scale):
    with pytest.raises(ValueError, match="scale must be finite, got"):
        spattn.attention(*inputs(), scale=scale)


@pytest.fixture
def nan_in_fresh_memory(monkeypatch):
    """Call it, and arrays that NumPy makes from then on hold NaN instead of whatever was there before."""

    def poisoned(make):
        def fresh(*args, **kwargs):
            array = make(*args, **kwargs)
            if array.dtype.kind == "f" or array.dtype.name == "bfloat16":
                array[...] = np.nan
            elif array.dtype == np.uint8:  # the kernels' scratch: all bits set are a NaN of any dtype
                array[...] = 255
            return array

        return fresh

    def start():
        for name in ("empty", "empty_like"):
            monkeypatch.setattr(np, name, poisoned(getattr(np, name)))
        assert np.isnan(np.empty(3)).all()

    return start


# At 70 × 3000 long lists: workspace and merges too.
LONG_LISTS = [p.Full(), p.Documents((40, 2000)), p.longformer(8, global_tokens=3)]


def test_fault_07_nan_in_output_buffers(forward, nan_in_fresh_memory):
    q, k, v = inputs(1, 1, 1, 70, 3000, 16)
    expected = [forward(q, k, v, pattern) for pattern in LONG_LISTS]
    nan_in_fresh_memory()
    for pattern, before in zip(LONG_LISTS, expected, strict=True):
        for a, b in zip(forward(q, k, v, pattern), before, strict=True):
            assert np.array_equal(a, b)


@pytest.mark.parametrize("isa", cpu.instruction_sets())
def test_fault_07_nan_in_gradient_buffers(isa, nan_in_fresh_memory):
    q, k, v = inputs(1, 2, 1, 70, 3000, 16)  # two heads share sums of dk and dv
    plans = [spattn.plan_for(pattern, q, k, v, backend="cpu") for pattern in LONG_LISTS]
    calls = [(q, q, k, v, *cpu.forward(q, k, v, plan, 0.3, isa=isa), plan, 0.3) for plan in plans]
    expected = [cpu.backward(*call, isa=isa) for call in calls]
    nan_in_fresh_memory()
    for call, before in zip(calls, expected, strict=True):
        for a, b in zip(cpu.backward(*call, isa=isa), before, strict=True):
            assert np.array_equal(a, b)


def test_fault_07_garbage_in_workspace(python):
    """glibc fills every block that malloc returns with 0xFE (about -1.7e38 in float32)."""
    source = """
import hashlib, numpy as np, spattn
import spattn
from spattn import cpu, patterns as p
from spattn.testing import inputs
q, k, v = inputs(1, 2, 1, 70, 3000, 20)
for isa in cpu.instruction_sets():
    for pattern in (p.Full(), p.Documents((40, 2000)), p.longformer(8, global_tokens=3)):
        plan = spattn.plan_for(pattern, q, k, v, backend="cpu")
        out, lse = cpu.forward(q, k, v, plan, 0.3, isa=isa)
        gradients = cpu.backward(q, q, k, v, out, lse, plan, 0.3, isa=isa)
        print(isa, *(hashlib.sha256(x.tobytes()).hexdigest() for x in (out, lse, *gradients)))
"""
    assert python(source, MALLOC_PERTURB_="1") == python(source, MALLOC_PERTURB_="0") != ""


FPU_MODE = """
import ctypes, ctypes.util, platform, threading
libm = ctypes.CDLL(ctypes.util.find_library("m"))

def mode():
    if platform.machine() == "x86_64":
        environment = (ctypes.c_uint32 * 8)()
        assert libm.fegetenv(environment) == 0
        return environment[0] & 0xFFFF, environment[7] & ~0x3F, libm.fegetround()  # x87 control, MXCSR less its flags
    return (libm.fegetround(),)

before = mode()
import spattn
assert mode() == before, "import"
import numpy as np
from spattn import cpu, patterns
tiny = np.float32(1e-40)
q, k, v = (np.full((1, 4, 400, 16), tiny, np.float32) for _ in range(3))
for isa in cpu.instruction_sets():
    plan = spattn.plan_for(patterns.Causal(), q, k, v, backend="cpu")
    out, lse = cpu.forward(q, k, v, plan, 1.0, isa=isa)
    assert mode() == before, isa
    _, _, dv = cpu.backward(q, q, k, v, out, lse, plan, 1.0, isa=isa)
    assert mode() == before, isa
    assert np.float32(1e-20) * np.float32(1e-20) > 0, "flushes denormals"
    assert (np.abs(out - tiny) <= 1e-43).all(), (isa, out.min(), out.max())
    to_first = tiny * (1 / np.arange(1, 401)).sum()  # every query i gives it 1 / (i + 1) of its gradient
    assert (np.abs(dv[:, :, 0] - to_first) <= 1e-42).all(), (isa, dv[:, :, 0], to_first)
in_thread = []
def call():
    first = mode()
    spattn.attention_backward(q, q, k, v, *spattn.attention(q, k, v, "causal", return_lse=True), "causal")
    in_thread.extend([first, mode()])
thread = threading.Thread(target=call)
thread.start(); thread.join()
assert in_thread == [before, before], in_thread
print("unchanged")
"""


def test_fault_08_denormals_and_the_fpu_mode(python):
    assert python(FPU_MODE) == "unchanged\n"
