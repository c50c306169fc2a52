"""Loaded kernels, cached by device, source and macros."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from . import compile
from ._launch import Launch, start
from .device import Device, address
from .errors import check

__all__ = ["Kernel", "Launch", "Moving", "Request", "compile_together", "kernel", "start"]

STATIC_SHARED_BYTES = 48 * 1024  # maximum shared memory without opt-in
_CAPTURES_EARLY = 12030  # first driver that captures programmatic dependent launches

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


Request = tuple[str, str, Mapping[str, object], Mapping[str, np.dtype], str, str]


def compile_together(requests: Sequence[Request]) -> None:
    """Compile several kernels in parallel, each (source, arch, defines, structs, entry, text); :func:`kernel` then
    finds them in the cache on disk."""
    with ThreadPoolExecutor(len(requests)) as pool:
        list(pool.map(lambda one: compile.cubin(one[0], one[1], one[2], one[3], one[5]), requests))


class Kernel:
    """A kernel function of one cubin, loaded on one device.

    The kernel file declares ``extern "C" __constant__ int launch_shape[3]``: threads per CTA, bytes of dynamic shared
    memory, bytes of the parameter struct.
    """

    def __init__(
        self,
        device: Device,
        source: str,
        arch: str,
        defines: Mapping[str, object],
        structs: Mapping[str, np.dtype],
        entry: str,
        text: str = "",
    ):
        from cuda.bindings import driver

        module = device.load(compile.cubin(source, arch, defines, structs, text))
        function = check(driver.cuModuleGetFunction(module, entry.encode()), "cuModuleGetFunction")
        shape = np.zeros(3, np.int32)
        pointer, _ = check(driver.cuModuleGetGlobal(module, b"launch_shape"), "cuModuleGetGlobal")
        check(driver.cuMemcpyDtoH(shape.ctypes.data, pointer, shape.nbytes), "cuMemcpyDtoH")
        self.handle, self.start = int(function), address("cuLaunchKernelEx")
        self.threads, self.shared_bytes, self.params_bytes = shape.tolist()
        self.starts_early = check(driver.cuDriverGetVersion(), "cuDriverGetVersion") >= _CAPTURES_EARLY
        if self.shared_bytes > device.shared_bytes:
            raise ValueError(
                f"{source}: needs {self.shared_bytes} bytes of shared memory for {dict(defines)}, "
                f"{device.name} has {device.shared_bytes}"
            )
        if self.shared_bytes > STATIC_SHARED_BYTES:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(driver.cuFuncSetAttribute(function, attribute, self.shared_bytes), "cuFuncSetAttribute")

    def launch(self, blocks: int, params: bytes, stream: int) -> None:
        """Launch `blocks` CTAs on a raw stream handle; the device's context must be current."""
        start([Launch(self, blocks, params, stream)])


def kernel(
    device: Device,
    source: str,
    arch: str,
    defines: Mapping[str, object],
    structs: Mapping[str, np.dtype],
    entry: str,
    text: str = "",
) -> Kernel:
    """Return the kernel, compiled and loaded at first use; the device's context must be current. `text` is generated
    C++ that precedes the kernel file."""
    key = device.ordinal, source, arch, tuple(sorted(defines.items())), entry, text
    found = _kernels.get(key)
    if found is None:
        with _lock:
            found = _kernels.get(key)
            if found is None:
                found = _kernels[key] = Kernel(device, source, arch, defines, structs, entry, text)
    return found
