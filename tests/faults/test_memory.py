"""docs/faults.rst, "Shapes and memory" 21 and 22, named by number; and how much memory a call takes."""

import os
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

import spattn
from spattn import cpu
from spattn import patterns as p
from spattn._util import limits as _limits
from spattn._util.imports import whole_imports
from spattn.cpu import _workspace
from spattn.testing import inputs, random

# -- 21: no squares ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["Full()", "Causal()", "SlidingWindow(1 << 18)"])
def test_fault_21_materialising_beyond_memory(python, peak, pattern):
    """MemoryError at once: within 64 MiB, not after filling the machine."""
    source = f"""
from spattn.patterns import *
index_set = {pattern}.index_set(1 << 20, 1 << 20)
for make in (index_set.to_dense, index_set.to_csr):
    before = peak()
    try:
        make()
    except MemoryError as error:
        print("MemoryError", str(error) != "", peak() - before < 65536)
"""
    assert python(peak + source) == "MemoryError True True\n" * 2


@pytest.mark.parametrize("make, cell", [("to_dense", 1), ("to_csr", 7 * 8)])
def test_fault_21_the_machine_that_is_one_byte_too_small(monkeypatch, make, cell):
    """What is needed is known before, to the byte; nothing of it is allocated where it does not fit."""
    index_set = p.Full().index_set(1000, 1500)
    needed = 1000 * 1500 * 7 * 8  # to_dense() goes through to_csr()
    build = getattr(index_set, make)
    size = {"SC_PAGE_SIZE": 1}
    monkeypatch.setattr(os, "sysconf", lambda name: size[name])
    size["SC_PHYS_PAGES"] = needed
    build()
    for missing in (1, needed - 1000 * 1500 * cell + 1):
        size["SC_PHYS_PAGES"] = needed - missing
        tracemalloc.start()
        with pytest.raises(MemoryError, match=f"needs {1000 * 1500 * (cell if missing > 1 else 56)} bytes as an array"):
            build()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()


@pytest.mark.parametrize("dtype, itemsize", [("float32", 4), ("float64", 8), ("float16", 2), ("bfloat16", 2)])
def test_fault_21_results_one_byte_too_large(monkeypatch, dtype, itemsize):
    """Nothing is planned for results that do not fit, in any of the calls."""
    q, k, v = inputs(1, 2, 1, 30, 50, 8, 24, dtype=dtype)
    out, lse = spattn.attention(q, k, v, return_lse=True)
    backward = (random(out.shape, dtype), q, k, v, out, lse)
    calls = {
        2 * 30 * 24 * itemsize: lambda pattern: spattn.attention(q, k, v, pattern),
        2 * 30 * (24 * itemsize + max(4, itemsize)): lambda pattern: spattn.attention(
            q, k, v, pattern, return_lse=True
        ),
        (2 * 30 * 8 + 50 * (8 + 24)) * itemsize: lambda pattern: spattn.attention_backward(*backward, pattern),
    }
    for number, (needed, call) in enumerate(calls.items()):
        monkeypatch.setattr(_limits, "memory", lambda needed=needed: needed)
        call(p.SlidingWindow(3 + number))
        monkeypatch.setattr(_limits, "memory", lambda needed=needed: needed - 1)
        with monkeypatch.context() as patch, pytest.raises(MemoryError, match=f"{needed} bytes, more than"):
            patch.setattr(cpu, "plan_for", None)
            call(p.SlidingWindow(13 + number))


@pytest.mark.footprint
def test_fault_21_results_beyond_memory(python, peak):
    """Both passes on views of a few numbers whose results would be 2⁴⁶ bytes and more."""
    source = """
import numpy as np
import spattn
from spattn.testing import inputs
q, k, v = (np.broadcast_to(x, (1 << 20, 1 << 10, 64, 256)) for x in inputs(1, 1, 1, 64, 64, 256))
lse = np.broadcast_to(np.float32(0), q.shape[:3])
before = peak()
for call in (
    lambda: spattn.attention(q, k, v, "causal"), lambda: spattn.attention_backward(q, q, k, v, q, lse, "causal"),
):
    try:
        call()
    except MemoryError as error:
        grown = peak() - before
        print("MemoryError", str(error) != "", grown < 65536)
"""
    assert python(peak + source) == "MemoryError True True\n" * 2


@pytest.mark.footprint
def test_fault_21_imports_without_memory(python):
    """MemoryError, whatever the dynamic linker says; with memory the same import works."""
    source = """
import resource
from spattn._util.imports import whole_imports
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))
try:
    with whole_imports:
        import spattn.cpu
except Exception as error:
    said = type(error)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
with whole_imports:
    import spattn.cpu
print(said.__name__, spattn.cpu.num_threads() > 0)
"""
    assert python(source) == "MemoryError True\n"


@pytest.mark.parametrize(
    "error, wanted",
    [
        (ImportError("libx.so: failed to map segment from shared object"), MemoryError),
        (ImportError("libx.so: cannot create shared object descriptor: Cannot allocate memory"), MemoryError),
        (OSError(12, "Cannot allocate memory"), MemoryError),
        (ImportError("No module named x"), ImportError),
        (OSError(2, "No such file"), OSError),
    ],
)
def test_fault_21_errors_of_imports(error, wanted):
    with pytest.raises(wanted) as raised, whole_imports:
        raise error
    assert type(raised.value) is (wanted if wanted is not OSError else type(error))
    assert raised.value is error or raised.value.__cause__ is error


