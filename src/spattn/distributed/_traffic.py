"""Bytes and messages of a pass, and the exchange of least predicted time: point-to-point, all-to-all or all-gather."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..schedule.shard import Sharding
from ._plans import Block, Transfer

__all__ = ["EXCHANGES", "HEADS", "NETWORKS", "Network", "Traffic", "block_bytes", "fastest", "of_rank", "of_ranks"]

EXCHANGES = "all_gather", "all_to_all", "point_to_point"  # of equals, the first: fewer calls of the library
HEADS = "heads"  # not rows; see _by_heads.py


class Network(NamedTuple):
    """Bytes per second into a rank, and seconds per message."""

    bandwidth: float
    latency: float


NETWORKS = {"cpu": Network(25e9, 20e-6), "cuda": Network(280e9, 100e-6)}


class Traffic(NamedTuple):
    """What ranks exchange.

    Attributes
    ----------
    sent, received, messages : (world_size,) int64 array
        Bytes that each rank sends and receives, and messages that it receives, if only needed rows are sent.
    shard : int
        Bytes of the largest shard.
    """

    sent: np.ndarray
    received: np.ndarray
    messages: np.ndarray
    shard: int

    def seconds(self, bandwidth: float, latency: float) -> dict[str, np.ndarray]:
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


def fastest(seconds: dict[str, np.ndarray]) -> str:
    """Return the exchange whose slowest rank is fastest."""
    return min((name for name in EXCHANGES if name in seconds), key=lambda name: float(seconds[name].max()))


def of_rank(transfers: Sequence[Transfer], local: Sequence[Any]) -> bytes:
    """Return what a rank sends and receives along transfers, for :func:`of_ranks` of all ranks."""
    sent = sum(block_bytes(block, local) for transfer in transfers for block in transfer.send)
    received = [sum(block_bytes(block, local) for block in transfer.receive) for transfer in transfers]
    return np.array([sent, sum(received), np.count_nonzero(received)], np.int64).tobytes()


def of_ranks(ranks: Sequence[bytes], sharding: Sharding, local: Sequence[Any]) -> Traffic:
    """Return the traffic of all ranks."""
    sent, received, messages = np.array([np.frombuffer(x, np.int64) for x in ranks]).T
    largest = max(len(sharding.rows(rank)) for rank in range(sharding.world_size))
    heads = np.arange(local[0].shape[0] * local[0].shape[1])
    return Traffic(sent, received, messages, block_bytes(Block(heads, np.arange(largest)), local))


def block_bytes(block: Block, tensors: Sequence[Any]) -> int:
    """Return the bytes of a block's rows of some tensors."""
    return len(block.heads) * len(block.rows) * sum(x.shape[3] * x.element_size() for x in tensors)
