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


def test_fifty_training_steps_are_one_program():
    weight = jnp.eye(16)
    traced = []

    @jax.jit
    def step(weight, q, k, v, ids, valid):
        def loss(weight):
            traced.append(weight)
            packed = p.Causal() & (p.Documents.from_segment_ids(ids) | p.Sinks(2))
            return (spattn.jax.attention(q @ weight, k, v, packed, key_padding=valid) ** 2).sum()

        found, gradient = jax.value_and_grad(loss)(weight)
        return found, gradient, weight - 1e-3 * gradient

    rng, (q, k, v) = np.random.default_rng(2), operands()
    for _ in range(50):
        ids, valid = np.sort(rng.integers(0, 5, (2, N)), axis=1), rng.random((2, N)) < 0.9
        valid[:, 0] = True
        mask = ((ids[:, None, :, None] == ids[:, None, None]) | (K < 2)) & (K <= Q) & valid[:, None, None]
        expected, (dq, _, _) = dense(q @ weight, k, v, mask)
        found, gradient, weight = step(weight, q, k, v, jnp.asarray(ids), jnp.asarray(valid))
        np.testing.assert_allclose(found, (expected**2).sum(), rtol=1e-4)
        np.testing.assert_allclose(gradient, np.einsum("bhni,bhnj->ij", q, dq), rtol=1e-3, atol=1e-3)
    assert len(traced) == 1 and step._cache_size() == 1


VALID = np.random.default_rng(8).random((2, N)) < 0.7
VALID[:, 0] = True


def additive(valid, dtype):
    return jnp.where(jnp.asarray(valid), 0, -jnp.inf).astype(dtype)


PADDINGS = {
    "bools": jnp.asarray,
    "integers": lambda x: jnp.asarray(x, jnp.int32),
    "floats": lambda x: additive(x, jnp.float32),
    "bfloat16": lambda x: additive(x, jnp.bfloat16),
    "four axes": lambda x: jnp.asarray(x[:, None, None]),
}


@pytest.mark.parametrize("name", PADDINGS)
def test_traced_key_padding(name):
    """It equals the intersection with KeyPadding; floats of a mask get no gradient."""
    q, k, v = operands()
    cu = np.array([0, 20, N])
    owner = np.repeat([0, 1], np.diff(cu))

    def loss(q, k, v, valid, cu):
        packed = (p.SlidingWindow(9, 0) & p.Documents.from_cu_seqlens(cu)) | p.Sinks(1)
        out = spattn.jax.attention(q, k, v, packed, key_padding=valid)
        return (out**2).sum(), out

    step = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))
    for valid in (VALID, VALID[::-1]):
        gradients, out = step(q, k, v, PADDINGS[name](valid), jnp.asarray(cu))
        near = (owner[:, None] == owner) & (K <= Q) & (K >= Q - 9)
        expected, of_inputs = dense(q, k, v, (near | (K < 1)) & valid[:, None, None])
        for found, wanted in zip((out, *gradients), (expected, *of_inputs), strict=True):
            np.testing.assert_allclose(found, wanted, **WITHIN)
    assert step._cache_size() == 1
    joint = (p.SlidingWindow(9, 0) & p.Documents.from_cu_seqlens(cu) | p.Sinks(1)) & p.KeyPadding(valid)
    np.testing.assert_array_equal(out, spattn.jax.attention(q, k, v, joint))


JOINED = {
    "mask and key padding": lambda m, v: {"pattern": m, "key_padding": v},
    "additive mask": lambda m, v: {"pattern": additive(m, jnp.bfloat16) + additive(v, jnp.bfloat16)[:, None, None]},
    "mask & pattern": lambda m, v: {"pattern": m & p.KeyPadding(v)},
    "pattern & mask": lambda m, v: {"pattern": p.KeyPadding(v) & m},
    "complement": lambda m, v: {"pattern": "full", "key_padding": v} | {"pattern": ~(~p.Mask(m))},
    "constant padding": lambda m, v: {"pattern": m, "key_padding": VALID},
    "pattern as key padding": lambda m, v: {"pattern": p.Full() & m, "key_padding": p.KeyPadding(v)},
    "list of heads": lambda m, v: {"pattern": p.PerHead([p.Mask(m)] * 3 + [m & p.Full()]), "key_padding": v},
}


