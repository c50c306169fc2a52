"""Backward kernels for compute capability 8.0 and later.

They use ``mma.sync`` for 16-bit types, and for float32 with ``precision="tf32"``; fused multiply-adds for float32 and
float64. A dK/dV kernel and a dQ kernel execute any plan whose query tiles are a multiple of 16 tokens.
"""

from __future__ import annotations

import itertools
from typing import Any

from ...driver.launch import Kernel, Request, start
from ...host.backward_pass import BackwardPass
from ...host.sinks import sink_gradient
from ..kernels import common_request, load, load_common
from ..kernels import requests as kernel_requests
from ..params import pack_backward, pack_sum, passes_on_device
from ..variants import backward_variants

__all__ = ["backward", "requests"]


def backward(call: BackwardPass) -> None:
    """Enqueue all kernels; the context must be current."""
    batch, heads_q, q_len, _ = call.q.shape
    heads_kv = call.k.shape[1]
    plan = passes_on_device(call.plan, call.device, batch, heads_q, heads_kv)
    itemsize = 8 if call.dtype == "float64" else 4  # of sums
    results = (0, call.dq), (1, call.dk), (1, call.dv)
    sizes = [batch * x.shape[1] * plan[keyed].partial_rows * x.shape[3] * itemsize for keyed, x in results]
    starts = list(itertools.accumulate([2 * batch * heads_q * q_len * itemsize, *sizes], initial=0))
    memory = call.allocate(starts[-1])
    statistics, dq, dk, dv = (memory + start for start in starts[:-1])
    targets = ((call.dq, dq), None), ((call.dk, dk), (call.dv, dv))
    for keyed, (scores, values) in enumerate(targets):
        own = plan[keyed]
        params = pack_backward(call, own, statistics, scores, values)
        if not keyed:
            ready = load_common(call.device, "backward/statistics", call.dtype)
            ready.launch(-(-batch * heads_q * q_len // (ready.threads // 32)), params, call.stream)  # one warp per row
            if call.sinks:
                start([sink_gradient(call, statistics + itemsize, 2)])
        if own.tasks:
            for ready, rows in backward_kernels(call, bool(keyed)):
                blocks = own.tasks * own.subtiles * -(-own.subtile_rows // rows)
                ready.launch(blocks, params, call.stream)
        if own.sum_blocks:
            ready = load_common(call.device, "backward/sum", call.dtype)
            for target, partial in filter(None, (scores, values)):
                blocks = batch * target.shape[1] * own.sum_blocks
                ready.launch(blocks, pack_sum(own, target, partial), call.stream)


def backward_kernels(call: BackwardPass, by_keys: bool) -> list[tuple[Kernel, int]]:
    """Return the dK/dV or dQ kernels, with their rows per CTA, for a call's types, sizes, alignment and score
    function."""
    return load(call.device, call.score.text, False, backward_variants, *_problem(call, by_keys))


def requests(call: BackwardPass) -> list[Request]:
    """Return the requests for the kernels of a call; the context must be current."""
    (batch, heads_q), heads_kv = call.q.shape[:2], call.k.shape[1]
    passes = passes_on_device(call.plan, call.device, batch, heads_q, heads_kv)
    found = [common_request(call.device, "backward/statistics", call.dtype)]
    for by_keys, own in enumerate(passes):
        if own.tasks:
            problem = _problem(call, bool(by_keys))
            found += kernel_requests(call.device, call.score.text, False, backward_variants, *problem)
    if any(own.sum_blocks for own in passes):
        found.append(common_request(call.device, "backward/sum", call.dtype))
    return found


def _problem(call: BackwardPass, by_keys: bool) -> tuple[Any, ...]:
    return call.dtype, call.precision, call.q.shape[3], call.v.shape[3], by_keys, call.aligned()
