"""Bytes and messages of a call, and the exchange of least predicted time: point-to-point, all-to-all or all-gather."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from ..planning import Plan
from ..planning.contract.cache import kept_with_plan
from ..schedule.shard import Sharding
from ..schedule.shard_totals import totals
from ._plans import Shape

__all__ = ["BANDWIDTH", "EXCHANGES", "LATENCY", "Traffic", "fastest", "traffic"]

EXCHANGES = "all_gather", "all_to_all", "point_to_point"  # of equals, the first: fewer calls of the library
BANDWIDTH, LATENCY = 25e9, 20e-6  # bytes per second into a rank, and seconds per message


class Traffic(NamedTuple):
    """What ranks exchange, and the tiles that they compute.

    Attributes
    ----------
    sent, received, messages : (world_size,) int64 array
        Bytes that each rank sends and receives, and messages that it receives, if only needed rows are sent.
    shard : int
        Bytes of the largest shard.
    own_tiles, tiles : (world_size,) int64 array
        See :class:`spattn.schedule.shard_totals.Totals`.
    """

    sent: np.ndarray
    received: np.ndarray
    messages: np.ndarray
    shard: int
    own_tiles: np.ndarray
    tiles: np.ndarray

    def seconds(self, bandwidth: float = BANDWIDTH, latency: float = LATENCY) -> dict[str, np.ndarray]:
        """Return the time of each exchange on each rank.

        Point-to-point, a rank waits for each message; in an all-to-all for one from each peer; an all-gather sends all
        rows to all, in logarithmically many rounds.
        """
        peers, moved = len(self.sent) - 1, np.maximum(self.sent, self.received) / bandwidth
        found = {"point_to_point": latency * self.messages + moved}
        if self.messages.any():
            found["all_to_all"] = latency * peers + moved
            rounds, gathered = peers.bit_length(), peers * self.shard / bandwidth
            found["all_gather"] = np.full(len(moved), latency * rounds + gathered)
        return found


@kept_with_plan
def traffic(plan: Plan, sharding: Sharding, shape: Shape, itemsize: int, backward: bool) -> Traffic:
    """Return what a pass exchanges: keys and values, or backward rows of q, the gradient of out, out and lse."""
    variant = np.broadcast_to(plan.variant, (shape.batch, shape.heads_q))
    heads = np.bincount(variant.ravel(), minlength=plan.variants)
    # Which variants each exchanged head takes part in, and the bytes of a row of such a head.
    groups = variant.reshape(-1, 1) if backward else variant.reshape(shape.batch * shape.heads_kv, -1)
    of_group = [(list(group), number) for group, number in Counter(map(tuple, groups.tolist())).items()]
    width = (shape.head_dim + shape.head_dim_v) * itemsize
    if backward:
        width += shape.head_dim_v * itemsize + max(itemsize, 4)
    found = totals(plan, sharding, of_group, heads, backward)
    largest = max(len(sharding.rows(rank)) for rank in range(sharding.world_size))
    return Traffic(
        found.sent * width,
        found.received * width,
        found.messages,
        largest * len(groups) * width,
        found.own_tiles,
        found.tiles,
    )


def fastest(seconds: dict[str, np.ndarray]) -> str:
    """Return the exchange whose slowest rank is fastest."""
    return min((name for name in EXCHANGES if name in seconds), key=lambda name: float(seconds[name].max()))
