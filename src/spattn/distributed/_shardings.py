"""Which rank has which rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..patterns.base.check import integer
from ..planning import Plan
from ..schedule.shard import Sharding, pairs_of_rows
from ._plans import Shape

__all__ = ["NAMES", "checked", "named", "shape_of"]

NAMES = "contiguous", "balanced", "head_tail", "striped"
_STRIPES = 16  # chunks of a rank


def shape_of(shape: Sequence[int]) -> Shape:
    """Validate the shape of a whole sequence."""
    sizes = tuple(shape)
    if len(sizes) != 5:
        raise ValueError(f"shape: expected (batch, heads_q, heads_kv, length, head_dim), got {sizes}")
    batch, heads_q, heads_kv, length, head_dim = (integer("shape", size, 1) for size in sizes)
    return Shape(batch, heads_q, heads_kv, length, head_dim, head_dim)


def checked(sharding: Sharding) -> Sharding:
    """Return a user's sharding with ints, each row of which has a rank; raise ValueError otherwise."""
    world_size = integer("sharding.world_size", sharding.world_size, 1)
    bounds = tuple(integer("sharding.bounds", x, 0) for x in sharding.bounds)
    ranks = tuple(integer("sharding.ranks", x, 0, world_size - 1) for x in sharding.ranks)
    if len(bounds) != len(ranks) + 1 or bounds[0] != 0 or list(bounds) != sorted(bounds):
        raise ValueError(f"sharding: expected ascending bounds from 0, one more than ranks; got {bounds} and {ranks}")
    return Sharding(bounds, ranks, world_size)


def named(sharding: str, shape: Shape, world_size: int, plan: Plan | None) -> Sharding:
    """Return the sharding of a name; "balanced" needs the plan."""
    length, ranks = shape.length, np.arange(world_size)
    if sharding == "contiguous":
        bounds = np.minimum(np.arange(world_size + 1) * -(-length // world_size), length)
    elif sharding == "balanced":
        assert plan is not None
        heads = np.bincount(np.broadcast_to(plan.variant, (shape.batch, shape.heads_q)).ravel())
        cost = np.cumsum(heads @ pairs_of_rows(plan))
        bounds = np.searchsorted(cost, cost[-1] * np.arange(world_size + 1) / world_size)
        bounds[0], bounds[-1] = 0, length
    else:
        if sharding == "head_tail":
            ranks = np.concatenate([ranks, ranks[::-1]])
        elif sharding == "striped":
            ranks = np.tile(ranks, _STRIPES)
        else:
            raise ValueError(f"sharding: expected 'auto' or one of {', '.join(map(repr, NAMES))}; got {sharding!r}")
        bounds = length * np.arange(len(ranks) + 1) // len(ranks)
    return Sharding(tuple(bounds.tolist()), tuple(ranks.tolist()), world_size)
