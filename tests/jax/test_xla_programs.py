"""How XLA's programs come into Python: from several threads, in another process, at the end."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

FOUR = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}


def test_programs_run_from_several_threads(program):
    """Threads that wait for results, and that trace, plan and compute at the same time, do not wait for each other."""
    program("""
from concurrent.futures import ThreadPoolExecutor
given, upstream = problem(q_len=300, kv_len=300)
wanted = {width: expected(given, upstream, patterns.SlidingWindow(width)) for width in range(8)}
step = jax.jit(lambda width, *x: both(functools.partial(attend, pattern=patterns.SlidingWindow(width)), x[:3], x[3:]),
               static_argnums=0)
def work(number):
    for width in range(8):
        width = (width + number) % 8
        assert_same(jax.block_until_ready(step(width, *given, *upstream)), wanted[width])
        assert_same(spattn.attention(*map(jnp.asarray, given), patterns.SlidingWindow(width)), wanted[width][0][0])
with ThreadPoolExecutor(6) as pool:
    list(pool.map(work, range(6)))
""")


@pytest.mark.parametrize("devices", [{}, FOUR], ids=["one device", "four devices"])
def test_python_ends_after_programs_that_run(program, devices):
    """Also those whose results nobody has: XLA's threads would come into a Python that is gone."""
    program(
        """
given = [jnp.asarray(x) for x in inputs(4, 4, q_len=600, head_dim=32)]
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("batch",))
spec = jax.sharding.PartitionSpec("batch")
twice = lambda q, k, v: attend(2 * attend(2 * q, k, v, pattern="full")[0], k, v, pattern="full")[0]
spread = jax.jit(jax.shard_map(twice, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec))
alone = jax.jit(twice)
jax.block_until_ready((spread(*given), alone(*given)))
kept = spread(*given), alone(*given)
for _ in range(3):
    spread(*given), alone(*given)
""",
        timeout=100,
        **devices,
    )


def test_an_exported_program_runs_in_another_process(program, tmp_path):
    """It holds the pattern as text, so that process need not have seen it before."""
    pytest.importorskip("flatbuffers", reason="jax.export writes programs with it")
    path = tmp_path / "program"
    program(f"""
from jax import export
given, upstream = problem(dtype="float32")
mask = np.random.default_rng(0).random((50, 70)) < 0.3
def step(*x):
    return both(functools.partial(attend, pattern=WINDOW | patterns.Mask(mask)), x[:3], x[3:])
checks = [export.DisabledSafetyCheck.custom_call("spattn_attention" + end) for end in ("", "_backward")]
exported = export.export(jax.jit(step), disabled_checks=checks)(*given, *upstream)
open({str(path)!r}, "wb").write(exported.serialize())
""")
    program(f"""
from jax import export
given, upstream = problem(dtype="float32")
mask = np.random.default_rng(0).random((50, 70)) < 0.3
exported = export.deserialize(open({str(path)!r}, "rb").read())
assert_same(exported.call(*given, *upstream), expected(given, upstream, WINDOW | patterns.Mask(mask)))
""")


def test_import_registers_and_starts_nothing(program):
    """JAX's backends start when they are used; their flags may be set until then."""
    program("""
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
""")
