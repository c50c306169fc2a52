"""spattn.jax.KVCache: steps in programs, with traced lengths, are those of spattn.KVCache."""

CACHES = """
import itertools
from spattn.patterns import BigBird, Causal, Mask, PerHead, Sinks, SlidingWindow

STREAMING = Causal() & (Sinks(2) | SlidingWindow(3, 0))
SIZES = {"batch": 2, "heads_kv": 2, "head_dim": 4}
rng = np.random.default_rng(0)


def tokens(n, heads=2, dtype=np.float32):
    return [rng.standard_normal((2, heads, n, 4)).astype(dtype) for _ in range(2)]


def score(s, b, h, q, k):
    return s + 0.01 * (q % 7) * (k % 5) + 0.1 * b


def caches(pattern, max_len=60, **options):
    return (module.KVCache(pattern, max_len, **SIZES, **options) for module in (spattn.jax, spattn))
"""


def test_steps_of_a_program(program):
    """One program for all lengths: ragged appends, crops and reordering, of patterns that keep all keys or few."""
    program(
        CACHES
        + """
sinks = rng.standard_normal(4).astype(np.float32)
traces = []

@jax.jit
def step(cache, k, v, q, new, most, order):
    traces.append(1)
    cache = cache.append(k, v, lengths=new).crop(most).reorder(order)
    return cache, cache.attention(q, lengths=jnp.minimum(new, cache.lengths), score=score, sinks=sinks, return_lse=True)

patterns_of = STREAMING, "causal", Causal() & BigBird(4, seed=1), Mask(np.tril(rng.random((60, 60)) < 0.5))
for pattern in patterns_of:
    one, other = caches(pattern, chunk=4)
    assert (one.k.shape[2] < 60) == (pattern is STREAMING)
    for number in range(12):
        (k, v), (q, _) = tokens(3), tokens(3, heads=4)
        new = rng.integers(0, 4, 2)
        most = np.where(rng.random(2) < 0.5, np.maximum(other.lengths + new - 1, 0), 60)
        order = np.array([1, 0]) if number % 4 == 3 else np.arange(2)
        one, got = step(one, k, v, q, new, most, order)
        other.append(k, v, lengths=new)
        other.crop(most)
        other.reorder(order)
        assert one.lengths.tolist() == other.lengths.tolist()
        want = other.attention(q, lengths=np.minimum(new, other.lengths), score=score, sinks=sinks, return_lse=True)
        for x, y in zip(got, want):
            np.testing.assert_allclose(x, y, atol=2e-6)
assert len(traces) == len(patterns_of)

# A loop in one program, then a call outside of one.
one, _ = caches(STREAMING, chunk=1, dtype="bfloat16")
(k, v), (q, _) = ([jnp.asarray(x, "bfloat16") for x in tokens(40)] for _ in range(2))

def loop(cache, at):
    x, y, z = (jax.lax.dynamic_slice_in_dim(x, at, 1, 2) for x in (k, v, q))
    cache = cache.append(x, y)
    return cache, cache.attention(z)[:, :, 0]

one, out = jax.lax.scan(loop, one, jnp.arange(40))
want = np.asarray(spattn.attention(q, k, v, STREAMING), np.float32)
np.testing.assert_allclose(np.asarray(jnp.moveaxis(out, 0, 2), np.float32), want, atol=2e-2)
np.testing.assert_allclose(np.asarray(one.attention(q[:, :, -1:]), np.float32), want[:, :, -1:], atol=2e-2)
assert one.attention(q[:, :, :0]).shape == (2, 2, 0, 4)
"""
    )


