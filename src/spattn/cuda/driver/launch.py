"""Loaded kernels, cached by device, source and macros."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

import numpy as np

from ..._util.meanwhile import take_work
from . import cache, compile
from ._launch import Launch, StepLaunch, StepParams, encode_map, replace_address, start
from .device import Device, address
from .errors import check

__all__ = [
    "Kernel",
    "Launch",
    "Moving",
    "Request",
    "StepLaunch",
    "StepParams",
    "compile_early",
    "encode_map",
    "kernel",
    "load_kernels",
    "replace_address",
    "start",
]

STATIC_SHARED_BYTES = 48 * 1024  # maximum shared memory without opt-in
_CAPTURES_EARLY = 12030  # first driver that captures programmatic dependent launches

_PATIENCE = 2.0  # seconds of waiting for nvcc until a call says so

_log = logging.getLogger("spattn.cuda")
_kernels: dict[tuple[Any, ...], Kernel] = {}
_lock = threading.Lock()


class Moving(NamedTuple):
    """Launch parameters of a length-polymorphic plan that depend on `kv_len`.

    Attributes
    ----------
    replace : int
        Address of cuTensorMapReplaceAddress.
    moved : int
        Run-time kv_len minus the plan's kv_len, as stored in the parameters.
    moved_at : int
        Offset of `moved` in the parameters.
    maps : list of (int, int, int)
        Offset in the parameters, base address for `moved` = 0, and bytes per additional key, of each tensor map.
    """

    replace: int
    moved: int
    moved_at: int
    maps: list[tuple[int, int, int]]


class Request(NamedTuple):
    """A kernel: its file, target, macros, structs, function, and the generated C++ that precedes the file."""

    source: str
    arch: str
    defines: Mapping[str, object]
    structs: Mapping[str, np.dtype]
    entry: str
    text: str = ""

    def key(self, device: Device) -> tuple[Any, ...]:
        """Return the key of the loaded kernel."""
        return device.ordinal, self.source, self.arch, tuple(sorted(self.defines.items())), self.entry, self.text

    def unit(self) -> compile.Unit:
        """Return what nvcc compiles."""
        return compile.Unit.of(self.source, self.arch, self.defines, self.structs, self.text)


def compile_early(device: Device, requests: Iterable[Request]) -> None:
    """Let threads compile kernels that :func:`load_kernels` will return later; raise no error of nvcc."""
    for one in requests:
        if one.key(device) not in _kernels:
            compile.begin_early(one.unit())


class Kernel:
    """A kernel function of one cubin, loaded on one device.

    The kernel file declares ``extern "C" __constant__ int launch_shape[3]``: threads per CTA, bytes of dynamic shared
    memory, bytes of the parameter struct.
    """

    def __init__(self, device: Device, request: Request, image: bytes):
        from cuda.bindings import driver

        module = device.load(image)
        function = check(driver.cuModuleGetFunction(module, request.entry.encode()), "cuModuleGetFunction")
        shape = np.zeros(3, np.int32)
        pointer, _ = check(driver.cuModuleGetGlobal(module, b"launch_shape"), "cuModuleGetGlobal")
        check(driver.cuMemcpyDtoH(shape.ctypes.data, pointer, shape.nbytes), "cuMemcpyDtoH")
        self.handle, self.start = int(function), address("cuLaunchKernelEx")
        self.threads, self.shared_bytes, self.params_bytes = shape.tolist()
        self.starts_early = check(driver.cuDriverGetVersion(), "cuDriverGetVersion") >= _CAPTURES_EARLY
        if self.shared_bytes > device.shared_bytes:
            raise ValueError(
                f"{request.source}: needs {self.shared_bytes} bytes of shared memory for {dict(request.defines)}, "
                f"{device.name} has {device.shared_bytes}"
            )
        if self.shared_bytes > STATIC_SHARED_BYTES:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(driver.cuFuncSetAttribute(function, attribute, self.shared_bytes), "cuFuncSetAttribute")

    def launch(self, blocks: int, params: bytes, stream: int) -> None:
        """Launch `blocks` CTAs on a raw stream handle; the device's context must be current."""
        start([Launch(self, blocks, params, stream)])


def kernel(device: Device, request: Request) -> Kernel:
    """Return the kernel; see :func:`load_kernels`."""
    return load_kernels(device, [request])[0]


def load_kernels(device: Device, requests: Sequence[Request]) -> list[Kernel]:
    """Return kernels, compiled in parallel and loaded at first use; the device's context must be current."""
    keys = [one.key(device) for one in requests]
    missing = {key: one for key, one in zip(keys, requests, strict=True) if key not in _kernels}
    if missing:
        images = [compile.begin(one.unit()) for one in missing.values()]
        _wait(list(missing.values()), images)
        with _lock:
            for (key, one), image in zip(missing.items(), images, strict=True):
                if key not in _kernels:
                    _kernels[key] = Kernel(device, one, image.result())
    return [_kernels[key] for key in keys]


def _wait(requests: list[Request], images: list[Future[bytes]]) -> None:
    """Wait for compilations, and do what the call offers to do meanwhile; after two seconds, log a line."""
    end = time.monotonic() + _PATIENCE
    work = None if all(image.done() for image in images) else take_work()
    if work is not None:
        try:
            work()
        except Exception:  # raised again by the call that the work prepares
            _log.debug("cannot prepare the backward while the forward is compiled", exc_info=True)
    wait(images, max(0.0, end - time.monotonic()))
    left = [one for one, image in zip(requests, images, strict=True) if not image.done()]
    if left:
        _log.warning("spattn: compiling %s (kept in %s)", _described(left), cache.folder())
    wait(images)


def _described(requests: list[Request]) -> str:
    """Return the number of kernels, and for which dtype and head dimension."""
    defines = requests[0].defines
    known = [str(defines["SPATTN_DTYPE"])] if "SPATTN_DTYPE" in defines else []
    known += [f"head_dim {defines['SPATTN_HEAD_DIM']}"] if "SPATTN_HEAD_DIM" in defines else []
    known += ["a score function"] if any(one.text for one in requests) else []
    count = "1 CUDA kernel" if len(requests) == 1 else f"{len(requests)} CUDA kernels"
    return f"{count} for {', '.join(known)}" if known else count
