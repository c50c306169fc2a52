"""Padding: every form in which libraries say it."""

import ml_dtypes
import numpy as np
import pytest

import spattn
from spattn import patterns as p
from spattn.testing import inputs

VALID = np.array([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1], [1, 0, 1, 0, 1]], bool)


def entries(pattern):
    batch = pattern.sizes()[0]
    return np.array([pattern.index_set(5, 5, batch=b).to_dense()[2] for b in range(batch)])


@pytest.mark.parametrize("kind", ["numpy", "torch", "jax"])
@pytest.mark.parametrize(
    "form",
    [
        lambda valid: valid,
        lambda valid: valid.astype(np.int64),
        lambda valid: valid[:, None, None],
        lambda valid: valid.astype(np.uint8)[:, None, None],
    ],
    ids=["bools", "ints", "four axes", "bytes"],
)
def test_forms(form, kind):
    module = pytest.importorskip("jax").numpy if kind == "jax" else pytest.importorskip(kind)
    pattern = p.KeyPadding(form(VALID) if kind == "numpy" else module.asarray(form(VALID)))
    assert pattern.sizes() == (3, 1) and np.array_equal(entries(pattern), VALID)
    assert pattern == p.KeyPadding(VALID) and p.from_json(pattern.to_json()) == pattern


def test_lists_and_one_entry():
    assert p.KeyPadding([[1, 0], [1, 1]]) == p.KeyPadding(np.array([[True, False], [True, True]]))
    assert p.KeyPadding(VALID[0]).sizes() == (1, 1)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("padding", ["-inf", "least"])
def test_additive(dtype, padding):
    least = -np.inf if padding == "-inf" else ml_dtypes.finfo(dtype).min
    mask = np.where(VALID, dtype(0), dtype(least)).astype(dtype)[:, None, None]
    assert p.KeyPadding.from_additive(mask) == p.KeyPadding(VALID)


def test_lengths():
    right = p.KeyPadding.from_lengths([0, 2, 5], 5)
    assert np.array_equal(entries(right), np.arange(5) < np.array([[0], [2], [5]]))
    assert np.array_equal(entries(p.KeyPadding.from_lengths([0, 2, 5], 5, left=True)), entries(right)[:, ::-1])


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("kv_len", [1, 63, 64, 65, 200])
def test_bits_of_lengths(kv_len, left):
    """Those of the same padding as an array."""
    made = p.KeyPadding.from_lengths(range(kv_len + 1), kv_len, left=left)
    same = p.KeyPadding(made.valid)
    assert np.array_equal(made._words, same._words) and (made == same) and hash(made) == hash(same)


def test_attention_over_what_is_there():
    """Padding of any values leaves the same bits as none at all, forward and backward."""
    q, k, v = inputs(2, 4, 2, 40, 60, 16)
    pattern = p.Causal() & p.KeyPadding.from_lengths([60, 33], 60)
    out, lse = spattn.attention(q, k, v, pattern, return_lse=True)
    gradients = spattn.attention_backward(out, q, k, v, out, lse, pattern)
    k[1, :, 33:], v[1, :, 33:] = np.nan, np.inf
    again = spattn.attention(q, k, v, pattern, return_lse=True)
    assert np.array_equal(again[0], out) and np.array_equal(again[1], lse)
    others = spattn.attention_backward(out, q, k, v, out, lse, pattern)
    assert all(map(np.array_equal, others, gradients)) and not others[1][1, :, 33:].any()


@pytest.mark.parametrize(
    "make, error, words",
    [
        (
            lambda: p.KeyPadding(np.array([[0, 2]])),
            ValueError,
            "^valid: expected bools, or the integers 0 and 1, got 0 … 2",
        ),
        (lambda: p.KeyPadding(np.array([0.0, 1.0])), TypeError, "^valid: expected an array of dtype bool, got float64"),
        (lambda: p.KeyPadding(np.ones((2, 2, 1, 5), bool)), ValueError, "^valid: expected shape .*, got"),
        (lambda: p.KeyPadding(np.ones((2, 3, 5), bool)), ValueError, "^valid: expected shape .*, got"),
        (lambda: p.KeyPadding(np.ma.array([1, 0], mask=[0, 1])), TypeError, "^valid: .*masked"),
        (
            lambda: p.KeyPadding.from_additive(np.array([0.0, -5.0])),
            ValueError,
            "^mask: expected a padding mask .*additive",
        ),
        (lambda: p.KeyPadding.from_additive(np.array([0.0, np.nan])), ValueError, "^mask: expected a padding mask"),
        (
            lambda: p.KeyPadding.from_additive(np.array([0, 1])),
            TypeError,
            "^mask: expected an array of float32, .*got int",
        ),
        (lambda: p.KeyPadding.from_lengths([6], 5), ValueError, "^lengths: expected at most 5 tokens .*, got 6"),
        (lambda: p.KeyPadding.from_lengths([-1], 5), ValueError, "^lengths: "),
        (lambda: p.KeyPadding.from_lengths([1], 5, left=1), TypeError, "^left: expected a bool, got int"),
        (lambda: p.KeyPadding(VALID).index_set(6, 6), ValueError, r"^valid: expected 6 keys \(kv_len\), got 5"),
        (lambda: p.KeyPadding(VALID).allows(0, 0), ValueError, r"use .at\(batch, head\)"),
    ],
)
def test_errors(make, error, words):
    with pytest.raises(error, match=words):
        make()