def test_what_a_cache_of_jax_refuses(program):
    """Outside of a program at once, in a program with the next attention."""
    program(
        CACHES
        + """
FAILED = jax.errors.JaxRuntimeError
k, v = map(jnp.asarray, tokens(5))
cache, _ = caches(STREAMING, 12, chunk=2)
cache = cache.append(k, v).append(k, v)
append, crop = jax.jit(lambda c: c.append(k, v)), jax.jit(lambda c, n: c.crop(n))
reorder = jax.jit(lambda c, index: c.reorder(index))
refused(ValueError, "k: batch entry 0 would have more than max_len tokens", lambda: cache.append(k, v))
refused(FAILED, "KVCache: batch entry 0 has 15 of 12 tokens", lambda: append(cache).attention(k[:, :, :1]))
np.testing.assert_array_equal(append(cache).crop(0).lengths, 0)

long, _ = caches(STREAMING, 100, chunk=2)
for _ in range(6):
    long = long.append(k, v)
refused(ValueError, "lengths: batch entry 1 dropped keys", lambda: long.crop(jnp.array([30, 20])))
bad = crop(long, jnp.array([30, 20])).append(k, v).append(k, v)
refused(FAILED, "batch entry 1 was cropped to dropped keys", lambda: bad.attention(k[:, :, :1]))
again = bad.crop(jnp.array([40, 0])).append(k, v)
assert again.lengths.tolist() == [45, 5]
again.attention(k[:, :, :1])
bad = reorder(long, jnp.array([0, 7]))
refused(FAILED, "batch entry 1 was cropped", lambda: bad.attention(k[:, :, :1]))
bad = jax.jit(lambda c, n: c.append(k, v, lengths=n))(cache.crop(3), jnp.array([2, 6])).append(k, v)
refused(FAILED, "batch entry 1 was cropped to dropped keys, or got wrong numbers", lambda: bad.attention(k[:, :, :1]))
assert bad.crop(jnp.array([1, 0])).append(k, v).lengths.tolist() == [6, 5]
attend = jax.jit(lambda c, n: c.attention(k, lengths=n))
refused(FAILED, "lengths: expected integers in [0, 5]", lambda: attend(cache, jnp.array([1, 6])))
refused(FAILED, "batch entry 0 was cropped", lambda: crop(long, jnp.array([-1, 0])).attention(k[:, :, :1]))
refused(FAILED, "chunk", lambda: long.attention(k))
refused(FAILED, "expected at most 10 queries", lambda: cache.attention(jnp.tile(k, (1, 1, 3, 1))))

for call, error, message in [
    (lambda: cache.append(k, v.astype(jnp.float64)), TypeError, "v: expected dtype float32"),
    (lambda: cache.append(k[:, :1], v), ValueError, "k: expected shape (2, 2, new, 4)"),
    (lambda: cache.append(k, v[:, :, :1]), ValueError, "v: expected shape (2, 2, 5, 4)"),
    (lambda: cache.append(k, 3), TypeError, "v: expected a JAX array"),
    (lambda: cache.append(k, v, lengths=[1, 6]), ValueError, "lengths: expected integers in [0, 5]"),
    (lambda: cache.append(k, v, lengths=[1.0, 1.0]), ValueError, "lengths: expected integers of shape (2,)"),
    (lambda: cache.reorder([0, 2]), ValueError, "index: expected batch entries in [0, 1]"),
    (lambda: cache.reorder([0]), ValueError, "index: expected integers of shape (2,)"),
    (lambda: cache.crop([1, -2]), ValueError, "lengths: expected integers >= 0; that of entry 1"),
    (lambda: cache.crop([1, 2, 3]), ValueError, "lengths: expected integers, one or 2"),
    (lambda: spattn.jax.KVCache(lambda b, h, q, k: k <= q, 9, **SIZES), TypeError, "serializable"),
    (lambda: spattn.jax.KVCache(spattn.plan("causal", 9), 9, **SIZES), TypeError, "pattern: a Plan"),
    (lambda: spattn.jax.KVCache("causal", 9, **SIZES, dtype="int8"), TypeError, "dtype: expected one of"),
    (lambda: spattn.KVCache("causal", 9, **SIZES, like=k), TypeError, "use spattn.jax.KVCache"),
    (lambda: jax.grad(lambda q: cache.attention(q).sum())(k[:, :, :1]), ValueError, "cannot be differentiated"),
]:
    refused(error, message, call)
"""
    )
