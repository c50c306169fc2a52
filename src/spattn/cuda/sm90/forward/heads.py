"""Grouped-query attention: pack the query heads of a group into one tile."""

from __future__ import annotations

from dataclasses import replace

from ....arrays.operand import Operand
from ....schedule.pack_heads import heads_that_fit, pack_heads
from ...host.forward_pass import ForwardPass


def with_packed_heads(call: ForwardPass) -> ForwardPass:
    """Pack the heads of each group of a call into one query tile, or as many as fit; return the call unchanged if that
    is impossible.

    It is impossible for packed calls, groups of one head, groups of which no two heads fit, ordered and gathered plans,
    patterns that differ between these heads, score functions and scales of float8 (they depend on the head), and arrays
    in which (head, query) is not one axis of constant stride.
    """
    group = packing(call)
    found = None if group == call.packed else pack_heads(call.plan, group)
    if found is None:
        return call
    q, out = _merge_axes(call.q, group), _merge_axes(call.out, group)
    return replace(call, plan=found, q=q, out=out, packed=group)


def packing(call: ForwardPass) -> int:
    """Return how many heads a query tile of a call gets if its pattern is the same for all of them."""
    if call.packed > 1:
        return call.packed
    group = heads_that_fit(call.q.shape[1] // call.k.shape[1], call.q.shape[2], call.plan.block_q)
    if group == 1 or call.plan.ordered or call.score.text or call.score.scales:
        return 1
    return group if all(x.shape[2] == 1 or x.strides[1] == x.shape[2] * x.strides[2] for x in (call.q, call.out)) else 1


def _merge_axes(x: Operand, group: int) -> Operand:
    """View (batch, heads, rows, columns), of which heads and rows are one axis of constant stride, as (batch,
    heads / group, group · rows, columns)."""
    (batch, heads, rows, columns), (by_batch, by_head, by_row, by_column) = x.shape, x.strides
    shape = batch, heads // group, group * rows, columns
    return Operand(x.pointer, shape, (by_batch, group * by_head, by_head if rows == 1 else by_row, by_column))
