"""JAX programs whose patterns have traced arrays: one for all values, compared with dense attention in float64."""

import numpy as np
import pytest

import spattn
from spattn import patterns as p

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

import spattn.jax  # noqa: E402

N = 61
Q, K = np.arange(N)[:, None], np.arange(N)[None]
WITHIN = {"rtol": 2e-5, "atol": 2e-5}


def operands():
    draw = np.random.default_rng(0).standard_normal
    return [jnp.asarray(draw(size), jnp.float32) for size in ((2, 4, N, 16), (2, 2, N, 16), (2, 2, N, 16))]


def dense(q, k, v, mask):
    """Results and gradients of their sum of squares, in float64, by the formulas."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, 2, 1) for x in (k, v))
    scores = np.where(mask, q @ k.swapaxes(-1, -2) / 4, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = weights @ v
    dweights = 2 * out @ v.swapaxes(-1, -2)
    dscores = weights * (dweights - (dweights * weights).sum(-1, keepdims=True)) / 4
    grouped = (
        x.reshape(2, 2, 2, N, 16).sum(2) for x in (dscores.swapaxes(-1, -2) @ q, weights.swapaxes(-1, -2) @ (2 * out))
    )
    return out, (dscores @ k, *grouped)


CASES = {
    "mask": (lambda ids: (ids[:, None, :, None] == ids[:, None, None]) & (K <= Q), lambda same: same & (K <= Q)),
    "segments": (lambda ids: p.Causal() & p.Documents.from_segment_ids(ids), lambda same: same & (K <= Q)),
    "clusters": (lambda ids: p.Clusters(ids[:, None]) & p.Causal(), lambda same: same & (K <= Q)),
    "window or global": (
        lambda ids: p.Causal() & (p.SlidingWindow(5) & p.Documents.from_segment_ids(ids) | p.Sinks(2)),
        lambda same: (same & (K >= Q - 5) | (K < 2)) & (K <= Q),
    ),
    "rows": (
        lambda ids: (
            p.RowIntervals(jnp.searchsorted(ids[0], ids[0]), jnp.arange(1, N + 1)) - ~p.Documents.from_segment_ids(ids)
        ),
        lambda same: same & same[:1] & (K <= Q),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_one_program_for_all_packings(name):
    make, mask = CASES[name]
    traced = []

    def loss(q, k, v, ids):
        traced.append(name)
        out = spattn.jax.attention(q, k, v, make(ids))
        return (out**2).sum(), out

    step = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))
    rng, tensors = np.random.default_rng(1), operands()
    for _ in range(3):
        ids = np.sort(rng.integers(0, 5, (2, N)), axis=1)
        gradients, out = step(*tensors, jnp.asarray(ids))
        expected, of_inputs = dense(*tensors, mask(ids[:, None, :, None] == ids[:, None, None]))
        for found, wanted in zip((out, *gradients), (expected, *of_inputs), strict=True):
            np.testing.assert_allclose(found, wanted, **WITHIN)
    assert len(traced) == 1


def test_lengths_and_cumulative_lengths():
    q, k, v = operands()
    padded = jax.jit(lambda n: spattn.jax.attention(q, k, v, p.KeyPadding.from_lengths(n, N)))
    packed = jax.jit(
        lambda cu: spattn.jax.attention(q, k, v, p.interop.from_flash_attention(causal=True, cu_seqlens_q=cu))
    )
    for lengths in ([5, 61], [30, 1]):
        mask = K < np.array(lengths)[:, None, None, None]
        np.testing.assert_allclose(padded(jnp.asarray(lengths)), dense(q, k, v, mask)[0], **WITHIN)
    for cu in ([0, 20, 61], [0, 1, 61]):
        owner = np.repeat([0, 1], np.diff(cu))
        mask = (owner[:, None] == owner) & (K <= Q)
        np.testing.assert_allclose(packed(jnp.asarray(cu)), dense(q, k, v, mask)[0], **WITHIN)


def test_dropout_and_score_with_packings():
    q, k, v = operands()
    slopes = jnp.asarray([0.1, 0.2, 0.3, 0.4])
    ids = np.sort(np.random.default_rng(3).integers(0, 4, (2, N)), axis=1)

    def run(make):
        return lambda ids, seed: spattn.jax.attention(
            q, k, v, make(ids), score=lambda s, b, h, i, j: s + slopes[h] * (j - i), dropout_p=0.2, seed=seed
        )

    found = jax.jit(run(lambda ids: p.Causal() & p.Documents.from_segment_ids(ids)))(jnp.asarray(ids), jnp.uint32(5))
    expected = run(lambda _: p.Causal() & p.Documents.from_segment_ids(ids))(None, 5)
    np.testing.assert_array_equal(found, expected)


def test_entries_of_vmap_have_packings_of_their_own():
    q, k, v = operands()
    ids = np.sort(np.random.default_rng(4).integers(0, 4, (2, N)), axis=1)

    def one(q, k, v, ids):
        return spattn.jax.attention(q[None], k[None], v[None], p.Causal() & p.Documents.from_segment_ids(ids))[0]

    expected, _ = dense(q, k, v, (ids[:, None, :, None] == ids[:, None, None]) & (K <= Q))
    np.testing.assert_allclose(jax.vmap(one)(q, k, v, jnp.asarray(ids)), expected, **WITHIN)


def test_what_cannot_be_traced():
    q, k, v = operands()

    def refused(error, words, make, *arguments):
        with pytest.raises(error, match=words):
            jax.block_until_ready(jax.jit(lambda *x: spattn.jax.attention(q, k, v, make(*x)))(*arguments))

    refused(TypeError, "numbers of a pattern are constants .*static_argnames", p.SlidingWindow, 3)
    refused(ValueError, "valid: expected 61 keys", p.KeyPadding, jnp.ones((2, 4), bool))
    refused(ValueError, "bool mask must have shape", lambda m: m, jnp.ones((3, N, N), bool))
    refused(TypeError, "got an array that JAX traces", p.interop.from_flashmask, jnp.zeros((2, 4, N, 1), int))
    refused(
        jax.errors.JaxRuntimeError,
        "ValueError: segment_ids: expected the tokens of a document in a row",
        p.Documents.from_segment_ids,
        jnp.asarray(np.arange(N) % 2),
    )
