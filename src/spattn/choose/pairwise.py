"""Choice of pair-by-pair plans (one query per tile) where they are predicted to be cheaper."""

from __future__ import annotations

from ..patterns import Pattern
from ..planning import Plan
from ..request.call import Call
from ..schedule import compiler
from .cpu import price_ms, price_of_pairs_ms
from .machine_cpu import Device

__all__ = ["instead", "may_pay"]

_SPARSE = 1 / 16  # efficiency below which the cost model is consulted


def instead(plan: Plan, pattern: Pattern, call: Call, workers: int, max_bytes: int | None, device: Device) -> Plan:
    """The one-query-per-tile plan if it is cheaper than `plan` and fits `max_bytes`; otherwise `plan`."""
    sizes = call.batch, call.heads_q, call.head_dim, call.head_dim_v
    if price_ms(plan, sizes, device) <= price_of_pairs_ms(plan, sizes, device):
        return plan
    return compiler.planned_or(plan, pattern, call, (1, plan.block_kv), workers, max_bytes)


def may_pay(plan: Plan) -> bool:
    """Whether the plan is sparse enough to consult the cost model. If q_len is below block_q, the low efficiency comes
    from padding rows, which no kernel computes."""
    return plan.efficiency < _SPARSE and plan.q_len >= plan.block_q > 1
