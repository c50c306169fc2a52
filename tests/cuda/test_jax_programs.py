"""Programs of JAX on a GPU: both passes on XLA's own buffers, against the oracle, and nothing leaves the device."""

from __future__ import annotations

import numpy as np
import pytest

from spattn import patterns
from spattn.testing import Expectation, GradientExpectation, inputs

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("family", ["sm90", "sm80"], indirect=True)]
WINDOW = patterns.SlidingWindow(70, 20)


@pytest.fixture
def jax():
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    try:
        jax.devices("gpu")
    except RuntimeError as error:
        pytest.skip(f"this JAX has no GPU: {error}")
    return jax


@pytest.fixture
def attend(jax):
    import spattn.jax

    return lambda q, k, v, pattern=WINDOW: spattn.jax.attention(q, k, v, pattern, return_lse=True)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("pattern", [WINDOW, patterns.Causal(), patterns.strided(16)], ids=repr)
def test_values_and_gradients_are_within_the_oracles_budget(jax, attend, family, pattern, dtype):
    if family == "sm90" and dtype == "float32":
        pytest.skip("the portable kernels compute float32")
    given = inputs(2, 4, 2, q_len=300, kv_len=300, head_dim=64, dtype=dtype)
    wanted = GradientExpectation(pattern, *given, with_dlse=True)
    arrays = [jax.device_put(x, jax.devices("gpu")[0]) for x in given]

    @jax.jit
    def both(*operands):
        results, back = jax.vjp(lambda *x: attend(*x, pattern), *operands)
        return results, back((wanted.dout, wanted.dlse))

    for _ in range(3):
        results, gradients = both(*arrays)
        Expectation(pattern, *given).check(*map(np.asarray, results))
        wanted.check(tuple(map(np.asarray, gradients)))


def test_nothing_leaves_the_device(jax, attend):
    """JAX refuses transfers that a program was not told of; kernels run between others of XLA's, in its order."""
    given = [jax.device_put(x, jax.devices("gpu")[0]) for x in inputs(2, 4, q_len=300, head_dim=64, dtype="float16")]
    chain = jax.jit(lambda q, k, v: attend(2 * attend(q + q, k, v)[0], k, v)[0] - q)
    expected = np.asarray(chain(*given))
    with jax.transfer_guard("disallow"):
        results = [chain(*given) for _ in range(20)]
    for out in results:
        assert out.devices() == given[0].devices()
        np.testing.assert_array_equal(np.asarray(out), expected)


def test_calls_between_parts_that_xla_captures(jax, attend):
    """XLA makes CUDA graphs of the rest of a program that runs again and again; every run gives the same bits."""
    q, k, v = (jax.device_put(x, jax.devices("gpu")[0]) for x in inputs(1, 2, q_len=256, head_dim=64, dtype="float16"))

    @jax.jit
    def loop(q):
        return jax.lax.fori_loop(0, 5, lambda _, x: jax.numpy.sin(attend(jax.numpy.cos(x), k, v)[0]), q)

    first = np.asarray(loop(q))
    assert np.isfinite(first).all() and first.any()
    for _ in range(20):
        np.testing.assert_array_equal(np.asarray(loop(q)), first)


def test_vmap(jax, attend):
    given = inputs(6, 2, q_len=200, head_dim=64, dtype="bfloat16")
    arrays = [jax.device_put(x, jax.devices("gpu")[0]) for x in given]
    out, _ = jax.vmap(attend)(*(x.reshape(3, 2, *x.shape[1:]) for x in arrays))
    whole, lse = attend(*arrays)
    np.testing.assert_array_equal(np.asarray(out).reshape(whole.shape), np.asarray(whole))
    Expectation(WINDOW, *given).check(np.asarray(whole), np.asarray(lse))
