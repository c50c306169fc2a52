"""The CPU core among threads, processes, signals and environment variables."""

from __future__ import annotations

import contextvars
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

import spattn
from spattn import cpu, patterns
from spattn.cpu import _threads
from spattn.request.call import Call
from spattn.testing import inputs


def call(isa=None, dtype="float32"):
    q, k, v = inputs(1, 4, q_len=500, head_dim=32, dtype=dtype)
    pattern = patterns.registry.get("longformer", window=64, global_tokens=8)
    return cpu.forward(q, k, v, spattn.plan_for(pattern, q, k, v, backend="cpu"), 0.2, isa=isa)


def assert_same(a, b):
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x.view(np.uint8), y.view(np.uint8))


@pytest.mark.skipif(not cpu._core.OPENMP, reason="built without OpenMP")
def test_thread_count_does_not_change_the_result():
    for isa in cpu.instruction_sets():
        results = []
        for threads in (1, 2, 3):
            with threadpool_limits(threads, user_api="openmp"):
                results.append(call(isa))
        assert_same(results[0], results[1])
        assert_same(results[0], results[2])


@pytest.mark.skipif(not cpu._core.OPENMP, reason="built without OpenMP")
def test_threadpoolctl_is_honoured():
    with threadpool_limits(1, user_api="openmp"):
        assert cpu.num_threads() == 1


@pytest.mark.skipif(not cpu._core.OPENMP, reason="built without OpenMP")
def test_threads_set_by_the_caller():
    """A block overrides the number of the process, which overrides OpenMP's; each ends where it should."""
    default = cpu.num_threads()
    try:
        spattn.set_num_threads(3)
        assert cpu.num_threads() == 3
        with spattn.threads(2):
            assert cpu.num_threads() == 2
            with spattn.threads(5):
                assert cpu.num_threads() == 5
            with ThreadPoolExecutor(1) as pool:  # a block is for its own thread
                assert pool.submit(cpu.num_threads).result() == 3
            assert cpu.num_threads() == 2
        with pytest.raises(ZeroDivisionError), spattn.threads(2):
            raise ZeroDivisionError
        assert cpu.num_threads() == 3
    finally:
        spattn.set_num_threads(None)
    assert cpu.num_threads() == default


@pytest.mark.parametrize(
    "n, error", [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError), ("2", TypeError)]
)
def test_impossible_numbers_of_threads(n, error):
    for setting in (spattn.set_num_threads, lambda n: spattn.threads(n).__enter__()):
        with pytest.raises(error, match="^n: expected"):
            setting(n)


@pytest.mark.skipif(not cpu._core.OPENMP, reason="built without OpenMP")
def test_a_limit_of_threadpoolctl_holds_beside_the_callers(monkeypatch):
    monkeypatch.setattr(_threads, "_OPENMP_AT_IMPORT", 8)
    with spattn.threads(6):
        for limit in (1, 3, 7):
            with threadpool_limits(limit, user_api="openmp"):
                assert cpu.num_threads() == min(limit, 6)
        with threadpool_limits(8, user_api="openmp"):
            assert cpu.num_threads() == 6


def test_blocks_of_threads_that_end_elsewhere():
    """In another context or thread, more than once at a time, and in a generator: no error, as decimal.localcontext."""
    default, block = cpu.num_threads(), spattn.threads(1)
    contextvars.copy_context().run(block.__enter__)
    block.__exit__(None, None, None)
    assert cpu.num_threads() == default
    with block, block:
        assert cpu.num_threads() == 1
    assert cpu.num_threads() == default

    def limited():
        with spattn.threads(1):
            yield

    generator = limited()
    contextvars.copy_context().run(next, generator)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(generator.close).result()
    assert cpu.num_threads() == default


@pytest.mark.skipif(not cpu._core.OPENMP, reason="built without OpenMP")
def test_threads_of_the_caller_do_not_change_the_result():
    expected = call()
    for n in (1, 2, 3):
        with spattn.threads(n):
            assert_same(call(), expected)


OCCUPIED = """
import time
from spattn.cpu._core import observe, team_size

ms = 1_000_000
assert team_size(8) == 8
observe(8, 10 * ms, 10 * ms, 0)  # one long task, whose thread had a core all the time
observe(8, 10 * ms, 10 * ms, 4 * ms)  # without a core for less than half of the time
observe(8, ms // 8, ms, ms // 8)  # no longer than waking a thread takes
observe(8, 100 * ms, 8 * 25 * ms + 1, 90 * ms)  # a long region
assert team_size(8) == 8
observe(8, 10 * ms, 8 * 25 * ms, 5 * ms)
assert team_size(8) == 4 and team_size(3) == 3
observe(4, 10 * ms, 10 * ms, 5 * ms)
assert team_size(8) == 2
observe(2, 10 * ms, 10 * ms, 5 * ms)
observe(1, 10 * ms, 10 * ms, 5 * ms)
assert team_size(8) == 1  # for 2 s
deadline, sizes = time.monotonic() + 60, []
while team_size(8) < 8 and time.monotonic() < deadline:  # and twice as many after each of them
    sizes.append(team_size(8))
    time.sleep(0.001)
assert team_size(8) == 8 and sizes == sorted(sizes) and set(sizes) <= {1, 2, 4, 8}
"""


