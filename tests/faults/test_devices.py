"""docs/faults.rst, "Devices and streams" 27-29: each test is named by its number there. The others: tests/cuda."""

import importlib.abc
import sys
from types import ModuleType, SimpleNamespace

import pytest

import spattn
from spattn import cuda
from spattn.cuda import device
from spattn.testing import inputs


def test_fault_27_no_gpu(python):
    source = """
import spattn
from spattn.testing import inputs
assert "cpu" in spattn.available_backends() and "cuda" not in spattn.available_backends()
try:
    spattn.attention(*inputs(), backend="cuda")
except spattn.BackendUnavailableError as error:
    assert isinstance(error, RuntimeError)
    print(error)
print(spattn.attention(*inputs()).shape)
"""
    message, shape = python(source, CUDA_VISIBLE_DEVICES="-1").strip().rsplit("\n", 1)
    assert message.startswith("backend 'cuda' is not available: ") and len(message) > 50
    assert shape == "(1, 1, 64, 32)"


class Broken(importlib.abc.MetaPathFinder):
    """Makes `module` fail to import with a message of the dynamic linker's."""

    def __init__(self, module, message):
        self.module, self.message = module, message

    def find_spec(self, name, path=None, target=None):
        if name == self.module:
            raise ImportError(self.message)


def says(reason):
    """Asked for by name the backend says why it is missing; nothing else suffers."""
    with pytest.raises(spattn.BackendUnavailableError, match=f"^backend 'cuda' is not available: .*{reason}"):
        spattn.attention(*inputs(), backend="cuda")
    assert "cuda" not in spattn.available_backends() and spattn.attention(*inputs()).shape == (1, 1, 64, 32)


@pytest.mark.parametrize(
    "message, reason",
    [
        (
            "_driver.so: undefined symbol: cuMemAdvise_v2",
            "the NVIDIA driver is older than PyCUDA needs .*cuMemAdvise_v2",
        ),
        ("libcuda.so.1: cannot open shared object file", r"no NVIDIA driver was found \(libcuda"),
        ("No module named 'pycuda'", r"No module named 'pycuda'; pip install pycuda cuda-bindings"),
    ],
)
def test_fault_27_driver_that_does_not_serve(monkeypatch, message, reason):
    monkeypatch.setattr(cuda, "_works_in", None)
    monkeypatch.delitem(sys.modules, "pycuda", raising=False)
    monkeypatch.delitem(sys.modules, "pycuda.driver", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken("pycuda", message), *sys.meta_path])
    says(reason)


@pytest.fixture
def driver(monkeypatch):
    """A driver interface without a machine, through both of its packages; tests set what it answers."""
    answers = SimpleNamespace(cuInit=0, gpus=1, capability=(9, 0))
    gpu = SimpleNamespace(name=lambda: "Card", compute_capability=lambda: answers.capability)
    pycuda, bindings = ModuleType("pycuda.driver"), ModuleType("cuda.bindings.driver")
    pycuda.init = lambda: None
    pycuda.Context, pycuda.device_attribute = SimpleNamespace(pop=None), None
    pycuda.Device = type("Device", (), {"__new__": lambda cls, n: gpu, "count": staticmethod(lambda: answers.gpus)})
    bindings.CUresult = int
    bindings.cuInit = lambda flags: (answers.cuInit,)
    bindings.cuGetErrorString = lambda code: (0, b"what the driver says")
    bindings.cuCtxGetDevice = lambda: (201, None)
    for module, *parents in ((pycuda, "pycuda"), (bindings, "cuda.bindings", "cuda")):
        monkeypatch.setitem(sys.modules, module.__name__, module)
        for name in parents:
            monkeypatch.setitem(sys.modules, name, SimpleNamespace(driver=module))
    monkeypatch.setattr(cuda, "_works_in", None)
    functions = dict.fromkeys(("cuCtxGetCurrent", "cuStreamIsCapturing", "cuMemcpyHtoDAsync_v2"))
    monkeypatch.setattr(device, "library", lambda: SimpleNamespace(**functions))
    monkeypatch.setattr(device, "_started", False)
    monkeypatch.setattr(device, "_devices", {})
    monkeypatch.setattr(device.atexit, "register", lambda function: None)
    device.address.cache_clear()
    yield answers
    device.address.cache_clear()  # later tests may have a driver


@pytest.mark.parametrize(
    "code, reason",
    [
        (100, "the driver sees no GPU; check nvidia-smi and CUDA_VISIBLE_DEVICES"),
        (803, "cuInit failed with CUDA error 803: what the driver says"),  # the libraries are not of the kernel module
        (3, "multiprocessing method 'spawn'"),
    ],
)
def test_fault_27_driver_that_does_not_start(driver, code, reason):
    driver.cuInit = code
    says(reason)


def test_fault_27_no_gpu_to_be_seen(driver):
    driver.gpus = 0
    says("the driver sees no GPU")


def test_fault_27_gpu_that_is_too_old(driver):
    driver.capability = (7, 5)
    says("Card has compute capability 7.5, the kernels need 8.0 or later; use backend='cpu'")


def test_fault_27_neither_compiler_nor_kernels(driver, monkeypatch, tmp_path):
    monkeypatch.setenv("SPATTN_NVCC", "")
    monkeypatch.setenv("SPATTN_CACHE_DIR", str(tmp_path))
    says("nvcc was not found and no kernel is in the cache")
    monkeypatch.delenv("SPATTN_NVCC")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    assert "cuda" in spattn.available_backends()


def test_fault_27_unknown_backend():
    with pytest.raises(ValueError, match="^backend: expected 'auto' or one of cpu, cuda, reference; got 'metal'"):
        spattn.attention(*inputs(), backend="metal")


def test_fault_28_nothing_of_cuda_at_import(python):
    source = """
import sys, spattn, spattn.patterns, spattn.testing, spattn.reference, spattn.cpu
spattn.attention(*spattn.testing.inputs())
maps = open("/proc/self/maps").read()
print([name for name in ("pycuda", "cuda", "cupy", "torch", "jax") if name in sys.modules], "libcuda" in maps)
"""
    assert python(source) == "[] False\n"


@pytest.mark.gpu
def test_fault_29_thread_that_exits_after_using_the_gpu(python):
    """PyCUDA aborts a process whose thread ends with a pushed context."""
    source = """
import threading, spattn
from spattn.testing import inputs
thread = threading.Thread(target=lambda: spattn.attention(*inputs(dtype="float16"), backend="cuda"))
thread.start(); thread.join()
print(spattn.attention(*inputs(dtype="float16"), backend="cuda").shape)
"""
    assert python(source) == "(1, 1, 64, 32)\n"
