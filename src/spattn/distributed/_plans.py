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
from ..schedule.placement import HOME, Placement
from ..schedule.shard import Sharding, keys_of_rows, lists_of_tables, rows_of_items, rows_of_keys
from ..schedule.shard_gradients import GradientShare

__all__ = [
    "Block",
    "GradientTransfers",
    "Shape",
    "Transfer",
    "call_of",
    "gradient_transfers",
    "key_transfers",
    "partial_transfers",
    "query_transfers",
    "row_transfers",
    "whole_plan",
]


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
    placement: Placement | None = None,
) -> tuple[Transfer, ...]:
    """Return who sends which keys to whom: a key that a rank's rows attend to, once.

    With `of_tables`, the plan of the backward pass, also the keys of all rows whose terms of table gradients it adds.
    With a placement, the keys of the items that a rank computes.
    """
    owners = sharding.owners()

    def needs(peer: int) -> np.ndarray:
        rows = owners == peer
        if of_tables is not None:
            rows |= lists_of_tables(of_tables, sharding, peer).rows.any(axis=0)
        return keys_of_rows(plan, rows) if placement is None else _keys_of_items(plan, placement, rows, peer)

    return _transfers(sharding.owners(), sharding.world_size, rank, _groups(plan, batch, heads_q, heads_kv), needs)


def _groups(plan: Plan, batch: int, heads_q: int, heads_kv: int) -> np.ndarray:
    """Return the variants of the query heads of each key-value head."""
    return np.broadcast_to(plan.variant, (batch, heads_q)).reshape(batch * heads_kv, -1)


def _keys_of_items(plan: Plan, placement: Placement, owned: np.ndarray, rank: int) -> np.ndarray:
    """Return the keys that a rank's items read for its rows and for those of other ranks: (variants, kv_len) bool."""
    found = keys_of_rows(plan, owned, placement.of_item == HOME)
    lent = placement.of_item == rank
    return found | keys_of_rows(plan, np.ones(plan.q_len, bool), lent) if lent.any() else found


def query_transfers(
    plan: Plan, placement: Placement, sharding: Sharding, rank: int, batch: int, heads_q: int
) -> tuple[Transfer, ...]:
    """Return who sends which query rows to whom in the forward pass: those of items that a rank computes for others."""
    groups = _groups(plan, batch, heads_q, heads_q)

    def needs(peer: int) -> np.ndarray:
        return rows_of_items(plan, placement.of_item == peer)

    return _transfers(sharding.owners(), sharding.world_size, rank, groups, needs) if placement else ()


def partial_transfers(placement: Placement, variant: np.ndarray, sharding: Sharding, rank: int) -> tuple[Transfer, ...]:
    """Return who sends which workspace rows to whom; ``variant[b, h]`` is the variant of a head's items."""
    if not placement:
        return ()
    owners = sharding.owners()

    def needs(peer: int) -> np.ndarray:
        return placement.needed(owners, peer)

    return _transfers(placement.writers(), sharding.world_size, rank, variant.reshape(-1, 1), needs)


class GradientTransfers(NamedTuple):
    """The transfers of a backward pass: q, dout, out and lse; keys and values that the forward did not send; partials
    of dq; and those of dk and dv."""

    rows: tuple[Transfer, ...]
    keys: tuple[Transfer, ...]
    query_partials: tuple[Transfer, ...]
    key_partials: tuple[Transfer, ...]


def gradient_transfers(
    plan: Plan, share: GradientShare, forward: tuple[Plan, Placement], sharding: Sharding, rank: int, shape: Shape
) -> GradientTransfers:
    """Return the transfers of a backward pass; `forward` has the plan and the placement of the forward pass."""
    batch, heads_q, heads_kv = shape[:3]
    work, of_queries, of_keys = share.work, share.of_queries, share.of_keys
    if not (of_queries or of_keys or forward[1]):
        return GradientTransfers(row_transfers(plan, sharding, rank, batch, heads_q), (), (), ())
    owners, groups = sharding.owners(), _groups(plan, batch, heads_q, heads_kv)

    def needs_rows(peer: int) -> np.ndarray:
        return work.rows(of_keys, sharding, peer) | rows_of_items(plan, of_queries.of_item == peer)

    def needs_keys(peer: int) -> np.ndarray:
        owned = owners == peer
        found = _keys_of_items(plan, of_queries, owned, peer) | work.keys_of(of_keys.of_item == peer)
        # Variants of the plans are compared: those of unlike plans may be numbered in another order.
        alike = np.array_equal(plan.variant, forward[0].variant)
        return found & ~_keys_of_items(*forward, owned, peer) if alike else found

    every = heads_q * batch
    return GradientTransfers(
        _transfers(owners, sharding.world_size, rank, groups.reshape(every, 1), needs_rows),
        _transfers(owners, sharding.world_size, rank, groups, needs_keys),
        partial_transfers(of_queries, groups, sharding, rank),
        partial_transfers(of_keys, work.made.variant, sharding, rank),
    )


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

    return _transfers(sharding.owners(), sharding.world_size, rank, _groups(plan, batch, heads_q, heads_q), needs)


def _transfers(
    owners: np.ndarray, world_size: int, rank: int, variants: np.ndarray, needs: Callable[[int], np.ndarray]
) -> tuple[Transfer, ...]:
    """Return the transfers of a rank; ``variants[h]`` are the variants that head h takes part in.

    ``needs(peer)`` has the rows that a rank needs, (variants, length) bool. `owners` has the rank of each row, for all
    variants or for each.
    """
    kinds, kind = np.unique(variants, axis=0, return_inverse=True)
    heads = [np.nonzero(kind.ravel() == number)[0] for number in range(len(kinds))]

    def blocks(needed: np.ndarray, owner: int) -> tuple[Block, ...]:
        here = needed & (owners == owner)
        rows = [np.nonzero(here[own].any(axis=0))[0] for own in kinds]
        return tuple(Block(*block) for block in zip(heads, rows, strict=True) if len(block[1]))

    mine, found = needs(rank), []
    for peer in range(world_size):
        if peer != rank:
            transfer = Transfer(peer, blocks(needs(peer), rank), blocks(mine, peer))
            if transfer.send or transfer.receive:
                found.append(transfer)
    return tuple(found)
