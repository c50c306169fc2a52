"""JAX arrays on the host, in a process of their own: JAX starts threads, which tests that fork must not have."""

from __future__ import annotations

import pytest

pytest.importorskip("jax", reason="pip install 'spattn[test]' brings it")

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


def test_both_passes_are_numpys_to_the_bit(python):
    """Every dtype; a transposed array too. JAX has no strides, so that is a copy, and the result's order its own."""
    python(SETUP + """
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
""")


def test_a_mask_may_be_a_jax_array(python):
    python(SETUP + """
given = inputs(1, 2, q_len=20, head_dim=8)
mask = np.random.default_rng(0).random((20, 20)) < 0.3
assert_same(spattn.attention(*map(jnp.asarray, given), jnp.asarray(mask)), spattn.attention(*given, mask))
""")


def test_other_kinds_and_tracers_are_refused(python):
    """Under jit and grad arrays have no values; JAX's own error says so, and that must not become a wrong result."""
    python(SETUP + """
given = inputs(1, 2, q_len=20, head_dim=8)
arrays = q, k, v = [jnp.asarray(x) for x in given]
for error, message, call in (
    (TypeError, "k: expected a jax array like q, got numpy", lambda: spattn.attention(q, *given[1:])),
    (jax.errors.ConcretizationTypeError, "traced array", lambda: jax.jit(spattn.attention)(*arrays)),
    (jax.errors.ConcretizationTypeError, "traced array",
     lambda: jax.grad(lambda *qkv: spattn.attention(*qkv).sum())(*arrays)),
):
    try:
        call()
    except error as raised:
        assert message in str(raised), raised
    else:
        raise AssertionError(f"no error: {message}")
""")
