"""JAX programs run in their own process: JAX starts threads, and other tests fork."""

from __future__ import annotations

import pytest

SETUP = """
import functools
import numpy as np
import jax
import jax.numpy as jnp
import spattn
import spattn.jax
from spattn import patterns
from spattn.testing import GradientExpectation, Expectation, inputs

jax.config.update("jax_enable_x64", True)
WINDOW = patterns.SlidingWindow(9, 3)

def problem(batch=2, dtype="float32", seed=0, **sizes):
    '''NumPy arrays: (q, k, v), (dout, dlse).'''
    sizes = dict(q_len=50, kv_len=70, head_dim=16, head_dim_v=24) | sizes
    given = inputs(batch, 4, 2, dtype=dtype, seed=seed, **sizes)
    expectation = GradientExpectation(patterns.Full(), *given, with_dlse=True, seed=seed)
    return given, (expectation.dout, expectation.dlse)

def expected(given, upstream, pattern=WINDOW):
    out, lse = spattn.attention(*given, pattern, return_lse=True)
    dout, dlse = upstream
    return (out, lse), spattn.attention_backward(dout, *given, out, lse, pattern, dlse=dlse)

def attend(*operands, pattern=WINDOW, **options):
    return spattn.jax.attention(*operands, pattern, return_lse=True, **options)

def both(function, given, upstream):
    '''The results of a function and its vector-Jacobian products.'''
    results, back = jax.vjp(function, *map(jnp.asarray, given))
    return results, back(tuple(map(jnp.asarray, upstream)))

def assert_same(got, wanted):
    got, wanted = jax.tree.leaves(got), jax.tree.leaves(wanted)
    assert len(got) == len(wanted)
    for x, y in zip(got, wanted):
        assert isinstance(x, jax.Array) and (x.shape, str(x.dtype)) == (y.shape, str(y.dtype)), (x.shape, x.dtype)
        assert np.asarray(x).tobytes() == np.ascontiguousarray(y).tobytes()

def refused(error, message, call):
    try:
        jax.block_until_ready(call())
    except error as raised:
        assert message in str(raised), raised
    else:
        raise AssertionError(f"no error: {message}")
"""


@pytest.fixture
def program(python):
    """``program(source, **environment) -> stdout``; the source may use the names that SETUP defines."""
    pytest.importorskip("jax", reason="pip install jax")
    return lambda source, **environment: python(SETUP + source, **({"JAX_PLATFORMS": "cpu"} | environment))