@pytest.mark.parametrize("name", JOINED)
def test_masks_that_are_joined(name):
    q, k, v = operands()
    mask = (np.random.default_rng(9).random((N, N)) < 0.5) | (K == 0)
    run = jax.jit(lambda m, valid: spattn.jax.attention(q, k, v, **JOINED[name](m, valid)))
    expected, _ = dense(q, k, v, mask & VALID[:, None, None])
    np.testing.assert_allclose(run(jnp.asarray(mask), jnp.asarray(VALID)), expected, **WITHIN)


def test_arrays_whose_values_zero_does_not_stand_for():
    """CSR's indptr may not be 0 throughout; sequences have any number of queries."""
    q, k, v = operands()
    pairs = jax.jit(lambda x, y: spattn.jax.attention(q, k, v, p.CSR(x, y, N)))
    np.testing.assert_allclose(pairs(jnp.arange(N + 1), jnp.arange(N)), dense(q, k, v, Q == K)[0], **WITHIN)
    packed = jax.jit(lambda x, y: spattn.jax.attention(q, k, v, p.Documents.from_cu_seqlens(x, y)))
    mask = (Q < 20) == (K < 7)
    np.testing.assert_allclose(packed(jnp.array([0, 20, N]), jnp.array([0, 7, N])), dense(q, k, v, mask)[0], **WITHIN)
    blocks = jnp.arange(8)[:, None]
    listed = jax.jit(lambda x: spattn.jax.attention(q, k, v, p.KeyBlocks(x, block_q=8, block_kv=8)))
    np.testing.assert_allclose(listed(blocks), dense(q, k, v, Q // 8 == K // 8)[0], **WITHIN)


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

    mask = (ids[:, None, :, None] == ids[:, None, None]) & (K <= Q)
    expected, of_inputs = dense(q, k, v, mask)
    mapped = jax.jit(jax.vmap(one))
    np.testing.assert_allclose(mapped(q, k, v, jnp.asarray(ids)), expected, **WITHIN)
    gradients = jax.grad(lambda *x: (mapped(*x, jnp.asarray(ids)) ** 2).sum(), (0, 1, 2))(q, k, v)
    for found, wanted in zip(gradients, of_inputs, strict=True):
        np.testing.assert_allclose(found, wanted, **WITHIN)
    shared = jax.jit(lambda ids: jax.vmap(one, (0, 0, 0, None))(q, k, v, ids))
    np.testing.assert_allclose(shared(jnp.asarray(ids[1])), dense(q, k, v, mask[1:])[0], **WITHIN)
    of_paddings = jax.vmap(lambda x: spattn.jax.attention(q, k, v, "causal", key_padding=x))
    for entry, valid in zip(
        of_paddings(jnp.asarray(np.stack([VALID, VALID[::-1]]))), (VALID, VALID[::-1]), strict=True
    ):
        np.testing.assert_allclose(entry, dense(q, k, v, (K <= Q) & valid[:, None, None])[0], **WITHIN)


def test_what_cannot_be_traced():
    q, k, v = operands()

    def refused(error, words, make, *arguments):
        with pytest.raises(error, match=words):
            jax.block_until_ready(jax.jit(lambda *x: spattn.jax.attention(q, k, v, make(*x)))(*arguments))

    refused(TypeError, "numbers of a pattern are constants .*static_argnames", p.SlidingWindow, 3)
    refused(TypeError, "numbers of a pattern are constants", lambda n: p.Documents((3, n)), 58)
    refused(TypeError, "got a tracer, which has no values", lambda x: p.KeyPadding(x).index_set(N, N), VALID)
    refused(ValueError, "JAX converts int64 to int32", lambda x: p.Clusters(x, np.arange(N) << 40), jnp.arange(N))
    refused(jax.errors.JaxRuntimeError, "numbers other than 0 and -inf", lambda x: x, jnp.ones((N, N)))
    refused(jax.errors.JaxRuntimeError, "lengths: expected an integer >= 0, got -9", p.Documents, jnp.array([70, -9]))
    refused(ValueError, "valid: expected 61 keys", p.KeyPadding, jnp.ones((2, 4), bool))
    refused(ValueError, "bool mask must have shape", lambda m: m, jnp.ones((3, N, N), bool))
    refused(TypeError, "got an array that JAX traces", p.interop.from_flashmask, jnp.zeros((2, 4, N, 1), int))
    refused(
        jax.errors.JaxRuntimeError,
        "ValueError: segment_ids: expected the tokens of a document in a row",
        p.Documents.from_segment_ids,
        jnp.asarray(np.arange(N) % 2),
    )
