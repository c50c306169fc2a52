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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores_and_sinks(jax, family, dtype):
    """Gradients to traced captured arrays too, against the reference backend's."""
    import jax.numpy as jnp

    import spattn.jax

    if family == "sm90" and dtype == "float32":
        pytest.skip("the portable kernels compute float32")
    rng = np.random.default_rng(0)
    q, k, v = inputs(2, 4, 2, q_len=300, kv_len=300, head_dim=64, dtype=dtype)
    captured = [rng.standard_normal(shape).astype(np.float32) for shape in ((4, 601), (4,), (4,))]

    def loss(backend, q, k, v, table, slopes, sinks):
        def score(s, b, h, i, j):
            return 4.0 * np.tanh(s / 4.0) + slopes[h] * (j - i) / 64 + table[h, j - i + 300]

        out, lse = spattn.jax.attention(q, k, v, WINDOW, score=score, sinks=sinks, return_lse=True, backend=backend)
        return (out.astype(jnp.float32) ** 2).sum() + (lse**2).sum()

    every = tuple(range(1, 7))
    on_host = [
        jax.device_put(x, jax.devices("cpu")[0]) for x in (*(x.astype(np.float32) for x in (q, k, v)), *captured)
    ]
    wanted = jax.grad(loss, every)("reference", *on_host)
    on_gpu = [jax.device_put(x, jax.devices("gpu")[0]) for x in (q, k, v, *captured)]
    for transformed in (jax.grad(loss, every), jax.jit(jax.grad(loss, every), static_argnums=0)):
        for found, want in zip(transformed("cuda", *on_gpu), wanted, strict=True):
            found, want = np.asarray(found, np.float64), np.asarray(want, np.float64)
            assert np.linalg.norm(found - want) <= (2e-5 if dtype == "float32" else 2e-2) * np.linalg.norm(want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dropout(jax, family, dtype):
    """The kernels read a traced seed on the device; the pairs are those of the reference backend."""
    import jax.numpy as jnp

    import spattn.jax

    if family == "sm90" and dtype == "float32":
        pytest.skip("the portable kernels compute float32")
    given = inputs(2, 4, 2, q_len=300, kv_len=300, head_dim=64, dtype=dtype)

    def loss(backend, seed, q, k, v):
        options = {"return_lse": True, "dropout_p": 0.3, "seed": seed, "backend": backend}
        out, lse = spattn.jax.attention(q, k, v, WINDOW, **options)
        return (out.astype(jnp.float32) ** 2).sum() + (lse**2).sum()

    gradients = jax.jit(jax.grad(loss, (2, 3, 4)), static_argnums=0)
    host, gpu = (jax.devices(name)[0] for name in ("cpu", "gpu"))
    on_host = [jax.device_put(x.astype(np.float32), host) for x in given]
    on_gpu = [jax.device_put(x, gpu) for x in given]
    for seed in (3, 2**31 - 1):
        on_device = jax.device_put(np.int32(seed), gpu)
        gradients("cuda", on_device, *on_gpu)
        with jax.transfer_guard("disallow"):
            got = gradients("cuda", on_device, *on_gpu)
        for found, want in zip(
            got, gradients("reference", jax.device_put(np.int32(seed), host), *on_host), strict=True
        ):
            found, want = np.asarray(found, np.float64), np.asarray(want, np.float64)
            assert np.linalg.norm(found - want) <= (2e-5 if dtype == "float32" else 2e-2) * np.linalg.norm(want)


@pytest.mark.parametrize(
    "pattern", [patterns.Causal(), patterns.Causal() & (patterns.Sinks(4) | patterns.SlidingWindow(30, 0))]
)
def test_kv_cache(jax, family, pattern):
    """Steps of a program on the device, also of entries with different lengths, are those of spattn.KVCache."""
    import spattn.jax

    n, sizes = 150, {"batch": 2, "heads_kv": 2, "head_dim": 64, "dtype": "float16", "chunk": 4}
    q, k, v = inputs(2, 4, 2, q_len=n, kv_len=n, head_dim=64, dtype="float16")
    with jax.default_device(jax.devices("gpu")[0]):
        ours = spattn.jax.KVCache(pattern, 300, **sizes)
    theirs = spattn.KVCache(pattern, 300, **sizes)

    @jax.jit
    def step(cache, q, k, v, new):
        cache = cache.append(k, v, lengths=new)
        return cache, cache.attention(q, lengths=new, return_lse=True)

    prompt = [x[:, :, :100] for x in (k, v)]
    ours = ours.append(*map(jax.numpy.asarray, prompt), lengths=np.array([100, 90]))
    theirs.append(*prompt, lengths=[100, 90])
    at = 100
    for size, new in [(1, (1, 1)), (3, (3, 1)), (4, (0, 4)), (2, (2, 2)), *[(1, (1, 1))] * 30]:
        given = [x[:, :, at : at + size] for x in (q, k, v)]
        ours, got = step(ours, *map(jax.numpy.asarray, given), np.array(new))
        theirs.append(*given[1:], lengths=new)
        want = theirs.attention(given[0], lengths=new, return_lse=True)
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), atol=3e-3)
        at += size
