"""spattn.jax.attention with dropout, under the transformations of JAX."""

import pytest

pytestmark = pytest.mark.slow

DROPOUT = """
import pytest
from spattn.testing import dense_mask, dropout_mask
PATTERN = patterns.SlidingWindow(5, 2) | patterns.Stride(7)
Q_LEN, KV_LEN, HEADS, SHARE, SEED = 18, 23, 4, 0.3, (5 << 40) + 11


def operands():
    '''q, k, v, slopes and sinks.'''
    rng = np.random.default_rng(0)
    shapes = (2, HEADS, Q_LEN, 8), (2, 2, KV_LEN, 8), (2, 2, KV_LEN, 8), (HEADS,), (HEADS,)
    return tuple(jnp.asarray(rng.standard_normal(shape)) for shape in shapes)


def attend(seed, q, k, v, slopes=None, sinks=None, share=SHARE):
    score = None if slopes is None else lambda s, b, h, i, j: 4 * np.tanh(s / 4) + slopes[h] * (j - i)
    options = dict(score=score, sinks=sinks, dropout_p=share, seed=seed)
    return spattn.jax.attention(q, k, v, PATTERN, return_lse=True, **options)


def factors(seed, batch=2, heads=HEADS, share=SHARE):
    return dropout_mask(seed, share, batch, heads, Q_LEN, KV_LEN) / (1 - round(share * 2**32) / 2**32)


def dense(factor, q, k, v, slopes=None, sinks=None):
    sizes = factor.shape
    k, v = (jnp.repeat(x, 2, 1) for x in (k, v))
    i, j = np.arange(Q_LEN)[:, None] + KV_LEN - Q_LEN, np.arange(KV_LEN)
    s = jnp.einsum("bhqd,bhkd->bhqk", q, k, precision="highest") / np.sqrt(8)
    s = s if slopes is None else 4 * jnp.tanh(s / 4) + slopes[:, None, None] * (j - i)
    s = jnp.where(dense_mask(PATTERN, *sizes), s, -jnp.inf)
    sinks = jnp.full(sizes[1], -jnp.inf) if sinks is None else sinks
    s = jnp.concatenate([s, jnp.broadcast_to(sinks[:, None, None], (*s.shape[:3], 1))], -1)
    weights = jax.nn.softmax(s)[..., :-1] * factor
    return jnp.einsum("bhqk,bhkd->bhqd", weights, v, precision="highest"), jax.nn.logsumexp(s, -1)


def gradients(function):
    '''out, lse and gradients with respect to all operands but the first.'''
    def both(first, *operands):
        results, back = jax.vjp(lambda *x: function(first, *x), *operands)
        return *results, *back(tuple(jnp.cos(x) for x in results))

    return both


def assert_close(got, want):
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want)
    for one, other in zip(got, want):
        assert one.shape == other.shape and jnp.abs(one - other).max() <= 1e-12 * jnp.abs(other).max()
"""


def test_traced_seeds(program):
    """One program of all seeds; forward and backward drop the pairs of dropout_mask()."""
    program(
        DROPOUT
        + """
traces = []
for count in (3, 5):
    some = operands()[:count]
    traces.clear()

    def counted(seed, *x):
        traces.append(seed)
        return attend(seed, *x)

    run, again = jax.jit(gradients(counted)), jax.jit(gradients(jax.checkpoint(attend)))
    wanted = jax.jit(gradients(dense))
    for seed in (1, SEED, 2**63 - 1):
        got, want = run(jnp.asarray(seed), *some), wanted(factors(seed), *some)
        assert_close(got, want)
        assert_close(again(jnp.asarray(seed), *some), want)
    assert len(traces) == 1
    assert_same(got, gradients(attend)(seed, *some))
"""
    )


