"""Devices and their primary contexts, shared with PyTorch, CuPy and JAX.

Nothing here runs at import. PyCUDA pushes a context for the length of a ``with device:`` block and pops it whatever
happens: a thread that ends with a pushed PyCUDA context aborts the process.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import threading
from typing import Any

from ..._util.cached import cached_property
from ._launch import Nothing, current_context, is_capturing
from .errors import CudaError, check

OLDEST_ARCHITECTURE = (8, 0)  # cp.async, ldmatrix and mma.sync on bfloat16

_NOTHING = Nothing()
_devices: dict[int, Device] = {}
_lock = threading.Lock()
_started = False  # whether this process, or one that it was forked from, initialised CUDA
_forked = False  # whether it was not this process


def _after_fork() -> None:
    global _forked
    _forked = _started


os.register_at_fork(after_in_child=_after_fork)


class Device:
    """One GPU. As a context manager it makes the GPU's primary context current.

    Attributes
    ----------
    ordinal : int
        CUDA's number of the GPU.
    """

    def __init__(self, ordinal: int):
        from pycuda import driver

        self.ordinal = ordinal
        self._pop = driver.Context.pop
        self._device = driver.Device(ordinal)
        self._attribute = driver.device_attribute
        self._context: Any = None
        self._current, self._capturing = address("cuCtxGetCurrent"), address("cuStreamIsCapturing")

    @cached_property
    def name(self) -> str:
        """As the driver calls it."""
        return self._device.name()

    @cached_property
    def capability(self) -> tuple[int, int]:
        """Compute capability (major, minor)."""
        return self._device.compute_capability()

    @cached_property
    def arch(self) -> str:
        """nvcc's name of the architecture, such as "sm_90"."""
        return "sm_{}{}".format(*self.capability)

    @cached_property
    def sm_count(self) -> int:
        """Number of SMs (streaming multiprocessors)."""
        return self._device.get_attribute(self._attribute.MULTIPROCESSOR_COUNT)

    @cached_property
    def total_bytes(self) -> int:
        """Device memory in bytes, used or free."""
        return self._device.total_memory()

    @cached_property
    def shared_bytes(self) -> int:
        """Shared memory that one block may have, in bytes."""
        return self._device.get_attribute(self._attribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)

    @cached_property
    def stream(self) -> int:
        """A stream of spattn's own that no other waits for, for copies and host arrays; the context must be current."""
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
        """For a ``with`` block in which this device's primary context is current; the process must be its owner. Where
        PyTorch has left it so already, asking takes less time than making it so."""
        return _NOTHING if current_context(self._current) == self._handle else self

    def is_capturing(self, stream: int) -> bool:
        """Whether a stream, of a raw handle, is being captured into a graph; the context must be current."""
        return is_capturing(self._capturing, stream)

    def _retain(self) -> Any:
        from pycuda import driver

        try:
            return self._device.retain_primary_context()
        except driver.MemoryError as error:
            raise MemoryError(f"{self.name} (cuda:{self.ordinal}): no memory is left to start CUDA in") from error
        except driver.Error as error:
            raise CudaError("cuDevicePrimaryCtxRetain", 0, str(error)) from error

    def __exit__(self, *error: object) -> None:
        self._pop()

    def load(self, image: bytes) -> Any:
        """Load a cubin into this device's context, which must be current; it stays loaded for the life of the process.

        PyCUDA's modules give no handle out, and only a handle can be launched on another library's stream.
        """
        from cuda.bindings import driver

        return check(driver.cuModuleLoadData(image), "cuModuleLoadData")

    def free_bytes(self) -> int:
        """Free device memory in bytes; the context must be current."""
        from pycuda import driver

        return driver.mem_get_info()[0]

    def close(self) -> None:
        """Give the primary context back."""
        if self._context is not None:
            self._context.detach()
            self._context = None


@functools.cache
def library() -> ctypes.CDLL:
    """The driver's own library, for calls on which PyCUDA or cuda-bindings would spend more time than the driver."""
    found = ctypes.CDLL("libcuda.so.1")
    found.cuTensorMapReplaceAddress.argtypes = [ctypes.c_void_p] * 2
    return found


def address(name: str) -> int:
    """Where a function of the driver's library starts, for callers in compiled code."""
    return ctypes.cast(getattr(library(), name), ctypes.c_void_p).value or 0


def initialise() -> None:
    """Start the CUDA driver interface in this process (no context).

    Raises
    ------
    RuntimeError
        In a process that was forked after CUDA was initialised.
    CudaError
        If the driver does not start.
    """
    global _started
    require_owner()
    if not _started:
        from cuda.bindings import driver as bindings
        from pycuda import driver

        check(bindings.cuInit(0), "cuInit")  # says more than PyCUDA's, which calls the same
        driver.init()
        _started = True
        atexit.register(_close_all)


def is_owner() -> bool:
    """Whether this process may call CUDA, as far as spattn knows."""
    return _started and not _forked


def require_owner() -> None:
    """Raise RuntimeError in a process that was forked after spattn initialised CUDA."""
    if _forked:
        raise RuntimeError(
            "CUDA was initialised before this process was forked and does not work in it; "
            "start processes with the multiprocessing method 'spawn'"
        )


def count() -> int:
    """How many GPUs this process sees."""
    initialise()
    from pycuda import driver

    return driver.Device.count()


def get(ordinal: int | None = None) -> Device:
    """The device with this number; None means the one that is current in this thread, else the first."""
    if ordinal is None:
        ordinal = current()
    found = _devices.get(ordinal)
    if found is None:
        initialise()
        with _lock:
            found = _devices.setdefault(ordinal, Device(ordinal))
    return found


def current() -> int:
    """Number of the device whose context is current in this thread, 0 when none is."""
    initialise()
    from cuda.bindings import driver

    status, device = driver.cuCtxGetDevice()
    return 0 if int(status) else int(device)


def _close_all() -> None:
    if is_owner():
        for device in _devices.values():
            device.close()
