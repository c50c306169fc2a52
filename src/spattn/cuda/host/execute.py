"""Calls on arrays of any library: device arrays in place, host arrays through copies."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..._util.limits import environment
from ...arrays.namespace import numpy_dtype
from ...arrays.operand import Operand, memory_order, row_major
from ...backends import PreparedBackward, PreparedForward
from ...planning.contract.types import Plan
from ...planning.contract.validated import moved, validated
from ...request.call import Call
from ...request.score import ScoreOperands
from ..driver.buffer import Buffer, keep_if_captured, out_of_memory
from ..driver.device import Device
from ..driver.errors import check
from .backward_pass import BackwardPass
from .family import Family
from .forward_pass import ForwardPass
from .sinks import has_sinks, score_of, sinks_of


def chosen_kernels() -> str:
    """Return the value of ``SPATTN_CUDA_KERNEL``."""
    return environment.get(b"SPATTN_CUDA_KERNEL", b"auto").decode()


class Workspace:
    """Allocates device memory that lives as long as this object.

    `own`, the caller's allocator, takes a number of bytes and returns (address, owner); owner is None if the array
    library has no allocator.
    """

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


class _Dispatch:
    """Base class of cached dispatches of calls that differ only in values, addresses, stream and scale.

    Device arrays are used in place, on the caller's stream and without synchronization (JAX exposes no stream: inputs
    and results are synchronized). Host arrays are copied to the device, and the results back.

    `results` has the shape and dtype of each result, and the index of the operand whose memory order it takes; `like`
    is q's index among the operands.
    """

    like = 0

    def __init__(self, call: Call, plan: Plan, device: Device, results: list[tuple[Any, str, int | None]]):
        self.kind, self.dtype, self.precision, self.score = call.kind, call.dtype, call.precision, score_of(call)
        self.plan, self.device, self._results = plan, device, results
        self._ordinal = call.kind.ordinal(call.q)
        self.on_device, self.has_sinks = self._ordinal is not None, has_sinks(call)
        self._heads_q, self._lse_dtype = call.heads_q, call.lse_dtype

    def sinks_of(self, score: ScoreOperands | None) -> tuple[Any, ...]:
        """Return the sinks of a call, the last of its inputs; an empty tuple without sinks."""
        if (score is not None and score.sinks is not None) != self.has_sinks:
            raise ValueError(f"sinks: expected {'an array' if self.has_sinks else 'None'}, as in the prepared call")
        return sinks_of(score, self._heads_q, self._lse_dtype, self.kind, self._ordinal)

    def enqueue(
        self, stream: int, operands: list[Operand], plan: Plan, scale: float, allocate: Callable[[int], int]
    ) -> None:
        """Enqueue the kernels of a call; `operands` are its inputs, then its results."""
        raise NotImplementedError

    def in_place(self, arrays: tuple[Any, ...], plan: Plan, scale: float) -> tuple[Any, ...]:
        """Compute results for device arrays; the device's context is current."""
        device, kind = self.device, self.kind
        arrays = tuple(map(kind.resolve, arrays))
        operands = list(map(kind.operand, arrays))
        q = arrays[self.like]
        stream = kind.stream(q)
        if stream is not None:
            keep_if_captured(device, stream, plan)
        allocate = Workspace(device, lambda nbytes: kind.allocate(q, nbytes))
        results = []
        try:
            for shape, dtype, of in self._results:
                results.append(kind.empty(q, shape, dtype, None if of is None else memory_order(operands[of])))
                operands.append(kind.operand(results[-1]))
            self.enqueue(device.stream if stream is None else stream, operands, plan, scale, allocate)
        except Exception as error:
            if type(error).__name__ == "OutOfMemoryError":  # PyTorch's and CuPy's own
                raise self.out_of_memory() from error
            raise
        if stream is None:
            _wait(device.stream)
        return tuple(results)

    def copied(self, arrays: tuple[Any, ...], plan: Plan, scale: float) -> tuple[Any, ...]:
        """Compute results for host arrays; the device's context is current."""
        device, stream = self.device, self.device.stream
        host = [np.ascontiguousarray(self.kind.to_numpy(x)) for x in arrays]
        results = [np.empty(shape, numpy_dtype(dtype)) for shape, dtype, _ in self._results]
        allocate = Workspace(device)
        try:
            operands = [Operand(allocate(x.nbytes), x.shape, row_major(x.shape)) for x in (*host, *results)]
            for x, operand in zip(host, operands, strict=False):
                _copy("cuMemcpyHtoDAsync", operand.pointer, x.ctypes.data, x.nbytes, stream)
            self.enqueue(stream, operands, plan, scale, allocate)
            for x, operand in zip(results, operands[len(host) :], strict=True):
                _copy("cuMemcpyDtoHAsync", x.ctypes.data, operand.pointer, x.nbytes, stream)
        finally:
            _wait(stream)
        return tuple(map(self.kind.from_numpy, results))

    def out_of_memory(self) -> MemoryError:
        """Return the error for a failed allocation of results and partials; the device's context must be current."""
        sizes = [math.prod(shape) * numpy_dtype(dtype).itemsize for shape, dtype, _ in self._results]
        return out_of_memory(self.device, sum(sizes) + self.partial_bytes())

    def partial_bytes(self) -> int:
        """Return the size of the split-KV partials."""
        return 0


