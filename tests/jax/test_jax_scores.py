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
want = jax.jit(jax.grad(loss(dense), every))(*operands())
for transformed in (jax.jit, jax.checkpoint):
    found = jax.grad(transformed(loss(attend)), every)(*operands())
    for one, other in zip(found, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-4 * float(jnp.abs(other).max()))
"""
    )


def test_vmap(program):
    """One call for q, k and v; a call for each entry where captured arrays, gradients or batch entries differ."""
    program(
        SCORES
        + """
q, k, v, *captured = operands()
table, slopes, sinks = captured
one = lambda *operands: attend(*(x[None] for x in operands), *captured)
found = jax.vmap(one)(q, k, v)
for got, want in zip(found, attend(*operands()), strict=True):
    np.testing.assert_allclose(got[:, 0], want, rtol=1e-5, atol=1e-5)
tables, many = jnp.stack([table, -table, 2 * table]), jnp.stack([sinks, sinks + 1, 2 * sinks])
found = jax.jit(jax.vmap(lambda table, sinks: attend(q, k, v, table, slopes, sinks)))(tables, many)
for got, want in zip(found, zip(*(attend(q, k, v, x, slopes, y) for x, y in zip(tables, many))), strict=True):
    np.testing.assert_array_equal(got, want)
score = lambda s, b, h, i, j: s * (b + 1)
found = jax.vmap(lambda q: spattn.jax.attention(q, k, v, score=score))(jnp.stack([q, 2 * q]))
np.testing.assert_array_equal(found[1], spattn.jax.attention(2 * q, k, v, score=score))


gradients = jax.jit(jax.grad(loss(attend), (0, 3, 4, 5)))
# Per example, of shared arrays; then of an array for each.
found = jax.vmap(lambda *x: gradients(*(y[None] for y in x), *captured))(q, k, v)
want = [gradients(*(x[n : n + 1] for x in (q, k, v)), *captured) for n in range(2)]
jax.tree.map(np.testing.assert_array_equal, found, tuple(map(jnp.stack, zip(*want))))
found = jax.vmap(lambda x: gradients(q, k, v, x, slopes, sinks))(tables)
want = [gradients(q, k, v, x, slopes, sinks) for x in tables]
jax.tree.map(np.testing.assert_array_equal, found, tuple(map(jnp.stack, zip(*want))))
"""
    )


def test_captured_values(program):
    """Other dtypes, traced numbers without axes, closures of checkpoints; NumPy arrays are constants of the program."""
    program(
        SCORES
        + """
q, k, v, table, slopes, sinks = operands()
found = jax.grad(loss(attend), (4, 5))(q, k, v, table, slopes.astype(jnp.bfloat16), sinks.astype(jnp.float16))
assert [x.dtype for x in found] == [jnp.bfloat16, jnp.float16]
want = jax.jit(jax.grad(loss(dense), (3, 6)))(*operands(), jnp.float32(4))
closure = lambda table, cap: jax.checkpoint(lambda q: loss(attend)(q, k, v, table, slopes, sinks, cap))(q)
found = jax.jit(jax.grad(closure, (0, 1)))(table, jnp.float32(4))
for one, other in zip(found, want, strict=True):
    np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-4 * float(jnp.abs(other).max()))
gains = np.ones(HEADS, np.float32)
call = lambda q: spattn.jax.attention(q, k, v, score=lambda s, b, h, i, j: s * gains[h])
jitted = jax.jit(call)
first = jitted(q)
gains *= 2
np.testing.assert_array_equal(jitted(q), first)
assert not np.array_equal(call(q), first)
np.testing.assert_array_equal(jax.jit(lambda q: call(q))(q), call(q))
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
