"""spattn.jax.attention under JAX's transformations: what NumPy's arrays give, to the bit, and the oracle's budget."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow


def test_values_and_gradients_are_numpys_to_the_bit(program):
    """Every dtype, as it is and under jit and checkpoint; the gradient of the lse is a part of them."""
    program("""
for dtype in ("float32", "float64", "float16", "bfloat16"):
    given, upstream = problem(dtype=dtype)
    wanted = expected(given, upstream)
    for transformed in (attend, jax.jit(attend), jax.checkpoint(attend), jax.jit(jax.checkpoint(attend))):
        assert_same(both(transformed, given, upstream), wanted)
    assert_same(spattn.jax.attention(*map(jnp.asarray, given), WINDOW), wanted[0][0])
""")


def test_value_and_grad_are_within_the_oracles_budget(program):
    """A loss of out and lse, whose gradients are the upstream ones; a loss of out alone; every registered pattern."""
    program("""
def loss(upstream, pattern):
    dout, dlse = map(jnp.asarray, upstream)
    def of(*operands):
        out, lse = attend(*operands, pattern=pattern)
        return (out * dout).sum() + jnp.where(jnp.isfinite(lse), lse * dlse, 0).sum()
    return of

for name in patterns.registry.names():
    pattern, length = patterns.registry.example(name)[:2]
    heads = max(1, pattern.sizes()[1])
    given = inputs(max(1, pattern.sizes()[0]), 2 * heads, heads, q_len=length, head_dim=8, dtype="float64")
    wanted = GradientExpectation(pattern, *given, with_dlse=True)
    step = jax.jit(jax.value_and_grad(loss((wanted.dout, wanted.dlse), pattern), (0, 1, 2)))
    _, gradients = step(*map(jnp.asarray, given))
    wanted.check(tuple(map(np.asarray, gradients)), name)
    Expectation(pattern, *given).check(*map(np.asarray, attend(*map(jnp.asarray, given), pattern=pattern)), name)

alone = GradientExpectation(WINDOW, *problem()[0])
gradients = jax.grad(lambda *x: (spattn.jax.attention(*x, WINDOW) * alone.dout).sum(), (0, 1, 2))(
    *map(jnp.asarray, problem()[0]))
alone.check(tuple(map(np.asarray, gradients)))
""")


def test_options_reach_the_backend(program):
    program("""
(q, k, v), upstream = problem()
for scale in (0.3, -1, np.float32(0.1)):
    out = spattn.jax.attention(*map(jnp.asarray, (q, k, v)), "causal", scale=scale)
    assert_same(out, spattn.attention(q, k, v, "causal", scale=scale))
out = spattn.jax.attention(*map(jnp.asarray, (q, k, v)), WINDOW, backend="reference")
assert_same(out, spattn.attention(q, k, v, WINDOW, backend="reference"))
mask = np.random.default_rng(0).random((4, 50, 70)) < 0.3
for pattern in (mask, jnp.asarray(mask), patterns.Mask(mask)):
    assert_same(attend(*map(jnp.asarray, (q, k, v)), pattern=pattern), spattn.attention(q, k, v, mask, return_lse=True))
""")


def test_equal_patterns_are_one_program(program):
    """And another pattern is another one."""
    program("""
q, k, v = map(jnp.asarray, problem()[0])
attention = jax.jit(lambda q, k, v, window: spattn.jax.attention(q, k, v, window), static_argnums=3)
first = attention(q, k, v, patterns.SlidingWindow(9, 3))
assert_same(attention(q, k, v, patterns.SlidingWindow(9, 3)), np.asarray(first))
assert attention._cache_size() == 1
other = patterns.SlidingWindow(9, 2)
assert_same(attention(q, k, v, other), spattn.attention(*problem()[0], other))
assert attention._cache_size() == 2
""")


# -- vmap --------------------------------------------------------------------------------------------------------------


def test_vmap_is_one_call_with_more_batch_entries(program):
    """Over any axis, of some of the operands, within each other, and of gradients."""
    program("""
given, upstream = problem(batch=6)
(out, lse), gradients = wanted = expected(given, upstream)

def split(x):
    return x.reshape(3, 2, *x.shape[1:])

