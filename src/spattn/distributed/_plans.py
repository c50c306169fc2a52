"""The whole plan of a distributed call, and the rows that ranks send to each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from ..arrays.namespace import numpy_dtype
from ..backends import load
from ..dispatch.plans import find_plan, resolve
from ..patterns import Pattern
from ..planning import Plan
from ..planning.contract.cache import kept_with_plan
from ..request.call import Call
from ..schedule.shard import Sharding, keys_of_rows, lists_of_tables, rows_of_keys

__all__ = ["Block", "Transfer", "Shape", "call_of", "key_transfers", "row_transfers", "whole_plan"]


class Shape(NamedTuple):
    """Sizes of the whole call."""

    batch: int
    heads_q: int
    heads_kv: int
    length: int
    head_dim: int
    head_dim_v: int


class Block(NamedTuple):
    """Rows of some heads, numbered ``batch entry * heads + head``; positions ascend."""

    heads: np.ndarray
    rows: np.ndarray


class Transfer(NamedTuple):
    """What a rank sends to a peer and receives from it."""

    peer: int
    send: tuple[Block, ...]
    receive: tuple[Block, ...]


def call_of(shape: Shape, dtype: str, scale: float | None = None, device: str = "cpu") -> Call:
    """Return the call of one process, on arrays without memory; torch tensors on a GPU."""
    one: Any = np.zeros(1, numpy_dtype(dtype))
    if device != "cpu":
        one = torch.zeros(1, dtype=getattr(torch, dtype), device=device)

    def empty(heads: int, width: int) -> Any:
        sizes = shape.batch, heads, shape.length, width
        return np.broadcast_to(one, sizes) if device == "cpu" else one.expand(sizes)

    q, k = empty(shape.heads_q, shape.head_dim), empty(shape.heads_kv, shape.head_dim)
    return Call.of(q, k, empty(shape.heads_kv, shape.head_dim_v), scale=scale)


def whole_plan(pattern: Any, call: Call, *, backward: bool = False) -> Plan:
    """Return the plan that one process would execute on the call's device."""
    module, own = load("cpu" if call.device == "cpu" else "cuda"), resolve(pattern, call.sizes)
    if isinstance(own, Pattern):
        return module.plan_for(own, call, backward=backward)
    return find_plan(module, own, call, backward=backward)


@kept_with_plan
def key_transfers(
    plan: Plan,
    sharding: Sharding,
    rank: int,
    batch: int,
    heads_q: int,
    heads_kv: int,
    of_tables: Plan | None = None,
) -> tuple[Transfer, ...]:
    """Return who sends which keys to whom: a key that a rank's rows attend to, once.

    With `of_tables`, the plan of the backward pass, also the keys of all rows whose terms of table gradients it adds.
    """
    owners = sharding.owners()

    def needs(peer: int) -> np.ndarray:
        rows = owners == peer
        if of_tables is not None:
            rows |= lists_of_tables(of_tables, sharding, peer).rows.any(axis=0)
        return keys_of_rows(plan, rows)

    groups = np.broadcast_to(plan.variant, (batch, heads_q)).reshape(batch * heads_kv, -1)
    return _transfers(sharding, rank, groups, needs)


@kept_with_plan
def row_transfers(
    plan: Plan, sharding: Sharding, rank: int, batch: int, heads_q: int, tables: bool = False
) -> tuple[Transfer, ...]:
    """Return who sends which query rows to whom in the backward pass: a row that attends to a key of a rank, once.

    With `tables`, also the rows whose terms of table gradients it adds.
    """
    owners = sharding.owners()

    def needs(peer: int) -> np.ndarray:
        rows = rows_of_keys(plan, owners == peer)
        return rows | lists_of_tables(plan, sharding, peer).rows if tables else rows

    return _transfers(sharding, rank, np.broadcast_to(plan.variant, (batch, heads_q)).reshape(-1, 1), needs)


def _transfers(
    sharding: Sharding, rank: int, variants: np.ndarray, needs: Callable[[int], np.ndarray]
) -> tuple[Transfer, ...]:
    """Return the transfers of a rank; ``variants[h]`` are the variants that head h takes part in.

    ``needs(peer)`` has the rows that a rank needs, (variants, length) bool.
    """
    owners = sharding.owners()
    kinds, kind = np.unique(variants, axis=0, return_inverse=True)
    heads = [np.nonzero(kind.ravel() == number)[0] for number in range(len(kinds))]

    def blocks(needed: np.ndarray, owner: int) -> tuple[Block, ...]:
        rows = [np.nonzero(needed[own].any(axis=0) & (owners == owner))[0] for own in kinds]
        return tuple(Block(*block) for block in zip(heads, rows, strict=True) if len(block[1]))

    mine, found = needs(rank), []
    for peer in range(sharding.world_size):
        if peer != rank:
            transfer = Transfer(peer, blocks(needs(peer), rank), blocks(mine, peer))
            if transfer.send or transfer.receive:
                found.append(transfer)
    return tuple(found)
