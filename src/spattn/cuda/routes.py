"""Calls that repeat: what depends on plan, shapes, strides, dtype and device alone is done once.

The rest of a call is two allocations, seven addresses and a launch or two. Hopper kernels on PyTorch tensors only;
every other call, and the first of each kind, takes the way through :func:`spattn.cuda.forward`.
"""

from __future__ import annotations

import os
from typing import Any

from . import arrays, execute, hopper
from .call import Call
from .driver.buffer import out_of_memory
from .driver.device import Device, require_owner
from .driver.launch import Launch
from .hopper.params import Addresses
from .recent import Recent

_KEPT = 64  # addresses of recent calls; an allocator hands out the same ones again and again
_environment = os.environ._data  # The dict behind os.environ: get() on os.environ encodes the key and costs 0.5 µs.


class Route:
    """The calls that agree with one call in everything but addresses, values, stream and scale.

    Parameters
    ----------
    call : Call
        Addresses do not matter; `scale` is the one of calls that give none.
    """

    def __init__(self, library: arrays.Torch, call: Call, prepared: hopper.Prepared):
        self._device = call.device
        self._index = call.device.ordinal
        self._stream = library.module._C._cuda_getCurrentRawStream
        self._wide, self._bytes = library.module.float32, library.module.uint8
        self._shape, self._strides = call.out.shape, call.out.strides
        self._rows, self._row_strides = call.out.shape[:3], arrays.row_major(call.out.shape[:3])
        self._scale = call.scale
        self._plan, self._ready = prepared.plan, prepared.ready
        self._counter, self._counter_at = prepared.plan.counter, prepared.ready.template.counter_at
        self._needed = execute.needed_bytes(self._shape, call.dtype, call.plan)
        sizes: list[int] = []
        prepared.call.allocate = lambda nbytes: sizes.append(nbytes) or 0
        self._partial_bytes = prepared.call.workspace()[1]
        self._workspace = tuple(sizes)
        self._launches = Recent(_KEPT)

    def __call__(self, q: Any, k: Any, v: Any, scale: float | None) -> tuple[Any, Any] | None:
        """(out, lse); None where these addresses, or the environment by now, need other kernels."""
        require_owner()
        if _environment.get(b"SPATTN_CUDA_KERNEL", b"auto") != b"auto" or q.is_neg() or k.is_neg() or v.is_neg():
            return None
        try:  # with strides even where they are in order: PyTorch takes a quarter less time
            out = q.new_empty_strided(self._shape, self._strides)
            lse = q.new_empty_strided(self._rows, self._row_strides, dtype=self._wide)
            rest = q.new_empty_strided(self._workspace, (1,), dtype=self._bytes) if self._workspace else None
        except Exception as error:
            if type(error).__name__ != "OutOfMemoryError":
                raise
            with self._device:
                raise out_of_memory(self._device, self._needed) from error
        key = (
            q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr(),
            0 if rest is None else rest.data_ptr(), self._scale if scale is None else scale, self._stream(self._index),
        )  # fmt: skip
        launches = self._launches.get(key) or self._write(key)
        if launches is None:
            return None
        if self._device.is_current():
            self._start(*launches)
        else:
            with self._device:
                self._start(*launches)
        return out, lse

    def _start(self, attention: list[Launch], merge: Launch | None) -> None:
        for launch in attention:
            launch(self._counter_at, self._counter())
        if merge is not None:
            merge()

    def _write(self, key: tuple) -> tuple[list[Launch], Launch | None] | None:
        """The launches for these addresses, but for the work counters; None where TMA cannot read there.

        A call has them to itself: no other writes to the same addresses while it holds its results.
        """
        if not hopper.aligned(key[:4]):
            return None
        *addresses, scale, stream = key
        to = Addresses(*addresses, addresses[5] + self._partial_bytes, scale)
        plan, ready = self._plan, self._ready
        attention = [
            Launch(ready.attention, blocks, ready.template.fill(number, to, 0), stream)
            for number, blocks in enumerate(plan.blocks)
        ]
        merge = Launch(ready.merge, ready.merge_blocks, ready.merge_params(to), stream) if ready.merge_blocks else None
        return self._launches.keep(key, (attention, merge))


def find(device: Device, library: arrays.Library, q: Any, k: Any, v: Any, plan: Any, scale: float) -> Route | None:
    """The route of calls like this one; None when the Hopper kernels cannot read the arrays."""
    operands = [library.operand(x) for x in (q, k, v)]
    order = arrays.memory_order(operands[0])
    shape = (*operands[0].shape[:3], operands[2].shape[3])
    out = library.empty(q, shape, library.dtype(q), order)
    with device:
        call = Call(device, 0, plan, *operands, library.operand(out), 0, library.dtype(q), scale, _no_memory)
        prepared = hopper.prepare(call)
    return None if prepared is None else Route(library, call, prepared)


def _no_memory(nbytes: int) -> int:
    raise RuntimeError(f"{nbytes} bytes asked for where nothing is computed")