parts = tuple(map(split, given)), tuple(map(split, upstream))
for axis in range(5):
    moved, above = [[jnp.moveaxis(x, 0, axis if x.ndim == 5 else min(axis, 3)) for x in xs] for xs in parts]
    axes = (axis, axis, axis), (axis, min(axis, 3))
    mapped = jax.jit(jax.vmap(attend, in_axes=axis, out_axes=axes[1]))
    results, slopes = both(mapped, moved, above)
    assert_same([jnp.moveaxis(x, a, 0) for x, a in zip(results, axes[1])], jax.tree.map(split, (out, lse)))
    assert_same([jnp.moveaxis(x, axis, 0) for x in slopes], jax.tree.map(split, gradients))

def slope(given, upstream):
    return both(attend, given, upstream)
assert_same(jax.vmap(slope)(*parts), jax.tree.map(split, wanted))
twice = jax.tree.map(lambda x: x.reshape(3, 2, 1, *x.shape[1:]), (given, upstream))
assert_same(jax.vmap(jax.vmap(slope))(*twice), jax.tree.map(lambda x: x.reshape(3, 2, 1, *x.shape[1:]), wanted))
""")


def test_vmap_repeats_what_is_not_mapped(program):
    """Gradients of what is not mapped are added up."""
    program("""
(q, k, v), (dout, dlse) = problem(batch=3)
one = k[:1], v[:1]
repeated = tuple(np.repeat(x, 3, axis=0) for x in one)
(out, lse), (dq, dk, dv) = expected((q, *repeated), (dout, dlse))
mapped = jax.vmap(attend, in_axes=(0, None, None))
results, gradients = both(mapped, (q[:, None], *one), (dout[:, None], dlse[:, None]))
assert_same(results, (out[:, None], lse[:, None]))
assert_same(gradients[0], dq[:, None])
for got, parts in zip(gradients[1:], (dk, dv)):
    assert_same(got, jnp.asarray(parts)[:, None].sum(0))
""")


def test_vmap_refuses_a_pattern_of_batch_entries(program):
    program("""
(q, k, v), _ = problem(batch=2, kv_len=50)
q, k, v = (jnp.asarray(x)[None] for x in (q, k, v))
documents = patterns.Documents(((20, 30), (50,)))
refused(ValueError, "pattern: must not differ between batch entries under jax.vmap, got Documents",
        lambda: jax.vmap(functools.partial(attend, pattern=documents))(q, k, v))
""")


# -- several devices ---------------------------------------------------------------------------------------------------

FOUR = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
MESH = """
P = jax.sharding.PartitionSpec
mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("batch", "heads"))
given, upstream = problem()
"""


def test_shard_map_over_batch_and_heads(program):
    """Each device computes what a call with its entries and heads alone gives, in both passes."""
    program(
        MESH
        + """
spread, rows = P("batch", "heads"), P("batch", "heads", None)
sharded = jax.shard_map(attend, mesh=mesh, in_specs=(spread,) * 3, out_specs=(spread, rows))
def each(x):
    return [part for entry in np.split(x, 2, 0) for part in np.split(entry, 2, 1)]
def joined(parts):
    return np.concatenate([np.concatenate(parts[n : n + 2], 1) for n in (0, 2)], 0)
wanted = [expected((q, k, v), up) for q, k, v, *up in zip(*map(each, (*given, *upstream)), strict=True)]
wanted = jax.tree.map(lambda *parts: joined(parts), *wanted)
for function in (sharded, jax.jit(sharded), jax.jit(jax.checkpoint(sharded))):
    results, gradients = both(function, given, upstream)
    assert_same((results, gradients), wanted)
    assert len(results[0].devices()) == 4
