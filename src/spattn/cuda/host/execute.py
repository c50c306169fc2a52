"""Calls on arrays of any library: device arrays in place, host arrays through copies."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..._util.limits import environment
from ...arrays.namespace import numpy_dtype
from ...arrays.operand import Operand, like, memory_order, row_major
from ...backends import PreparedForward
from ...planning.contract.types import Plan
from ...planning.contract.validated import moved, validated
from ...request.call import Call
from ...request.score import ScoreOperands
from ..driver.buffer import Buffer, keep_if_captured, out_of_memory
from ..driver.device import Device
from ..driver.errors import check
from ..driver.launch import Request, compile_early, load_kernels
from .backward_pass import BackwardPass
from .family import CapturedGradients, Family
from .forward_pass import ForwardPass
from .score import IDENTITY, Binder, BoundScore
from .sinks import gradient_requests


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
        self.kind, self.dtype, self.precision = call.kind, call.dtype, call.precision
        self.binder, self.scored = Binder(call, device), call.score is not None
        self.plan, self.device, self._results = plan, device, results
        self.on_device = call.kind.ordinal(call.q) is not None

    def enqueue(
        self,
        stream: int,
        operands: list[Operand],
        plan: Plan,
        scale: float,
        allocate: Callable[[int], int],
        score: BoundScore = IDENTITY,
    ) -> None:
        """Enqueue the kernels of a call; `operands` are its inputs, then its results."""
        raise NotImplementedError

    def in_place(
        self, arrays: tuple[Any, ...], plan: Plan, scale: float, score: ScoreOperands | None = None
    ) -> tuple[Any, ...]:
        """Compute results for device arrays; the device's context is current."""
        device, kind, tables = self.device, self.kind, self.binder.check(score)
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
            given = device.stream if stream is None else stream
            lengths = operands[self.like].shape[2], operands[self.like + 1].shape[2]
            bound = self.binder.bind(given, score, list(map(kind.operand, tables)), lengths, allocate)
            self.enqueue(given, operands, plan, scale, allocate, bound)
        except Exception as error:
            if type(error).__name__ == "OutOfMemoryError":  # PyTorch's and CuPy's own
                raise self.out_of_memory() from error
            raise
        if stream is None:
            _wait(device.stream)
        return tuple(results)

    def copied(
        self, arrays: tuple[Any, ...], plan: Plan, scale: float, score: ScoreOperands | None = None
    ) -> tuple[Any, ...]:
        """Compute results for host arrays; the device's context is current."""
        device, stream = self.device, self.device.stream
        captured = [np.ascontiguousarray(self.kind.to_numpy(x)).reshape(x.shape) for x in self.binder.check(score)]
        host = [np.ascontiguousarray(self.kind.to_numpy(x)) for x in arrays]
        results = [np.empty(shape, numpy_dtype(dtype)) for shape, dtype, _ in self._results]
        allocate = Workspace(device)
        try:
            operands = [Operand(allocate(x.nbytes), x.shape, row_major(x.shape)) for x in (*host, *results)]
            tables = [Operand(allocate(x.nbytes), x.shape, row_major(x.shape)) for x in captured]
            for x, operand in zip((*host, *captured), (*operands[: len(host)], *tables), strict=True):
                _copy("cuMemcpyHtoDAsync", operand.pointer, x.ctypes.data, x.nbytes, stream)
            lengths = operands[self.like].shape[2], operands[self.like + 1].shape[2]
            bound = self.binder.bind(stream, score, tables, lengths, allocate)
            self.enqueue(stream, operands, plan, scale, allocate, bound)
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
    SPATTN_CUDA_KERNEL has changed.
    """

    def __init__(
        self, call: Call, plan: Plan, forward: Callable[[ForwardPass], None], device: Device, again: Callable[..., Any]
    ):
        super().__init__(call, plan, device, [(call.out_shape, call.out_dtype, 0)])
        self._wants_lse, self._lse_dtype = call.return_lse or not self.on_device, call.lse_dtype
        if self._wants_lse:
            self._results.append((call.rows, call.lse_dtype, None))
        self._forward, self._again, self._kv_len = forward, again, call.kv_len
        self._chosen = environment.get(b"SPATTN_CUDA_KERNEL", b"auto")

    def __call__(self, q: Any, k: Any, v: Any, scale: float, score: ScoreOperands | None = None) -> tuple[Any, Any]:
        kv_len = int(k.shape[2])
        plan = self.plan if kv_len == self._kv_len else moved(validated(self.plan), kv_len)
        if environment.get(b"SPATTN_CUDA_KERNEL", b"auto") != self._chosen:
            return self._again(q, k, v, plan, scale, precision=self.precision, score=score)
        with self.device:
            results = (self.in_place if self.on_device else self.copied)((q, k, v), plan, scale, score)
        return results if self._wants_lse else (results[0], None)

    def enqueue(
        self,
        stream: int,
        operands: list[Operand],
        plan: Plan,
        scale: float,
        allocate: Callable[[int], int],
        score: BoundScore = IDENTITY,
    ) -> None:
        q, k, v, out = operands[:4]
        lse, dtype, precision = operands[4].pointer if self._wants_lse else 0, self.dtype, self.precision
        run = ForwardPass(self.device, stream, plan, q, k, v, out, lse, dtype, scale, allocate, precision, score)
        self._forward(run)

    def partial_bytes(self) -> int:
        (batch, heads, _, head_dim_v), *_ = self._results[0]
        rows = batch * heads * self.plan.slots * self.plan.block_q
        return rows * (head_dim_v + 1) * numpy_dtype(self._lse_dtype).itemsize


class Backward(_Dispatch):
    """Cached dispatch of gradients; `choose` returns the kernel family that SPATTN_CUDA_KERNEL selects now. `captured`
    computes gradients of captured arrays, if any are wanted."""

    like = 1

    def __init__(
        self,
        call: Call,
        plan: Plan,
        device: Device,
        choose: Callable[[], Family],
        captured: CapturedGradients | None = None,
    ):
        shapes = [tuple(map(int, x.shape)) for x in (call.q, call.k, call.v)]
        results: list[tuple[Any, str, int | None]] = [(shape, call.dtype, 1 + n) for n, shape in enumerate(shapes)]
        self._captured, self._arrays = captured, len(call.score.types) if call.score is not None else 0
        self._wanted = list(captured.wanted) if captured is not None else []
        results += [(call.score.types[number].shape, call.lse_dtype, None) for number in self._wanted if call.score]
        super().__init__(call, plan, device, results)
        if self.binder.has_sinks:
            self._results.append(((call.heads_q,), call.lse_dtype, None))
        self.choose = choose
        self._loaded = False  # True once the first call has loaded its kernels together

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
        with self.device:
            results = (self.in_place if self.on_device else self.copied)(arrays, self.plan, scale, score)
        return results if score is None else self.of_score(results)

    def of_score(self, results: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return (dq, dk, dv, gradients of the captured arrays, dsinks); a gradient that is not wanted is None."""
        dq, dk, dv, *rest = results
        dsinks = rest.pop() if self.binder.has_sinks else None
        found = dict(zip(self._wanted, rest, strict=True))
        return dq, dk, dv, tuple(found.get(number) for number in range(self._arrays)), dsinks

    def enqueue(
        self,
        stream: int,
        operands: list[Operand],
        plan: Plan,
        scale: float,
        allocate: Callable[[int], int],
        score: BoundScore = IDENTITY,
    ) -> None:
        dsinks = operands[-1].pointer if self.binder.has_sinks else 0
        operands = operands[: len(operands) - self.binder.has_sinks]
        arrays = len(operands) - len(self._wanted)
        call = self.call_of(stream, operands[:arrays], scale, allocate, score, dsinks)
        if self._captured is not None:
            self._captured.begin(call)
        if not self._loaded:
            load_kernels(self.device, self._requests(call))
            self._loaded = True
        nonfinite = self.choose().backward(call)
        if self._captured is not None:
            self._captured.enqueue(call, operands[arrays:], nonfinite)

    def _requests(self, call: BackwardPass) -> list[Request]:
        """Return the requests for the kernels of a call; the device's context must be current."""
        found = self.choose().backward_requests(call) + gradient_requests(call)
        return found if self._captured is None else found + self._captured.requests(call)

    def compile_early(self, call: Call) -> None:
        """Let threads compile the kernels, for the layouts that gradients of `call` have in autograd."""
        kind, device = call.kind, self.device
        if self.on_device:
            q, k, v = (kind.operand(kind.resolve(x)) for x in (call.q, call.k, call.v))
        else:
            q, k, v = (Operand(0, shape, row_major(shape)) for shape, *_ in self._results[:3])
        out, lse = like(q, call.out_shape), Operand(0, call.rows, row_major(call.rows))
        gradients = (like(x, x.shape) for x in (q, k, v))
        own = self.call_of(0, [out, q, k, v, out, lse, *gradients], call.scale, no_memory, self.binder.unbound())
        if self._captured is not None:
            own.table_sums = self._captured.sums()
        with device:
            compile_early(device, self._requests(own))

    def call_of(
        self,
        stream: int,
        operands: list[Operand],
        scale: float,
        allocate: Callable[[int], int],
        score: BoundScore = IDENTITY,
        dsinks: int = 0,
    ) -> BackwardPass:
        """Return the backward pass of these arrays and results."""
        dout, q, k, v, out, lse, *dlse, dq, dk, dv = operands
        arrays = dout, q, k, v, out, lse, dlse[0] if dlse else None, dq, dk, dv
        options = self.dtype, scale, allocate, self.precision, score, dsinks
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


