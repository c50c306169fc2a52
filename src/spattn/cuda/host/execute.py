"""Calls on arrays of any library: device arrays in place, host arrays through copies."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from ..._util.limits import environment
from ...arrays.namespace import numpy_dtype
from ...arrays.operand import Operand, memory_order, row_major
from ...planning.contract.types import Plan
from ...planning.contract.validated import moved, validated
from ...request.call import Call
from ..driver.buffer import Buffer, keep_if_captured, out_of_memory
from ..driver.device import Device
from ..driver.errors import check
from .backward_pass import BackwardPass
from .forward_pass import ForwardPass


def chosen_kernels() -> str:
    """Value of ``SPATTN_CUDA_KERNEL``."""
    return environment.get(b"SPATTN_CUDA_KERNEL", b"auto").decode()


_BACKWARD_ARRAYS = ("dout", "q", "k", "v", "out", "lse", "dlse", "dq", "dk", "dv")


class Workspace:
    """Allocates device memory that lives as long as this object; `own` is the caller's allocator: bytes to (address,
    owner), where owner None means that it has none."""

    def __init__(self, device: Device, own: Callable[[int], tuple[int, Any]] = lambda nbytes: (0, None)):
        self._device, self._own = device, own
        self._owners: list[Any] = []

    def __call__(self, nbytes: int) -> int:
        address, owner = self._own(nbytes)
        if owner is None:
            owner = Buffer(self._device, nbytes)
            address = owner.pointer
        self._owners.append(owner)
        return address


class Kernels(Protocol):
    """A kernel family, or an adapter that forwards to one."""

    def forward(self, call: ForwardPass) -> None:
        """Enqueue a call; the context must be current."""


class Prepared:
    """Base class: cached dispatch of forwards that differ in values, addresses, stream and scale only.

    `again` runs a call, ``(q, k, v, plan, scale, precision=, score=)``, if the environment now selects other kernels.
    """

    def __init__(self, call: Call, plan: Plan, kernels: Kernels, device: Device, again: Callable[..., Any]):
        self.kind, self.dtype, self.lse_dtype, self.precision = call.kind, call.dtype, call.lse_dtype, call.precision
        self.rows, self.shape, self.return_lse, self.score = call.rows, call.out_shape, call.return_lse, call.score
        self.plan, self.kernels, self.device, self._again = plan, kernels, device, again
        self._kv_len = call.kv_len
        self._chosen = chosen_kernels()
        wide, narrow = (numpy_dtype(name).itemsize for name in (call.lse_dtype, call.dtype))
        heads = call.batch * call.heads_q
        results = heads * call.q_len * (call.head_dim_v * narrow + wide)
        self._needed = results + heads * plan.slots * plan.block_q * (call.head_dim_v + 1) * wide

    def __call__(self, q: Any, k: Any, v: Any, scale: float) -> tuple[Any, Any]:
        if chosen_kernels() != self._chosen:
            return self._again(q, k, v, self.plan_for(k), scale, precision=self.precision, score=self.score)
        with self.device:
            return self.run(q, k, v, scale)

    def plan_for(self, k: Any) -> Plan:
        """The plan for the number of keys in `k`."""
        kv_len = int(k.shape[2])
        return self.plan if kv_len == self._kv_len else moved(validated(self.plan), kv_len)

    def run(self, q: Any, k: Any, v: Any, scale: float) -> tuple[Any, Any]:
        """Compute the results; the device's context is current."""
        raise NotImplementedError

    def out_of_memory(self) -> MemoryError:
        """The error for a failed allocation; the device's context must be current."""
        return out_of_memory(self.device, self._needed)


