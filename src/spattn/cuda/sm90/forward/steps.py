"""Launches of steps of generation, whose tables are made from the bits of rows by one native call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ....arrays.operand import Operand
from ....choose.specializations import TILE
from ....schedule.few_queries import device_tables
from ....schedule.pack_heads import variant_of_groups
from ....schedule.proof import Writers, prove
from ...driver.buffer import copy_in_order
from .heads import packing
from .launches import COUNTERS, MERGE_TABLES, ROWS_PER_BLOCK, Launches, Tables, counters

__all__ = ["of_rows"]


def of_rows(
    known: Sequence[Launches],
    words: np.ndarray,
    variant: np.ndarray,
    k: Operand,
    v: Operand,
    workers: int,
    staging: Any,
) -> tuple[int, Launches] | None:
    """Return launches for rows of bits, (variants, queries, words), made from those of another step, and its number.

    `known` are the launches of plans by rows with one tile, for a q of these shapes and strides, and any kv_len and
    strides of k and v. Return None if the rows or these k and v need other kernels or maps. The tables are copied in
    the order of PyTorch's current stream; the device's context must be current.
    """
    packed, kv_len = packing(known[0].part.call), k.shape[2]
    own = variant_of_groups(variant, packed)
    if own is None:
        packed, own = 1, variant
    suited = [pair for pair in enumerate(known) if pair[1].part.call.packed == packed and pair[1].addresses(k, v)]
    if not suited:
        return None
    layout, call = suited[0][1].part
    plan, (batch, heads) = call.plan, call.q.shape[:2]
    index = np.empty((batch, heads), np.int32)
    index[:] = own
    keys = layout.key_views.copy()
    keys["extent"][1, -1] = kv_len
    tables = layout.query_views.view(np.uint8), keys.view(np.uint8)
    image, offsets, items, (tasks, longest, slots, most) = device_tables(
        words, index, kv_len, packed, heads // call.k.shape[1], plan.block_q, workers, *tables, COUNTERS
    )
    rest: list[Any] = [*items, plan.q_len, plan.block_q]
    prove(Writers(plan.views, np.zeros(len(words), np.int32), *rest))  # it reads the query view alone
    if not tasks:
        return None
    merge_blocks, length = -(-most // ROWS_PER_BLOCK), float(TILE[1] * longest)
    for number, first in suited:
        if first.executes(length):
            owner, address = copy_in_order(call.device, image, staging)
            at = {name: address + offset for name, offset in offsets.items()}
            merges = [tuple(at[name] for name in MERGE_TABLES)]
            made = Tables(at, merges, [(0, tasks)], length, counters(at["counters"]), (owner,))
            return number, first.with_keys(k, v).with_tables(made, slots, merge_blocks)
    return None
