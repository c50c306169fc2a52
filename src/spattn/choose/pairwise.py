"""Choice of plans with one-query tiles, which the kernels compute pair by pair."""

from __future__ import annotations

from ..patterns import Pattern
from ..planning import Plan
from ..request.call import Call
from ..schedule import compiler
from .cpu import cost_ms, cost_of_pairs_ms
from .machine_cpu import Device

__all__ = ["instead", "may_pay"]

_SPARSE = 1 / 16  # efficiency below which the predicted times are compared


def instead(plan: Plan, pattern: Pattern, call: Call, workers: int, max_bytes: int | None, device: Device) -> Plan:
    """Return the plan with one-query tiles if it is predicted faster than `plan` and fits `max_bytes`, else `plan`."""
    sizes = call.batch, call.heads_q, call.head_dim, call.head_dim_v
    if cost_ms(plan, sizes, device) <= cost_of_pairs_ms(plan, sizes, device):
        return plan
    return compiler.planned_or(plan, pattern, call, (1, plan.block_kv), workers, max_bytes)


def may_pay(plan: Plan) -> bool:
    """Return whether the plan is sparse enough to compare times; the padding of a short q_len costs nothing."""
    return plan.efficiency < _SPARSE and plan.q_len >= plan.block_q > 1
