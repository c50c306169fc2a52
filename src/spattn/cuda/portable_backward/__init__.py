"""The backward for every GPU from compute capability 8.0 and every dtype: fused multiply-adds, simple and exact.

The same two passes as the Hopper kernels. It executes any plan whose query tiles are multiples of 16 tokens.
"""

from __future__ import annotations

import itertools

from ..backward_pass import BackwardPass
from ..driver.launch import Kernel, kernel
from .params import STRUCTS, pack, pack_sum, plan_on_device

__all__ = ["STRUCTS", "backward", "variant"]

_THREADS = 256
_ROWS = 32  # of backward.cu's blocks
_COLUMNS = 32  # features that a kernel takes at a time
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
            _kernel(call, "statistics", 0).launch(-(-rows // (_THREADS // 32)), params, call.stream)
        if plan[keyed].tasks:
            blocks = plan[keyed].tasks * plan[keyed].slabs * -(-plan[keyed].slab_rows // _ROWS)
            _kernel(call, "backward", keyed).launch(blocks, params, call.stream)
        if plan[keyed].sum_blocks:
            for target, partial in filter(None, (scores, values)):
                blocks = batch * target.shape[1] * plan[keyed].sum_blocks
                _kernel(call, "sum", 0).launch(blocks, pack_sum(plan[keyed], target, partial), call.stream)


def variant(name: str, dtype: str, head_dim: int, head_dim_v: int, by_keys: int) -> tuple[str, dict[str, object]]:
    """(source, macros) of a kernel; only those of "backward" differ by head dimension and pass."""
    macros: dict[str, object] = {"SPATTN_DTYPE": dtype}
    if name == "backward":
        padded, padded_v = (-(-dim // _COLUMNS) * _COLUMNS for dim in (head_dim, head_dim_v))
        macros |= {"SPATTN_BY_KEYS": by_keys, "SPATTN_HEAD_DIM": padded, "SPATTN_HEAD_DIM_V": padded_v}
    return f"portable_backward/{name}.cu", macros


def _kernel(call: BackwardPass, name: str, by_keys: int) -> Kernel:
    source, macros = variant(name, call.dtype, call.q.shape[3], call.v.shape[3], by_keys)
    return kernel(call.device, source, call.device.arch, macros, STRUCTS, name)
