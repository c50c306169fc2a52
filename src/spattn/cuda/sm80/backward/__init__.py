"""Backward kernels for compute capability 8.0 and later.

``mma.sync`` for 16-bit types, and for float32 with ``precision="tf32"``; fused multiply-adds for float32 and float64. A
dK/dV kernel and a dQ kernel execute any plan with query tiles of a multiple of 16 tokens.
"""

from __future__ import annotations

import itertools

from ...driver.launch import Kernel, kernel
from ...host.backward_pass import BackwardPass
from .params import STRUCTS, pack, pack_sum, plan_on_device
from .variants import of_pass, variant

__all__ = ["STRUCTS", "backward", "of_pass", "variant"]

_THREADS = 256  # of statistics.cu
_ITEMSIZE = {"float64": 8}


def backward(call: BackwardPass) -> None:
    """Enqueue all kernels; the context must be current."""
    batch, heads_q, q_len, _ = call.q.shape
    heads_kv = call.k.shape[1]
    plan = plan_on_device(call.plan, call.device, batch, heads_q, heads_kv)
    itemsize = _ITEMSIZE.get(call.dtype, 4)
    results = (0, call.dq), (1, call.dk), (1, call.dv)
    sizes = [batch * x.shape[1] * plan[keyed].partial_rows * x.shape[3] * itemsize for keyed, x in results]
    starts = list(itertools.accumulate([2 * batch * heads_q * q_len * itemsize, *sizes], initial=0))
    memory = call.allocate(starts[-1])
    statistics, dq, dk, dv = (memory + start for start in starts[:-1])
    targets = ((call.dq, dq), None), ((call.dk, dk), (call.dv, dv))
    for keyed, (scores, values) in enumerate(targets):
        params = pack(call, plan[keyed], statistics, scores, values)
        if not keyed:
            rows = batch * heads_q * q_len
            ready = _kernel(call, *variant("statistics", call.dtype), "statistics")
            ready.launch(-(-rows // (_THREADS // 32)), params, call.stream)
        if plan[keyed].tasks:
            dims, room = (call.q.shape[3], call.v.shape[3]), call.device.shared_bytes
            for source, macros, rows in of_pass(call.dtype, *dims, bool(keyed), call.aligned(), room, call.precision):
                blocks = plan[keyed].tasks * plan[keyed].subtiles * -(-plan[keyed].subtile_rows // rows)
                _kernel(call, source, macros, "backward").launch(blocks, params, call.stream)
        if plan[keyed].sum_blocks:
            ready = _kernel(call, *variant("sum", call.dtype), "sum")
            for target, partial in filter(None, (scores, values)):
                blocks = batch * target.shape[1] * plan[keyed].sum_blocks
                ready.launch(blocks, pack_sum(plan[keyed], target, partial), call.stream)


def _kernel(call: BackwardPass, source: str, macros: dict[str, object], entry: str) -> Kernel:
    return kernel(call.device, source, call.device.arch, macros, STRUCTS, entry)
