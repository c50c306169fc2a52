"""Move rows between ranks, without arithmetic: one message from a rank to a peer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ._plans import Block, Transfer

__all__ = ["exchange", "scatter", "whole"]


def whole(x: torch.Tensor, rows: torch.Tensor, length: int) -> torch.Tensor:
    """Return a local shard at its positions of the whole sequence, between zeros, whose memory is not touched."""
    batch, heads, _, width = x.shape
    size = batch * heads * length * width * x.element_size()
    found = torch.from_numpy(np.zeros(size, np.uint8)).view(x.dtype).view(batch, heads, length, width)
    found[:, :, rows] = x
    return found


def exchange(
    group: Any,
    transfers: Sequence[Transfer],
    header: bytes,
    local: Sequence[torch.Tensor],
    rows: torch.Tensor,
    to: Sequence[torch.Tensor],
) -> Callable[[], None]:
    """Begin to send rows of local shards, (batch, heads, n, width), along the transfers.

    Each message starts with the sender's digest of the call, `header`.

    Returns
    -------
    callable
        Waits for the messages and writes the received rows to `to`.

    Raises
    ------
    RuntimeError
        If a rank does not answer within the timeout of the process group.
    ValueError
        If a received header differs.
    """
    if not transfers:
        return lambda: None
    number = torch.full((to[0].shape[2],), -1)
    number[rows] = torch.arange(len(rows))
    receives = {
        transfer.peer: torch.empty(
            len(header) + sum(_bytes(block, to) for block in transfer.receive), dtype=torch.uint8
        )
        for transfer in transfers
        if transfer.receive
    }
    first = torch.tensor(list(header), dtype=torch.uint8)
    sends = {transfer.peer: _packed(first, transfer.send, local, number) for transfer in transfers if transfer.send}
    peers = [transfer.peer for transfer in transfers]
    operations = [_operation(dist.irecv, x, group, peer) for peer, x in receives.items()]
    operations += [_operation(dist.isend, x, group, peer) for peer, x in sends.items()]
    try:
        works = dist.batch_isend_irecv(operations)
    except RuntimeError as error:
        raise _no_exchange(peers) from error

    def finish() -> None:
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise _no_exchange(peers) from error
        others = [peer for peer, x in receives.items() if not torch.equal(x[: len(header)], first)]
        if others:
            raise ValueError(
                f"attention: ranks {sorted(others)} passed another pattern, shape, scale or seed; "
                "SPATTN_CHECK_RANKS=1 says which"
            )
        for transfer in transfers:
            if transfer.receive:
                _unpack(transfer.receive, receives[transfer.peer][len(header) :], to)

    return finish


def scatter(group: Any, x: np.ndarray) -> tuple[slice, np.ndarray]:
    """Divide the rows of an array, (n, words), among the ranks.

    Returns
    -------
    slice
        The rank's part.
    (ranks, rows, words) array
        This part of the arrays of all ranks.

    Raises
    ------
    RuntimeError
        If a rank does not answer within the timeout of the process group.
    """
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    bounds = [len(x) * part // world_size for part in range(world_size + 1)]
    counts = [stop - start for start, stop in itertools.pairwise(bounds)]
    received = torch.from_numpy(np.empty((world_size, counts[rank], x.shape[1]), x.dtype))
    try:
        dist.all_to_all_single(
            received.flatten(0, 1), torch.from_numpy(x), [counts[rank]] * world_size, counts, group=group
        )
    except RuntimeError as error:
        raise _no_exchange(set(range(world_size)) - {rank}) from error
    return slice(*bounds[rank : rank + 2]), received.numpy()


def _no_exchange(ranks: Iterable[int]) -> RuntimeError:
    peers = sorted(ranks)
    return RuntimeError(
        f"attention: no exchange with ranks {peers} within the timeout of the process group: a rank has died, "
        "stalled, or made another call (SPATTN_CHECK_RANKS=1 compares all calls). Make a new process group"
    )


def _operation(what: Any, x: torch.Tensor, group: Any, peer: int) -> Any:
    return dist.P2POp(what, x, dist.get_global_rank(group, peer), group)


def _bytes(block: Block, tensors: Sequence[torch.Tensor]) -> int:
    return len(block.heads) * len(block.rows) * sum(x.shape[3] * x.element_size() for x in tensors)


def _index(block: Block) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(block.heads)[:, None], torch.from_numpy(block.rows)


def _packed(
    header: torch.Tensor, blocks: Sequence[Block], local: Sequence[torch.Tensor], number: torch.Tensor
) -> torch.Tensor:
    parts = [header]
    for block in blocks:
        heads, rows = _index(block)
        parts += [x.flatten(0, 1)[heads, number[rows]].view(torch.uint8).flatten() for x in local]
    return torch.cat(parts)


def _unpack(blocks: Sequence[Block], received: torch.Tensor, to: Sequence[torch.Tensor]) -> None:
    begin = 0
    for block in blocks:
        heads, rows = _index(block)
        for x in to:
            shape = len(block.heads), len(block.rows), x.shape[3]
            end = begin + math.prod(shape) * x.element_size()
            # A copy: the bytes may not be aligned to elements.
            x.view(-1, *x.shape[2:])[heads, rows] = received[begin:end].clone().view(x.dtype).view(shape)
            begin = end
