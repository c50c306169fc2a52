"""Kernels ready to launch: compiled, loaded, and told apart by device, source and macros."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from . import compile
from .device import Device, library
from .errors import check, error

STATIC_SHARED_BYTES = 48 * 1024  # a block gets more only after asking

# CUlaunchConfig (grid, block, shared memory, stream, no attributes) and then the addresses of the parameters: one.
_CONFIG, _WORD = struct.Struct("@7IPPIP"), struct.Struct("@Q")

_kernels: dict[tuple[Any, ...], Kernel] = {}
_lock = threading.Lock()


class Kernel:
    """One entry point of one cubin on one device.

    The kernel file declares ``extern "C" __constant__ int launch_shape[3]``: threads of a block, bytes of dynamic
    shared memory and size of the parameter struct in bytes, so that these numbers are written down once.
    """

    def __init__(
        self,
        device: Device,
        source: str,
        arch: str,
        defines: Mapping[str, object],
        structs: Mapping[str, np.dtype],
        entry: str,
    ):
        from cuda.bindings import driver

        module = device.load(compile.cubin(source, arch, defines, structs))
        function = check(driver.cuModuleGetFunction(module, entry.encode()), "cuModuleGetFunction")
        shape = np.zeros(3, np.int32)
        pointer, _ = check(driver.cuModuleGetGlobal(module, b"launch_shape"), "cuModuleGetGlobal")
        check(driver.cuMemcpyDtoH(shape.ctypes.data, pointer, shape.nbytes), "cuMemcpyDtoH")
        self.handle, self.start = int(function), library().cuLaunchKernelEx
        self.threads, self.shared_bytes, self.params_bytes = shape.tolist()
        if self.shared_bytes > device.shared_bytes:
            raise ValueError(
                f"{source}: needs {self.shared_bytes} bytes of shared memory for {dict(defines)}, "
                f"{device.name} has {device.shared_bytes}"
            )
        if self.shared_bytes > STATIC_SHARED_BYTES:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(driver.cuFuncSetAttribute(function, attribute, self.shared_bytes), "cuFuncSetAttribute")

    def launch(self, blocks: int, params: bytes, stream: int) -> None:
        """Start `blocks` blocks on a raw stream handle; the device's context must be current."""
        Launch(self, blocks, params, stream)()


class Launch:
    """A prepared launch: config and parameters in one buffer. Reusable, not thread-safe.

    Parameters
    ----------
    params : bytes
        The kernel's only parameter, passed by value.
    stream : int
        Raw handle.
    """

    def __init__(self, kernel: Kernel, blocks: int, params: bytes, stream: int):
        if len(params) != kernel.params_bytes:
            raise ValueError(f"params: expected {kernel.params_bytes} bytes, got {len(params)}")
        self._memory = bytearray(_CONFIG.size) + params  # stays where it is: its size does not change
        at = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        _CONFIG.pack_into(
            self._memory, 0, blocks, 1, 1, kernel.threads, 1, 1, kernel.shared_bytes, stream, 0, 0, at + _CONFIG.size
        )
        self._start = kernel.start
        self._arguments = at, kernel.handle, at + _CONFIG.size - _WORD.size, None

    def __call__(self, at: int = 0, word: int | None = None) -> None:
        """Start it; the device's context must be current. The driver has copied everything when this returns.

        Parameters
        ----------
        at, word : int
            Eight bytes of the parameter to replace first.
        """
        if word is not None:
            _WORD.pack_into(self._memory, _CONFIG.size + at, word)
        status = self._start(*self._arguments)
        if status:
            raise error(status, "cuLaunchKernelEx")


def kernel(
    device: Device,
    source: str,
    arch: str,
    defines: Mapping[str, object],
    structs: Mapping[str, np.dtype],
    entry: str,
) -> Kernel:
    """The kernel, compiled and loaded at its first use; the device's context must be current."""
    key = device.ordinal, source, arch, tuple(sorted(defines.items())), entry
    found = _kernels.get(key)
    if found is None:
        with _lock:
            found = _kernels.get(key)
            if found is None:
                found = _kernels[key] = Kernel(device, source, arch, defines, structs, entry)
    return found
