"""Cached dispatch of repeated PyTorch calls: allocate the results, look up addresses, launch.

Everything that depends only on plan, shapes, strides, dtype and device is computed once; launches are cached by
address. A length-polymorphic plan is uploaded once; kernel parameters hold the change of `kv_len`, so that a decoding
step copies nothing to the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ..._util.cached import BoundedCache
from ..._util.limits import environment
from ...arrays.operand import memory_order, row_major
from ...backends import PreparedForward
from ...planning.contract.types import Plan
from ...request.call import Call
from ...request.score import ScoreOperands
from ..driver.buffer import keep_if_captured
from ..driver.device import Device, require_owner
from ..driver.launch import Launch, start
from .execute import Backward, Forward, no_memory
from .family import CapturedGradients, Family, ForwardLaunches, GradientLaunches, Launcher
from .forward_pass import ForwardPass
from .score import IDENTITY, Binder, BoundScore

if TYPE_CHECKING:
    from ...arrays.torch import Torch

__all__ = ["LAUNCHES_KEPT", "Repeated", "RepeatedBackward", "Results", "backward", "forward", "pass_of"]

LAUNCHES_KEPT = 64  # most recent address tuples; allocators reuse addresses


class Results(NamedTuple):
    """Shapes and strides with which PyTorch allocates a call's results."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    like_q: bool  # True if q has this shape and these strides
    rows: tuple[int, ...]
    row_strides: tuple[int, ...]
    return_lse: bool


def pass_of(call: Call, plan: Plan, device: Device, staging: Any = None) -> tuple[ForwardPass, Results]:
    """Return the forward pass of a PyTorch call, with placeholder addresses, and its results."""
    kind = call.kind
    operands = kind.operand(call.q), kind.operand(call.k), kind.operand(call.v)
    out = kind.operand(kind.empty(call.q, call.out_shape, call.dtype, memory_order(operands[0])))
    like_q = call.out_shape == tuple(call.q.shape) and out.strides == operands[0].strides
    score = Binder(call, device).unbound()
    options: dict[str, Any] = {"score": score, "staging": staging}
    run = ForwardPass(device, 0, plan, *operands, out, 0, call.dtype, call.scale, no_memory, **options)
    return run, Results(call.out_shape, out.strides, like_q, call.rows, row_major(call.rows), call.return_lse)


class _Launched:
    """Launches, those already written by address, and the function for calls whose addresses are not aligned."""

    __slots__ = "first", "general", "workspace", "written"

    def __init__(self, first: ForwardLaunches, general: Any):
        self.first, self.general, self.written = first, general, BoundedCache(LAUNCHES_KEPT)
        self.workspace = (first.workspace_bytes,) if first.workspace_bytes else None


