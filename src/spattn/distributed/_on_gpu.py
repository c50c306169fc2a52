"""Attention over local shards on GPUs: rows travel on NCCL's stream while tiles of local rows are computed."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ..arrays.operand import Operand, row_major
from ..cuda.host.backward_pass import BackwardPass
from ..cuda.host.execute import Workspace
from ..cuda.host.forward_pass import ForwardPass, partial_bytes
from ..planning import Plan
from ..request.call import Call
from ..schedule.placement import LATE, LENT, OWN
from ..schedule.shard import LOCAL, Sharding, Stage, TileRows, forward_stages
from ..schedule.shard_gradients import GradientShare, GradientStage
from ._plans import (
    Block,
    GradientTransfers,
    Shape,
    Transfer,
    gradient_transfers,
    key_transfers,
    partial_transfers,
    query_transfers,
)
from ._row_copies import RowCopy, Rows, runs_of

if TYPE_CHECKING:
    from ..cuda.driver.device import Device
    from ..cuda.host.family import Family

__all__ = ["OnGpu", "Received", "exchange", "needs_hopper", "readable"]

Received = list[tuple[Block, tuple[torch.Tensor, ...]]]
_CYCLES = 20_000  # about 10 µs
_ALIGNMENT = 16  # bytes of a tensor in a message
Range = tuple[int, int]  # first row, end


class Held(NamedTuple):
    """An array of the whole length of which only rows from `first` on are in memory, in `x`.

    Kernels address rows by their positions, and touch those of a stage's tiles alone: these must be in `x`.
    """

    x: torch.Tensor
    first: int
    length: int

    def operand(self) -> Operand:
        """Return the whole array as an operand of kernels."""
        (*sizes, _, width), strides = self.x.shape, self.x.stride()
        start = self.x.data_ptr() - self.first * strides[2] * self.x.element_size()
        return Operand(start, (*sizes, self.length, width), strides)

    @property
    def stop(self) -> int:
        """End of the rows in memory."""
        return self.first + self.x.shape[2]

    def covers(self, read: TileRows) -> bool:
        """Return whether the rows from the first to the last of some tiles are in memory."""
        return self.first <= read.first and read.stop <= self.stop


class Partials(NamedTuple):
    """A workspace of kernels, and the partials in it: tensors (batch, heads, workspace rows, width)."""

    buffer: torch.Tensor
    tensors: tuple[torch.Tensor, ...]


class Message(NamedTuple):
    """Bytes to send or to receive, and the tensors in them."""

    buffer: torch.Tensor
    tensors: list[torch.Tensor]

    @classmethod
    def of(cls, blocks: Sequence[Block], like: Sequence[torch.Tensor]) -> Message:
        """Return a message with the rows of some blocks, (heads, rows, width), of each array in `like`."""
        shapes = [((len(block.heads), len(block.rows), x.shape[3]), x.dtype) for block in blocks for x in like]
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in shapes]
        *starts, total = itertools.accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0)
        buffer = like[0].new_empty(total, dtype=torch.uint8)
        tensors = [
            buffer[start : start + size].view(dtype).view(shape)
            for start, size, (shape, dtype) in zip(starts, sizes, shapes, strict=True)
        ]
        return cls(buffer, tensors)


def exchange(
    group: Any, transfers: Sequence[Transfer], send: Sequence[Message], received: Sequence[Message]
) -> Callable[[], None]:
    """Begin to send and to receive a message for each transfer, unless it is empty.

    The current stream waits for all in the returned function.
    """
    operations = [
        dist.P2POp(begin, message.buffer, dist.get_global_rank(group, transfer.peer), group)
        for begin, messages in ((dist.irecv, received), (dist.isend, send))
        for transfer, message in zip(transfers, messages, strict=True)
        if message.tensors
    ]
    works = dist.batch_isend_irecv(operations) if operations else []

    def finish() -> None:
        for work in works:
            work.wait()

    return finish


class OnGpu:
    """What all calls of a rank with one plan share: stages, and indices on the device.

    `exchange` has the parameters and the result of the function of that name.
    """

    def __init__(
        self,
        group: Any,
        rank: int,
        sharding: Sharding,
        shape: Shape,
        call: Call,
        plan: Plan,
        plan_backward: Callable[[], Plan],
        gpu: Device,
        family: Family,
        exchange: Callable[..., Callable[[], None]] = exchange,
    ):
        self._group = _no_group if group is None else weakref.ref(group)
        self._rank, self._sharding, self._shape, self._call = rank, sharding, shape, call
        self._gpu, self._family = gpu, family
        self._plan, self._plan_backward, self._exchange = plan, plan_backward, exchange
        launcher = self._family.launcher
        if launcher is None or not self._family.accepts(plan):
            raise ValueError(needs_hopper(call, gpu))
        self._rows = sharding.rows(rank)
        self.length = shape.length
        self.first = int(self._rows[0]) if len(self._rows) else 0
        self.contiguous = len(self._rows) == 0 or int(self._rows[-1]) - self.first == len(self._rows) - 1
        self._everything = TileRows.of(np.ones(shape.length, bool))
        self._indices: dict[Any, Any] = {}
        sizes = shape.batch, shape.heads_q, shape.heads_kv
        self._placement = placement = launcher.placement(plan, self._sizes(), sharding)
        self._stages = forward_stages(plan, sharding, rank, placement=placement)
        self._keys = key_transfers(plan, sharding, rank, *sizes, placement=placement)
        self._queries = query_transfers(plan, placement, sharding, rank, *sizes[:2])
        variant = np.broadcast_to(plan.variant, sizes[:2])
        self._partials = partial_transfers(placement, variant, sharding, rank)
        self._of_backward: tuple[Plan, GradientShare, GradientTransfers] | None = None

    @property
    def sm_count(self) -> int:
        """Number of SMs, on which the work items depend that ranks share."""
        return self._gpu.sm_count

    def _sizes(self) -> tuple[int, int, int, int, int]:
        """Return batch, heads_q, heads_kv, head_dim and head_dim_v."""
        batch, heads_q, heads_kv, _, head_dim, head_dim_v = self._shape
        return batch, heads_q, heads_kv, head_dim, head_dim_v

    def backward_plan(self) -> tuple[Plan, GradientShare, GradientTransfers]:
        """Return plan, stages and transfers of the backward pass."""
        if self._of_backward is None:
            plan = self._plan_backward()
            launcher = self._family.launcher
            if launcher is None or not self._family.accepts(plan, backward=True):
                raise ValueError("pattern: the plan has no gradients on GPUs; pass its pattern")
            share = launcher.stages(plan, self._gpu.sm_count, self._sizes(), self._sharding, self._rank)
            forward = self._plan, self._placement
            transfers = gradient_transfers(plan, share, forward, self._sharding, self._rank, self._shape)
            self._of_backward = plan, share, transfers
        return self._of_backward

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, Received]:
        """Return the local rows of out and of lse, (batch, heads_q, n, 1), and the received rows of k and v."""
        of = self._shape
        if not len(self._rows):
            nothing = q.new_empty((of.batch, of.heads_q, 0, of.head_dim_v))
            return nothing, nothing[..., :1].float(), []
        lse = q.new_empty((of.batch, of.heads_q, of.length), dtype=torch.float32)
        received, finish = self._begin(self._keys, (k, v))
        lent_rows, finish_lent = self._begin(self._queries, (q,))
        own, lent, late = _by_role(self._stages)
        queries, keys = hull([x.queries for x in own]), hull([x.keys for x in own])
        out = self._result(q, of.head_dim_v, queries)
        partials = self._forward_partials(q) if late or lent else None
        of_queries = _Rows(self, (q,), queries)
        of_keys = _Rows(self, (k, v), keys)
        for stage in own:
            if stage.where != LOCAL:
                finish()
                finish = _nothing
                of_keys.add(received)
            arrays = *of_queries.of(stage.queries), *of_keys.of(stage.keys), out
            self._run_forward(stage, arrays, lse, scale, partials)
        finish()
        finish_lent()
        for stage in lent:
            arrays = *self._rows_for(stage.queries, (q,), lent_rows), *self._rows_for(stage.keys, (k, v), received), out
            self._run_forward(stage, arrays, lse, scale, partials)
        if partials is not None:
            self._exchange_partials([(self._partials, partials.tensors)])
        for stage in late:
            local = (Held(x, self.first, of.length) for x in (q, k, v))
            self._run_forward(stage, (*local, out), lse, scale, partials)
        return self._local(out), self._local(Held(lse[..., None], 0, of.length)).contiguous(), received

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        received: Received,
        scale: float,
    ) -> tuple[torch.Tensor, ...]:
        """Return the local rows of dq, dk and dv."""
        plan, share, transfers = self.backward_plan()
        if not len(self._rows):
            return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        remote, finish = self._begin(transfers.rows, (q, dout, out, lse))
        more, finish_keys = self._begin(transfers.keys, (k, v))
        received = [*received, *more]
        own, lent, late = _by_role(share.stages)
        queries, keys = hull([x.queries for x in own]), hull([x.keys for x in own])
        of_queries, of_keys = _Rows(self, (q, dout, out), queries), _Rows(self, (k, v), keys)
        # Rows of tiles that are not here take no part.
        every = self._everything
        of_lse = _Rows(self, (lse,), (every.first, every.stop), number=3, fill=-math.inf)
        dq = self._result(q, q.shape[3], hull([x.queries for x in own if x.items.any()]))
        written = hull([x.keys for x in own if x.key_items.any()])
        dk, dv = (self._result(x, x.shape[3], written) for x in (k, v))
        partials = self._gradient_partials(q, share) if late or lent else None
        for stage in sorted(own, key=lambda stage: stage.where_queries != LOCAL):
            if stage.where_queries != LOCAL:
                finish()
                finish = _nothing
                of_queries.add(remote)
                of_lse.add(remote)
            if stage.where_keys != LOCAL:
                finish_keys()
                finish_keys = _nothing
                of_keys.add(received)
            (held_q, held_dout, held_out), (lses,) = of_queries.of(stage.queries), of_lse.of(every)
            arrays = held_dout, held_q, *of_keys.of(stage.keys), held_out
            self._run_backward(plan, stage, arrays, lses.x[..., 0], (dq, dk, dv), scale, partials)
        finish()
        finish_keys()
        of_lse.add(remote)
        (lses,) = of_lse.of(every)
        for stage in lent:
            held_q, held_dout, held_out = self._rows_for(stage.queries, (q, dout, out), remote)
            arrays = held_dout, held_q, *self._rows_for(stage.keys, (k, v), received), held_out
            self._run_backward(plan, stage, arrays, lses.x[..., 0], (dq, dk, dv), scale, partials)
        if partials is not None:
            of_dq, *of_dk_dv = partials.tensors
            self._exchange_partials([(transfers.query_partials, [of_dq]), (transfers.key_partials, of_dk_dv)])
        for stage in late:
            arrays = tuple(Held(x, self.first, self.length) for x in (dout, q, k, v, out))
            self._run_backward(plan, stage, arrays, lses.x[..., 0], (dq, dk, dv), scale, partials)
        return self._local(dq), self._local(dk), self._local(dv)

    def _rows_for(self, read: TileRows, local: Sequence[torch.Tensor], received: Received) -> list[Held]:
        """Return arrays for one stage alone."""
        rows = _Rows(self, local, (read.first, read.stop))
        rows.add(received)
        return rows.of(read)

    def _forward_partials(self, like: torch.Tensor) -> Partials:
        """Return memory for the partials of out and of lse."""
        of, rows = self._shape, self._plan.slots * self._plan.block_q
        first, total = partial_bytes(of.batch * of.heads_q * rows, of.head_dim_v, 4)
        shape = of.batch, of.heads_q, rows
        return self._in_workspace(like, total, ((0, (*shape, of.head_dim_v)), (first, (*shape, 1))))

    def _gradient_partials(self, like: torch.Tensor, share: GradientShare) -> Partials:
        """Return memory for the statistics of rows and for the partials of dq, dk and dv."""
        return self._in_workspace(like, share.workspace_bytes, share.partials)

    def _in_workspace(self, like: torch.Tensor, nbytes: int, arrays: Sequence[tuple[int, tuple[int, ...]]]) -> Partials:
        """Return a workspace with float32 arrays, (offset in bytes, shape)."""
        buffer = like.new_empty(nbytes, dtype=torch.uint8)
        of = [buffer[first : first + 4 * math.prod(shape)].view(torch.float32).view(shape) for first, shape in arrays]
        return Partials(buffer, tuple(of))

    def _exchange_partials(self, each: Sequence[tuple[Sequence[Transfer], Sequence[torch.Tensor]]]) -> None:
        """Send partials and receive others. A kernel of NCCL that waits for a peer occupies SMs: begin late."""
        begun = [(to, *self._begin(transfers, to, partial=True)) for transfers, to in each]
        for to, received, finish in begun:
            finish()
            for block, tensors in received:
                for whole, x in zip(to, tensors, strict=True):
                    self.rows_of(block, (0, whole.shape[2]), whole.shape[1]).unpack(x, whole)

    def _run_forward(
        self, stage: Stage, arrays: Sequence[Held], lse: torch.Tensor, scale: float, partials: Partials | None
    ) -> None:
        q, k, v, out = (x.operand() for x in arrays)
        stream, workspace = self._stream_and_workspace(arrays[0].x, partials)
        sizes = self._call.dtype, scale, workspace
        with self._gpu:
            own = ForwardPass(self._gpu, stream, self._plan, q, k, v, out, lse.data_ptr(), *sizes, stage=stage)
            self._family.forward(own)

    def _run_backward(
        self,
        plan: Plan,
        stage: GradientStage,
        arrays: Sequence[Held],
        lse: torch.Tensor,
        results: Sequence[Held],
        scale: float,
        partials: Partials | None,
    ) -> None:
        dout, q, k, v, out = (x.operand() for x in arrays)
        dq, dk, dv = (x.operand() for x in results)
        lses = Operand(lse.data_ptr(), tuple(lse.shape), row_major(tuple(lse.shape)))
        stream, workspace = self._stream_and_workspace(arrays[0].x, partials)
        rest = lses, None, dq, dk, dv, self._call.dtype, scale, workspace
        with self._gpu:
            own = BackwardPass(self._gpu, stream, plan, dout, q, k, v, out, *rest, stage=stage)
            self._family.backward(own)

    def _stream_and_workspace(self, like: torch.Tensor, partials: Partials | None) -> tuple[int, Callable[[int], int]]:
        """Return the current stream, and an allocator of memory that lives as long as it, or of given memory."""
        kind, stream = self._call.kind, torch.cuda.current_stream(like.device).cuda_stream
        if partials is not None:
            buffer = partials.buffer

            def allocate(nbytes: int) -> int:
                if nbytes not in (0, buffer.nbytes):
                    raise RuntimeError(f"expected a workspace of {buffer.nbytes} bytes, got {nbytes}: a bug in spattn")
                return int(buffer.data_ptr())

            return stream, allocate
        return stream, Workspace(self._gpu, lambda nbytes: kind.allocate(like, nbytes))

    def _begin(
        self, transfers: Sequence[Transfer], local: Sequence[torch.Tensor], partial: bool = False
    ) -> tuple[Received, Callable[[], None]]:
        """Begin to send rows of local shards, or of partials; return where rows are received, and what waits for
        them."""
        if not transfers:
            return [], _nothing
        send = [Message.of(transfer.send, local) for transfer in transfers]
        messages = [Message.of(transfer.receive, local) for transfer in transfers]
        for transfer, message in zip(transfers, send, strict=True):
            pairs = itertools.product(transfer.send, local)
            for (block, x), packed in zip(pairs, message.tensors, strict=True):
                self.rows_of(block, (0, x.shape[2]) if partial else None, x.shape[1]).pack(x, packed)
        finish = self._exchange(self._group(), transfers, send, messages)
        if local[0].is_cuda and not partial:
            # Persistent CTAs of the local stage would occupy all SMs until they end: let NCCL's start first.
            torch.cuda._sleep(_CYCLES)
        received: Received = []
        for transfer, message in zip(transfers, messages, strict=True):
            tensors = iter(message.tensors)
            received += [(block, tuple(itertools.islice(tensors, len(local)))) for block in transfer.receive]
        return received, finish

    def rows_of(self, block: Block, there: Range | None, heads: int) -> RowCopy:
        """Return the copy between the rows of a block and those of an array that has the rows of a range, or the local
        rows if it is None."""
        key = id(block), there
        if key not in self._indices:
            begin, end = (0, len(block.rows)) if there is None else np.searchsorted(block.rows, there)
            rows, device = block.rows[begin:end], self._call.q.device
            of_array = np.searchsorted(self._rows, rows) if there is None else rows - there[0]
            every = len(block.heads) == self._shape.batch * heads
            own = None if every else torch.from_numpy(block.heads).to(device)
            # The block is kept, so that no other has its id.
            self._indices[key] = RowCopy(runs_of(device, of_array, np.arange(begin, end)), own), block
        copy: RowCopy = self._indices[key][0]
        return copy

    def others(self, read: TileRows, received: Received, heads: int, first: int) -> tuple[tuple[Rows, ...], ...]:
        """Return the rows of tiles that are neither the rank's nor received for all heads, counted from `first`."""
        key = id(read.mask), first, tuple(id(block) for block, _ in received)
        if key not in self._indices:
            mask = read.mask.copy()
            mask[self._rows] = False
            for block, _ in received:
                if len(block.heads) == self._shape.batch * heads:
                    mask[block.rows] = False
            self._indices[key] = runs_of(self._call.q.device, np.nonzero(mask)[0] - first), read
        rows: tuple[tuple[Rows, ...], ...] = self._indices[key][0]
        return rows

    def own_rows(self, read: TileRows | None, there: Range) -> tuple[tuple[Rows, ...], ...]:
        """Return the rank's rows of some tiles, None for all, in a range: counted from its start, and local."""
        key = "own rows", None if read is None else id(read.mask), there
        if key not in self._indices:
            rows = self._rows[slice(*np.searchsorted(self._rows, there))]
            rows = rows if read is None else rows[read.mask[rows]]
            of_local = np.searchsorted(self._rows, rows)
            self._indices[key] = runs_of(self._call.q.device, rows - there[0], of_local), read
        runs: tuple[tuple[Rows, ...], ...] = self._indices[key][0]
        return runs

    def within(self, read: TileRows, copied: TileRows | None) -> bool:
        """Return whether the rank's rows of some tiles are among those of others; None stands for all."""
        if copied is None or copied is read:
            return True
        key = "within", id(read.mask), id(copied.mask)
        if key not in self._indices:
            self._indices[key] = bool((copied.mask | ~read.mask)[self._rows].all()), read, copied
        found: bool = self._indices[key][0]
        return found

    def has_all(self, read: TileRows) -> bool:
        """Return whether the rank's rows are contiguous, and have all rows of tiles."""
        inside = self.first <= read.first and read.stop <= self.first + len(self._rows)
        return read.first == read.stop or (self.contiguous and inside)

    def _result(self, like: torch.Tensor, width: int, written: Range) -> Held:
        """Return memory for the rank's rows of a result and for those that are written."""
        first, stop = min(written[0], self.first), max(written[1], int(self._rows[-1]) + 1)
        return Held(like.new_empty((*like.shape[:2], stop - first, width)), first, self._shape.length)

    def _local(self, held: Held) -> torch.Tensor:
        """Return the rank's rows."""
        key = "rows", held.first
        if key not in self._indices:
            own = self._rows - held.first, np.arange(len(self._rows))
            self._indices[key] = runs_of(self._call.q.device, *own)
        if self.contiguous:
            return held.x[:, :, self._indices[key][0][0]]
        found = held.x.new_empty((*held.x.shape[:2], len(self._rows), held.x.shape[3]))
        for source, target in self._indices[key]:
            found[:, :, target] = held.x[:, :, source]
        return found


