"""spattn.jax.attention with score functions and sinks, under the transformations of JAX."""

import pytest

pytestmark = pytest.mark.slow

SCORES = """
import pytest
WINDOW = patterns.SlidingWindow(5, 2)
Q_LEN, KV_LEN, HEADS = 18, 23, 4
PICK = np.arange(HEADS)[::-1].copy()


def operands():
    '''q, k, v, a table of (heads, distance), slopes and sinks.'''
    rng = np.random.default_rng(0)
    shapes = (2, HEADS, Q_LEN, 8), (2, 2, KV_LEN, 8), (2, 2, KV_LEN, 8), (HEADS, 2 * KV_LEN), (HEADS,), (HEADS,)
    return tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)


def attend(q, k, v, table, slopes, sinks, cap=4.0, backend="reference"):
    def score(s, b, h, i, j):
        return cap * np.tanh(s / cap) + slopes[h] * (j - i) + table[PICK[h], j - i + KV_LEN] * s

    return spattn.jax.attention(q, k, v, WINDOW, score=score, sinks=sinks, return_lse=True, backend=backend)


def dense(q, k, v, table, slopes, sinks, cap=4.0):
    k, v = (jnp.repeat(x, 2, 1) for x in (k, v))
    i, j = np.arange(Q_LEN)[:, None] + KV_LEN - Q_LEN, np.arange(KV_LEN)
    s = jnp.einsum("bhqd,bhkd->bhqk", q, k, precision="highest") / np.sqrt(8)
    s = cap * jnp.tanh(s / cap) + slopes[:, None, None] * (j - i) + table[PICK][:, j - i + KV_LEN] * s
    s = jnp.where(WINDOW.index_set(Q_LEN, KV_LEN).to_dense(), s, -jnp.inf)
    s = jnp.concatenate([s, jnp.broadcast_to(sinks[:, None, None], (*s.shape[:3], 1))], -1)
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(s)[..., :-1], v), jax.nn.logsumexp(s, -1)


def loss(function):
    def total(*operands):
        out, lse = function(*operands)
        return (out**2).sum() + (lse**2).sum()

    return total
"""


def test_gradients(program):
    """Of traced captured arrays too, under jit and checkpoint."""
    program(
        SCORES
        + """
every = tuple(range(6))
want = jax.grad(loss(dense), every)(*operands())
for transformed in (jax.jit, jax.checkpoint):
    found = jax.grad(transformed(loss(attend)), every)(*operands())
    for one, other in zip(found, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-4 * float(jnp.abs(other).max()))
"""
    )


def test_arrays_of_other_dtypes(program):
    """Gradients have the dtype of the array."""
    program(
        SCORES
        + """
*others, slopes, sinks = operands()
given = *others, slopes.astype(jnp.bfloat16), sinks.astype(jnp.float16)
found = jax.grad(loss(attend), (4, 5))(*given)
assert [x.dtype for x in found] == [jnp.bfloat16, jnp.float16]
"""
    )


def test_vmap(program):
    """Over q, k and v; what would need another call for each entry is refused."""
    program(
        SCORES
        + """
q, k, v, *captured = operands()
found = jax.vmap(lambda q, k, v: attend(q[None], k[None], v[None], *captured)[0][0])(q, k, v)
np.testing.assert_allclose(found, attend(*operands())[0], rtol=1e-5, atol=1e-5)
with pytest.raises(ValueError, match="must not depend on the batch entry"):
    jax.vmap(lambda s: attend(q, k, v, *captured[:2], s)[0])(jnp.zeros((3, HEADS)))
with pytest.raises(ValueError, match="must not depend on the batch entry"):
    jax.vmap(lambda q: spattn.jax.attention(q, k, v, score=lambda s, b, h, i, j: s * b))(q[None])
"""
    )


def test_refused(program):
    program(
        SCORES
        + """
q, k, v, *_ = operands()
with pytest.raises(ValueError, match="sinks: expected floats of shape"):
    spattn.jax.attention(q, k, v, sinks=jnp.zeros(3))
with pytest.raises(TypeError, match="Symbol"):
    spattn.jax.attention(q, k, v, score=lambda s, b, h, i, j: jnp.tanh(s))
"""
    )
