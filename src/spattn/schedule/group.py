"""Grouped launches: tiles, workers and task order for several problems in one launch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .tasks import Listed

__all__ = ["in_turns", "pieces", "tiles_of", "workers"]

_ITEM, _MERGE = 6, 6  # fixed cost of an item and of a combine, in tiles: docs/notebook/hopper_forward.md
_ROUNDS = 4  # number of rounds to try; more rounds mean more items


def tiles_of(plan: Listed, batch: int, heads: int, chosen: np.ndarray | None = None) -> int:
    """Count the tiles of a plan over all batch entries and query heads, optionally only in the `chosen` work items."""
    length = plan.work["end"] - plan.work["begin"]
    if chosen is not None:
        length = length * chosen
    ends = np.concatenate([[0], np.cumsum(length, dtype=np.int64)])[plan.work_indptr]
    return int(np.diff(ends)[np.broadcast_to(plan.variant, (batch, heads))].sum())


def workers(blocks: int, heads: int) -> int:
    """Return the number of workers for each head, at least 1; `heads` counts the heads of all batch entries."""
    return max(1, math.ceil(blocks / max(1, heads)))


def pieces(blocks: int, lists: int, tiles: int) -> int:
    """Return the number of items to split each of several equal lists into, so that the launch finishes soonest.

    `blocks` blocks run concurrently and take an item in each round. The heads of all batch entries have `lists` lists
    in total, each with `tiles` tiles.
    """

    def time(count: int) -> int:
        rounds = -(-max(1, lists) * count // blocks)
        return rounds * (-(-tiles // count) + _ITEM) + (_MERGE if count > 1 else 0)

    least = -(-max(1, lists) // blocks)  # minimum number of rounds
    full = (rounds * blocks // max(1, lists) for rounds in range(least, least + _ROUNDS))
    return min({1, *full}, key=lambda count: (time(count), count))


def in_turns(tasks: Sequence[np.ndarray], length: np.ndarray) -> np.ndarray:
    """Return the tasks of all problems in launch order; `length` is the number of tiles of each work item.

    Tasks are sorted by descending length, rounded to a power of two, so that the launch ends with short ones. Tasks of
    about equal length keep their order within a problem, so that the keys of few heads stay in the cache.
    """
    joined = np.concatenate(tasks)
    magnitude = np.frexp(length[joined["item"]])[1]
    return joined[np.argsort(-magnitude, kind="stable")]
