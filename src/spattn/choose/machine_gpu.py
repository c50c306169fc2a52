"""Cost model coefficients for compute capability 9.0, in nanoseconds.

Measured by ``benchmarks/costs/price_cuda.py``, which prints these lines.
"""

from __future__ import annotations

from ..planning import Plan
from .features_cpu import predicted_ms
from .features_gpu import GpuCounts, KernelShape, Sizes, count_on_gpu
from .specializations import KEYS_TOGETHER, ROWS, TILE, Specialization, build, item_keys

__all__ = [
    "KINDS",
    "LARGEST_HEAD_DIM",
    "LAUNCH_MS",
    "SMS",
    "specialization_of",
    "coefficients",
    "kernel_of",
    "kind_of",
    "cost_ms",
]

LARGEST_HEAD_DIM = 128  # largest measured
SMS = 132  # of the measured device

# Fields as in GpuCounts, for tiles of 128 queries, fewer queries, three CTAs per SM, and permuted or gathered tokens.
_COEFFICIENTS = {
    "wide": GpuCounts(4.65e03, 4.55e03, 248, 0.0716, 0.00019, 0.011, 0.283, 0.322, 0, 0.000344),
    "narrow": GpuCounts(4.65e03, 4.55e03, 302, 0.0828, 0.00107, 0.0399, 0.36, 0.85, 0, 0.000344),
    "thirds": GpuCounts(4.65e03, 4.55e03, 549, 0.197, 0, 0.048, 0, 1.45, 0, 0.000344),
    "looked up": GpuCounts(4.65e03, 4.55e03, 931, 0, 0.0019, 0.0847, 0.23, 0.852, 0, 0.000344),
}
KINDS = tuple(_COEFFICIENTS)
LAUNCH_MS = 1e-6 * _COEFFICIENTS["wide"].launches  # for a launch with items


def specialization_of(plan: Plan, head_dim: int) -> Specialization:
    """Kernel specialization of a plan; `head_dim` is the larger of q's and v's."""
    return build(plan.block_q, head_dim, item_keys(plan))


def kernel_of(row: Specialization, sms: int) -> KernelShape:
    """Cost model's view of a specialization on `sms` SMs."""
    return KernelShape(row.rows, row.step_kv // TILE[1], row.head_dim, row.ctas * sms, KEYS_TOGETHER)


def kind_of(row: Specialization, looked_up: bool = False) -> str:
    """Kind of tiles of a specialization, the key of its coefficients."""
    if looked_up:
        return "looked up"
    return "wide" if row.rows > ROWS else "thirds" if row.ctas > 2 else "narrow"


def coefficients(row: Specialization, looked_up: bool = False) -> GpuCounts:
    """Nanoseconds per feature."""
    return _COEFFICIENTS[kind_of(row, looked_up)]


def cost_ms(plan: Plan, sizes: Sizes, sms: int, alone: bool = True) -> float:
    """Predicted milliseconds of a forward of 16-bit arrays, without host time; if not `alone`, the time it adds to a
    grouped launch."""
    row = specialization_of(plan, max(sizes.head_dim, sizes.head_dim_v))
    return predicted_ms(count_on_gpu(plan, sizes, kernel_of(row, sms), alone), coefficients(row, plan.ordered))