def no_memory(nbytes: int) -> int:
    """Allocate for a call that is only prepared: raise RuntimeError."""
    raise RuntimeError(f"unexpected allocation of {nbytes} bytes while preparing a call")


def nothing(call: Call) -> PreparedForward:
    """Return a forward without queries, heads or keys: out = 0 and lse = −∞, or the sinks."""
    if call.score is None or call.score.sinks is None:
        return Constant(call, ((call.out_shape, call.out_dtype, 0.0), (call.rows, call.lse_dtype, -np.inf)))
    found = Constant(call, ((call.out_shape, call.out_dtype, 0.0), (call.rows, call.lse_dtype, 0.0)))
    binder = Binder(call)

    def forward(q: Any, k: Any, v: Any, scale: float, score: ScoreOperands | None = None) -> tuple[Any, Any]:
        *_, sinks = binder.check(score)
        out, lse = found(q)
        return out, lse + sinks[:, None]

    return forward


def no_gradients(call: Call) -> Callable[..., tuple[Any, ...]]:
    """Return zeros as gradients, for calls without queries, heads or keys; dsinks is the sum of `dlse` over the rows,
    since each row's lse is the sink."""
    found = [(tuple(map(int, x.shape)), call.dtype, 0.0) for x in (call.q, call.k, call.v)]
    score = call.score
    if score is None:
        return Constant(call, tuple(found))
    wanted = [number for number, one in enumerate(score.wanted) if one]
    results = Constant(call, (*found, *((tuple(score.types[number].shape), call.lse_dtype, 0.0) for number in wanted)))

    rows = Constant(call, (((call.heads_q,), call.lse_dtype, 0.0),))

    def gradients(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dlse: Any, *_: Any) -> tuple[Any, ...]:
        dq, dk, dv, *tables = results(dout)
        of_table = dict(zip(wanted, tables, strict=True))
        dsinks = None if score.sinks is None else rows(dout)[0] if dlse is None else dlse.sum((0, 2))
        return dq, dk, dv, tuple(of_table.get(number) for number in range(len(score.types))), dsinks

    return gradients


def _copy(function: str, destination: int, source: int, nbytes: int, stream: int) -> None:
    from cuda.bindings import driver

    check(getattr(driver, function)(destination, source, nbytes, stream), function)


def _wait(stream: int) -> None:
    from cuda.bindings import driver

    check(driver.cuStreamSynchronize(stream), "cuStreamSynchronize")
