"""docs/faults.rst, "Shapes and memory" 9-20: each test is named by its number there."""

import re

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import spattn
from spattn import cpu, reference
from spattn import patterns as p
from spattn.testing import (
    DTYPES,
    LAYOUTS,
    Expectation,
    dense_mask,
    inputs,
    naive_gradients,
    random,
)


def attend(*args, **options):
    return spattn.attention(*args, return_lse=True, **options)


# -- 9, 10: sizes beyond 32 and 16 bits --------------------------------------------------------------------------------


def test_fault_09_more_than_two_to_the_31_elements(forward):
    """2³² elements of K and V without the memory: all tokens share one row."""
    kv_len = 1 << 24
    q, tail_k, tail_v = inputs(1, 1, 1, 4, 1, 256)
    k, v = (np.broadcast_to(x, (1, 1, kv_len, 256)) for x in (tail_k, tail_v))
    assert k.size > 2**31
    pattern = p.SlidingWindow(100, 0)
    out, lse = forward(q, k, v, pattern)
    small = [np.broadcast_to(x, (1, 1, 104, 256)) for x in (tail_k, tail_v)]
    Expectation(pattern, q, *small).check(out, lse)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_fault_09_stride_products_beyond_two_to_the_31(forward, dtype):
    """Heads 2³¹ elements apart; the system gives memory only to the pages that are written."""
    q, k, v = inputs(1, 2, 2, 70, 70, 8, dtype=dtype)
    store = np.zeros((1 << 31) + k[0, 0].size + 64, k.dtype)
    far = as_strided(store, k.shape, (0, store.itemsize << 31, 8 * store.itemsize, store.itemsize))
    far[...] = k
    for a, b in zip(forward(q, far, v, p.Causal()), forward(q, k, v, p.Causal()), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("isa", cpu.instruction_sets())
def test_fault_09_more_than_two_to_the_31_elements_of_queries(isa):
    """All but the last hundred rows stand before the first key."""
    q, k, v = inputs(1, 1, 1, 1, 100, 256, 1, dtype="float16")
    many, few = (np.broadcast_to(q, (1, 1, rows, 256)) for rows in ((1 << 23) + 7, 100))
    assert many.size > 2**31
    out, lse = cpu.forward(many, k, v, spattn.plan_for(p.Causal(), many, k, v, backend="cpu"), 0.1, isa=isa)
    assert not out[:, :, :-100].any() and (lse[:, :, :-100] == -np.inf).all()
    Expectation(p.Causal(), few, k, v, 0.1).check(out[:, :, -100:], lse[:, :, -100:])


def far_apart(x, axis, sign):
    """A copy whose entries along an axis are at addresses that only 64 bits can tell: their last is 2³¹ elements and
    more behind the first, or before it. The system gives memory only to the pages that are written."""
    step = sign * (-(-(1 << 31) // (x.shape[axis] - 1)) + 5)
    strides = list(np.empty(x.shape, x.dtype).strides)
    room = np.zeros((x.shape[axis] - 1) * abs(step) + x.size, x.dtype)
    strides[axis] = step * x.itemsize
    first = room[(x.shape[axis] - 1) * abs(step) if sign < 0 else 0 :]
    far = as_strided(first, x.shape, strides)
    far[...] = x
    return far


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["dout", "q", "k", "v", "out", "lse"])
def test_fault_09_entries_beyond_two_to_the_31(name, axis, sign):
    """Every argument of both passes, along every axis, by every instruction set."""
    q, k, v = inputs(2, 4, 2, 7, 7, 8, dtype="float16")
    dout, plan = random(q.shape, "float16", seed=5), spattn.plan_for(p.Causal(), q, k, v, backend="cpu")
    for isa in cpu.instruction_sets():
        out, lse = cpu.forward(q, k, v, plan, 0.3, isa=isa)
        plain = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
        far = plain | {name: far_apart(plain[name], min(axis, plain[name].ndim - 1), sign)}
        results = [
            (*cpu.forward(a["q"], a["k"], a["v"], plan, 0.3, isa=isa), *cpu.backward(*a.values(), plan, 0.3, isa=isa))
            for a in (plain, far)
        ]
        for a, b in zip(*results, strict=True):
            assert np.array_equal(a, b)


@pytest.mark.parametrize("batch, heads", [(65537, 1), (1, 65537)])
def test_fault_10_batch_or_heads_beyond_65536(forward, batch, heads):
    q, k, v = inputs(batch, heads, 1, 2, 3, 8)
    out, lse = forward(q, k, v, p.Causal())
    for b, h in ((0, 0), (batch - 1, heads - 1), (batch // 2, heads // 2)):
        one = q[b : b + 1, h : h + 1], k[b : b + 1], v[b : b + 1]
        Expectation(p.Causal(), *one).check(out[b : b + 1, h : h + 1], lse[b : b + 1, h : h + 1])
    assert np.isfinite(out).all() and np.isfinite(lse).all()


@pytest.mark.slow
@pytest.mark.parametrize("batch, heads", [(65537, 1), (1, 65537)])
def test_fault_10_gradients_of_batch_or_heads_beyond_65536(unchecked_plans, batch, heads):
    q, k, v = inputs(batch, heads, heads, 2, 3, 8)
    dout = random(q.shape, seed=5)
    got = spattn.attention_backward(dout, q, k, v, *attend(q, k, v, p.Causal()), p.Causal())
    exact = naive_gradients(*(x.astype(np.float64) for x in (dout, q, k, v)), dense_mask(p.Causal(), 1, 1, 2, 3))
    for a, b in zip(got, exact, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


# -- 11: nothing to do -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["full", "causal", p.BigBird(4), p.longformer(4, global_tokens=2)], ids=str)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(
    "batch, heads, q_len, kv_len", [(0, 2, 5, 5), (2, 0, 5, 5), (2, 2, 0, 5), (2, 2, 5, 0), (2, 2, 0, 0), (0, 0, 0, 0)]
)
def test_fault_11_zero_sizes(backend, pattern, batch, heads, q_len, kv_len):
    q, k, v = inputs(batch, heads, heads, q_len, kv_len, 8, 4)
    out, lse = attend(q, k, v, pattern, backend=backend)
    assert out.shape == (batch, heads, q_len, 4) and lse.shape == (batch, heads, q_len)
    assert (out == 0).all() and (lse == -np.inf).all()


# -- 12, 13, 14: memory of any shape -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fault_12_13_14_strides_misaligned_and_read_only(layout, dtype):
    laid = inputs(2, 4, 2, 33, 45, 24, 8, dtype=dtype, layout=layout)
    before = [x.copy() for x in laid]
    out, lse = attend(*laid, p.SlidingWindow(9, 3))
    for x, y in zip(laid, before, strict=True):
        assert np.array_equal(x, y), "inputs are left alone"
    plain = [np.ascontiguousarray(x) for x in laid]
    for a, b in zip(attend(*plain, p.SlidingWindow(9, 3)), (out, lse), strict=True):
        assert np.array_equal(a, b)
    Expectation(p.SlidingWindow(9, 3), *plain).check(out, lse)
    assert out.flags.writeable and out.flags.owndata | (out.base is not None)


def test_layouts_are_what_they_say():
    for dtype in DTYPES:
        made = {name: random((2, 3, 6, 8), dtype, layout=name) for name in LAYOUTS}
        assert {x.shape for x in made.values()} == {(2, 3, 6, 8)} and len({x.dtype for x in made.values()}) == 1
        assert all(stride < 0 for stride in made["negative"].strides)
        assert made["broadcast_heads"].strides[1] == made["broadcast_tokens"].strides[2] == 0
        assert made["overlapping"].strides[2] == made["overlapping"].itemsize
        assert made["misaligned"].ctypes.data % 16 and made["misaligned"].ctypes.data % made["misaligned"].itemsize == 0
        assert made["unaligned"].ctypes.data % 2 and not made["unaligned"].flags.aligned
        assert not made["read_only"].flags.writeable


# -- 15, 16: lengths ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("q_len, kv_len", [(1, 1), (1, 90), (30, 90), (90, 30), (65, 64), (64, 65), (90, 1)])
def test_fault_15_causal_with_unequal_lengths_is_bottom_right(forward, q_len, kv_len):
    i, j = np.ogrid[:q_len, :kv_len]
    expected = j <= i + kv_len - q_len
    assert np.array_equal(dense_mask(p.Causal(), 1, 1, q_len, kv_len)[0, 0], expected)
    q, k, v = inputs(1, 2, 2, q_len, kv_len, 16)
    out, lse = forward(q, k, v, p.Causal())
    Expectation(p.Mask(expected), q, k, v).check(out, lse)


LENGTHS = [1, 2, 47, 48, 49, 63, 64, 65, 95, 97, 127, 128, 129, 193]
RAGGED = [p.Full(), p.Causal(), p.DilatedWindow(5, 5, 3), p.strided(16)]


@pytest.mark.parametrize("length", LENGTHS)
def test_fault_16_lengths_that_are_not_multiples_of_a_tile(forward, length):
    for pattern in RAGGED:
        for q_len in {length, max(1, length - 5)}:
            q, k, v = inputs(1, 1, 1, q_len, length, 16)
            Expectation(pattern, q, k, v).check(*forward(q, k, v, pattern))


@pytest.mark.parametrize("dtype, tolerance", [("float64", 1e-11), ("float32", 1e-4)])
@pytest.mark.parametrize("length", LENGTHS)
def test_fault_16_gradients(length, dtype, tolerance):
    """Every instruction set against the oracle, and that against the formula; budgets are for tests/cpu."""
    for pattern in RAGGED:
        for q_len in {length, max(1, length - 5)}:
            q, k, v = inputs(1, 2, 1, q_len, length, 16, dtype=dtype)
            dout, plan = random(q.shape, dtype, seed=5), spattn.plan_for(pattern, q, k, v, backend="cpu")
            wide = [x.astype(np.float64) for x in (dout, q, k, v)]
            expected = reference.gradients(*wide, pattern)
            for a, b in zip(expected, naive_gradients(*wide, dense_mask(pattern, 1, 2, q_len, length)), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
            for isa in cpu.instruction_sets():
                got = cpu.backward(dout, q, k, v, *cpu.forward(q, k, v, plan, 0.25, isa=isa), plan, 0.25, isa=isa)
                for a, b in zip(got, expected, strict=True):
                    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=isa)


# -- 19, 20: types and shapes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.int32, np.int8, np.complex64, object, bool, "float128", "datetime64[s]", "U3"])
def test_fault_19_wrong_dtype(dtype):
    good = inputs()
    for n, name in enumerate("qkv"):
        bad = list(good)
        bad[n] = np.zeros(good[n].shape, dtype)
        with pytest.raises(TypeError, match=f"^{name}: expected"):
            spattn.attention(*bad)


def test_fault_19_mixed_dtypes_are_not_upcast():
    q, k, v = inputs()
    with pytest.raises(TypeError, match="^k: expected dtype float32 like q, got float64"):
        spattn.attention(q, k.astype(np.float64), v)
    with pytest.raises(TypeError, match="^v: expected dtype float32 like q, got float16"):
        spattn.attention(q, k, v.astype(np.float16))


@pytest.mark.parametrize("bad", [None, [[1.0]], 3.0, "q"])
def test_fault_19_not_an_array(bad):
    q, k, v = inputs()
    with pytest.raises(TypeError, match="^k: expected a NumPy"):
        spattn.attention(q, bad, v)


BACKWARD_ARRAYS = ["dout", "out", "lse"]


def backward(**changed):
    """attention_backward() of 20 queries and 30 keys, with other arrays or another pattern."""
    q, k, v = inputs(1, 2, 1, 20, 30, 16, 24)
    out, lse = attend(q, k, v, "causal")
    given = {"dout": random(out.shape), "q": q, "k": k, "v": v, "out": out, "lse": lse, "pattern": "causal"}
    return spattn.attention_backward(**given | changed)


def test_backward_takes_what_the_forward_returned():
    assert [x.shape for x in backward()] == [(1, 2, 20, 16), (1, 1, 30, 16), (1, 1, 30, 24)]


@pytest.mark.parametrize("name", BACKWARD_ARRAYS)
@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int32])
def test_fault_19_wrong_dtype_of_the_backward(name, dtype):
    shape = (1, 2, 20) if name == "lse" else (1, 2, 20, 24)
    with pytest.raises(TypeError, match=f"^{name}: expected float32, got {np.dtype(dtype).name}"):
        backward(**{name: np.zeros(shape, dtype)})


@pytest.mark.parametrize("name", BACKWARD_ARRAYS)
@pytest.mark.parametrize("bad", [None, [[[[1.0]]]], 3.0, memoryview(b"")], ids=lambda x: type(x).__name__)
def test_fault_19_not_an_array_of_the_backward(name, bad):
    with pytest.raises(TypeError, match=f"^{name}: expected a numpy array like q, got {type(bad).__name__}"):
        backward(**{name: bad})


@pytest.mark.parametrize("name", BACKWARD_ARRAYS)
def test_fault_19_another_kind_of_array_for_the_backward(name):
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=f"^{name}: expected a numpy array like q, got Tensor"):
        backward(**{name: torch.zeros((1, 2, 20) if name == "lse" else (1, 2, 20, 24))})


@pytest.mark.parametrize("bad", [3, None, np.ones((64, 64)), np.zeros((64, 64), np.int64), object(), b"causal"])
def test_fault_19_not_a_pattern(bad):
    with pytest.raises(TypeError, match="^pattern: (expected|got) "):
        spattn.attention(*inputs(), bad)


@pytest.mark.parametrize("name", ["nonsense", "", "causal causal"])
def test_fault_19_unknown_pattern(name):
    with pytest.raises(ValueError, match="^pattern: expected (one of|a description like) .*causal"):
        spattn.attention(*inputs(), name)


@pytest.mark.parametrize("head_dim, head_dim_v", [(0, 8), (1025, 8), (8, 0), (8, 1025)])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_fault_20_unsupported_head_dim(backend, head_dim, head_dim_v):
    with pytest.raises(ValueError, match="^head_dim: expected 1 … 1024 "):
        spattn.attention(*inputs(head_dim=head_dim, head_dim_v=head_dim_v), backend=backend)


@pytest.mark.parametrize("heads_q, heads_kv", [(3, 2), (2, 3), (2, 4), (1, 0)])
def test_fault_20_heads_that_do_not_divide(heads_q, heads_kv):
    with pytest.raises(ValueError, match=f"^k: expected a number of heads that divides q's {heads_q}, got {heads_kv}"):
        spattn.attention(*inputs(1, heads_q, heads_kv))


@pytest.mark.parametrize(
    "shapes, message",
    [
        (((1, 1, 5, 8), (1, 1, 6, 8), (1, 1, 7, 8)), "^v: expected shape"),
        (((1, 1, 5, 8), (1, 1, 6, 9), (1, 1, 6, 8)), "^k: expected shape"),
        (((2, 1, 5, 8), (1, 1, 6, 8), (1, 1, 6, 8)), "^k: expected shape"),
        (((1, 2, 5, 8), (1, 2, 6, 8), (1, 1, 6, 8)), "^v: expected shape"),
        (((1, 5, 8), (1, 6, 8), (1, 6, 8)), r"^q: expected shape \(batch, heads, length, head_dim\)"),
        (((1, 1, 5, 8), (1, 1, 6, 8), (1, 6, 8)), r"^v: expected shape \(batch, heads, length, head_dim\)"),
    ],
)
def test_fault_20_shapes_that_do_not_fit(shapes, message):
    with pytest.raises(ValueError, match=message):
        spattn.attention(*(np.zeros(shape, np.float32) for shape in shapes))


@pytest.mark.parametrize("shape", [(64, 63), (63, 64), (3, 64, 64), (2, 2, 64, 64), (64,), (1, 1, 1, 64, 64)])
def test_fault_20_mask_of_another_shape(shape):
    with pytest.raises(ValueError, match="mask|pattern"):
        spattn.attention(*inputs(1, 2, 2), np.ones(shape, bool))


@pytest.mark.parametrize("name", BACKWARD_ARRAYS)
@pytest.mark.parametrize("changed", [{0: 2}, {1: 1}, {2: 30}, {-1: 16}])
def test_fault_20_shapes_that_do_not_fit_the_backward(name, changed):
    expected = [1, 2, 20] if name == "lse" else [1, 2, 20, 24]
    shape = [changed.get(n, changed.get(n - len(expected), size)) for n, size in enumerate(expected)]
    message = f"{name}: expected shape {tuple(expected)}, got {tuple(shape)}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        backward(**{name: np.zeros(shape, np.float32)})