class OnDevice(Prepared):
    """Cached dispatch on device arrays, on the caller's stream and without synchronization.

    JAX exposes no stream: inputs and results are synchronized.
    """

    def run(self, q: Any, k: Any, v: Any, scale: float) -> tuple[Any, Any]:
        device, kind = self.device, self.kind
        q, k, v = map(kind.resolve, (q, k, v))
        operands = kind.operand(q), kind.operand(k), kind.operand(v)
        stream, plan = kind.stream(q), self.plan_for(k)
        if stream is not None:
            keep_if_captured(device, stream, plan)
        allocate = Workspace(device, lambda nbytes: kind.allocate(q, nbytes))
        try:
            out = kind.empty(q, self.shape, self.dtype, memory_order(operands[0]))
            lse = kind.empty(q, self.rows, self.lse_dtype) if self.return_lse else None
            self.kernels.forward(
                ForwardPass(
                    device,
                    device.stream if stream is None else stream,
                    plan,
                    *operands,
                    kind.operand(out),
                    0 if lse is None else kind.operand(lse).pointer,
                    self.dtype,
                    scale,
                    allocate,
                    self.precision,
                    self.score,
                )
            )
        except Exception as error:
            if type(error).__name__ == "OutOfMemoryError":  # PyTorch's and CuPy's own
                raise self.out_of_memory() from error
            raise
        if stream is None:
            _wait(device.stream)
        return out, lse


class FromHost(Prepared):
    """Cached dispatch on host arrays: copied to the device, results copied back."""

    def run(self, q: Any, k: Any, v: Any, scale: float) -> tuple[Any, Any]:
        q, k, v = (np.ascontiguousarray(self.kind.to_numpy(x)) for x in (q, k, v))
        device, stream = self.device, self.device.stream
        allocate = Workspace(device)

        def on_device(x: np.ndarray) -> Operand:
            return Operand(allocate(x.nbytes), x.shape, row_major(x.shape))

        out, lse = np.empty(self.shape, q.dtype), np.empty(self.rows, self.lse_dtype)
        try:
            operands = on_device(q), on_device(k), on_device(v), on_device(out)
            lse_at = allocate(lse.nbytes)
            for x, operand in zip((q, k, v), operands, strict=False):
                _copy("cuMemcpyHtoDAsync", operand.pointer, x.ctypes.data, x.nbytes, stream)
            plan, options = self.plan_for(k), (self.precision, self.score)
            self.kernels.forward(
                ForwardPass(device, stream, plan, *operands, lse_at, self.dtype, scale, allocate, *options)
            )
            _copy("cuMemcpyDtoHAsync", out.ctypes.data, operands[3].pointer, out.nbytes, stream)
            _copy("cuMemcpyDtoHAsync", lse.ctypes.data, lse_at, lse.nbytes, stream)
        finally:
            _wait(stream)
        return self.kind.from_numpy(out), self.kind.from_numpy(lse)