class Repeated:
    """Runs PyTorch forwards with launches cached by address; `general` runs calls whose addresses are not aligned."""

    def __init__(
        self, general: Forward, run: ForwardPass, results: Results, launcher: Launcher, launches: ForwardLaunches
    ):
        self._pass, self._launcher = run, launcher
        self.shape, self._strides, self._like_q, self.rows, self._row_strides, self.return_lse = results
        self.device, self.plan, self._kv_len = general.device, general.plan, run.k.shape[2]
        self.general = general  # the dispatch of calls whose addresses are not aligned
        torch = cast("Torch", general.kind)
        self._index, self._stream, self._types = self.device.ordinal, torch.raw_stream, torch.module
        self._empty_like, self._operand = self._types.empty_like, torch.operand
        self._wide, self._bytes = self._types.float32, self._types.uint8
        self._moves, self._own = launches.moves, _Launched(launches, general)
        self._by_strides, self._scored = BoundedCache(LAUNCHES_KEPT), general.scored

    def __call__(self, q: Any, k: Any, v: Any, scale: float, score: ScoreOperands | None = None) -> tuple[Any, Any]:
        return self._run(self._own, q, k, v, scale, score)

    def _run(
        self, own: _Launched, q: Any, k: Any, v: Any, scale: float, score: ScoreOperands | None = None
    ) -> tuple[Any, Any]:
        require_owner()
        if environment.get(b"SPATTN_CUDA_KERNEL", b"auto") != b"auto" or q.is_neg() or k.is_neg() or v.is_neg():
            return own.general(q, k, v, scale, *(() if score is None else (score,)))
        scored = self._scored or score is not None
        stream = self._stream(self._index)
        bound = self.general.binder.bound(stream, score, q, k) if scored else IDENTITY
        try:  # explicit strides save a quarter of PyTorch's time even if contiguous; empty_like is faster still
            out = self._empty_like(q) if self._like_q else q.new_empty_strided(self.shape, self._strides)
            lse = q.new_empty_strided(self.rows, self._row_strides, dtype=self._wide) if self.return_lse else None
            rest = q.new_empty_strided(own.workspace, (1,), dtype=self._bytes) if own.workspace else None
        except self._types.OutOfMemoryError as error:
            with self.device:
                raise self.general.out_of_memory() from error
        key = (
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            out.data_ptr(),
            0 if lse is None else lse.data_ptr(),
            scale,
            0 if rest is None else rest.data_ptr(),
            stream,
            bound.address,
            bound.sinks,
            (k.stride(), v.stride()) if self._moves else None,
        )
        moved = k.size(2) - self._kv_len if self._moves else 0
        with self.device.made_current():
            launches = own.written.get(key) or self._write(own, key, k, v, moved)
            if launches is not None:
                start(launches, own.first.counter, moved)
                return out, lse
        return own.general(q, k, v, scale, *(() if score is None else (score,)))

    def of_launches(self, launches: ForwardLaunches, general: Any) -> PreparedForward:
        """Return the dispatch for other launches that do not move; `general` runs calls that are not aligned."""
        return functools.partial(self._run, _Launched(launches, general))

    @property
    def launches(self) -> ForwardLaunches:
        """The launches for any addresses."""
        return self._own.first

    def _write(self, own: _Launched, key: tuple[Any, ...], k: Any, v: Any, moved: int) -> list[Launch] | None:
        """Return launches for these addresses and any `kv_len`, without task counters; None if they are not aligned.
        The device's context must be current."""
        *problem, workspace, stream, score, sinks, _ = key
        if (problem[0] | problem[1] | problem[2] | problem[3]) % self._launcher.alignment:
            return None
        launches = self._launches_for(k, v) if self._moves else own.first
        if launches is None:
            return None
        keep_if_captured(self.device, stream, launches)
        given = *problem, score, sinks
        written = launches.write([given], workspace, stream, early=launches.computes, moved=moved)
        kept: list[Launch] = own.written.keep(key, written)
        return kept

    def _launches_for(self, k: Any, v: Any) -> ForwardLaunches | None:
        """Return kernels and parameters for these strides of k and v; None if the kernels cannot address them."""
        strides = k.stride(), v.stride()
        found = self._by_strides.get(strides)
        if found is None:
            run = replace(self._pass, k=self._operand(k), v=self._operand(v))
            found = self._by_strides.keep(strides, self._launcher.prepare(run))
        return cast("ForwardLaunches | None", found)


