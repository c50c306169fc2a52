"""From checked arguments to kernels in a stream: device arrays in place, host arrays up and back."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from .. import _arrays
from ..plan._types import Plan
from . import arrays
from .arrays import Library
from .call import Call, Operand
from .driver.buffer import Buffer, out_of_memory
from .driver.device import Device
from .driver.errors import check


@dataclass(slots=True)
class Request:
    """What a caller asks of some kernels on a device: arrays of its library, as they came.

    Once there are addresses, results and a stream it becomes a :class:`~spattn.cuda.call.Call`.
    """

    kernels: ModuleType
    device: Device
    library: Library
    q: Any
    k: Any
    v: Any
    plan: Plan
    scale: float
    precision: str | None


def on_device(request: Request) -> tuple[Any, Any]:
    """Attention of arrays in device memory, on the caller's stream and without waiting for it.

    JAX shares no stream: its inputs are waited for, and so is the result.
    """
    device, library, plan = request.device, request.library, request.plan
    q, k, v = map(library.resolve, (request.q, request.k, request.v))
    dtype = library.dtype(q)
    operands = [library.operand(x) for x in (q, k, v)]
    stream = library.stream(q)
    own = stream is None
    owners: list[Any] = []

    def allocate(nbytes: int) -> int:
        address, owner = library.allocate(q, nbytes)
        if owner is None:
            owner = Buffer(device, nbytes)
            address = owner.pointer
        owners.append(owner)
        return address

    rows = operands[0].shape[:3]
    shape = (*rows, operands[2].shape[3])
    try:
        out = library.empty(q, shape, dtype, arrays.memory_order(operands[0]))
        lse = library.empty(q, rows, lse_dtype(dtype))
        call = Call(device, device.stream if own else stream, plan, *operands, library.operand(out),
                    library.operand(lse).pointer, dtype, request.scale, allocate, request.precision)  # fmt: skip
        request.kernels.forward(call)
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # PyTorch's and CuPy's own
            raise out_of_memory(device, needed_bytes(shape, dtype, plan)) from error
        raise
    if own:
        _wait(device.stream)
    return out, lse


def from_host(request: Request) -> tuple[Any, Any]:
    """Attention of arrays in host memory: copied to the device, and the result back."""
    host = [np.ascontiguousarray(_arrays.to_numpy(x)) for x in (request.q, request.k, request.v)]
    dtype = _arrays.dtype_name(host[0])
    device = request.device
    stream = device.stream
    buffers: list[Buffer] = []

    def allocate(nbytes: int) -> int:
        buffers.append(Buffer(device, nbytes))
        return buffers[-1].pointer

    out = np.empty((*host[0].shape[:3], host[2].shape[3]), host[0].dtype)
    lse = np.empty(out.shape[:3], lse_dtype(dtype))
    try:
        operands = [_on_device(x, allocate) for x in (*host, out)]
        lse_at = allocate(lse.nbytes)
        for x, operand in zip(host, operands, strict=False):
            _copy("cuMemcpyHtoDAsync", operand.pointer, x.ctypes.data, x.nbytes, stream)
        call = Call(device, stream, request.plan, *operands, lse_at, dtype, request.scale, allocate, request.precision)
        request.kernels.forward(call)
        _copy("cuMemcpyDtoHAsync", out.ctypes.data, operands[3].pointer, out.nbytes, stream)
        _copy("cuMemcpyDtoHAsync", lse.ctypes.data, lse_at, lse.nbytes, stream)
    finally:
        _wait(stream)
    return _arrays.from_numpy(out, request.q), _arrays.from_numpy(lse, request.q)


def needed_bytes(shape: tuple[int, ...], dtype: str, plan: Plan) -> int:
    """Bytes of the result and of the workspace."""
    batch, heads, q_len, head_dim_v = shape
    wide = 8 if dtype == "float64" else 4
    rows = batch * heads * plan.slots * plan.block_q
    narrow = {"float16": 2, "bfloat16": 2}.get(dtype, wide)
    return batch * heads * q_len * (head_dim_v * narrow + wide) + rows * (head_dim_v + 1) * wide


def lse_dtype(dtype: str) -> str:
    """The element type of lse."""
    return "float64" if dtype == "float64" else "float32"


def _on_device(x: np.ndarray, allocate) -> Operand:
    return Operand(allocate(x.nbytes), x.shape, arrays.row_major(x.shape))


def _copy(function: str, destination: int, source: int, nbytes: int, stream: int) -> None:
    from cuda.bindings import driver

    check(getattr(driver, function)(destination, source, nbytes, stream), function)


def _wait(stream: int) -> None:
    from cuda.bindings import driver

    check(driver.cuStreamSynchronize(stream), "cuStreamSynchronize")
