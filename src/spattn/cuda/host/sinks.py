"""Sinks of a call, and the kernel for their gradients, shared by all kernel families."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...arrays import ArrayNamespace, dtype_name
from ...request.call import Call
from ...request.score import Score, ScoreOperands
from ..driver.launch import Launch, kernel
from ..driver.structs import packer
from .backward_pass import BackwardPass

__all__ = ["SINK_GRADIENT", "has_sinks", "score_of", "sink_gradient", "sink_macros", "sinks_of"]

SINK_GRADIENT = np.dtype(
    [
        *((name, "u8") for name in ("sinks", "lse", "delta", "dsinks")),
        *((name, "i8") for name in ("lse_batch", "lse_head", "lse_token", "delta_stride")),
        *((name, "i4") for name in ("batch", "heads_q", "q_len", "unused")),
    ]
)
_pack = packer(SINK_GRADIENT).pack


def score_of(call: Call) -> Score | None:
    """Return the score function of a call."""
    if not isinstance(call.score, ScoreOperands):
        return call.score
    if call.score.program is not None:
        raise ValueError("score: expected sinks alone, got a score function")
    return None


def has_sinks(call: Call) -> bool:
    """True if the call has sinks."""
    return isinstance(call.score, ScoreOperands) and call.score.sinks is not None


def sinks_of(
    score: ScoreOperands | None, heads_q: int, dtype: str, kind: ArrayNamespace, ordinal: int | None
) -> tuple[Any, ...]:
    """Return a call's sinks as a tuple of one array, contiguous in device memory; an empty tuple without sinks.

    `dtype` is that of lse, `ordinal` the device of q, None for host memory.
    """
    if score is None or score.sinks is None:
        return ()
    sinks = score.sinks
    found, shape = dtype_name(sinks), tuple(map(int, sinks.shape))
    if found != dtype or shape != (heads_q,):
        raise ValueError(f"sinks: expected shape {(heads_q,)} and dtype {dtype}, got {shape} of {found}")
    if kind.ordinal(sinks) != ordinal:
        raise ValueError(f"sinks: expected an array on the device of q, got one on {kind.device(sinks)}")
    if ordinal is not None:
        sinks = kind.resolve(sinks)
        if kind.operand(sinks).strides != (1,):
            sinks = sinks + 0  # a sum is contiguous
    return (sinks,)


def sink_macros(sinks: int) -> dict[str, object]:
    """Return the macros of a forward kernel for the address of a call's sinks; none without sinks."""
    return {"SPATTN_SINKS": 1} if sinks else {}


def sink_gradient(call: BackwardPass, delta: int, delta_stride: int) -> Launch:
    """Return the launch for the gradients of a call's sinks; the device's context must be current.

    Earlier launches write ``rowsum(dout ∘ out) − dlse`` of the rows, (batch, heads_q, q_len), to the address `delta`,
    `delta_stride` elements apart.
    """
    batch, heads_q, q_len, _ = call.q.shape
    strides = *call.lse.strides, delta_stride
    params = _pack(call.sinks, call.lse.pointer, delta, call.dsinks, *strides, batch, heads_q, q_len, 0)
    source, defines = "common/sink_gradient.cu", {"SPATTN_DTYPE": call.dtype}
    structs = {"SinkGradient": SINK_GRADIENT}
    own = kernel(call.device, source, call.device.arch, defines, structs, "sink_gradient")
    return Launch(own, heads_q, params, call.stream)
