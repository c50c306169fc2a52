"""Report versions, hardware and backend availability of this installation."""

from __future__ import annotations

import ctypes
import importlib.metadata
import platform
import sys

from .. import backends as _backends
from .._util.imports import whole_imports

_PACKAGES = ("numpy", "ml_dtypes", "pycuda", "cuda-bindings", "torch", "cupy", "jax")


def version() -> str:
    """Return the installed version."""
    return importlib.metadata.version("spattn")


def versions() -> dict[str, object]:
    """Collect the facts that :func:`show_versions` prints."""
    facts: dict[str, object] = {
        "spattn": version(),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
    }
    for package in _PACKAGES:
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = "not installed"
    for name in _backends.names():
        reason = _backends.why_unavailable(name)
        facts[f"backend {name}"] = "available" if reason is None else f"unavailable: {reason}"
        if reason is None:
            facts.update({f"  {key}": value for key, value in _backends.load(name).info().items()})
        elif name == "cuda":
            facts.update({f"  {key}": value for key, value in _cuda_parts().items()})
    return facts


def _cuda_parts() -> dict[str, str]:
    """Return the GPU, the driver and nvcc, without PyCUDA or a CUDA context."""
    with whole_imports:
        from ..cuda import compile

    return _driver() | {"nvcc": str(compile.find_nvcc() or "not found")}


def _driver() -> dict[str, str]:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"GPU": "unknown without a driver", "driver": f"not found ({error})"}
    version, count, device = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    driver = f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    status = library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count))
    if status:
        return {"GPU": f"unknown: driver initialization failed (CUDA error {status})", "driver": driver}
    gpus, name = [], ctypes.create_string_buffer(256)
    for ordinal in range(count.value):
        library.cuDeviceGet(ctypes.byref(device), ordinal)
        library.cuDeviceGetName(name, len(name), device)
        gpus.append(name.value.decode())
    return {"GPU": ", ".join(gpus) or "none", "driver": driver}


def show_versions() -> None:
    """Print versions, supported instruction sets, threads, GPU, driver, compiler, and why a backend is unavailable."""
    facts = versions()
    width = max(map(len, facts))
    for key, value in facts.items():
        print(f"{key:{width}}  {value}")
