"""Warn where attention over all pairs is predicted to be faster than a plan."""

from __future__ import annotations

import warnings

from ..backends import PredictingBackend
from ..errors import EfficiencyWarning
from ..planning import Plan
from ..planning.contract.cache import kept_with_plan

__all__ = ["may_lose", "warn_where_dense_wins"]

_LEAST_EFFICIENCY = 0.05  # below it a plan is compared with dense attention
_MOST_TILES = 4  # dense tiles per tile of the plan: a tile with its own queries, keys and partial rows may cost as much
_FACTOR, _LOST_MS = 1.5, 1.0  # both must be lost before a warning: predictions err by a quarter


def may_lose(plan: Plan) -> bool:
    """Whether dense attention may cost less, judged without the cost model: few of the computed pairs are allowed, not
    for want of queries, and dense attention does not have many times as many tiles."""
    dense = plan.variants * -(-plan.q_len // plan.block_q) * -(-plan.kv_len // plan.block_kv)
    queries = min(plan.block_q, plan.q_len) / plan.block_q
    return plan.efficiency < _LEAST_EFFICIENCY * queries and plan.tiles * _MOST_TILES > dense


@kept_with_plan
def warn_where_dense_wins(
    plan: Plan, module: PredictingBackend, batch: int, heads: int, head_dim: int, head_dim_v: int, dtype: str
) -> tuple[float, float]:
    """Warn once for each plan where dense attention is predicted to save time worth a change; returns both times."""
    sizes = batch, heads, head_dim, head_dim_v, dtype
    own, dense = module.predicted_ms(plan, *sizes), module.dense_ms(plan.q_len, plan.kv_len, *sizes)
    if own > max(_FACTOR * dense, dense + _LOST_MS):
        warnings.warn(
            f"{plan.pattern!r}: {100 * plan.efficiency:.2g} % of the pairs that its plan computes are allowed, and "
            f"attention over all pairs is predicted to take {dense:.3g} ms instead of {own:.3g} ms on one thread. "
            "Give all pairs to a dense attention with a mask, or, if the pattern is a mask or a list, "
            "spattn.patterns.discover(mask) in its place; spattn.explain(spattn.plan(...)) says more",
            EfficiencyWarning,
            stacklevel=6,
        )
    return own, dense
