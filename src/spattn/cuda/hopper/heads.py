"""The heads of a group in one query tile, for arrays whose (head, query) are one axis in memory."""

from __future__ import annotations

from dataclasses import replace

from ...arrays.operand import Operand
from ...schedule.pack_heads import pack_heads
from ..forward_pass import ForwardPass


def with_packed_heads(call: ForwardPass) -> ForwardPass:
    """The call with the heads of each group in one query tile, or the call itself where that cannot be done.

    It cannot when a group has one head, when its rows do not fit into a tile, when the plan looks places up, when the
    pattern tells the heads of a group apart, or when (head, query) is not one axis of constant stride in memory.
    """
    heads_kv, q_len = call.k.shape[1], call.q.shape[2]
    group = call.q.shape[1] // heads_kv
    if group == 1 or group * q_len > call.plan.block_q or call.plan.ordered:
        return call
    q, out = _merge_axes(call.q, group), _merge_axes(call.out, group)
    if q is None or out is None:
        return call
    found = pack_heads(call.plan, group)
    return call if found is None else replace(call, plan=found, q=q, out=out)


def _merge_axes(x: Operand, group: int) -> Operand | None:
    """(batch, heads, rows, columns) as (batch, heads / group, group · rows, columns), where strides allow it."""
    (batch, heads, rows, columns), (by_batch, by_head, by_row, by_column) = x.shape, x.strides
    if rows > 1 and by_head != rows * by_row:
        return None
    shape = batch, heads // group, group * rows, columns
    return Operand(x.pointer, shape, (by_batch, group * by_head, by_head if rows == 1 else by_row, by_column))