class Forward(_Dispatch):
    """Cached dispatch of forwards.

    `forward` enqueues a pass. `again` runs a call, ``(q, k, v, plan, scale, precision=, score=)``, after
    SPATTN_CUDA_KERNEL has changed; its `score` holds the sinks.
    """

    def __init__(
        self, call: Call, plan: Plan, forward: Callable[[ForwardPass], None], device: Device, again: Callable[..., Any]
    ):
        super().__init__(call, plan, device, [(call.out_shape, call.dtype, 0)])
        self._wants_lse = call.return_lse or not self.on_device
        if self._wants_lse:
            self._results.append((call.rows, call.lse_dtype, None))
        self._forward, self._again, self._kv_len = forward, again, call.kv_len
        self._chosen = environment.get(b"SPATTN_CUDA_KERNEL", b"auto")

    def __call__(self, q: Any, k: Any, v: Any, scale: float, score: ScoreOperands | None = None) -> tuple[Any, Any]:
        kv_len = int(k.shape[2])
        plan = self.plan if kv_len == self._kv_len else moved(validated(self.plan), kv_len)
        if environment.get(b"SPATTN_CUDA_KERNEL", b"auto") != self._chosen:
            return self._again(q, k, v, plan, scale, precision=self.precision, score=score or self.score)
        arrays = q, k, v, *self.sinks_of(score)
        with self.device:
            results = (self.in_place if self.on_device else self.copied)(arrays, plan, scale)
        return results if self._wants_lse else (results[0], None)

    def enqueue(
        self, stream: int, operands: list[Operand], plan: Plan, scale: float, allocate: Callable[[int], int]
    ) -> None:
        q, k, v = operands[:3]
        sinks = operands[3].pointer if self.has_sinks else 0
        out, *rows = operands[3 + self.has_sinks :]
        lse, options = rows[0].pointer if rows else 0, (self.precision, self.score, sinks)
        run = ForwardPass(self.device, stream, plan, q, k, v, out, lse, self.dtype, scale, allocate, *options)
        self._forward(run)

    def partial_bytes(self) -> int:
        (batch, heads, _, head_dim_v), *_ = self._results[0]
        rows = batch * heads * self.plan.slots * self.plan.block_q
        return rows * (head_dim_v + 1) * numpy_dtype(self._lse_dtype).itemsize