def test_seeds(program):
    """Integers of every dtype; a negative array is taken modulo 2**64; a share is a constant of the program."""
    program(
        DROPOUT
        + """
some = operands()[:3]
run = jax.jit(attend, static_argnames="share")
for seed in (np.iinfo(name).max for name in ("int8", "uint8", "int32", "uint32", "int64", "uint64")):
    want = spattn.attention(*map(np.asarray, some), PATTERN, dropout_p=SHARE, seed=seed, return_lse=True)
    for one in (seed, np.uint64(seed), jnp.asarray(seed, "uint64")):
        assert_same(attend(one, *some), want)
for name in ("int8", "uint8", "int32", "uint32", "int64"):
    seed = jnp.asarray(np.iinfo(name).max, name)
    assert_same(run(seed, *some), attend(int(seed), *some))
for name in ("int8", "int32", "int64"):
    assert_same(run(jnp.asarray(-5, name), *some), attend(2**64 - 5, *some))
for share in (0.5, 0.1, 0.0, 2.0**-34):
    assert_close(run(jnp.asarray(3), *some, share=share), dense(factors(3, share=share), *some))
jax.config.update("jax_enable_x64", False)
q, k, v = (x.astype(jnp.float32) for x in some)
for seed in (SEED, 2**64 - 1):
    assert_same(run(jnp.uint32(2**32 - 1), q, k, v), attend(2**32 - 1, q, k, v))
    for one, other in zip(attend(seed, q, k, v), spattn.attention(
        *map(np.asarray, (q, k, v)), PATTERN, dropout_p=SHARE, seed=seed, return_lse=True
    )):
        assert np.array_equal(one, other)
"""
    )


def test_vmap(program):
    """Each entry drops the pairs of the call on it alone, with its own or a shared seed."""
    program(
        DROPOUT
        + """
for count, mapped in ((3, (0, 0)), (5, (None, 0)), (5, (0, None))):
    q, k, v, *more = operands()[:count]
    many, seeds = jnp.stack([q, 2 * q, q - 1]), jnp.asarray([3, 4, SEED])
    call = jax.jit(lambda seed, q: gradients(attend)(seed, q, k, v, *more))
    of = [(seeds[n if mapped[0] == 0 else 0], many[n if mapped[1] == 0 else 0]) for n in range(3)]
    given = [x if axis == 0 else x[0] for x, axis in zip((seeds, many), mapped)]
    got = jax.jit(jax.vmap(call, mapped))(*given)
    assert_same(got, tuple(map(jnp.stack, zip(*(call(*entry) for entry in of)))))
    seed, q = of[2]
    assert_close([x[2] for x in got], jax.jit(gradients(dense))(factors(int(seed)), q, k, v, *more))
"""
    )


def test_shards(program):
    """Heads count from 0 on each device; a seed for each device makes their pairs differ."""
    program(
        DROPOUT
        + """
q, k, v, *_ = operands()
mesh = jax.sharding.Mesh(jax.devices(), ("heads",))
heads = jax.sharding.PartitionSpec(None, "heads")

def shard(q, k, v):
    return attend(3 + jax.lax.axis_index("heads"), q, k, v)[0]

# The check of mesh axes, which JAX's default switches on, needs operands that vary over all of them.
run = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=(heads,) * 3, out_specs=heads))
found = run(q, k, v)
for n in range(2):
    some = q[:, 2 * n : 2 * n + 2], k[:, n : n + 1], v[:, n : n + 1]
    np.testing.assert_array_equal(found[:, 2 * n : 2 * n + 2], attend(3 + n, *some)[0])
    assert_close(found[:, 2 * n : 2 * n + 2], dense(factors(3 + n, heads=2), *some)[0])
""",
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
    )


def test_refused(program):
    program(
        DROPOUT
        + """
some = operands()[:3]
for seed, share, error, message in (
    (None, SHARE, ValueError, "seed: required if dropout_p > 0"),
    (-1, SHARE, ValueError, "seed: must be in [0, 2**64), got -1"),
    (2**64, SHARE, ValueError, "seed: must be in [0, 2**64)"),
    (1.5, SHARE, TypeError, "seed: expected an integer, got float"),
    (jnp.zeros(()), SHARE, TypeError, "seed: expected an integer without axes, got float64 of shape ()"),
    (jnp.zeros(2, int), SHARE, TypeError, "seed: expected an integer without axes, got int64 of shape (2,)"),
    (jax.random.key(0), SHARE, TypeError, "of a key, pass jax.random.bits(key)"),
    (1, 1.0, ValueError, "dropout_p: must be at least 0 and less than 1"),
    (1, jnp.float32(0.5), TypeError, "dropout_p: expected a float"),
):
    refused(error, message, lambda: attend(seed, *some, share=share))
    refused(error, message, lambda: jax.jit(lambda *x: attend(seed, *x, share=share))(*some))
bits = jax.random.bits(jax.random.key(0))
assert_same(jax.jit(attend)(bits, *some), attend(int(bits), *some))
"""
    )
