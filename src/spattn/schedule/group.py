"""Problems that run together: how much of the machine each of them has, and the order of all of their tasks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .tasks import Listed

__all__ = ["in_turns", "shares", "tiles_of", "workers"]


def tiles_of(plan: Listed, batch: int, heads: int) -> int:
    """Tiles that a plan computes for so many batch entries and query heads."""
    length = plan.work["end"] - plan.work["begin"]
    ends = np.concatenate([[0], np.cumsum(length, dtype=np.int64)])[plan.work_indptr]
    return int(np.diff(ends)[np.broadcast_to(plan.variant, (batch, heads))].sum())


def shares(costs: Sequence[float]) -> list[float]:
    """The part of the machine that each of several problems has while they run side by side: as large as its part of
    their cost, so that all of them would end together. Problems that cost nothing have equal parts."""
    total = sum(costs)
    return [cost / total if total else 1 / len(costs) for cost in costs]


def workers(blocks: int, heads: int, share: float = 1.0) -> int:
    """How many workers share the work of one head, at least 1.

    Parameters
    ----------
    blocks : int
        That run side by side on the machine.
    heads : int
        Of all batch entries of the problem.
    share : float
        The problem's part of the machine.
    """
    return max(1, math.ceil(blocks * share / max(1, heads)))


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
