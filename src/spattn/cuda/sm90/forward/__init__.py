"""Forward kernels for compute capability 9.0: TMA, WGMMA and persistent CTAs, for 16-bit types.

They execute plans with tiles of 128, or up to 64, queries and 64 keys; two key tiles form one product of 128 keys where
the head dimension leaves room. Permuted and gathered tokens are copied row by row. Arrays that TMA cannot address (rows
not 16-byte aligned, zero or negative strides) and plans of more than 240 tensor maps fall back to the portable kernels,
with the same plan or, if these lack its tile shape, another one of its pattern.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from ....choose.specializations import DTYPES, ROWS, TILE
from ....schedule import compiler
from ....schedule.group import workers
from ....schedule.tensor_maps import MAPS
from ...driver.device import Device
from ...host.forward_pass import ForwardPass
from ...sm80 import forward as portable
from ..maps import readable
from .prepared import prepare

__all__ = ["TILE", "accepts", "aligned", "forward", "prepare", "supports", "tile", "why_not"]

NAME = "hopper"
LARGEST_HEAD_DIM = 256
_log = logging.getLogger("spattn.cuda")


def supports(device: Device, dtype: str, head_dim: int, head_dim_v: int) -> bool:
    """Whether these kernels support a problem. Whether TMA can read its arrays is known only at the call."""
    return (
        device.capability == (9, 0)
        and dtype in DTYPES
        and all(dim % 8 == 0 and 0 < dim <= LARGEST_HEAD_DIM for dim in (head_dim, head_dim_v))
    )


def tile(device: Device, dtype: str, head_dim: int) -> tuple[int, int]:
    """Common tile shape (block_q, block_kv)."""
    return TILE


def accepts(block_q: int, block_kv: int) -> bool:
    """Whether the kernels can execute plans with this tile shape."""
    return block_kv == TILE[1] and (1 <= block_q <= ROWS or block_q == TILE[0])


def forward(call: ForwardPass) -> None:
    """Enqueue the attention kernel and, for plans with split-KV partials, the combine kernel; the context must be
    current."""
    prepared = prepare(call)
    addresses = call.q.pointer, call.k.pointer, call.v.pointer, call.out.pointer
    if prepared is None or not aligned(addresses):
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("fall back to the portable kernels: %s", why_not(call))
        portable.forward(_for_portable(call))
        return
    plan, ready, call = prepared
    plan.enqueue(ready, call)


def _for_portable(call: ForwardPass) -> ForwardPass:
    """The call with a plan that the portable kernels can execute, if necessary a new one of its pattern."""
    plan, device = call.plan, call.device
    if portable.accepts(plan.block_q, plan.block_kv) and not plan.ordered:
        return call
    if plan.pattern is None:
        raise ValueError(f"plan: the portable kernels do not support tiles of {plan.tile}, and {why_not(call)}")
    batch, heads = call.q.shape[:2]
    tile = portable.tile(device, call.dtype, max(call.q.shape[3], call.v.shape[3]))
    each = workers(2 * device.sm_count, batch * heads)
    sizes = plan.pattern, plan.q_len, call.k.shape[2]
    return replace(call, plan=compiler.plan(*sizes, batch=batch, heads=heads, tile=tile, workers=each))


def aligned(addresses: tuple[int, ...]) -> bool:
    """Whether TMA can address arrays that start at these addresses."""
    q, k, v, out = addresses
    return (q | k | v | out) % 16 == 0


def why_not(call: ForwardPass) -> str:
    """Why TMA cannot address the arrays of a call."""
    for name in ("q", "k", "v", "out"):
        operand = getattr(call, name)
        if operand.pointer % 16:
            return f"{name} starts at {operand.pointer:#x}, which is not 16-byte aligned"
        if not readable(operand):
            return (
                f"{name} has shape {operand.shape} and strides {operand.strides}: rows must be contiguous and 16-byte "
                "aligned, and strides positive"
            )
    return f"the plan needs more than {MAPS[-1]} tensor maps"
