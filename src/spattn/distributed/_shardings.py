"""Which rank has which rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..patterns.base.check import integer
from ..planning import Plan
from ..schedule.shard import Sharding, pairs_of_rows
from ._plans import Shape, call_of, whole_plan

__all__ = ["NAMES", "named", "shape_of", "shard"]

NAMES = "contiguous", "balanced", "head_tail", "striped"
_STRIPES = 16  # chunks of a rank


def shard(
    pattern: Any, shape: Sequence[int], world_size: int, sharding: str = "auto", *, dtype: str = "float32"
) -> Sharding:
    """Return which rank has which rows.

    Parameters
    ----------
    pattern : Pattern, Plan, array or str
        As in :func:`spattn.attention`.
    shape : sequence of int
        (batch, heads_q, heads_kv, length, head_dim) of the whole sequence.
    world_size : int
        Number of ranks.
    sharding : {"auto", "contiguous", "balanced", "head_tail", "striped"}, optional
        "contiguous": one chunk per rank, as in ``torch.chunk``. "balanced": one chunk per rank, with equal numbers of
        pairs. "head_tail": of ``2 * world_size`` chunks, rank r has the chunks r from either end. "striped": each rank
        has every ``world_size``-th of ``16 * world_size`` chunks. "auto": the one for which :func:`simulate` predicts
        the least time.
    dtype : str, optional
        "float32", "float64", "float16" or "bfloat16".

    Returns
    -------
    Sharding
        ``rows(rank)`` are the positions of a rank's rows.

    Examples
    --------
    >>> from spattn.distributed import shard
    >>> shard("causal", (1, 8, 8, 64, 32), 2, "head_tail").rows(0)[[0, 15, 16, 31]]
    array([ 0, 15, 48, 63])
    """
    world_size = integer("world_size", world_size, 1)
    if sharding == "auto":
        from ._simulation import simulate

        return simulate(pattern, shape, world_size, dtype=dtype).sharding
    sizes = shape_of(shape)
    plan = whole_plan(pattern, call_of(sizes, dtype)) if sharding == "balanced" else None
    return named(sharding, sizes, world_size, plan)


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
