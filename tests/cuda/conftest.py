"""GPU tests skip with the backend's own reason where it cannot run; arrays of every library from NumPy's."""

from __future__ import annotations

import importlib
import importlib.util
import os

import numpy as np
import pytest

from spattn import _arrays, cuda
from spattn.cuda import device, portable
from spattn.testing import Expectation

# JAX would take three quarters of the GPU's memory when it starts.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def pytest_runtest_setup(item):
    if "gpu" in item.keywords:
        reason = cuda.unavailable()
        if reason is not None:
            pytest.skip(reason)


@pytest.fixture(autouse=True)
def portable_kernels(request, monkeypatch):
    """These tests are of the kernels that every GPU runs, whatever else the device has."""
    if "hopper" not in request.module.__name__:
        monkeypatch.setenv("SPATTN_CUDA_KERNEL", "portable")


@pytest.fixture
def hopper_kernels(monkeypatch):
    """Skips elsewhere, and fails a test whose call silently went to the portable kernels."""
    if device.get().capability != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    monkeypatch.setenv("SPATTN_CUDA_KERNEL", "auto")
    monkeypatch.setattr(portable, "forward", lambda call: pytest.fail("the portable kernels were called"))


@pytest.fixture
def portable_allowed(hopper_kernels, monkeypatch):
    """How often the portable kernels took over."""
    calls = []
    monkeypatch.undo()
    original = portable.forward
    monkeypatch.setattr(portable, "forward", lambda call: (calls.append(call), original(call)))
    return calls


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="PyTorch is not installed")


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy", reason="CuPy is not installed")


def on_gpu(x: np.ndarray, kind: str):
    """A NumPy array as an array of another library: in device memory, or where it is for "numpy" and "torch-cpu"."""
    library = kind.removesuffix("-cpu")
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    module = importlib.import_module(library)
    match kind:
        case "torch" | "torch-cpu":
            tensor = _arrays.from_numpy(np.array(x), module.empty(0))
            return tensor if kind == "torch-cpu" else tensor.cuda()
        case "cupy":
            try:
                return module.asarray(x)
            except (TypeError, ValueError) as error:
                pytest.skip(f"this CuPy has no {x.dtype}: {error}")
        case "jax":
            return module.device_put(x, module.devices("gpu")[0])
    return x


def to_host(x) -> np.ndarray:
    """Any library's array as NumPy."""
    if _arrays.kind(x) == "torch":
        return _arrays.to_numpy(x.cpu())
    return x.get() if _arrays.kind(x) == "cupy" else np.asarray(x)


@pytest.fixture
def attend():
    """``attend(kind)`` is a forward pass over NumPy arrays that runs on the GPU through arrays of that kind."""

    def of_kind(kind: str):
        def forward(q, k, v, pattern, scale=None):
            q, k, v = (on_gpu(x, kind) for x in (q, k, v))
            scale = q.shape[3] ** -0.5 if scale is None else scale
            out, lse = cuda.forward(q, k, v, cuda.plan_for(pattern, q, k, v), scale)
            assert _arrays.kind(out) == _arrays.kind(lse) == _arrays.kind(q)
            assert _arrays.device_of(out) == _arrays.device_of(q)
            return to_host(out), to_host(lse)

        return forward

    return of_kind


@pytest.fixture
def check(attend):
    """``check(pattern, q, k, v)`` holds the GPU's results, through arrays of each kind, against the oracle."""

    def run(pattern, q, k, v, scale=None, *, kinds=("numpy",), forward=None):
        expectation = Expectation(pattern, q, k, v, scale)
        for kind in kinds:
            expectation.check(*(forward or attend(kind))(q, k, v, pattern, scale), kind)

    return run
