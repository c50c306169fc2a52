"""When a plan is computed pair by pair, its tiles being lists of keys of one query: where that costs less than another
plan."""

from __future__ import annotations

from ..patterns import Pattern
from ..planning import Plan
from ..request.call import Call
from ..schedule import compiler
from .cpu import price_ms, price_of_pairs_ms
from .machine_cpu import Device

__all__ = ["instead", "may_pay"]

_SPARSE = 1 / 16  # allowed pairs among those that are computed, from which on no price is asked for


def instead(plan: Plan, pattern: Pattern, call: Call, workers: int, max_bytes: int | None, device: Device) -> Plan:
    """The plan whose tiles have one query where that costs less than `plan`, and does not take more than
    `max_bytes`."""
    sizes = call.batch, call.heads_q, call.head_dim, call.head_dim_v
    if price_ms(plan, sizes, device) <= price_of_pairs_ms(plan, sizes, device):
        return plan
    return compiler.planned_or(plan, pattern, call, (1, plan.block_kv), workers, max_bytes)


def may_pay(plan: Plan) -> bool:
    """Whether so few of the pairs of a plan are allowed that a price is worth asking for. Of fewer queries than a tile
    has most rows are padding, which no kernel computes."""
    return plan.efficiency < _SPARSE and plan.q_len >= plan.block_q > 1