""",
        **FOUR,
    )


def test_shard_map_adds_up_gradients_of_what_every_device_has(program):
    """K and V are the same on all devices along the batch axis; gradients taken inside and outside agree, computed in
    float64 to float32's precision."""
    program(
        MESH
        + """
q, k, v = map(jnp.asarray, problem(dtype="float64")[0])
k, v = k[:1], v[:1]
eps = np.finfo(np.float32).eps
in_specs = P("batch", "heads"), P(None, "heads"), P(None, "heads")
def loss(q, k, v):
    out, lse = attend(q, k, v)
    return jax.lax.psum((out * out).sum() + lse.sum(), ("batch", "heads"))
whole = lambda q, k, v: (lambda out, lse: (out * out).sum() + lse.sum())(
    *attend(q, jnp.repeat(k, 2, 0), jnp.repeat(v, 2, 0)))
value, gradients = jax.value_and_grad(whole, (0, 1, 2))(q, k, v)
sharded = jax.shard_map(loss, mesh=mesh, in_specs=in_specs, out_specs=P())
inside = jax.shard_map(jax.grad(loss, (0, 1, 2)), mesh=mesh, in_specs=in_specs, out_specs=in_specs)
np.testing.assert_allclose(sharded(q, k, v), value, rtol=eps)
for got in (jax.jit(jax.grad(sharded, (0, 1, 2)))(q, k, v), inside(q, k, v)):
    for x, y in zip(got, gradients):
        np.testing.assert_allclose(x, y, rtol=0, atol=eps * np.abs(y).max())
""",
        **FOUR,
    )


def test_arrays_on_several_devices_without_shard_map(program):
    """They are gathered, and the result is that of one device."""
    program(
        MESH
        + """
spread = jax.sharding.NamedSharding(mesh, P("batch", "heads"))
rows = jax.sharding.NamedSharding(mesh, P("batch", "heads", None))
arrays = [jax.device_put(x, s) for x, s in zip((*given, *upstream), (spread,) * 4 + (rows,))]
assert all(len(x.devices()) == 4 for x in arrays)
assert_same(jax.jit(lambda *x: both(attend, x[:3], x[3:]))(*arrays), expected(given, upstream))
""",
        **FOUR,
    )


def test_patterns_and_padding_in_other_forms(program):
    """Text, an additive mask, a sparse matrix and key padding, which here are constants of the program."""
    program("""
import scipy.sparse
given, _ = problem()
arrays = tuple(map(jnp.asarray, given))
tokens = np.arange(70) < np.array([[70], [33]])
allowed = WINDOW.index_set(50, 70).to_dense()
padded = WINDOW & patterns.KeyPadding(tokens)
for form in ("sliding_window(9, 3)", np.where(allowed, 0, -np.inf), scipy.sparse.csr_array(allowed)):
    run = jax.jit(functools.partial(spattn.jax.attention, pattern=form, key_padding=tokens))
    np.testing.assert_allclose(run(*arrays), spattn.attention(*given, padded), atol=2e-6)
refused(ValueError, "key_padding: expected shape (2, 70)",
        lambda: spattn.jax.attention(*arrays, key_padding=tokens[:, 1:]))
refused(ValueError, "key_padding: expected shape (2, 70)",
        lambda: jax.jit(lambda x: spattn.jax.attention(*arrays, key_padding=x))(jnp.asarray(tokens[:, 1:])))
""")


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_refusals_name_the_argument_while_the_program_is_traced(program):
    program("""
given, _ = problem()
q, k, v = map(jnp.asarray, given)
attention = jax.jit(spattn.jax.attention, static_argnums=3, static_argnames=("scale", "backend", "precision"))
for name, operands in (("q", (given[0], k, v)), ("k", (q, given[1], v)), ("v", (q, k, None))):
    refused(TypeError, f"{name}: expected a JAX array, got", lambda: spattn.jax.attention(*operands))
refused(TypeError, "v: expected dtype float32 like q, got float16", lambda: attention(q, k, v.astype(jnp.float16)))
refused(TypeError, "q: expected one of float32", lambda: attention(q.astype(int), k, v))
refused(ValueError, "q: expected shape (batch, heads, length, head_dim)", lambda: attention(q[..., 0], k, v))
refused(ValueError, "k: expected shape (2, 2, 70, 16), got (1, 2, 70, 16)", lambda: attention(q, k[:1], v))
refused(ValueError, "kv_len: expected 9 (a grid", lambda: attention(q, k, v, patterns.Neighborhood((3, 3), 3)))
refused(ValueError, "batch entries", lambda: attention(q, k, v, patterns.Documents(((70,),) * 3)))
refused(TypeError, "pattern: expected a Pattern, a registered name or a bool array, got a Plan",
        lambda: spattn.jax.attention(q, k, v, spattn.plan(WINDOW, 50, 70)))
mask = jnp.ones((50, 70), jnp.int32)
refused(TypeError, "pattern: got an array of int32; a mask is bool: write array.astype(bool)",
        lambda: jax.jit(lambda mask: spattn.jax.attention(q, k, v, mask))(mask))
refused(TypeError, "scale must be an int", lambda: jax.jit(lambda s: spattn.jax.attention(q, k, v, scale=s))(0.5))
refused(ValueError, "scale must be finite", lambda: attention(q, k, v, scale=float("inf")))
refused(ValueError, "precision: expected None or 'tf32'", lambda: attention(q, k, v, precision="bf16"))
refused(TypeError, "backend: expected a name", lambda: spattn.jax.attention(q, k, v, backend=3))

class Own(patterns.Pattern):
    def allows(self, q, k):
        return q >= k
import dataclasses
Own = dataclasses.dataclass(frozen=True)(Own)
refused(TypeError, "pattern: a JAX program requires a serializable pattern", lambda: attention(q, k, v, Own()))
""")