def test_fault_21_the_reference_needs_no_square():
    """A quarter of the pairs' cells in float64, for all its temporaries."""
    q, k, v = inputs(q_len=4096, head_dim=4)
    tracemalloc.start()
    spattn.attention(q, k, v, p.SlidingWindow(4), backend="reference")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * 4096**2 / 4


def test_fault_21_long_sequences_need_no_square():
    """A window over 2²⁰ tokens is planned in megabytes: nothing of q_len × kv_len is ever made."""
    plan = spattn.plan(p.SlidingWindow(256), 1 << 20)
    assert plan.nbytes < 64 << 20 and plan.nnz == (1 << 20) * 513 - 256 * 257


PATTERNS = [p.Full(), p.Causal(), p.SlidingWindow(64), p.longformer(64, global_tokens=16), p.strided(64), p.BigBird(16)]


def extra_bytes(call) -> int:
    """The most that a call has allocated at any time, without its results. NumPy reports to tracemalloc, and kernels
    allocate by NumPy only. The first call plans; plans are kept, and so would its workspaces be."""
    call()
    cpu.free_workspaces()
    tracemalloc.start()
    results = call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak - sum(x.nbytes for x in results)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads, pattern", [*((1, each) for each in PATTERNS), (8, p.SlidingWindow(64))], ids=str)
def test_memory_of_a_call_grows_with_the_length_only(heads, pattern, dtype):
    """O(batch · heads · N · head_dim) and a megabyte a thread; at these lengths 4 N² bytes would exceed both bounds.

    The factors: the forward keeps partial results of long lists, the backward up to eight sums of dk and dv.
    """
    constant, before = cpu.num_threads() << 20, None
    for length in (2048, 4096):
        q, k, v = inputs(1, heads, heads, length, length, 64, dtype=dtype)
        dout = random(q.shape, dtype, seed=9)
        forward = partial(spattn.attention, q, k, v, pattern, return_lse=True, backend="cpu")
        backward = partial(spattn.attention_backward, dout, q, k, v, *forward(), pattern, backend="cpu")
        extra = extra_bytes(forward), extra_bytes(backward)
        inputs_in_float32 = 4 * (q.size + k.size + v.size)
        assert extra[0] <= 2 * inputs_in_float32 + constant
        assert extra[1] <= 6 * inputs_in_float32 + constant
        assert before is None or all(now <= 2 * then + constant for now, then in zip(extra, before, strict=True))
        before = extra


def test_workspaces_are_kept_within_a_limit():
    q, k, v = inputs(1, 8, 8, 2048, 2048, 64)
    call = partial(spattn.attention, q, k, v, p.strided(64), return_lse=True, backend="cpu")
    first = extra_bytes(call)
    results = call()
    tracemalloc.start()
    again = call()
    peak = tracemalloc.get_traced_memory()[1] - sum(x.nbytes for x in again)
    tracemalloc.stop()
    assert peak < first / 100
    assert all((a == b).all() for a, b in zip(results, again, strict=True))
    for length in range(2048, 4096, 256):
        spattn.attention(*inputs(1, 8, 8, length, length, 64), p.strided(64), backend="cpu")
        kept = sum(size * len(same) for size, same in _workspace._kept.items())
        assert 0 < kept <= 64 << 20


def test_workspaces_of_calls_at_the_same_time():
    """Every call works in memory of its own."""
    q, k, v = inputs(1, 4, 4, 1024, 1024, 32)
    expected = spattn.attention(q, k, v, p.strided(32), backend="cpu")
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(spattn.attention, q, k, v, p.strided(32), backend="cpu") for _ in range(64)]
    assert all((each.result() == expected).all() for each in calls)


# -- 22: protected pages -----------------------------------------------------------------------------------------------

PROGRAM = Path(__file__).with_name("protected_pages.py")


@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("isa", cpu.instruction_sets())
def test_fault_22_arrays_beside_a_protected_page(python, isa, side):
    """Inputs, results, plan and workspace, forward and backward, at odd lengths and head_dims."""
    source = f"import runpy; runpy.run_path({str(PROGRAM)!r})['main']({isa!r}, {side!r})"
    assert python(source) == "intact\n"


@pytest.mark.parametrize(
    "array, inside, outside",
    [
        ("at_protected_page(np.arange(10.0))", 79, 80),
        ("beside_protected_page(10, float, 'after')", 79, 80),
        ("beside_protected_page(10, float, 'before')", 0, -1),
    ],
)
def test_fault_22_protected_page_is_protected(python, array, inside, outside):
    source = f"""
import ctypes, os, runpy
import numpy as np
from spattn.testing import at_protected_page
beside_protected_page = runpy.run_path({str(PROGRAM)!r})["beside_protected_page"]
x = {array}

def ends_the_process(offset):
    child = os.fork()
    if child == 0:
        ctypes.string_at(x.ctypes.data + offset, 1)
        os._exit(0)
    return os.waitpid(child, 0)[1] != 0

print(ends_the_process({inside}), ends_the_process({outside}))
"""
    assert python(source) == "False True\n"
