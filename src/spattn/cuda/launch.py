"""Kernels ready to launch: compiled, loaded, and told apart by device, source and macros."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Mapping

import numpy as np

from . import compile
from .device import Device, library
from .errors import check, error

LARGEST_PARAMS = 32764  # CUDA's limit in bytes, from 12.1 and compute capability 7.0 on
STATIC_SHARED_BYTES = 48 * 1024  # a block gets more only after asking

_CONFIG, _WORD = struct.Struct("@7IPPI"), struct.Struct("@Q")

_kernels: dict[tuple, Kernel] = {}
_lock = threading.Lock()


class _Config(ctypes.Structure):
    """CUlaunchConfig without attributes."""

    _fields_ = [
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint),
    ]  # fmt: skip


class _Arguments(threading.local):
    """What cuLaunchKernelEx reads a launch from, one per thread: the driver has copied it when it returns."""

    def __init__(self):
        self._params = np.zeros(LARGEST_PARAMS, np.uint8)
        self._pointers = np.array([self._params.ctypes.data], np.uint64)
        self.bytes = memoryview(self._params)
        self.config = _Config()
        self.at = ctypes.addressof(self.config), self._pointers.ctypes.data


_arguments = _Arguments()


class Kernel:
    """One entry point of one cubin on one device.

    The kernel file declares ``extern "C" __constant__ int launch_shape[3]``: threads of a block, bytes of dynamic
    shared memory and size of the parameter struct in bytes, so that these numbers are written down once.
    """

    def __init__(self, device: Device, source: str, arch: str, defines: Mapping[str, object], entry: str):
        from cuda.bindings import driver

        module = device.load(compile.cubin(source, arch, defines))
        function = check(driver.cuModuleGetFunction(module, entry.encode()), "cuModuleGetFunction")
        shape = np.zeros(3, np.int32)
        pointer, _ = check(driver.cuModuleGetGlobal(module, b"launch_shape"), "cuModuleGetGlobal")
        check(driver.cuMemcpyDtoH(shape.ctypes.data, pointer, shape.nbytes), "cuMemcpyDtoH")
        self._handle, self._launch = int(function), library().cuLaunchKernelEx
        self.threads, self.shared_bytes, self.params_bytes = shape.tolist()
        if self.shared_bytes > device.shared_bytes:
            raise ValueError(
                f"{source}: needs {self.shared_bytes} bytes of shared memory for {dict(defines)}, "
                f"{device.name} has {device.shared_bytes}"
            )
        if self.shared_bytes > STATIC_SHARED_BYTES:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(driver.cuFuncSetAttribute(function, attribute, self.shared_bytes), "cuFuncSetAttribute")

    def launch(
        self, blocks: int, params: bytes | np.ndarray, stream: int, at: int = 0, word: int | None = None
    ) -> None:
        """Start `blocks` blocks on a raw stream handle; the device's context must be current.

        Parameters
        ----------
        params : bytes or array of uint8
            The kernel's only parameter, passed by value.
        at, word : int
            Eight bytes of the parameter to replace, so that `params` can be used again.
        """
        if len(params) != self.params_bytes:
            raise ValueError(f"params: expected {self.params_bytes} bytes, got {len(params)}")
        own = _arguments
        own.bytes[: self.params_bytes] = params
        if word is not None:
            _WORD.pack_into(own.bytes, at, word)
        _CONFIG.pack_into(own.config, 0, blocks, 1, 1, self.threads, 1, 1, self.shared_bytes, stream, 0, 0)
        config, pointers = own.at
        status = self._launch(config, self._handle, pointers, None)
        if status:
            raise error(status, "cuLaunchKernelEx")


def kernel(device: Device, source: str, arch: str, defines: Mapping[str, object], entry: str) -> Kernel:
    """The kernel, compiled and loaded at its first use; the device's context must be current."""
    key = device.ordinal, source, arch, tuple(sorted(defines.items())), entry
    found = _kernels.get(key)
    if found is None:
        with _lock:
            found = _kernels.get(key)
            if found is None:
                found = _kernels[key] = Kernel(device, source, arch, defines, entry)
    return found
