"""What one of each count costs on a GPU of compute capability 9.0, in nanoseconds: measured by
``benchmarks/price_cuda.py``, which prints these lines."""

from __future__ import annotations

from ..plan import Plan
from ..schedule.price import predicted_ms
from ..schedule.price_gpu import GpuCounts, Kernel, Sizes, count_on_gpu
from .hopper.builds import KEYS_TOGETHER, ROWS, TILE, build

__all__ = ["LARGEST_HEAD_DIM", "SMS", "coefficients", "kernel_of", "price_ms"]

LARGEST_HEAD_DIM = 128  # that was measured
SMS = 132  # of the device that was measured

# In the order of GpuCounts: of tiles of 128 queries, of fewer, and of those whose places are looked up.
_WIDE = GpuCounts(5.18e03, 5.38e03, 111, 0.0745, 0.000143, 0.0119, 0.143, 0.49, 0.00112, 0.000367)
_NARROW = GpuCounts(5.18e03, 5.38e03, 311, 0.0864, 0.000973, 0.0317, 0, 1.25, 0.00112, 0.000367)
_LOOKED_UP = GpuCounts(5.18e03, 5.38e03, 670, 0.0583, 0.00183, 0.0347, 0, 1.25, 0.00112, 0.000367)


def kernel_of(block_q: int, head_dim: int, sms: int) -> Kernel:
    """What executes plans with tiles of so many queries on so many SMs; `head_dim` is the larger one of K and V."""
    row = build(block_q, head_dim, False)
    return Kernel(row.rows, row.step_kv // TILE[1], row.head_dim, row.ctas * sms, KEYS_TOGETHER)


def coefficients(block_q: int, looked_up: bool = False) -> GpuCounts:
    """Nanoseconds for one of each, of plans with tiles of so many queries."""
    if looked_up:
        return _LOOKED_UP
    return _NARROW if block_q <= ROWS else _WIDE


def price_ms(plan: Plan, sizes: Sizes, sms: int) -> float:
    """The predicted milliseconds of a forward of 16-bit arrays, without the host's."""
    kernel = kernel_of(plan.block_q, max(sizes.head_dim, sizes.head_dim_v), sms)
    return predicted_ms(count_on_gpu(plan, sizes, kernel), coefficients(plan.block_q, plan.ordered))
