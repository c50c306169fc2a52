"""The kernels of a recorded call's backward are compiled while its forward's are: no GPU, and a script as nvcc."""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace

import pytest

import spattn
from spattn import cuda, patterns
from spattn.arrays import namespace_of
from spattn.cuda.driver import jobs, launch
from spattn.cuda.host import execute, repeat, sinks
from spattn.cuda.host import score as host_score
from spattn.cuda.sm80 import backward as portable_backward
from spattn.cuda.sm80 import kernels as portable_kernels
from spattn.cuda.sm80 import params as portable_params
from spattn.cuda.sm80.backward import captured
from spattn.cuda.sm90.backward import prepared as backwards
from spattn.cuda.sm90.forward import launches, prepared
from spattn.dispatch import plans

pytestmark = pytest.mark.family("sm90")

HEADS, TOKENS, DIM = 2, 4096, 64
WINDOW = patterns.SlidingWindow(512)


class Gpu(contextlib.nullcontext):
    """A part of an H200, so small that backwards are fused, that is current."""

    ordinal, sm_count, shared_bytes, capability, arch, name = 0, 4, 227 << 10, (9, 0), "sm_90", "H200"
    total_bytes = 141 << 30
    made_current = contextlib.nullcontext

    def is_capturing(self, stream):
        return False


@pytest.fixture
def gpu(torch, monkeypatch, nvcc, tmp_path, tensor_maps):
    """CPU tensors pass for tensors on a GPU, launches for nothing. nvcc ends when a call begins to wait."""
    kind, device = type(namespace_of(torch.zeros(1))), Gpu()
    monkeypatch.setattr(kind, "ordinal", lambda self, x: 0)
    monkeypatch.setattr(kind, "stream", lambda self, x: 7)
    monkeypatch.setattr(kind, "raw_stream", staticmethod(lambda ordinal: 7))
    monkeypatch.setattr(cuda.device, "get", lambda ordinal=None: device)
    monkeypatch.setattr(plans, "load", lambda name: cuda)
    for module in (host_score, portable_params, prepared, backwards):
        monkeypatch.setattr(module, "upload", lambda device, arrays: (None, dict.fromkeys(arrays, 4096)))
    for module in (launches, backwards, sinks):
        monkeypatch.setattr(module, "Launch", lambda *arguments, **options: None)
    for module in (launches, backwards, portable_backward, repeat):
        monkeypatch.setattr(module, "start", lambda *arguments: None)
    monkeypatch.setattr(captured, "clear", lambda *arguments: None)
    loaded = SimpleNamespace(threads=128, launch=lambda *arguments: None)
    monkeypatch.setattr(launch, "Kernel", lambda device, request, image: loaded)
    monkeypatch.setattr(launch, "_kernels", {})
    monkeypatch.setattr(jobs, "processors", lambda: 16)
    portable_kernels.load.cache_clear()
    portable_kernels.load_common.cache_clear()
    spattn.clear_plan_cache()
    nvcc.wait_for(tmp_path / "go")
    wait = launch.wait

    def waited(*arguments):
        (tmp_path / "go").write_text("")
        return wait(*arguments)

    monkeypatch.setattr(launch, "wait", waited)
    yield device
    portable_kernels.load.cache_clear()
    portable_kernels.load_common.cache_clear()
    spattn.clear_plan_cache()


def compiled(place):
    """The files of all kernels that were compiled, when no compiler runs."""
    end = time.monotonic() + 20
    while jobs._jobs.threads:
        assert time.monotonic() < end
        time.sleep(0.01)
    return sorted(path.name.rsplit("-", 2)[0] for path in place.glob("*.cubin"))


def alibi(table):
    return lambda s, b, h, q, k: s - table[h] * abs(q - k)