class Backward(_Dispatch):
    """Cached dispatch of gradients; `choose` returns the kernel family that SPATTN_CUDA_KERNEL selects now."""

    like = 1

    def __init__(self, call: Call, plan: Plan, device: Device, choose: Callable[[], Family]):
        shapes = [tuple(map(int, x.shape)) for x in (call.q, call.k, call.v)]
        results: list[tuple[Any, str, int | None]] = [(shape, call.dtype, 1 + n) for n, shape in enumerate(shapes)]
        super().__init__(call, plan, device, results)
        if self.has_sinks:
            self._results.append(((call.heads_q,), call.lse_dtype, None))
        self.choose = choose

    def __call__(
        self,
        dout: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        dlse: Any,
        scale: float,
        score: ScoreOperands | None = None,
    ) -> tuple[Any, ...]:
        arrays = (dout, q, k, v, out, lse) if dlse is None else (dout, q, k, v, out, lse, dlse)
        results = self.run((*arrays, *self.sinks_of(score)), scale)
        return results if score is None else with_sink_gradients(results)

    def run(self, arrays: tuple[Any, ...], scale: float) -> tuple[Any, ...]:
        """Return the gradients of q, k, v and the sinks, which are the last of the arrays."""
        with self.device:
            return (self.in_place if self.on_device else self.copied)(arrays, self.plan, scale)

    def enqueue(
        self, stream: int, operands: list[Operand], plan: Plan, scale: float, allocate: Callable[[int], int]
    ) -> None:
        self.choose().backward(self.call_of(stream, operands, scale, allocate))

    def call_of(
        self, stream: int, operands: list[Operand], scale: float, allocate: Callable[[int], int]
    ) -> BackwardPass:
        """Return the backward pass of these arrays and results."""
        (dout, q, k, v, out, lse), rest = operands[:6], operands[6:]
        dsinks = rest.pop().pointer if self.has_sinks else 0
        *rest, dq, dk, dv = rest
        sinks = rest.pop().pointer if self.has_sinks else 0
        arrays = dout, q, k, v, out, lse, rest[0] if rest else None, dq, dk, dv
        options = self.dtype, scale, allocate, self.precision, self.score, sinks, dsinks
        return BackwardPass(self.device, stream, self.plan, *arrays, *options)


class Constant:
    """Calls without queries, heads or keys: return constant results, each (shape, dtype, value), without a launch."""

    def __init__(self, call: Call, results: tuple[tuple[tuple[int, ...], str, float], ...]):
        self.kind, self.results, self._on_device = call.kind, results, call.kind.ordinal(call.q) is not None

    def __call__(self, *arguments: Any, **_: Any) -> tuple[Any, ...]:
        if self._on_device:
            return tuple([self.kind.full(arguments[0], *one) for one in self.results])
        filled = (np.full(shape, value, numpy_dtype(dtype)) for shape, dtype, value in self.results)
        return tuple(map(self.kind.from_numpy, filled))


def nothing(call: Call) -> PreparedForward:
    """Return a forward without queries, heads or keys: out = 0 and lse = −∞, or the sinks."""
    lse = 0.0 if has_sinks(call) else -np.inf
    found = Constant(call, ((call.out_shape, call.dtype, 0.0), (call.rows, call.lse_dtype, lse)))

    def forward(q: Any, k: Any, v: Any, scale: float, score: ScoreOperands | None = None) -> tuple[Any, Any]:
        out, lse = found(q)
        (sinks,) = sinks_of(score, call.heads_q, call.lse_dtype, call.kind, call.kind.ordinal(q))
        return out, lse + sinks[:, None]

    return forward if has_sinks(call) else found


def no_gradients(call: Call) -> PreparedBackward:
    """Return gradients of zero, for calls without queries, heads or keys; a sink has that of the rows' lse."""
    results = [(tuple(map(int, x.shape)), call.dtype, 0.0) for x in (call.q, call.k, call.v)]
    results += [((call.heads_q,), call.lse_dtype, 0.0)] * has_sinks(call)
    found = Constant(call, tuple(results))

    def backward(
        dout: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        dlse: Any,
        scale: float,
        score: ScoreOperands | None = None,
    ) -> tuple[Any, ...]:
        own = found(q)
        return with_sink_gradients(own if dlse is None or not has_sinks(call) else (*own[:3], dlse.sum((0, 2))))

    return backward if isinstance(call.score, ScoreOperands) else found


def with_sink_gradients(results: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return (dq, dk, dv, dtables, dsinks) from the results of a backward with ScoreOperands."""
    return *results[:3], (), results[3] if len(results) > 3 else None


def _copy(function: str, destination: int, source: int, nbytes: int, stream: int) -> None:
    from cuda.bindings import driver

    check(getattr(driver, function)(destination, source, nbytes, stream), function)


def _wait(stream: int) -> None:
    from cuda.bindings import driver

    check(driver.cuStreamSynchronize(stream), "cuStreamSynchronize")