def test_there_is_no_second_derivative_and_no_forward_mode(program):
    program("""
q, k, v = map(jnp.asarray, problem()[0])
def loss(q):
    return attend(q, k, v)[0].sum()
refused(ValueError, "cannot be differentiated", lambda: jax.grad(lambda q: jax.grad(loss)(q).sum())(q))
refused(TypeError, "forward-mode", lambda: jax.jvp(loss, (q,), (q,)))
""")


def test_errors_while_the_program_runs_have_type_and_message(program):
    program("""
from spattn import cpu, cuda
q, k, v = map(jnp.asarray, problem()[0])
cuda.unavailable = lambda: "there is none"
for attention in (spattn.jax.attention, jax.jit(spattn.jax.attention, static_argnames="backend")):
    refused(jax.errors.JaxRuntimeError, "BackendUnavailableError: backend 'cuda' is not available: there is none",
            lambda: attention(q, k, v, backend="cuda"))
refused(jax.errors.JaxRuntimeError, "INVALID_ARGUMENT: ValueError: backend: expected 'auto' or one of",
        lambda: spattn.jax.attention(q, k, v, backend="cpus"))
cpu.prepare = lambda call, plan: 1 / 0
refused(jax.errors.JaxRuntimeError, "INTERNAL: ZeroDivisionError", lambda: attend(q, k, v))
""")


# -- edges -------------------------------------------------------------------------------------------------------------


def test_nothing_to_attend_to(program):
    """No foreign function is called for arrays without elements; zeros and −∞ have gradients, of zero."""
    program("""
for sizes in (dict(kv_len=0), dict(q_len=0), dict(batch=0)):
    given, upstream = problem(**sizes)
    wanted = expected(given, upstream, "full")
    full = functools.partial(attend, pattern="full")
    for function in (full, jax.jit(full)):
        assert_same(both(function, given, upstream), wanted)
    assert "custom_call" not in jax.jit(full).lower(*map(jnp.asarray, given)).as_text()
mapped = jax.vmap(attend)(*(jnp.zeros((0, *x.shape), x.dtype) for x in problem()[0]))
assert mapped[0].shape == (0, 2, 4, 50, 24) and mapped[1].shape == (0, 2, 4, 50)
""")


def test_values_that_no_pair_allows_have_no_influence(program):
    """NaN and infinities at hidden keys, and rows that may attend to nothing."""
    program("""
given, upstream = problem(q_len=70)
given[2][:, :, -1], given[1][:, :, -1] = np.nan, np.inf
pattern = patterns.Mask(np.tri(70, 70, -1, dtype=bool))
wanted = expected(given, upstream, pattern)
assert_same(both(functools.partial(attend, pattern=pattern), given, upstream), wanted)
""")


def test_a_long_row_and_a_large_mask(program):
    """The text of a mask is long; XLA's own threads run the program."""
    program("""
given, upstream = problem(batch=1, q_len=1, kv_len=20_000)
assert_same(both(jax.jit(attend), given, upstream), expected(given, upstream))
mask = np.random.default_rng(0).random((700, 700)) < 0.01
given, upstream = problem(batch=1, q_len=700, kv_len=700)
assert_same(both(jax.jit(functools.partial(attend, pattern=mask)), given, upstream), expected(given, upstream, mask))
""")
