"""Sinks in kernels, and the kernel for their gradients, shared by all kernel families."""

from __future__ import annotations

import numpy as np

from ..driver.launch import Launch, Request, kernel
from ..driver.structs import packer
from .backward_pass import BackwardPass

__all__ = ["SINK_GRADIENT", "gradient_requests", "sink_gradient", "sink_macros"]

SINK_GRADIENT = np.dtype(
    [
        *((name, "u8") for name in ("sinks", "lse", "delta", "dsinks")),
        *((name, "i8") for name in ("lse_batch", "lse_head", "lse_token", "delta_stride")),
        *((name, "i4") for name in ("batch", "heads_q", "q_len", "unused")),
    ]
)
_pack = packer(SINK_GRADIENT).pack


def sink_macros(sinks: int) -> dict[str, object]:
    """Return the macros of a forward kernel, given the address of a call's sinks; none without sinks."""
    return {"SPATTN_SINKS": 1} if sinks else {}


def sink_gradient(call: BackwardPass, delta: int, delta_stride: int) -> Launch:
    """Return the launch for the gradients of a call's sinks; the device's context must be current.

    Earlier launches write ``rowsum(dout ∘ out) − dlse`` of the rows, (batch, heads_q, q_len), to the address `delta`,
    `delta_stride` elements apart.
    """
    batch, heads_q, q_len, _ = call.q.shape
    strides = *call.lse.strides, delta_stride
    params = _pack(call.sinks, call.lse.pointer, delta, call.dsinks, *strides, batch, heads_q, q_len, 0)
    return Launch(kernel(call.device, *gradient_requests(call)), heads_q, params, call.stream)


def gradient_requests(call: BackwardPass) -> list[Request]:
    """Return the request for the kernel of :func:`sink_gradient`; none without sinks."""
    if not call.sinks:
        return []
    source, defines = "common/sink_gradient.cu", {"SPATTN_DTYPE": call.dtype}
    return [Request(source, call.device.arch, defines, {"SinkGradient": SINK_GRADIENT}, "sink_gradient")]