# name: (dtype, whether the function's array needs a gradient; None without a function, sinks, layout)
CASES = {
    "plain": ("bfloat16", None, False, "bhsd"),
    "rows of tokens": ("float16", None, False, "bshd"),
    "score": ("bfloat16", False, False, "bhsd"),
    "array": ("bfloat16", True, False, "bhsd"),
    "array, portable": ("float32", True, True, "bhsd"),
    "sinks": ("bfloat16", None, True, "bhsd"),
    "sinks, float64": ("float64", None, True, "bhsd"),
}


def attend(torch, name, pattern, requires_grad=True):
    dtype, wanted, with_sinks, layout = CASES[name]
    shape = (1, HEADS, TOKENS, DIM) if layout == "bhsd" else (1, TOKENS, HEADS, DIM)
    q, k, v = (torch.zeros(shape, dtype=getattr(torch, dtype), requires_grad=requires_grad) for _ in range(3))
    options = {"layout": layout, "backend": "cuda"}
    if wanted is not None:
        options["score"] = alibi(torch.ones(HEADS, requires_grad=wanted and requires_grad))
    if with_sinks:
        options["sinks"] = torch.zeros(HEADS, requires_grad=requires_grad)
    return spattn.attention(q, k, v, pattern, **options)


@pytest.mark.parametrize("pattern", [WINDOW, patterns.longformer(20, global_tokens=(0, 9)) - patterns.Sinks(2)])
@pytest.mark.parametrize("name", CASES)
def test_a_backward_compiles_nothing_more(torch, gpu, place, nvcc, name, pattern):
    """All that it needs, and nothing else, began to compile when its forward did."""
    out = attend(torch, name, pattern)
    before = compiled(place)
    runs = len(nvcc.compiled)
    fused = pattern == WINDOW and CASES[name][0] in ("float16", "bfloat16")
    assert ("sm90-backward-convert" in before) == fused
    assert len(jobs._jobs.kept) == sum("backward" in one or "sink_gradient" in one for one in before) > 1
    out.sum().backward()
    assert compiled(place) == before and len(nvcc.compiled) == runs and not jobs._jobs.kept


@pytest.mark.parametrize("name", ["plain", "array"])
def test_no_gradient_no_backward(torch, gpu, place, name):
    """Neither without a tensor that requires one nor under no_grad; nor if the forward's kernels are cached."""
    attend(torch, name, "causal", requires_grad=False)
    with torch.no_grad():
        attend(torch, name, "causal")
    attend(torch, name, "causal")
    found = compiled(place)
    assert found and not any("backward" in one for one in found)


def test_an_error_waits_for_the_backward(torch, gpu, place, nvcc, tmp_path):
    script = nvcc.path.read_text()
    nvcc.path.write_text(script.replace("while [ ! -e", 'case "$*" in *BY_KEYS=1*) exit 3;; esac; while [ ! -e', 1))
    out = attend(torch, "plain", "causal")
    with pytest.raises(RuntimeError, match="exit status 3"):
        out.sum().backward()


def test_a_plan_that_fails_does_not_reach_the_forward(torch, gpu, place, monkeypatch):
    monkeypatch.setattr(execute.Backward, "compile_early", lambda self, call: 1 / 0)
    assert attend(torch, "plain", "causal").shape == (1, HEADS, TOKENS, DIM)


def test_dropout(torch, gpu, place, monkeypatch):
    """The kernel of its words, too, is compiled with those of the forward."""
    began, begin, wait = [], jobs.start, launch.wait
    monkeypatch.setattr(jobs, "start", lambda name, *rest, **more: began.append(name) or begin(name, *rest, **more))
    monkeypatch.setattr(launch, "wait", lambda *arguments: began.append("wait") or wait(*arguments))
    q = torch.zeros(1, HEADS, TOKENS, DIM, dtype=torch.bfloat16)
    spattn.attention(q, q, q, "causal", backend="cuda", dropout_p=0.5, seed=3)
    first = sorted(began[: began.index("wait")])
    assert [name.rsplit("-", 2)[0] for name in first] == ["common-dropout_words", "sm90-forward-attention"]
