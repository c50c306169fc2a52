"""Work is ordered on the caller's stream and device, and does not wait for it."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import spattn
from spattn import cuda, patterns

pytestmark = [pytest.mark.family("sm80"), pytest.mark.gpu]

PATTERN = patterns.longformer(64, global_tokens=3)
DELAY = 400_000_000  # clock cycles, about 0.2 s


def run(q, k, v):
    return cuda.forward(q, k, v, spattn.plan_for(PATTERN, q, k, v, backend="cuda"), 0.125)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("sm80", "bfloat16"), ("sm80", "float32"), ("sm90", "bfloat16")],
    indirect=["family"],
)
def test_fault_24_torch_stream(torch, dtype):
    """Inputs still being written on a side stream are waited for there, and the host does not wait."""
    values = torch.randn(3, 1, 4, 500, 64, device="cuda", dtype=getattr(torch, dtype))
    expected = run(*values)
    inputs = torch.full_like(values, torch.nan)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(DELAY)
        inputs.copy_(values)
        got = run(*inputs)
        assert not side.query(), "the call waited for the stream"
    side.synchronize()
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("family", ["sm90"], indirect=True)
@pytest.mark.parametrize("pattern", [patterns.Causal(), patterns.longformer(256, global_tokens=9)], ids=str)
def test_calls_that_read_what_others_write(torch, pattern):
    """Calls of a chain start before those before them have ended, and wait for what they read and overwrite."""

    def chain(x, between=lambda: None):
        for _ in range(30):
            x = spattn.attention(x, x, x, pattern)
            between()
        return x

    x = torch.randn(1, 7, 5000, 64, device="cuda", dtype=torch.bfloat16)
    expected = chain(x, torch.cuda.synchronize)
    torch.cuda._sleep(DELAY)  # so that all calls are enqueued when the first one starts
    assert torch.equal(chain(x), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(x)
    for _ in range(3):
        graph.replay()
        assert torch.equal(captured, expected)


@pytest.mark.parametrize("family", ["sm80", "sm90"], indirect=True)
def test_workspace_follows_the_stream(torch):
    """Calls on two streams at once do not share a workspace."""
    values = torch.randn(8, 3, 1, 4, 700, 64, device="cuda", dtype=torch.bfloat16)
    expected = [run(*x) for x in values]
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    got = []
    for x, stream in zip(values, streams * 2, strict=True):
        with torch.cuda.stream(stream):
            got.append(run(*x))
    torch.cuda.synchronize()
    for pair, other in zip(got, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(pair, other, strict=True))


@pytest.mark.parametrize(("family", "dtype"), [("sm80", "float32"), ("sm90", "float16")], indirect=["family"])
def test_fault_24_cupy_stream(cupy, dtype):
    values = cupy.random.standard_normal((3, 1, 4, 500, 64), dtype=np.float32).astype(dtype)
    expected = run(*values)
    inputs = cupy.empty_like(values)
    inputs[...] = values  # CuPy compiles the copy now, not while the stream is being watched
    inputs.fill(cupy.nan)
    delay = cupy.RawKernel(
        """extern "C" __global__ void delay(long long cycles) {
        for (long long start = clock64(); clock64() - start < cycles;);
    }""",
        "delay",
    )
    delay((1,), (1,), (np.int64(1),))
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as side:
        delay((1,), (1,), (np.int64(DELAY),))
        inputs[...] = values
        got = run(*inputs)
        assert not side.done, "the call waited for the stream"
        side.synchronize()
    for a, b in zip(got, expected, strict=True):
        assert cupy.array_equal(a, b)


@pytest.mark.parametrize("family", ["sm80", "sm90"], indirect=True)
def test_graph_capture(torch):
    """A call with a warm plan and a warm kernel can be captured and replayed."""
    q, k, v = torch.randn(3, 1, 2, 300, 64, device="cuda", dtype=torch.bfloat16)
    plan = spattn.plan_for(PATTERN, q, k, v, backend="cuda")
    cuda.forward(q, k, v, plan, 0.125)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = cuda.forward(q, k, v, plan, 0.125)
    q.copy_(torch.randn_like(q))
    graph.replay()
    expected = cuda.forward(q, k, v, plan, 0.125)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


@pytest.mark.parametrize("family", ["sm80", "sm90"], indirect=True)
def test_captured_calls_and_plans_that_are_dropped(torch):
    """A graph keeps what it reads, and its capture does not mind what Python frees meanwhile."""
    q, k, v, dout = torch.randn(4, 1, 2, 300, 64, device="cuda", dtype=torch.bfloat16)
    others = [patterns.strided(stride) for stride in range(2, 12)]

    def both(pattern):
        out, lse = spattn.attention(q, k, v, pattern, return_lse=True)
        return out, lse, *spattn.attention_backward(dout, q, k, v, out, lse, pattern)

    def drop():
        spattn.clear_plan_cache()
        gc.collect()

    drop()  # what other tests have left might end the capture
    for pattern in (PATTERN, *others):
        both(pattern)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # threads of JAX do what they want meanwhile
        before = both(PATTERN)
        drop()
        after = q + 1
    drop()
    for pattern in others:  # which take the room of what was freed
        both(pattern)
    q.copy_(torch.randn_like(q))
    graph.replay()
    assert all(map(torch.equal, before, both(PATTERN))) and torch.equal(after, q + 1)


@pytest.mark.parametrize("family", ["sm80", "sm90"], indirect=True)
def test_fault_23_other_device(torch):
    """Arrays of cuda:1 are worked on there while cuda:0 is current, and cuda:0 stays current."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, there is {torch.cuda.device_count()}")
    x = torch.randn(3, 1, 2, 300, 64, dtype=torch.bfloat16)
    with torch.cuda.device(0):
        got = run(*x.to("cuda:1"))
        expected = run(*x.to("cuda:0"))
        assert torch.cuda.current_device() == 0
    assert got[0].device.index == got[1].device.index == 1
    assert torch.equal(got[0].cpu(), expected[0].cpu())


def test_current_context_is_restored(torch):
    """The thread's current context is the same before and after, whether or not there was one."""
    from cuda.bindings import driver

    q = torch.randn(1, 1, 64, 64, device="cuda")
    before = int(driver.cuCtxGetCurrent()[1])
    run(q, q, q)
    assert int(driver.cuCtxGetCurrent()[1]) == before


def test_threads(torch):
    """Threads that share a plan and a kernel get the same results, each on its own stream."""
    import threading

    values = torch.randn(3, 1, 2, 300, 64, device="cuda", dtype=torch.bfloat16)
    host = [x.float().cpu().numpy() for x in values]
    expected, expected_host = run(*values), run(*host)
    torch.cuda.synchronize()
    failures = []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                got = run(*values)
                torch.cuda.current_stream().synchronize()
                if not torch.equal(got[0], expected[0]) or not np.array_equal(run(*host)[0], expected_host[0]):
                    failures.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
