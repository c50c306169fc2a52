"""Move rows between ranks, without arithmetic: point-to-point, by an all-to-all, or by an all-gather."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..schedule.shard import Sharding
from ._plans import Block, Transfer
from ._traffic import block_bytes

__all__ = ["exchange", "no_exchange", "scatter", "whole"]


def whole(x: torch.Tensor, rows: torch.Tensor, length: int) -> torch.Tensor:
    """Return a local shard at its positions of the whole sequence, between zeros, whose memory is not touched."""
    batch, heads, _, width = x.shape
    size = batch * heads * length * width * x.element_size()
    found = torch.from_numpy(np.zeros(size, np.uint8)).view(x.dtype).view(batch, heads, length, width)
    found[:, :, rows] = x
    return found


def exchange(
    group: Any,
    kind: str,
    transfers: Sequence[Transfer],
    local: Sequence[torch.Tensor],
    sharding: Sharding,
    to: Sequence[torch.Tensor],
) -> Callable[[], None]:
    """Begin to send rows of local shards, (batch, heads, n, width), along the transfers; an all-gather sends all rows.

    Returns
    -------
    callable
        Waits for the messages and writes the received rows to `to`.

    Raises
    ------
    RuntimeError
        If a rank does not answer within the timeout of the process group.
    """
    rank, peers = dist.get_rank(group), [transfer.peer for transfer in transfers]
    rows = sharding.rows(rank)
    if kind != "point_to_point":
        peers = [peer for peer in range(sharding.world_size) if peer != rank]
    if kind == "all_gather":
        heads = np.arange(local[0].shape[0] * local[0].shape[1])
        mine = (Block(heads, rows),)
        transfers = [Transfer(peer, mine, (Block(heads, sharding.rows(peer)),)) for peer in peers]
    if not peers:
        return lambda: None
    number = torch.full((sharding.length,), -1)
    number[torch.from_numpy(rows)] = torch.arange(len(rows))
    sizes = {x.peer: sum(block_bytes(block, to) for block in x.receive) for x in transfers if x.receive}
    try:
        if kind == "all_gather":
            own = _packed(mine, local, number)
            works, receives = _all_gather(group, own, sizes)
        else:
            sends = {x.peer: _packed(x.send, local, number) for x in transfers if x.send}
            works, receives = (_all_to_all if kind == "all_to_all" else _point_to_point)(group, sends, sizes)
    except RuntimeError as error:
        raise no_exchange(peers) from error

    def finish() -> None:
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise no_exchange(peers) from error
        for transfer in transfers:
            if transfer.receive:
                _unpack(transfer.receive, receives[transfer.peer], to)

    return finish


_Begun = tuple[Sequence[Any], dict[int, torch.Tensor]]  # works, and the messages by peer


def _point_to_point(group: Any, sends: dict[int, torch.Tensor], sizes: dict[int, int]) -> _Begun:
    receives = {peer: torch.empty(size, dtype=torch.uint8) for peer, size in sizes.items()}
    operations = [_operation(dist.irecv, x, group, peer) for peer, x in receives.items()]
    operations += [_operation(dist.isend, x, group, peer) for peer, x in sends.items()]
    return dist.batch_isend_irecv(operations), receives


def _all_to_all(group: Any, sends: dict[int, torch.Tensor], sizes: dict[int, int]) -> _Begun:
    ranks = range(dist.get_world_size(group))
    given, taken = [len(sends[peer]) if peer in sends else 0 for peer in ranks], [sizes.get(peer, 0) for peer in ranks]
    received, nothing = torch.empty(sum(taken), dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)
    sent = torch.cat([nothing, *(sends[peer] for peer in sorted(sends))])
    work = dist.all_to_all_single(received, sent, taken, given, group=group, async_op=True)
    return [work], {peer: x for peer, x in enumerate(received.split(taken)) if peer in sizes}


def _all_gather(group: Any, own: torch.Tensor, sizes: dict[int, int]) -> _Begun:
    most = max(len(own), *sizes.values())  # messages of an all-gather have one length
    received = [torch.empty(most, dtype=torch.uint8) for _ in range(dist.get_world_size(group))]
    work = dist.all_gather(received, torch.nn.functional.pad(own, (0, most - len(own))), group=group, async_op=True)
    return [work], {peer: received[peer] for peer in sizes}


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
        raise no_exchange(set(range(world_size)) - {rank}) from error
    return slice(*bounds[rank : rank + 2]), received.numpy()


def no_exchange(ranks: Iterable[int]) -> RuntimeError:
    """Return the error of an exchange that does not end."""
    peers = sorted(ranks)
    return RuntimeError(
        f"attention: no exchange with ranks {peers} within the timeout of the process group: a rank has died "
        "or stalled. Make a new process group"
    )


def _operation(what: Any, x: torch.Tensor, group: Any, peer: int) -> Any:
    return dist.P2POp(what, x, dist.get_global_rank(group, peer), group)


def _index(block: Block) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(block.heads)[:, None], torch.from_numpy(block.rows)


def _packed(blocks: Sequence[Block], local: Sequence[torch.Tensor], number: torch.Tensor) -> torch.Tensor:
    parts = []
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
