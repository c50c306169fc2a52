"""Forward kernels for compute capability 8.0 and later.

They use ``mma.sync`` for 16-bit types and, as TF32 products, for float32; fused multiply-adds for float64. They execute
any plan whose query tiles are a multiple of 16 tokens.
"""

from __future__ import annotations

from ...driver.device import Device
from ...driver.launch import Kernel
from ...host.forward_pass import ForwardPass
from ..kernels import load, load_common
from ..params import PlanOnDevice, pack, plan_on_device
from ..variants import HEAD_DIMS, ITEMSIZE, KEYS, forward_variants, tile_within

__all__ = ["LARGEST_HEAD_DIM", "accepts", "forward", "tile"]

NAME = "portable"
LARGEST_HEAD_DIM = HEAD_DIMS[-1]
LARGEST_BLOCK_Q = 256
LARGEST_GRID = 2**31 - 1


def tile(device: Device, dtype: str, head_dim: int) -> tuple[int, int]:
    """Return the tile shape (block_q, block_kv) for a head dimension (the larger of q's and v's)."""
    return tile_within(device.shared_bytes, dtype, head_dim)


def accepts(block_q: int, block_kv: int) -> bool:
    """True if the kernels execute plans with this tile shape."""
    return block_q % 16 == 0 and 16 <= block_q <= LARGEST_BLOCK_Q and block_kv % KEYS == 0


def forward(call: ForwardPass) -> None:
    """Enqueue the attention kernel, then the combine kernel if the plan has partials; the context must be current."""
    batch, heads_q = call.q.shape[:2]
    plan = plan_on_device(call.plan, call.device, batch, heads_q)
    partial, partial_lse = call.workspace()
    if plan.items:
        ready, rows = attention_kernel(call, plan)
        launch_all(call, plan, ready, plan.items * (call.plan.block_q // rows), partial, partial_lse)
    if plan.merges:
        ready = load_common(call.device, "forward/merge", call.dtype, bool(call.sinks))
        blocks = -(-plan.merges // (ready.threads // 32))  # one warp per row
        launch_all(call, plan, ready, blocks, partial, partial_lse)


def launch_all(
    call: ForwardPass, plan: PlanOnDevice, ready: Kernel, blocks: int, partial: int, partial_lse: int
) -> None:
    """Launch a kernel over a flat list of CTAs, in as many grids as needed."""
    for first in range(0, blocks, LARGEST_GRID):
        params = pack(call, plan, partial, partial_lse, first)
        ready.launch(min(blocks - first, LARGEST_GRID), params, call.stream)


def attention_kernel(call: ForwardPass, plan: PlanOnDevice) -> tuple[Kernel, int]:
    """Return the kernel, with its rows per CTA, for a call's types, sizes, tiles, alignment, score function and
    sinks."""
    head_dim, head_dim_v, aligned = call.q.shape[3], call.v.shape[3], call.aligned(ITEMSIZE[call.dtype])
    sinks = bool(call.sinks)
    key = call.dtype, call.precision, head_dim, head_dim_v, aligned, call.score.text, sinks
    found = plan.kernels.get(key)
    if found is None:
        problem = *key[:4], (call.plan.block_q, call.plan.block_kv), aligned
        beside = ("forward/merge",) if plan.merges else ()
        (found,) = load(call.device, call.score.text, sinks, forward_variants, *problem, beside=beside)
        plan.kernels[key] = found
    return found
