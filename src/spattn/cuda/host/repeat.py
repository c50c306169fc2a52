"""Cached dispatch of repeated Hopper calls: allocate the results, look up addresses, launch.

Everything that depends on plan, shapes, strides, dtype and device only is computed once; launches are cached by
address. A length-polymorphic plan is uploaded once, with the change of `kv_len` in its kernel parameters: a generation
step copies nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from ..._util.cached import Recent
from ..._util.limits import environment
from ...arrays.operand import memory_order, row_major
from ...planning.contract.types import Plan
from ...request.call import Call
from ..driver.buffer import keep_if_captured, out_of_memory
from ..driver.device import Device, require_owner
from ..driver.launch import Launch, start
from ..sm90 import backward as hopper_backward
from ..sm90 import forward as hopper
from ..sm90.forward.params import Addresses
from ..sm90.forward.prepared import Prepared, Ready
from .execute import Backward, OnDevice
from .forward_pass import ForwardPass

if TYPE_CHECKING:
    from ...arrays.torch import Torch

_KEPT = 64  # recent address tuples; allocators reuse addresses


class Repeated(OnDevice):
    """PyTorch forwards on the Hopper kernels, falling back where TMA cannot read an address."""

    def __init__(self, run: ForwardPass, prepared: Prepared, call: Call, *args: Any):
        super().__init__(call, *args)
        self._own_plan, self._ready, self._run = prepared.plan, prepared.ready, prepared.call
        self._moves = prepared.plan.layout.moves
        self._counter, self._counter_at = prepared.plan.counter, prepared.ready.template.counter_at
        self._strides, self._row_strides = run.out.strides, row_major(self.rows)
        torch = cast("Torch", call.kind)
        self._index, self._stream, self._types = self.device.ordinal, torch.raw_stream, torch.module
        self._like_q = self.shape == tuple(call.q.shape) and self._strides == call.q.stride()
        self._empty_like = self._types.empty_like
        self._wide, self._bytes = self._types.float32, self._types.uint8
        sizes: list[int] = []

        def note(nbytes: int) -> int:
            sizes.append(nbytes)
            return 0

        prepared.call.allocate = note
        self._partial_bytes = prepared.call.workspace()[1]
        self._workspace = tuple(sizes)
        self._launches, self._readies = Recent(_KEPT), Recent(_KEPT)

    def __call__(self, q: Any, k: Any, v: Any, scale: float) -> tuple[Any, Any]:
        require_owner()
        if environment.get(b"SPATTN_CUDA_KERNEL", b"auto") != b"auto" or q.is_neg() or k.is_neg() or v.is_neg():
            return super().__call__(q, k, v, scale)
        try:  # explicit strides even if contiguous: a quarter faster in PyTorch; empty_like is faster still
            out = self._empty_like(q) if self._like_q else q.new_empty_strided(self.shape, self._strides)
            lse = q.new_empty_strided(self.rows, self._row_strides, dtype=self._wide) if self.return_lse else None
            rest = q.new_empty_strided(self._workspace, (1,), dtype=self._bytes) if self._workspace else None
        except self._types.OutOfMemoryError as error:
            with self.device:
                raise self.out_of_memory() from error
        key = (
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            out.data_ptr(),
            0 if lse is None else lse.data_ptr(),
            0 if rest is None else rest.data_ptr(),
            scale,
            self._stream(self._index),
            (k.stride(), v.stride()) if self._moves else None,
        )
        moved = k.size(2) - self._kv_len if self._moves else 0
        launches = self._launches.get(key) or self._write(key, k, v, moved)
        if launches is None:
            return super().__call__(q, k, v, scale)
        with self.device.made_current():
            start(launches, self._counter, moved)
        return out, lse

    def _write(self, key: tuple[Any, ...], k: Any, v: Any, moved: int) -> list[Launch] | None:
        """Launches for these addresses and any `kv_len`, without work counters; None if TMA cannot read them.

        They are exclusive to one call: no other writes to the same addresses while its results are alive.
        """
        if not hopper.aligned(key[:4]):
            return None
        q_at, k_at, v_at, out, lse, partial, scale, stream, _ = key
        to = Addresses(q_at, k_at, v_at, out, lse, partial, partial + self._partial_bytes, scale, moved)
        launches = []
        with self.device.made_current():
            keep_if_captured(self.device, stream, self.plan)
            ready = self._ready_for(k, v)
            if ready is None:
                return None
            if ready.attention is not None:
                moving = ready.template.moving(to)
                for number, blocks in enumerate(ready.blocks):
                    params = ready.template.fill(number, to, 0)
                    one = Launch(ready.attention, blocks, params, stream, self._counter_at, moving, early=True)
                    launches.append(one)
            if ready.merge is not None:
                launches.append(Launch(ready.merge.kernel, ready.merge.blocks, ready.merge.params(to), stream))
        return cast("list[Launch]", self._launches.keep(key, launches))

    def _ready_for(self, k: Any, v: Any) -> Ready | None:
        """Kernels and parameters for these strides of k and v; None if TMA cannot read them."""
        if not self._moves:
            return self._ready
        strides = k.stride(), v.stride()
        found = self._readies.get(strides)
        if found is None:
            run = replace(self._run, k=self.kind.operand(k), v=self.kind.operand(v))
            found = self._readies.keep(strides, self._own_plan.ready(run))
        return cast("Ready | None", found)


class RepeatedBackward(Backward):
    """PyTorch gradients of fixed shapes and strides on the Hopper kernels, falling back where TMA cannot read an
    address."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        torch = cast("Torch", self.kind)
        self._types, self._stream, self._index = torch.module, torch.raw_stream, self.device.ordinal
        self._empty_like, self._bytes = self._types.empty_like, self._types.uint8
        self._ready: hopper_backward.Ready | None = None
        self._laid_out: list[tuple[Any, Any] | None] = []  # shape and strides of each result; None: those of its input
        self._launches = Recent(_KEPT)

    def __call__(
        self, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dlse: Any, scale: float
    ) -> tuple[Any, ...]:
        arrays = (dout, q, k, v, out, lse) if dlse is None else (dout, q, k, v, out, lse, dlse)
        ready, chosen = self._ready, environment.get(b"SPATTN_CUDA_KERNEL", b"auto")
        if ready is None or chosen != b"auto" or True in [x.is_neg() for x in arrays]:
            return super().__call__(dout, q, k, v, out, lse, dlse, scale)
        require_owner()
        try:
            results = [
                self._empty_like(x) if laid_out is None else x.new_empty_strided(*laid_out)
                for x, laid_out in zip((q, k, v), self._laid_out, strict=True)
            ]
            rest = q.new_empty_strided((ready.workspace_bytes,), (1,), dtype=self._bytes)
        except self._types.OutOfMemoryError as error:
            with self.device:
                raise out_of_memory(self.device, self._needed) from error
        addresses = [x.data_ptr() for x in (*arrays, *results, rest)]
        key = *addresses, scale, self._stream(self._index)
        launches = self._launches.get(key)
        if launches is None:
            if any(address % 16 for address in addresses[:5]):
                return super().__call__(dout, q, k, v, out, lse, dlse, scale)
            operands = [x if x is None else self.kind.operand(x) for x in (dout, q, k, v, out, lse, dlse, *results)]
            with self.device.made_current():
                keep_if_captured(self.device, key[-1], self.plan)
                launches = ready.write(self.call_of(key[-1], operands, scale, _no_memory), addresses[-1])
            launches = self._launches.keep(key, launches)
        with self.device.made_current():
            start(launches, ready.counter)
        return tuple(results)

    def _enqueue(self, stream: int, operands: list[Any], scale: float, allocate: Callable[[int], int]) -> None:
        """The general path; caches what it prepares."""
        super()._enqueue(stream, operands, scale, allocate)
        if self._ready is None and self._choose() is hopper_backward:
            self._laid_out = [
                None if x.strides == result.strides else (result.shape, result.strides)
                for x, result in zip(operands[1:4], operands[-3:], strict=True)
            ]
            self._ready = hopper_backward.prepare(self.call_of(stream, operands, scale, allocate))


def on_device(call: Call, plan: Plan, kernels: ModuleType, device: Device, again: Callable[..., Any]) -> OnDevice:
    """Cached dispatch of forwards on device arrays."""
    kind = call.kind
    if kernels is hopper and kind.name == "torch":
        operands = kind.operand(call.q), kind.operand(call.k), kind.operand(call.v)
        out = kind.empty(call.q, call.out_shape, call.dtype, memory_order(operands[0]))
        with device:
            run = ForwardPass(
                device, 0, plan, *operands, kind.operand(out), 0, call.dtype, call.scale, _no_memory, score=call.score
            )
            prepared = hopper.prepare(run)
        if prepared is not None:
            return Repeated(run, prepared, call, plan, kernels, device, again)
    return OnDevice(call, plan, kernels, device, again)


def gradients(call: Call, plan: Plan, device: Device, choose: Callable[[], ModuleType]) -> Backward:
    """Cached dispatch of gradients."""
    repeats = call.kind.name == "torch" and call.kind.ordinal(call.q) is not None
    return (RepeatedBackward if repeats else Backward)(call, plan, device, choose)


def _no_memory(nbytes: int) -> int:
    raise RuntimeError(f"unexpected allocation of {nbytes} bytes while preparing a call")
