"""Attention under shard_map over a sharded sequence: values and gradients of one device."""

import pytest

pytestmark = pytest.mark.slow


def test_sequences_over_four_devices(program):
    """Windows within a shard, over several, and to the ends; causal; with batch or heads on the other mesh axis."""
    program(
        """
P = jax.sharding.PartitionSpec
from spattn.patterns import Causal, Full, SlidingWindow
q, k, v = inputs(2, 4, 2, q_len=40, head_dim=8, dtype="float64")
dout = inputs(2, 4, 4, q_len=40, head_dim=8, dtype="float64", seed=1)[0]
sinks = jnp.arange(4.0)
cases = [(SlidingWindow(3, 0), 4), (SlidingWindow(7, 5), 4), (SlidingWindow(13, 25), 4), (SlidingWindow(-1, 2), 4),
         ("causal", 4), (Full(), 4), (SlidingWindow(0, 0), 4), (SlidingWindow(24, 11), 2), (Causal(), 2)]
for number, (pattern, devices) in enumerate(cases):
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(devices, -1), ("sequence", "other"))
    spec = P(None, "other", "sequence") if number % 2 else P("other", None, "sequence")
    def attend(q, k, v):
        return spattn.jax.sequence_attention(q, k, v, pattern, axis_name="sequence", return_lse=True, scale=0.4)
    sharded = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=(spec,) * 3, out_specs=(spec, spec)))
    def plain(q, k, v):
        return spattn.jax.attention(q, k, v, pattern, return_lse=True, scale=0.4)
    def loss(of):
        def computed(*x):
            out, lse = of(*x)
            return (out * dout).sum() + (lse * dout[..., 0]).sum()
        return computed
    given = tuple(map(jnp.asarray, (q, k, v)))
    for got, want in zip(sharded(*given), plain(*given), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
    found, expected = (jax.grad(loss(of), (0, 1, 2))(*given) for of in (sharded, plain))
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
def other(q, k, v):
    return spattn.jax.sequence_attention(q, k, v, spattn.patterns.strided(4), axis_name="sequence")
try:
    jax.shard_map(other, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)(*given)
except ValueError as error:
    assert "expected Causal, Full or SlidingWindow" in str(error)
else:
    raise AssertionError
""",
        XLA_FLAGS="--xla_force_host_platform_device_count=4",
    )
