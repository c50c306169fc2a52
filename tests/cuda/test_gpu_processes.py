"""Processes, threads and failures: what ends a process elsewhere must end in a Python exception here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from functools import partial

import numpy as np
import pytest

import spattn
from spattn import Tiling, cuda, patterns, plan
from spattn.cuda.driver import device
from spattn.cuda.driver.buffer import Buffer
from spattn.request.call import Call

pytestmark = pytest.mark.family("sm80")


def run_script(text: str, **environment: str) -> subprocess.CompletedProcess:
    """A fresh interpreter, with what it printed."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def call(x):
    return cuda.forward(x, x, x, spattn.plan_for(patterns.Full(), x, x, x, backend="cuda"), 1.0)


CALL = """
import numpy as np
import spattn
from spattn import cuda, patterns
from spattn.request.call import Call
def call(n=200):
    q = np.random.default_rng(0).standard_normal((1, 2, n, 64), dtype=np.float32)
    return cuda.forward(q, q, q, spattn.plan_for(patterns.Causal(), q, q, q, backend="cuda"), 0.125)
"""


def test_import_touches_no_gpu():
    done = run_script("""
        import sys, spattn, spattn.cuda, spattn.cuda.sm80.forward
        loaded = {"pycuda", "cuda", "torch", "cupy", "jax"} & set(sys.modules)
        assert not loaded, loaded
    """)
    assert done.returncode == 0, done.stderr


def test_no_gpu_is_said():
    done = run_script(
        """
        import spattn.cuda
        reason = spattn.cuda.unavailable()
        assert reason, "expected a reason"
        print(reason)
        """,
        CUDA_VISIBLE_DEVICES="",
    )
    assert done.returncode == 0, done.stderr
    assert any(word in done.stdout for word in ("nvidia-smi", "driver", "pip install")), done.stdout


@pytest.mark.gpu
def test_clean_exit():
    """A process that used the GPU ends silently."""
    done = run_script(CALL + "call()")
    assert done.returncode == 0 and done.stderr == ""


@pytest.mark.gpu
def test_threads_that_end():
    """A thread that used the GPU may end: no context stays pushed in it."""
    done = run_script(
        CALL
        + textwrap.dedent("""
        import gc, threading
        import spattn
        for _ in range(3):
            thread = threading.Thread(target=call)
            thread.start(); thread.join()
        call()
        spattn.clear_plan_cache(); gc.collect()
        thread = threading.Thread(target=lambda: (call(300), spattn.clear_plan_cache(), gc.collect()))
        thread.start(); thread.join()
    """)
    )
    assert done.returncode == 0 and done.stderr == ""


@pytest.mark.gpu
def test_error_inside_pops_the_context():
    done = run_script(
        CALL
        + textwrap.dedent("""
        import threading
        from spattn.cuda.sm80 import forward as portable
        def broken(call): raise KeyError("inside")
        working, portable.forward = portable.forward, broken
        def work():
            try: call()
            except KeyError: pass
        thread = threading.Thread(target=work); thread.start(); thread.join()
        portable.forward = working
        call()
    """)
    )
    assert done.returncode == 0 and done.stderr == ""


