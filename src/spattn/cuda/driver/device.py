"""Devices and their primary contexts, shared with PyTorch, CuPy and JAX.

Importing this module initialises nothing. A ``with device:`` block pushes a PyCUDA context and always pops it: a thread
that ends with a pushed PyCUDA context aborts the process.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import threading
from typing import Any

from ..._util.cached import cached_property
from ._launch import Nothing, copy_to_device, current_context, is_capturing
from .errors import CudaError, check

OLDEST_ARCHITECTURE = (8, 0)  # cp.async, ldmatrix and mma.sync on bfloat16

_NOTHING = Nothing()
_devices: dict[int, Device] = {}
_lock = threading.Lock()
_started = False  # True if this process, or an ancestor before a fork, initialised CUDA
_forked = False  # True if an ancestor initialised CUDA


def _after_fork() -> None:
    global _forked
    _forked = _started


os.register_at_fork(after_in_child=_after_fork)


class Device:
    """A GPU; `ordinal` is its CUDA device index. A ``with`` block makes its primary context current."""

    def __init__(self, ordinal: int):
        from pycuda import driver

        self.ordinal = ordinal
        self._pop = driver.Context.pop
        self._device = driver.Device(ordinal)
        self._attribute = driver.device_attribute
        self._context: Any = None
        self._current, self._capturing = address("cuCtxGetCurrent"), address("cuStreamIsCapturing")
        self._copy = address("cuMemcpyHtoDAsync_v2")

    @cached_property
    def name(self) -> str:
        return self._device.name()

    @cached_property
    def capability(self) -> tuple[int, int]:
        """Compute capability (major, minor)."""
        return self._device.compute_capability()

    @cached_property
    def arch(self) -> str:
        """Name of the architecture for nvcc, such as "sm_90"."""
        return "sm_{}{}".format(*self.capability)

    @cached_property
    def sm_count(self) -> int:
        """Number of SMs (streaming multiprocessors)."""
        return self._device.get_attribute(self._attribute.MULTIPROCESSOR_COUNT)

    @cached_property
    def total_bytes(self) -> int:
        """Total device memory in bytes."""
        return self._device.total_memory()

    @cached_property
    def shared_bytes(self) -> int:
        """Maximum shared memory per CTA in bytes."""
        return self._device.get_attribute(self._attribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)

    @cached_property
    def stream(self) -> int:
        """Non-blocking stream owned by spattn, for copies and host arrays; the context must be current."""
        from cuda.bindings import driver

        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value
        return int(check(driver.cuStreamCreate(flags), "cuStreamCreate"))

    def __enter__(self) -> Device:
        require_owner()
        if self._context is None:
            with _lock:
                self._context = self._context or self._retain()
        self._context.push()
        return self

    @cached_property
    def _handle(self) -> int:
        with self:
            return current_context(self._current)

    def made_current(self) -> Device | Nothing:
        """Return a context manager that makes the primary context current; cheaper than ``with device`` if it already
        is. The caller has called :func:`require_owner`."""
        return _NOTHING if current_context(self._current) == self._handle else self

    def is_capturing(self, stream: int) -> bool:
        """True if a graph capture records the stream (raw handle); the context must be current."""
        return is_capturing(self._capturing, stream)

    def copy(self, pointer: int, host: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy from host memory on a stream (raw handle); the context must be current."""
        copy_to_device(self._copy, pointer, host, nbytes, stream)

    def _retain(self) -> Any:
        from pycuda import driver

        try:
            return self._device.retain_primary_context()
        except driver.MemoryError as error:
            raise MemoryError(
                f"{self.name} (cuda:{self.ordinal}): out of memory while creating the CUDA context"
            ) from error
        except driver.Error as error:
            raise CudaError("cuDevicePrimaryCtxRetain", 0, str(error)) from error

    def __exit__(self, *error: object) -> None:
        self._pop()

    def load(self, image: bytes) -> Any:
        """Load a cubin into this device's context, which must be current, until the process ends.

        PyCUDA's modules expose no handle, but launches on another library's stream need one.
        """
        from cuda.bindings import driver

        return check(driver.cuModuleLoadData(image), "cuModuleLoadData")

    def free_bytes(self) -> int:
        """Return the free device memory in bytes; the context must be current."""
        from pycuda import driver

        return driver.mem_get_info()[0]

    def close(self) -> None:
        """Release the primary context."""
        if self._context is not None:
            self._context.detach()
            self._context = None


@functools.cache
def library() -> ctypes.CDLL:
    """Load libcuda, whose functions compiled code calls: PyCUDA and cuda-bindings take longer than the driver."""
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def address(name: str) -> int:
    """Return the address of a driver function, for compiled code."""
    return ctypes.cast(getattr(library(), name), ctypes.c_void_p).value or 0


def initialise() -> None:
    """Initialise the CUDA driver API without a context; raise RuntimeError in a process forked after spattn initialised
    CUDA, CudaError if the driver fails."""
    global _started
    require_owner()
    if not _started:
        from cuda.bindings import driver as bindings
        from pycuda import driver

        check(bindings.cuInit(0), "cuInit")  # reports errors more precisely than PyCUDA's init
        driver.init()
        _started = True
        atexit.register(_close_all)


def is_owner() -> bool:
    """True if this process may call CUDA, as far as spattn knows."""
    return _started and not _forked


def require_owner() -> None:
    """Raise RuntimeError in a process forked after spattn initialised CUDA."""
    if _forked:
        raise RuntimeError(
            "CUDA was initialised before this process was forked and does not work in it; "
            "start processes with the multiprocessing method 'spawn'"
        )


def count() -> int:
    """Return the number of visible GPUs."""
    initialise()
    from pycuda import driver

    return driver.Device.count()


def get(ordinal: int | None = None) -> Device:
    """Return the device with this index; None selects this thread's current device, else the first."""
    if ordinal is None:
        ordinal = current()
    found = _devices.get(ordinal)
    if found is None:
        initialise()
        with _lock:
            found = _devices.setdefault(ordinal, Device(ordinal))
    return found


def current() -> int:
    """Return the index of this thread's current device, else 0."""
    initialise()
    from cuda.bindings import driver

    status, device = driver.cuCtxGetDevice()
    return 0 if int(status) else int(device)


def _close_all() -> None:
    if is_owner():
        for device in _devices.values():
            device.close()
