"""When a plan is computed pair by pair, its tiles being lists of keys of one query: where that costs less than another
plan."""

from __future__ import annotations

import numpy as np

from .. import compiler
from .._index_checks import q_offset
from ..call import Call
from ..patterns import Pattern
from ..plan import Plan
from ._choice import price_ms, price_of_pairs_ms
from ._coefficients import Device

__all__ = ["clearly", "instead", "may_pay"]

_SPARSE = 1 / 16  # allowed pairs among those that are computed, from which on no price is asked for
_SAMPLE = 16  # query tiles whose listed pairs are looked at
_FEW = 8  # pairs of a tile: fewer cost less than any tile that holds a pair


def clearly(pattern: Pattern, call: Call, tile: tuple[int, int]) -> bool:
    """Whether a look at some query tiles of a pattern that lists its pairs, and has no order in which they lie
    together, says that no other plan need be made: that of scattered pairs is large."""
    tiles = call.q_len // tile[0]
    if not pattern._has_order or not tiles or call.kv_len == 0:
        return False
    variants, _ = pattern.variants(call.batch, call.heads_q)
    bound = [variant.bind(call.q_len, call.kv_len) for variant in variants]
    if len(bound) != 1 or not bound[0]._lists_pairs:
        return False
    some = np.unique(np.linspace(0, tiles - 1, _SAMPLE).astype(np.int64))
    rows = (some[:, None] * tile[0] + np.arange(tile[0])).ravel()
    row, key = bound[0]._pairs(rows + q_offset(call.q_len, call.kv_len), call.kv_len)
    met = np.unique(row // tile[0] * -(-call.kv_len // tile[1]) + key // tile[1])
    return 0 < len(row) < _FEW * len(met) and bound[0]._in_order() is None


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