class Backward:
    """Cached dispatch of gradients for calls that differ in values, addresses, stream and scale only.

    Device arrays are used in place, on the caller's stream and without synchronization (JAX exposes no stream). Host
    arrays are copied to the device, and the gradients back. `choose` returns the kernels that the environment selects
    now.
    """

    def __init__(self, call: Call, plan: Plan, device: Device, choose: Callable[[], ModuleType]):
        self.kind, self.dtype, self.plan, self.device = call.kind, call.dtype, plan, device
        self._choose, self._on_device, self._precision = choose, call.kind.ordinal(call.q) is not None, call.precision
        self._score = call.score
        sizes = (call.heads_q * call.q_len + call.heads_kv * call.kv_len) * (call.head_dim + call.head_dim_v)
        self._needed = call.batch * sizes * numpy_dtype(call.dtype).itemsize

    def __call__(
        self, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dlse: Any, scale: float
    ) -> tuple[Any, ...]:
        with self.device:
            arrays = dout, q, k, v, out, lse, dlse
            return self._in_place(arrays, scale) if self._on_device else self._copied(arrays, scale)

    def _in_place(self, arrays: tuple[Any, ...], scale: float) -> tuple[Any, ...]:
        device, kind = self.device, self.kind
        arrays = tuple(x if x is None else kind.resolve(x) for x in arrays)
        operands: list[Any] = [x if x is None else kind.operand(x) for x in arrays]
        q, stream = arrays[1], kind.stream(arrays[1])
        if stream is not None:
            keep_if_captured(device, stream, self.plan)
        allocate = Workspace(device, lambda nbytes: kind.allocate(q, nbytes))
        try:
            results = tuple(kind.empty(q, x.shape, self.dtype, memory_order(x)) for x in operands[1:4])
            operands += map(kind.operand, results)
            self._enqueue(device.stream if stream is None else stream, operands, scale, allocate)
        except Exception as error:
            if type(error).__name__ == "OutOfMemoryError":  # PyTorch's and CuPy's own
                raise out_of_memory(device, self._needed) from error
            raise
        if stream is None:
            _wait(device.stream)
        return results

    def _copied(self, arrays: tuple[Any, ...], scale: float) -> tuple[Any, ...]:
        device, stream = self.device, self.device.stream
        host = tuple(x if x is None else np.ascontiguousarray(self.kind.to_numpy(x)) for x in arrays)
        allocate = Workspace(device)

        def on_device(x: np.ndarray) -> Operand:
            return Operand(allocate(x.nbytes), x.shape, row_major(x.shape))

        results = tuple(np.empty_like(x) for x in host[1:4])
        try:
            operands: list[Any] = [x if x is None else on_device(x) for x in host]
            for x, operand in zip(host, operands, strict=True):
                if x is not None:
                    _copy("cuMemcpyHtoDAsync", operand.pointer, x.ctypes.data, x.nbytes, stream)
            operands += map(on_device, results)
            self._enqueue(stream, operands, scale, allocate)
            for x, operand in zip(results, operands[-3:], strict=True):
                _copy("cuMemcpyDtoHAsync", x.ctypes.data, operand.pointer, x.nbytes, stream)
        finally:
            _wait(stream)
        return tuple(map(self.kind.from_numpy, results))

    def _enqueue(self, stream: int, operands: list[Any], scale: float, allocate: Callable[[int], int]) -> None:
        self._choose().backward(self.call_of(stream, operands, scale, allocate))

    def call_of(self, stream: int, operands: list[Any], scale: float, allocate: Callable[[int], int]) -> BackwardPass:
        """The backward pass of these arrays and results."""
        return BackwardPass(
            self.device,
            stream,
            self.plan,
            dtype=self.dtype,
            scale=scale,
            allocate=allocate,
            precision=self._precision,
            score=self._score,
            **dict(zip(_BACKWARD_ARRAYS, operands, strict=True)),
        )


class NoGradients:
    """Gradients of calls without queries, heads or keys: zeros."""

    def __init__(self, call: Call):
        self.kind, self.dtype = call.kind, call.dtype

    def __call__(
        self, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dlse: Any, scale: float
    ) -> tuple[Any, ...]:
        if self.kind.ordinal(q) is None:
            shapes = (tuple(x.shape) for x in (q, k, v))
            return tuple(self.kind.from_numpy(np.zeros(shape, numpy_dtype(self.dtype))) for shape in shapes)
        return tuple(self.kind.full(q, tuple(x.shape), self.dtype, 0.0) for x in (q, k, v))


class Nothing:
    """Forwards without queries, heads or keys: out = 0 and lse = −∞ without a launch."""

    def __init__(self, call: Call):
        self.kind, self.results = call.kind, ((call.out_shape, call.dtype, 0.0), (call.rows, call.lse_dtype, -np.inf))

    def __call__(self, q: Any, k: Any, v: Any, scale: float) -> tuple[Any, Any]:
        if self.kind.ordinal(q) is None:
            return tuple(
                [
                    self.kind.from_numpy(np.full(shape, value, numpy_dtype(dtype)))
                    for shape, dtype, value in self.results
                ]
            )
        return tuple([self.kind.full(q, *one) for one in self.results])


def _copy(function: str, destination: int, source: int, nbytes: int, stream: int) -> None:
    from cuda.bindings import driver

    check(getattr(driver, function)(destination, source, nbytes, stream), function)


def _wait(stream: int) -> None:
    from cuda.bindings import driver

    check(driver.cuStreamSynchronize(stream), "cuStreamSynchronize")
