"""Backward kernels for compute capability 9.0: TMA, WGMMA and persistent CTAs, for 16-bit types.

A dK/dV kernel and a dQ kernel, or a fused backward. No sum depends on the order of atomics: gradients are bitwise
reproducible.
"""

from __future__ import annotations

import logging

from ....choose.specializations import TILE
from ...host.backward_pass import BackwardPass
from ...sm80 import backward as portable_backward
from .prepared import Ready, plan_on_device

__all__ = ["Ready", "accepts", "backward", "prepare"]

_log = logging.getLogger("spattn.cuda")


def accepts(block_q: int, block_kv: int) -> bool:
    """Whether the kernels can execute plans with this tile shape."""
    return (block_q, block_kv) == TILE


def prepare(call: BackwardPass) -> Ready | None:
    """The cached state for calls of these shapes and strides, or None if TMA cannot address the arrays; the context
    must be current."""
    (batch, heads_q), heads_kv = call.q.shape[:2], call.k.shape[1]
    if any(x.pointer % 16 for x in (call.q, call.k, call.v, call.dout, call.out, call.dq, call.dk, call.dv)):
        return None
    return plan_on_device(call.plan, call.device, batch, heads_q, heads_kv).ready(call)


def backward(call: BackwardPass) -> None:
    """Enqueue all kernels; the context must be current."""
    ready = prepare(call)
    if ready is None:
        _log.debug(
            "fall back to the portable kernels: TMA cannot address the arrays, or the plan needs too many tensor maps"
        )
        portable_backward.backward(call)
    else:
        ready.run(call)
