"""Device memory allocated by PyCUDA, freed from any thread and kept for captured graphs."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ._launch import address_of
from .device import Device, is_owner
from .errors import check

_BUFFERED_BYTES = 1 << 16  # of host memory that the driver copies before cuMemcpyHtoDAsync returns
_captured: dict[int, object] = {}  # by id; kept alive until the process ends


class Buffer:
    """`nbytes` of memory on `device`, whose context must be current; MemoryError states the bytes needed and free."""

    def __init__(self, device: Device, nbytes: int):
        from pycuda import driver

        try:
            allocation = driver.mem_alloc(max(nbytes, 1))
        except driver.MemoryError as error:
            raise out_of_memory(device, nbytes) from error
        self.pointer = int(allocation)
        # PyCUDA frees memory only in the thread that owns the context, or while the context is current.
        weakref.finalize(self, _free, device, allocation).atexit = False


def upload(device: Device, arrays: dict[str, np.ndarray], staging: Any = None) -> tuple[Any, dict[str, int]]:
    """Copy arrays into one buffer, synchronously, so that every stream sees them; return (owner, addresses).

    Also while this thread captures a graph on another stream: the copy is no part of the graph.

    With `staging`, the module ``torch``, the copy is asynchronous: from pinned memory, on PyTorch's current stream, the
    only one that may use the buffer. A stream that captures a graph gets a synchronous copy.
    """
    from cuda.bindings import driver

    offsets, total = {}, 0
    for name, array in arrays.items():
        offsets[name] = total
        total += -(-array.nbytes // 256) * 256
    image = np.zeros(total, np.uint8)
    for name, array in arrays.items():
        image[offsets[name] : offsets[name] + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if staging is not None and not staging.cuda.is_current_stream_capturing():
        owner, pointer = copy_in_order(device, total, lambda to: ctypes.memmove(to, image.ctypes.data, total), staging)
        return owner, {name: pointer + offset for name, offset in offsets.items()}
    with _beside_captures():
        buffer = Buffer(device, total)
        check(driver.cuMemcpyHtoDAsync(buffer.pointer, image.ctypes.data, total, device.stream), "cuMemcpyHtoDAsync")
        check(driver.cuStreamSynchronize(device.stream), "cuStreamSynchronize")
    return buffer, {name: buffer.pointer + offset for name, offset in offsets.items()}


def copy_in_order(device: Device, nbytes: int, write: Callable[[int], object], torch: Any) -> tuple[Any, int]:
    """Copy bytes asynchronously, on PyTorch's current stream; return (owner, address). The context must be current.

    `write` writes the bytes to an address of host memory. No other stream may use the copy. The driver buffers up to
    64 KiB; more bytes go through pinned memory, which PyTorch reuses after the copy. The owner's memory is reused in
    stream order.
    """
    owner = torch.empty(nbytes, dtype=torch.uint8, device=device.ordinal)
    if nbytes <= _BUFFERED_BYTES:
        image = bytearray(nbytes)
        at = address_of(image)
        write(at)
        device.copy(owner.data_ptr(), at, nbytes, torch._C._cuda_getCurrentRawStream(device.ordinal))
    else:
        pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        write(pinned.data_ptr())
        owner.copy_(pinned, non_blocking=True)
    return owner, owner.data_ptr()


def clear(pointer: int, nbytes: int, stream: int) -> None:
    """Enqueue a memset to 0."""
    from cuda.bindings import driver

    if nbytes:
        check(driver.cuMemsetD8Async(pointer, 0, nbytes, stream), "cuMemsetD8Async")


def out_of_memory(device: Device, nbytes: int) -> MemoryError:
    """Return the error for a failed allocation; the device's context must be current."""
    return MemoryError(f"{device.name} (cuda:{device.ordinal}): needed {nbytes} bytes, {device.free_bytes()} are free")


def keep_if_captured(device: Device, stream: int, owner: object) -> None:
    """Keep `owner` until the process ends if the stream is capturing: every replay of the graph reads its buffers, and
    the graph's destruction cannot be observed."""
    if device.is_capturing(stream):
        _captured[id(owner)] = owner


def _free(device: Device, allocation: Any) -> None:
    if is_owner():
        with device, _beside_captures():
            allocation.free()


@contextmanager
def _beside_captures() -> Iterator[None]:
    """Allow driver calls that would otherwise invalidate a graph capture; garbage collection may run during one."""
    from cuda.bindings import driver

    function, relaxed = "cuThreadExchangeStreamCaptureMode", driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = check(driver.cuThreadExchangeStreamCaptureMode(relaxed), function)
    try:
        yield
    finally:
        check(driver.cuThreadExchangeStreamCaptureMode(before), function)
