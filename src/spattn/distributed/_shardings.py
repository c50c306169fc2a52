"""Which rank has which rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..patterns.base.check import integer
from ..planning import Plan
from ..schedule.shard import Sharding, pairs_of_rows
from ._plans import Shape

__all__ = ["NAMES", "named", "shape_of"]

NAMES = "contiguous", "balanced", "head_tail", "striped"
_STRIPES = 16  # chunks of a rank


def shape_of(shape: Sequence[int]) -> Shape:
    """Validate the shape of a whole sequence."""
    sizes = tuple(shape)
    if len(sizes) != 5:
        raise ValueError(f"shape: expected (batch, heads_q, heads_kv, length, head_dim), got {sizes}")
    batch, heads_q, heads_kv, length, head_dim = (integer("shape", size, 1) for size in sizes)
    return Shape(batch, heads_q, heads_kv, length, head_dim, head_dim)


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