def test_teams_shrink_where_cores_are_occupied():
    """A team halves after a region in which a thread had no core, and grows again. In a process of its own."""
    done = subprocess.run([sys.executable, "-c", OCCUPIED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_affinity_bounds_the_threads(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert cpu.num_threads() == 1


def test_cgroup_quota(monkeypatch, tmp_path):
    from spattn._util import limits as _limits

    monkeypatch.setattr(_limits, "_CGROUPS", str(tmp_path))
    assert _limits._quota.__wrapped__() == np.inf
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert _limits._quota.__wrapped__() == 2
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("100000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert _limits._quota.__wrapped__() == 1
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    assert _limits._quota.__wrapped__() == 2


@pytest.mark.skipif(not cpu._core.OPENMP, reason="built without OpenMP")
@pytest.mark.parametrize("processors, most", [(1, 64), (16, 64), (100, 400)])
def test_omp_num_threads_is_bounded(monkeypatch, processors, most):
    from spattn._util import limits as _limits

    monkeypatch.setenv("OMP_NUM_THREADS", "100000")
    monkeypatch.setattr(_limits, "processors", lambda: processors)
    for asked, expected in ((100_000, most), (most, most), (most - 1, most - 1), (2, 2)):
        monkeypatch.setattr(cpu._core, "openmp_threads", lambda asked=asked: asked)
        assert cpu.num_threads() == expected


@pytest.mark.skipif(not cpu._core.OPENMP, reason="built without OpenMP")
def test_no_more_threads_than_tasks(monkeypatch):
    """However many threads there may be: one query tile of one head is not shared by 64."""
    for q_len, kv_len, heads, most in ((40, 40, 64, 64), (500, 40, 1, 11), (1, 4000, 1, 63)):
        q, k, v = inputs(1, heads, heads, q_len, kv_len, 256, dtype="float64")
        made = spattn.plan_for(patterns.Full(), q, k, v, backend="cpu")
        monkeypatch.setattr(cpu, "_FLOPS_PER_THREAD", 1)
        assert cpu._useful_threads(Call.of(q, k, v), made) == most
        monkeypatch.setattr(cpu, "_FLOPS_PER_THREAD", 1e18)
        assert cpu._useful_threads(Call.of(q, k, v), made) == 1


@pytest.mark.footprint
@pytest.mark.skipif(not cpu._core.OPENMP, reason="built without OpenMP")
def test_a_hundred_thousand_threads_do_not_fill_the_memory(python, peak):
    source = """
import spattn
from spattn.request.call import Call
from spattn.testing import inputs
spattn.attention(*inputs(1, 8, 8, 1000, head_dim=32), spattn.patterns.Full())
print(peak() >> 10)
"""
    assert int(python(peak + source, OMP_NUM_THREADS="100000")) < 1000


def test_concurrent_calls():
    expected = call()
    with ThreadPoolExecutor(4) as pool:
        for result in pool.map(lambda _: call(), range(40)):
            assert_same(result, expected)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_does_not_hang():
    expected = call()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            assert cpu.num_threads() == 1
            assert_same(call(), expected)
            status = 0
        finally:
            os._exit(status)
    deadline = time.monotonic() + 30
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail("the forked child hangs")
    assert os.waitstatus_to_exitcode(ended[1]) == 0


def test_fault_35_interrupt(assert_interruptible):
    """The call would take minutes; the next one works."""
    q, k, v = (np.broadcast_to(x, (64, 8, 4096, 64)) for x in inputs(q_len=4096, head_dim=64, dtype="float64"))
    made = spattn.plan_for(patterns.Full(), q, k, v, backend="cpu")
    assert_interruptible(lambda: cpu.forward(q, k, v, made, 0.1, isa="baseline"))
    call()


def test_spattn_isa(monkeypatch):
    expected = {name: call(isa=name) for name in cpu.instruction_sets()}
    for name in cpu.instruction_sets():
        monkeypatch.setenv("SPATTN_ISA", name)
        cpu._default_isa.cache_clear()
        assert cpu.info()["in use"] == name
        assert_same(call(), expected[name])
    monkeypatch.setenv("SPATTN_ISA", "avx1024")
    cpu._default_isa.cache_clear()
    with pytest.raises(ValueError, match="SPATTN_ISA: expected one of .*baseline on this machine; got 'avx1024'"):
        call()
    monkeypatch.undo()
    cpu._default_isa.cache_clear()
    with pytest.raises(ValueError, match="isa: expected one of .*baseline, got 'sse9'"):
        call(isa="sse9")


def test_floating_point_mode_is_unchanged():
    call()
    tiny = np.full(64, 1e-40, np.float32)
    assert (tiny * np.float32(0.5) > 0).all()
