"""Coefficients of the GPU cost model (compute capability 9.0), in nanoseconds per count.

Measured and printed by ``benchmarks/price_cuda.py``.
"""

from __future__ import annotations

from ..planning import Plan
from .features_cpu import predicted_ms
from .features_gpu import GpuCounts, Kernel, Sizes, count_on_gpu
from .specializations import KEYS_TOGETHER, ROWS, TILE, Build, build, item_keys

__all__ = [
    "KINDS",
    "LARGEST_HEAD_DIM",
    "LAUNCH_MS",
    "SMS",
    "build_of",
    "coefficients",
    "kernel_of",
    "kind_of",
    "price_ms",
]

LARGEST_HEAD_DIM = 128  # largest measured head_dim
SMS = 132  # SMs of the measured device

# In the order of GpuCounts: tiles of 128 queries, of fewer, of those with three CTAs per SM, and gathered KV.
_COEFFICIENTS = {
    "wide": GpuCounts(4.65e03, 4.55e03, 248, 0.0716, 0.00019, 0.011, 0.283, 0.322, 0, 0.000344),
    "narrow": GpuCounts(4.65e03, 4.55e03, 302, 0.0828, 0.00107, 0.0399, 0.36, 0.85, 0, 0.000344),
    "thirds": GpuCounts(4.65e03, 4.55e03, 549, 0.197, 0, 0.048, 0, 1.45, 0, 0.000344),
    "looked up": GpuCounts(4.65e03, 4.55e03, 931, 0, 0.0019, 0.0847, 0.23, 0.852, 0, 0.000344),
}
KINDS = tuple(_COEFFICIENTS)
LAUNCH_MS = 1e-6 * _COEFFICIENTS["wide"].launches


def build_of(plan: Plan, head_dim: int) -> Build:
    """The kernel specialization of a plan; `head_dim` is the larger one of K and V."""
    return build(plan.block_q, head_dim, item_keys(plan))


def kernel_of(row: Build, sms: int) -> Kernel:
    """The counts' view of a specialization on a device of `sms` SMs."""
    return Kernel(row.rows, row.step_kv // TILE[1], row.head_dim, row.ctas * sms, KEYS_TOGETHER)


def kind_of(row: Build, looked_up: bool = False) -> str:
    """The coefficient set of a specialization."""
    if looked_up:
        return "looked up"
    return "wide" if row.rows > ROWS else "thirds" if row.ctas > 2 else "narrow"


def coefficients(row: Build, looked_up: bool = False) -> GpuCounts:
    """Coefficients in nanoseconds per count."""
    return _COEFFICIENTS[kind_of(row, looked_up)]


def price_ms(plan: Plan, sizes: Sizes, sms: int, alone: bool = True) -> float:
    """Predicted device milliseconds of a 16-bit forward; unless `alone`, what it adds to a shared launch."""
    row = build_of(plan, max(sizes.head_dim, sizes.head_dim_v))
    return predicted_ms(count_on_gpu(plan, sizes, kernel_of(row, sms), alone), coefficients(row, plan.ordered))