class RepeatedBackward:
    """Runs PyTorch gradients of fixed shapes and strides with launches cached by address; `general` runs the first
    call, and calls whose addresses are not aligned."""

    def __init__(self, general: Backward):
        self._general, self.device, self.plan = general, general.device, general.plan
        torch = cast("Torch", general.kind)
        self._types, self._stream, self._index = torch.module, torch.raw_stream, self.device.ordinal
        self._empty_like, self._bytes, self._operand = self._types.empty_like, self._types.uint8, torch.operand
        self._ready: GradientLaunches | None = None
        self._alignment = 1
        self._laid_out: list[tuple[Any, Any] | None] = []  # shape and strides of dq, dk, dv; None: like q, k, v
        self._launches = BoundedCache(LAUNCHES_KEPT)

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
        scored = self._general.scored or score is not None
        bound = self._general.binder.bound(self._stream(self._index), score, q, k) if scored else IDENTITY
        ready, chosen = self._ready, environment.get(b"SPATTN_CUDA_KERNEL", b"auto")
        if ready is None or chosen != b"auto" or True in [x.is_neg() for x in arrays]:
            results = self._general(dout, q, k, v, out, lse, dlse, scale, score)
            if ready is None:
                self._prepare(arrays, results[:3], scale, bound)
            return results
        require_owner()
        try:
            results = tuple(
                [
                    self._empty_like(x) if laid_out is None else x.new_empty_strided(*laid_out)
                    for x, laid_out in zip((q, k, v), self._laid_out, strict=True)
                ]
            )
            dsinks = lse.new_empty(q.shape[1]) if bound.sinks else None
            rest = q.new_empty_strided((ready.workspace_bytes,), (1,), dtype=self._bytes)
        except self._types.OutOfMemoryError as error:
            with self.device:
                raise self._general.out_of_memory() from error
        addresses = [x.data_ptr() for x in (*arrays, *results, rest)]
        to_sinks = 0 if dsinks is None else dsinks.data_ptr()
        key = *addresses, scale, bound.address, bound.sinks, to_sinks, self._stream(self._index)
        launches = self._launches.get(key)
        if launches is None:
            if any(address % self._alignment for address in addresses[:5]):
                return self._general(dout, q, k, v, out, lse, dlse, scale, score)
            with self.device.made_current():
                keep_if_captured(self.device, key[-1], self.plan)
                operands = list(map(self._operand, (*arrays, *results)))
                call = self._general.call_of(key[-1], operands, scale, no_memory, bound, to_sinks)
                launches = ready.write(call, addresses[-1])
            launches = self._launches.keep(key, launches)
        with self.device.made_current():
            start(launches, ready.counter)
        return results if score is None else self._general.of_score(results if dsinks is None else (*results, dsinks))

    def _prepare(self, arrays: tuple[Any, ...], results: tuple[Any, ...], scale: float, bound: BoundScore) -> None:
        """Prepare the launches for calls with these shapes and strides."""
        launcher = self._general.choose().launcher
        if launcher is None:
            return
        operands = list(map(self._operand, (*arrays, *results)))
        self._alignment = launcher.alignment
        with self.device:
            self._ready = launcher.prepare_backward(self._general.call_of(0, operands, scale, no_memory, bound))
        self._laid_out = [
            None if x.strides == result.strides else (result.shape, result.strides)
            for x, result in zip(operands[1:4], operands[-3:], strict=True)
        ]


def forward(
    call: Call, plan: Plan, family: Family, device: Device, again: Callable[..., Any], staging: Any = None
) -> Forward | Repeated:
    """Return a cached dispatch of forwards; `staging` as for :func:`.driver.buffer.upload`."""
    general = Forward(call, plan, family.forward, device, again)
    launcher = family.launcher
    if launcher is not None and _repeats(call):
        run, results = pass_of(call, plan, device, staging)
        with device:
            launches = launcher.prepare(run)
        if launches is not None:
            return Repeated(general, run, results, launcher, launches)
    return general


def backward(
    call: Call, plan: Plan, device: Device, choose: Callable[[], Family], captured: CapturedGradients | None = None
) -> Backward | RepeatedBackward:
    """Return a cached dispatch of gradients; see :class:`~spattn.cuda.host.execute.Backward`."""
    general = Backward(call, plan, device, choose, captured)
    repeats = captured is None and _repeats(call) and choose().launcher is not None
    return RepeatedBackward(general) if repeats else general


def _repeats(call: Call) -> bool:
    """True if launches are cached for such calls: PyTorch's allocator reuses addresses."""
    return call.kind.name == "torch" and call.kind.ordinal(call.q) is not None