class _Rows:
    """Arrays of a rank with received rows, as the stages of a pass read them; rows of no tile are undefined.

    A stage whose tiles have rows of the rank alone reads the rank's arrays, if their rows are contiguous. Other stages
    read copies, in memory from the first to the last row of the stage, of the rows of its tiles or, if the rank's rows
    are in several parts, of all rows in the range `all_stages`, so that they are copied once.

    Parameters
    ----------
    local : sequence of tensors
        The rank's rows of each array.
    number : int
        Index of the first array among those of received blocks.
    fill : float
        Value of the rows of tiles that are not here.
    """

    def __init__(self, of: OnGpu, local: Sequence[torch.Tensor], all_stages: Range, number: int = 0, fill: float = 0.0):
        self._of, self._local, self._number, self._fill = of, local, number, fill
        self._all = None if of.contiguous else all_stages
        self._received: Received = []
        self._held, self._added = list[Held](), 0
        self._copied: TileRows | None = None  # the tiles whose rows are copied, None for all

    def add(self, received: Received) -> None:
        """Add the blocks that have come."""
        self._received = received

    def of(self, read: TileRows) -> list[Held]:
        """Return the arrays for a stage that reads the rows of some tiles."""
        own, heads = self._of, self._local[0].shape[1]
        if own.has_all(read):
            return [Held(x, own.first, own.length) for x in self._local]
        if not self._held or not self._held[0].covers(read) or not own.within(read, self._copied):
            self._copied = read if self._all is None else None
            self._held, self._added = self._copies(*(self._all or (read.first, read.stop))), 0
        held, first = self._held, self._held[0].first
        others = own.others(read, self._received, heads, first)
        if others:
            self._added = 0  # some heads' rows may be among those that blocks of other heads lack
        for (rows,) in others:
            for one in held:
                one.x[:, :, rows] = self._fill
        for block, tensors in self._received[self._added :]:
            copy = own.rows_of(block, (first, held[0].stop), heads)
            for one, x in zip(held, tensors[self._number : self._number + len(held)], strict=True):
                copy.unpack(x, one.x)
        self._added = len(self._received)
        return held

    def _copies(self, first: int, stop: int) -> list[Held]:
        """Return memory of a range, with the rank's rows of the copied tiles."""
        own, found = self._of, []
        for x in self._local:
            held = x.new_empty((*x.shape[:2], stop - first, x.shape[3]))
            for target, source in own.own_rows(self._copied, (first, stop)):
                held[:, :, target] = x[:, :, source]
            found.append(Held(held, first, own.length))
        return found


