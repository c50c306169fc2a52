"""Problems that run together: their tiles, the workers of each, and the order of all of their tasks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .tasks import Listed

__all__ = ["in_turns", "pieces", "tiles_of", "workers"]

_ITEM, _MERGE = 6, 6  # tiles that an item, and a merge of all, take as long as: docs/notebook/hopper_forward.md
_ROUNDS = 4  # that are tried; more of them are more items


def tiles_of(plan: Listed, batch: int, heads: int, chosen: np.ndarray | None = None) -> int:
    """Tiles that a plan computes for so many batch entries and query heads, or those of the chosen work items."""
    length = plan.work["end"] - plan.work["begin"]
    if chosen is not None:
        length = length * chosen
    ends = np.concatenate([[0], np.cumsum(length, dtype=np.int64)])[plan.work_indptr]
    return int(np.diff(ends)[np.broadcast_to(plan.variant, (batch, heads))].sum())


def workers(blocks: int, heads: int) -> int:
    """How many workers share the work of one head, at least 1.

    Parameters
    ----------
    blocks : int
        That run side by side on the machine.
    heads : int
        Of all batch entries of the problem.
    """
    return max(1, math.ceil(blocks / max(1, heads)))


def pieces(blocks: int, lists: int, tiles: int) -> int:
    """Into how many pieces equal lists are cut, so that blocks which take a piece each, round after round, end soonest.

    Parameters
    ----------
    blocks : int
        That run side by side on the machine.
    lists : int
        Of all heads and batch entries.
    tiles : int
        Of each list.
    """

    def time(count: int) -> int:
        rounds = -(-max(1, lists) * count // blocks)
        return rounds * (-(-tiles // count) + _ITEM) + (_MERGE if count > 1 else 0)

    least = -(-max(1, lists) // blocks)  # rounds
    full = (rounds * blocks // max(1, lists) for rounds in range(least, least + _ROUNDS))
    return min({1, *full}, key=lambda count: (time(count), count))


def in_turns(tasks: Sequence[np.ndarray], length: np.ndarray) -> np.ndarray:
    """The tasks of all problems in the order in which blocks take them.

    Tasks of more tiles come before tasks of fewer, by powers of two, so that only short ones are left when blocks run
    out of work. Among those that are about as long, the tasks of a problem stay together and in their order, which
    keeps the keys of few heads in the cache.

    Parameters
    ----------
    tasks : sequence of arrays of TASK
        Of each problem, in its own order.
    length : (items,) array
        Tiles of the work items that they name.
    """
    joined = np.concatenate(tasks)
    magnitude = np.frexp(length[joined["item"]])[1]
    return joined[np.argsort(-magnitude, kind="stable")]
