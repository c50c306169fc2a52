"""Grouped launches: tiles, workers and task order of several problems."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .tasks import Listed

__all__ = ["in_turns", "pieces", "tiles_of", "workers"]

_ITEM, _MERGE = 6, 6  # cost of an item, and of combining partials, in tiles: docs/notebook/hopper_forward.md
_ROUNDS = 4  # rounds tried; more rounds mean more items


def tiles_of(plan: Listed, batch: int, heads: int, chosen: np.ndarray | None = None) -> int:
    """Return the tiles of a plan over all batch entries and query heads, optionally of chosen work items only."""
    length = plan.work["end"] - plan.work["begin"]
    if chosen is not None:
        length = length * chosen
    ends = np.concatenate([[0], np.cumsum(length, dtype=np.int64)])[plan.work_indptr]
    return int(np.diff(ends)[np.broadcast_to(plan.variant, (batch, heads))].sum())


def workers(blocks: int, heads: int) -> int:
    """Return the workers per head, at least 1, for `blocks` concurrent blocks and `heads` heads over the batch."""
    return max(1, math.ceil(blocks / max(1, heads)))


def pieces(blocks: int, lists: int, tiles: int) -> int:
    """Return the number of pieces to cut equal lists into, so that blocks that take a piece per round finish soonest.

    `blocks` run concurrently; `lists` counts the lists of all heads and batch entries, of `tiles` tiles each.
    """

    def time(count: int) -> int:
        rounds = -(-max(1, lists) * count // blocks)
        return rounds * (-(-tiles // count) + _ITEM) + (_MERGE if count > 1 else 0)

    least = -(-max(1, lists) // blocks)  # rounds
    full = (rounds * blocks // max(1, lists) for rounds in range(least, least + _ROUNDS))
    return min({1, *full}, key=lambda count: (time(count), count))


def in_turns(tasks: Sequence[np.ndarray], length: np.ndarray) -> np.ndarray:
    """Return the tasks of all problems in launch order; `length` is the tiles of their work items.

    Longer tasks come first, by powers of two, so that only short ones are left at the end of the launch. Tasks of about
    equal length keep their order within a problem, so that the keys of few heads stay in the cache.
    """
    joined = np.concatenate(tasks)
    magnitude = np.frexp(length[joined["item"]])[1]
    return joined[np.argsort(-magnitude, kind="stable")]
