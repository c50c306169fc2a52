"""When a plan is computed pair by pair, its tiles being lists of keys of one query: what that costs, and whether it is
less than another plan costs."""

from __future__ import annotations

from ..call import Call
from ..patterns import Pattern
from ..plan import Plan
from ._choice import planned_or

__all__ = ["instead", "may_pay", "price_ms"]

_SPARSE = 1 / 16  # allowed pairs among those that are computed, from which on no price is asked for
_ROW = 500.0  # nanoseconds
# Nanoseconds for each feature of K and V of a pair, out of a second-level cache: benchmarks/pairwise_cpu.py.
_FEATURE = {"float32": 0.45, "float64": 0.9, "float16": 0.36, "bfloat16": 0.36}
_BASELINE_FEATURE = {"float32": 0.75, "float64": 1.45, "float16": 3.6, "bfloat16": 0.85}


def price_ms(plan: Plan, batch: int, heads: int, features: int, isa: str, dtype: str) -> float:
    """Predicted milliseconds of a forward with the pairs of a plan, of whatever tile, on one thread.

    `features` are those of K and of V.
    """
    feature = (_BASELINE_FEATURE if isa == "baseline" else _FEATURE)[dtype]
    pairs = plan.nnz / max(plan.variants, 1)
    return 1e-6 * batch * heads * (pairs * features * feature + plan.q_len * _ROW)


def instead(
    plan: Plan, price: float, pattern: Pattern, call: Call, workers: int, max_bytes: int | None, isa: str
) -> Plan:
    """The plan whose tiles have one query where that costs less than `plan`, which costs `price` milliseconds, and does
    not take more than `max_bytes`."""
    features = call.head_dim + call.head_dim_v
    if price <= price_ms(plan, call.batch, call.heads_q, features, isa, call.dtype):
        return plan
    return planned_or(plan, pattern, call, (1, plan.block_kv), workers, max_bytes)


def may_pay(plan: Plan) -> bool:
    """Whether so few of the pairs of a plan are allowed that a price is worth asking for. Of fewer queries than a tile
    has most rows are padding, which no kernel computes."""
    return plan.efficiency < _SPARSE and plan.q_len >= plan.block_q > 1