def hull(tiles: Sequence[TileRows]) -> Range:
    """Return the range from the first to the last row of some tiles."""
    some = [x for x in tiles if x.first < x.stop]
    return min((x.first for x in some), default=0), max((x.stop for x in some), default=0)


def _by_role(stages: Sequence[Any]) -> tuple[list[Any], ...]:
    """Return the rank's own stages, those for other ranks, and those with partials of other ranks."""
    return tuple([stage for stage in stages if stage.role == role] for role in (OWN, LENT, LATE))


def needs_hopper(call: Call, gpu: Device) -> str:
    """Return why these kernels do not compute a call."""
    return (
        "q: distributed attention on GPUs needs float16 or bfloat16, a head_dim of at most 256 that 8 divides, and "
        f"compute capability 9.0; got {call.dtype}, {call.head_dim} on {gpu.name}"
    )


def _no_group() -> None:
    """A rank that is alone has no group."""


def _nothing() -> None:
    """All rows have come."""


def readable(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor that TMA can address: aligned, with contiguous rows and positive strides."""
    steps = [step * x.element_size() for step, size in zip(x.stride()[:3], x.shape[:3], strict=True) if size > 1]
    fits = x.stride(3) == 1 and x.data_ptr() % 16 == 0 and all(step > 0 and step % 16 == 0 for step in steps)
    return x if fits else x.clone(memory_format=torch.contiguous_format)
