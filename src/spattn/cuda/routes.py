"""Calls that repeat: what depends on plan, shapes, strides, dtype and device alone is done once.

The rest of a call is two allocations, seven addresses and a launch or two. Hopper kernels on PyTorch tensors only;
every other call, and the first of each kind, takes the way through :func:`spattn.cuda.forward`.
"""

from __future__ import annotations

import os
from typing import Any

from . import arrays, execute, hopper
from .buffer import out_of_memory
from .device import Device, require_owner
from .hopper_params import Addresses
from .params import Call
from .portable import workspace

_IMAGES_KEPT = 64  # addresses of recent calls; an allocator hands out the same ones again and again


class Route:
    """The calls that agree with one call in everything but addresses, values, stream and scale.

    Parameters
    ----------
    call : Call
        Addresses do not matter.
    order : tuple of int
        Axes of the result in memory, see :func:`arrays.memory_order`.
    """

    def __init__(self, library: arrays.Torch, call: Call, order: tuple[int, ...], prepared: hopper.Prepared):
        self._device, self._library = call.device, library
        self._index = call.device.ordinal
        self._stream = library.module._C._cuda_getCurrentRawStream
        self._wide, self._bytes = library.module.float32, library.module.uint8
        self._shape, self._rows = call.out.shape, call.out.shape[:3]
        self._stored, self._back = arrays.in_order(self._shape, order)
        self._plan, self._ready = prepared.plan, prepared.ready
        self._needed = execute.needed_bytes(self._shape, call.dtype, call.plan)
        sizes: list[int] = []
        prepared.call.allocate = lambda nbytes: sizes.append(nbytes) or 0
        self._partial_bytes = workspace(prepared.call)[1]
        self._workspace = sum(sizes)
        self._images: dict[tuple, tuple[list[bytes], bytes | None]] = {}

    def __call__(self, q: Any, k: Any, v: Any, scale: float) -> tuple[Any, Any] | None:
        """(out, lse); None where these addresses, or the environment by now, need other kernels."""
        require_owner()
        if os.environ.get("SPATTN_CUDA_KERNEL", "auto") != "auto" or q.is_neg() or k.is_neg() or v.is_neg():
            return None
        try:
            stored = q.new_empty(self._stored)
            lse = q.new_empty(self._rows, dtype=self._wide)
            rest = q.new_empty(self._workspace, dtype=self._bytes) if self._workspace else None
        except Exception as error:
            if type(error).__name__ != "OutOfMemoryError":
                raise
            with self._device:
                raise out_of_memory(self._device, self._needed) from error
        at = q.data_ptr(), k.data_ptr(), v.data_ptr(), stored.data_ptr()
        if not hopper.aligned(at):
            return None
        partial = 0 if rest is None else rest.data_ptr()
        key = *at, lse.data_ptr(), partial, scale
        images = self._images.get(key) or self._fill(key)
        stream = self._stream(self._index)
        if self._device.is_current():
            self._launch(*images, stream)
        else:
            with self._device:
                self._launch(*images, stream)
        return stored if self._back is None else stored.permute(self._back), lse

    def _launch(self, images: list[bytes], merge: bytes | None, stream: int) -> None:
        plan, ready = self._plan, self._ready
        counter_at = ready.template.counter_at
        for blocks, image in zip(plan.blocks, images, strict=True):
            ready.attention.launch(blocks, image, stream, counter_at, plan.counter())
        if merge is not None:
            ready.merge.launch(ready.merge_blocks, merge, stream)

    def _fill(self, key: tuple) -> tuple[list[bytes], bytes | None]:
        """The kernels' parameters for these addresses, but for the work counters."""
        to = Addresses(*key[:6], key[5] + self._partial_bytes, key[6])
        template = self._ready.template
        images = [template.fill(launch, to, 0) for launch in range(len(self._plan.blocks))]
        merge = self._ready.merge_params(to) if self._ready.merge_blocks else None
        if len(self._images) >= _IMAGES_KEPT:
            self._images.clear()
        return self._images.setdefault(key, (images, merge))


def find(device: Device, library: arrays.Library, q: Any, k: Any, v: Any, plan: Any) -> Route | None:
    """The route of calls like this one; None when the Hopper kernels cannot read the arrays."""
    operands = [library.operand(x) for x in (q, k, v)]
    order = arrays.memory_order(operands[0])
    shape = (*operands[0].shape[:3], operands[2].shape[3])
    out = library.empty(q, shape, library.dtype(q), order)
    with device:
        call = Call(device, 0, plan, *operands, library.operand(out), 0, library.dtype(q), 1.0, _no_memory)
        prepared = hopper.prepare(call)
    return None if prepared is None else Route(library, call, order, prepared)


def _no_memory(nbytes: int) -> int:
    raise RuntimeError(f"{nbytes} bytes asked for where nothing is computed")