def test_fault_30_fork_without_gpu():
    """Forked processes, and those that they fork, are refused from the moment CUDA is initialised and not before."""
    done = run_script("""
        import os
        from spattn.cuda.driver import device

        def refused():
            try: device.require_owner()
            except RuntimeError as error: return "spawn" in str(error) and not device.is_owner()
            return False

        def in_child(question):
            child = os.fork()
            if child == 0: os._exit(0 if question() else 1)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

        assert in_child(lambda: not refused() and not device.is_owner()) and not refused()
        device._started = True
        assert device.is_owner() and in_child(refused) and in_child(lambda: in_child(refused)) and not refused()
    """)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_fault_30_fork():
    done = run_script(
        CALL
        + textwrap.dedent("""
        import os
        call()
        child = os.fork()
        if child == 0:
            try: call()
            except RuntimeError as error: os._exit(0 if "spawn" in str(error) else 2)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        call()
    """)
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_fault_30_fork_after_another_library():
    """CUDA that PyTorch started in the parent is as lost in the child as our own."""
    pytest.importorskip("torch")
    done = run_script(
        CALL
        + textwrap.dedent("""
        import os, torch
        torch.ones(1, device="cuda")
        child = os.fork()
        if child == 0:
            try: call()
            except RuntimeError as error: os._exit(0 if "spawn" in str(error) and "spawn" in cuda.unavailable() else 2)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """)
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_planning_makes_no_context():
    """Asking what there is, and planning for it, leaves the GPU's memory alone."""
    done = run_script(
        CALL
        + textwrap.dedent("""
        import json
        assert cuda.unavailable() is None and json.dumps(cuda.info()) and cuda.sm_count() and cuda.tile("float16", 64)
        q = np.zeros((1, 1, 100, 64), np.float32)
        made = spattn.plan_for(patterns.Causal(), q, q, q, backend="cuda")
        assert cuda.accepts(made, Call.of(q, q, q))
        from cuda.bindings import driver
        def active(): return driver.cuDevicePrimaryCtxGetState(0)[2]
        assert not active()
        call()
        assert active()
    """)
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_plans_that_do_not_fit():
    """Tiles of other shapes are refused before a kernel is asked for, so that the caller can plan again."""
    q = np.zeros((1, 1, 300, 128), np.float64)
    for tile, fine in {(128, 64): True, (48, 64): True, (256, 64): True, (40, 64): False, (512, 64): False}.items():
        assert cuda.accepts(plan(patterns.Full(), 300, tiling=Tiling(tile=tile)), Call.of(q, q, q)) == fine, tile
    with pytest.raises(ValueError, match="plan: no CUDA kernel has tiles of 40 × 64"):
        cuda.forward(q, q, q, plan(patterns.Full(), 300, tiling=Tiling(tile=(40, 64))), 1.0)


@pytest.mark.gpu
def test_fault_26_sticky_error():
    """After an illegal access every call says that the process must restart."""
    done = run_script(
        CALL
        + textwrap.dedent("""
        import spattn
        from spattn.cuda.sm80 import forward as portable
        from spattn.arrays.operand import Operand
        from spattn.cuda.host.forward_pass import ForwardPass
        from spattn.cuda.driver import device, errors
        q = np.zeros((1, 1, 64, 64), np.float32)
        plan = spattn.plan_for(patterns.Full(), q, q, q, backend="cuda")
        wild = Operand(16, q.shape, (4096, 4096, 64, 1))
        with device.get() as gpu:
            portable.forward(ForwardPass(gpu, gpu.stream, plan, wild, wild, wild, wild, 16, "float32", 1.0, None))
        for _ in range(2):
            try: call()
            except errors.CudaError as error:
                assert error.sticky and "must restart" in str(error), error
            else: raise AssertionError("expected CudaError")
        print("as expected")
    """)
    )
    assert "as expected" in done.stdout, done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["torch", "cupy"])
def test_fault_25_out_of_memory(kind):
    """MemoryError with the bytes needed and free, or with those of the GPU where no GPU is large enough; the next call
    works."""
    library = pytest.importorskip(kind)
    if kind == "torch":
        small = library.ones(1, 1, 64, 128, dtype=library.float16, device="cuda")
        repeat = small.expand
    else:
        small = library.ones((1, 1, 64, 128), dtype="float16")
        repeat = partial(library.broadcast_to, small)
    of_entry = 4096 * 64 * (128 * 2 + 4)
    entries = (device.get().total_bytes - (64 << 20)) // of_entry  # CUDA itself needs more than is left
    for _ in range(2):
        with pytest.raises(MemoryError) as caught:
            call(repeat((entries, 4096, 64, 128)))
        needed, free = map(int, re.search(r"needed (\d+) bytes, (\d+) are free", str(caught.value)).groups())
        assert needed > free and needed >= entries * of_entry
        with pytest.raises(MemoryError, match=f"the results need {4096 * of_entry} bytes, more than the "):
            call(repeat((4096, 4096, 64, 128)))
        out, _ = call(small)
        assert bool((out == 1).all())


@pytest.mark.gpu
def test_fault_25_out_of_memory_for_host_arrays():
    """The same where spattn allocates itself."""
    with device.get() as gpu:
        with pytest.raises(MemoryError, match=rf"needed {1 << 50} bytes, \d+ are free"):
            Buffer(gpu, 1 << 50)
    out, _ = call(np.ones((1, 1, 64, 128), np.float16))
    assert (out == 1).all()


@pytest.mark.gpu
def test_unknown_kernel_is_refused(monkeypatch):
    monkeypatch.setenv("SPATTN_CUDA_KERNEL", "fastest")
    q = np.zeros((1, 1, 8, 8), np.float32)
    with pytest.raises(ValueError, match="SPATTN_CUDA_KERNEL"):
        spattn.plan_for(patterns.Full(), q, q, q, backend="cuda")


@pytest.mark.gpu
def test_head_dim_is_checked():
    for shape in ((1, 1, 8, 257), (1, 1, 8, 300)):
        q = np.zeros(shape, np.float32)
        with pytest.raises(ValueError, match=r"^head_dim \d+ is not supported on CUDA \(max 256\); pass arrays"):
            spattn.plan_for(patterns.Full(), q, q, q, backend="cuda")
