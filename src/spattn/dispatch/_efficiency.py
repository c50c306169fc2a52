"""Warn if dense attention is predicted to be faster than a plan."""

from __future__ import annotations

import warnings

from ..backends import PredictingBackend
from ..errors import EfficiencyWarning
from ..planning import Plan
from ..planning.contract.cache import kept_with_plan

__all__ = ["may_lose", "warn_where_dense_wins"]

_LEAST_EFFICIENCY = 0.05  # only plans below this efficiency are compared with dense attention
_MOST_TILES = 4  # a sparse tile, with its own Q, K and split-KV partials, may cost as much as this many dense tiles
_FACTOR, _LOST_MS = 1.5, 1.0  # dense must be faster by both; the cost model is accurate to about 25 %


def may_lose(plan: Plan) -> bool:
    """Return whether dense attention may be faster; this check is cheaper than the cost model.

    It may be if the efficiency is low even after correction for a short q_len, and dense attention has less than four
    times as many tiles.
    """
    dense = plan.variants * -(-plan.q_len // plan.block_q) * -(-plan.kv_len // plan.block_kv)
    queries = min(plan.block_q, plan.q_len) / plan.block_q
    return plan.efficiency < _LEAST_EFFICIENCY * queries and plan.tiles * _MOST_TILES > dense


@kept_with_plan
def warn_where_dense_wins(
    plan: Plan, module: PredictingBackend, batch: int, heads: int, head_dim: int, head_dim_v: int, dtype: str
) -> tuple[float, float]:
    """Warn once for each plan if dense attention is predicted to be clearly faster; return both times."""
    sizes = batch, heads, head_dim, head_dim_v, dtype
    own, dense = module.predicted_ms(plan, *sizes), module.dense_ms(plan.q_len, plan.kv_len, *sizes)
    if own > max(_FACTOR * dense, dense + _LOST_MS):
        warnings.warn(
            f"{plan.pattern!r}: {100 * plan.efficiency:.2g} % of the computed pairs are allowed; dense attention is "
            f"predicted to take {dense:.3g} ms instead of {own:.3g} ms on one thread. Use dense attention with a mask, "
            "or, if the pattern is a mask or a list of pairs, pass spattn.patterns.discover(mask) instead; "
            "spattn.explain(spattn.plan(...)) gives details",
            EfficiencyWarning,
            stacklevel=6,
        )
    return own, dense
