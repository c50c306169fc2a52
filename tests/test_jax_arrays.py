"""JAX arrays on the host, in a process of their own: JAX starts threads, which tests that fork must not have."""

from __future__ import annotations

import pytest

pytest.importorskip("jax", reason="pip install jax")

SETUP = """
import numpy as np
import jax
import jax.numpy as jnp
import spattn
from spattn.testing import inputs

jax.config.update("jax_enable_x64", True)
pattern = spattn.patterns.SlidingWindow(9, 3)

def assert_same(result, expected):
    assert isinstance(result, jax.Array) and str(result.dtype) == str(expected.dtype), (type(result), result.dtype)
    assert next(iter(result.devices())).platform == "cpu"
    assert np.asarray(result).tobytes() == np.ascontiguousarray(expected).tobytes()
"""


@pytest.mark.slow
def test_both_passes_are_numpys_to_the_bit(python):
    """Every dtype; a transposed array too. JAX has no strides, so that is a copy, and the result's order its own."""
    python(
        SETUP
        + """
for dtype in ("float32", "float64", "float16", "bfloat16"):
    given = inputs(2, 4, 2, q_len=50, kv_len=70, head_dim=16, head_dim_v=24, dtype=dtype)
    expected = spattn.attention(*given, pattern, return_lse=True)
    for arrays in (map(jnp.asarray, given), (jnp.asarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in given)):
        arrays = list(arrays)
        out, lse = spattn.attention(*arrays, pattern, return_lse=True)
        assert_same(out, expected[0])
        assert_same(lse, expected[1])
    dout = inputs(2, 4, q_len=50, kv_len=50, head_dim=24, dtype=dtype, seed=1)[0]
    gradients = spattn.attention_backward(jnp.asarray(dout), *arrays, out, lse, pattern)
    for got, want in zip(gradients, spattn.attention_backward(dout, *given, *expected, pattern), strict=True):
        assert_same(got, want)
"""
    )


def test_a_mask_may_be_a_jax_array(python):
    python(
        SETUP
        + """
given = inputs(1, 2, q_len=20, head_dim=8)
mask = np.random.default_rng(0).random((20, 20)) < 0.3
assert_same(spattn.attention(*map(jnp.asarray, given), jnp.asarray(mask)), spattn.attention(*given, mask))
"""
    )


REFUSED = """
def refused(error, message, call):
    try:
        call()
    except error as raised:
        assert str(raised).startswith(message), raised
    else:
        raise AssertionError(f"no error: {message}")
"""


def test_other_kinds_and_tracers_are_refused(python):
    """Under jit, grad and vmap arrays have no values: an error names the first that has none, in either pass."""
    python(
        SETUP
        + REFUSED
        + """
given = inputs(1, 2, q_len=20, head_dim=8)
arrays = q, k, v = [jnp.asarray(x) for x in given]
out, lse = spattn.attention(*arrays, pattern, return_lse=True)
refused(TypeError, "k: expected a jax array like q, got numpy", lambda: spattn.attention(q, *given[1:]))
tracer = ": expected a plain array, got a tracer, which has no values; call this outside of jax.jit"
for n, name in enumerate("qkv"):
    def attend(x):
        return spattn.attention(*arrays[:n], x, *arrays[n + 1:]).sum()
    for traced in (jax.jit(attend), jax.grad(attend), lambda x: jax.jvp(attend, (x,), (x,))):
        refused(TypeError, name + tracer, lambda: traced(arrays[n]))
    refused(TypeError, name + tracer, lambda: jax.vmap(attend)(arrays[n][None]))
args = out, q, k, v, out, lse
for n, name in enumerate(("dout", "q", "k", "v", "out", "lse")):
    traced = jax.jit(lambda x: spattn.attention_backward(*args[:n], x, *args[n + 1:], pattern))
    refused(TypeError, name + tracer, lambda: traced(args[n]))
mask = jnp.ones((20, 20), bool)
refused(TypeError, "pattern" + tracer, lambda: jax.jit(lambda mask: spattn.attention(*arrays, mask))(mask))
"""
    )


def test_an_array_on_several_devices_is_refused(python):
    """Which of them should compute is the caller's to say."""
    python(
        SETUP
        + REFUSED
        + """
q, k, v = (jnp.asarray(x) for x in inputs(2, 2, q_len=20, head_dim=8))
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("batch",))
split = jax.device_put(k, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch")))
refused(TypeError, "k: expected a plain array, got an array on 2 devices; use jax.device_put",
        lambda: spattn.attention(q, split, v))
expected = np.asarray(spattn.attention(q, k, v))
assert_same(spattn.attention(q, jax.device_put(split, jax.devices()[0]), v), expected)
""",
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
    )
