"""Attention by heads: ranks exchange rows of all heads for all rows of some heads, compute, and exchange back.

Source: Jacobs et al., DeepSpeed Ulysses (arXiv:2309.14509). Here, heads are computed in parts while others travel.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist

from .. import attention as attention_of_one
from .. import cpu
from ..arrays.operand import Operand
from ..cuda.host.backward_pass import BackwardPass
from ..cuda.host.execute import Workspace
from ..cuda.host.forward_pass import ForwardPass
from ..planning import Plan
from ..request.call import Call
from ..schedule.shard import Sharding
from ._exchange import no_exchange
from ._on_gpu import needs_hopper
from ._plans import Shape
from ._row_copies import runs_of

if TYPE_CHECKING:
    from ..cuda.driver.device import Device
    from ..cuda.host.family import Family

__all__ = ["ByHeads", "OnCpu", "OnHopper"]

_PARTS = 8  # of the heads or batch entries of a rank; each is a message to each rank
_Tensors = Sequence[torch.Tensor]


class Part(NamedTuple):
    """Some batch entries and key-value heads of a rank, and the query heads of these."""

    entries: slice
    heads: slice
    heads_kv: int  # of the rank

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Return the part of an array with the rank's heads."""
        group = x.shape[1] // self.heads_kv
        return x[self.entries, self.heads.start * group : self.heads.stop * group]


class Kernels(Protocol):
    """Compute heads of a call with the bits of the whole call."""

    def in_parts(self, backward: bool) -> bool:
        """Return whether parts are computed when they have come, rather than all heads together."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Compute out and lse, (batch, heads, n)."""

    def backward(self, arrays: _Tensors, results: _Tensors) -> None:
        """Compute dq, dk and dv of dout, q, k, v, out and lse."""


class OnCpu:
    """See :class:`Kernels`; `call` is the whole call."""

    def __init__(self, plan: Plan, plan_backward: Callable[[], Plan], call: Call):
        self._plan, self._plan_backward, self._scale = plan, plan_backward, call.scale
        self._whole = call.batch * call.heads_kv

    def in_parts(self, backward: bool) -> bool:
        return False

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        found = attention_of_one(q, k, v, self._plan, scale=self._scale, backend="cpu", return_lse=True)
        for to, x in zip((out, lse), found, strict=True):
            to.copy_(x)

    def backward(self, arrays: _Tensors, results: _Tensors) -> None:
        call = Call.of(*arrays[1:4], scale=self._scale)
        run = cpu.prepare_backward(call, self._plan_backward(), whole=self._whole)
        dout, q, k, v, out, lse = map(call.kind.to_numpy, arrays)
        for to, x in zip(results, run(dout, q, k, v, out, lse, None, call.scale), strict=True):
            to.copy_(call.kind.from_numpy(x))


class OnHopper:
    """See :class:`Kernels`; `call` is the whole call, of whose heads the ranks have equally many."""

    def __init__(
        self,
        plan: Plan,
        plan_backward: Callable[[], Plan],
        call: Call,
        world_size: int,
        gpu: Device,
        family: Family,
    ):
        if family.launcher is None or not family.accepts(plan):
            raise ValueError(needs_hopper(call, gpu))
        self._plan, self._plan_backward, self._call = plan, plan_backward, call
        self._gpu, self._family, self._launcher = gpu, family, family.launcher
        self._whole = call.batch, call.heads_q, call.heads_kv
        self._own = call.batch, call.heads_q // world_size, call.heads_kv // world_size

    def in_parts(self, backward: bool) -> bool:
        if not backward:
            return True
        with self._gpu:
            return not self._launcher.fuses(self._plan_backward(), self._gpu, self._own, self._whole)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        of_q, of_k, of_v, of_out = map(_operand, (q, k, v, out))
        rest = lse.data_ptr(), self._call.dtype, self._call.scale, self._workspace(q)
        with self._gpu:
            self._family.forward(ForwardPass(self._gpu, _stream(q), self._plan, of_q, of_k, of_v, of_out, *rest))

    def backward(self, arrays: _Tensors, results: _Tensors) -> None:
        dout, q, k, v, out, lse = map(_operand, arrays)
        dq, dk, dv = map(_operand, results)
        rest = self._call.dtype, self._call.scale, self._workspace(arrays[0])
        with self._gpu:
            to = self._gpu, _stream(arrays[0]), self._plan_backward()
            own = BackwardPass(*to, dout, q, k, v, out, lse, None, dq, dk, dv, *rest, whole=self._whole)
            self._family.backward(own)

    def _workspace(self, like: torch.Tensor) -> Callable[[int], int]:
        return Workspace(self._gpu, lambda nbytes: self._call.kind.allocate(like, nbytes))


def _operand(x: torch.Tensor) -> Operand:
    return Operand(x.data_ptr(), tuple(x.shape), x.stride())


def _stream(like: torch.Tensor) -> int:
    return int(torch.cuda.current_stream(like.device).cuda_stream)


class ByHeads:
    """What all calls of a rank with one plan share; the ranks divide the key-value heads."""

    def __init__(self, group: Any, sharding: Sharding, shape: Shape, device: torch.device, kernels: Kernels):
        self._group, self._length, self._kernels = weakref.ref(group), shape.length, kernels
        self._world_size = sharding.world_size
        heads = shape.heads_kv // sharding.world_size
        self._all = Part(slice(0, shape.batch), slice(0, heads), heads)
        if shape.batch == 1:  # rows of one head are contiguous, and received in place
            self._parts = [Part(slice(0, 1), own, heads) for own in _slices(heads)]
        else:
            self._parts = [Part(own, slice(0, heads), heads) for own in _slices(shape.batch)]
        rows = [sharding.rows(rank) for rank in range(sharding.world_size)]
        self._count = [len(own) for own in rows]
        self._runs = [runs_of(device, own, np.arange(len(own))) for own in rows]  # of the sequence, and of a rank

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the local rows of out; then q, k, v, out and lse of the rank's heads."""
        whole = [self._whole(x) for x in (q, k, v)]
        out = whole[0].new_empty((*whole[0].shape[:3], v.shape[3]))
        lse = out.new_empty(out.shape[:3], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
        local = q.new_empty((*q.shape[:3], v.shape[3]))

        def compute(part: Part) -> None:
            self._kernels.forward(*map(part.of, (*whole, out, lse)))

        self._run(((q, k, v), whole), compute, ((out,), (local,)), in_parts=self._kernels.in_parts(False))
        return local, *whole, out, lse

    def backward(self, dout: torch.Tensor, saved: _Tensors) -> tuple[torch.Tensor, ...]:
        """Return the local rows of dq, dk and dv, given the arrays of the rank's heads from :meth:`forward`."""
        whole, results = self._whole(dout), [torch.empty_like(x) for x in saved[:3]]
        sizes = [(len(x), x.shape[1] * self._world_size, dout.shape[2], x.shape[3]) for x in results]
        local = tuple(map(dout.new_empty, sizes))

        def compute(part: Part) -> None:
            self._kernels.backward([part.of(x) for x in (whole, *saved)], [part.of(x) for x in results])

        self._run(((dout,), (whole,)), compute, (results, local), in_parts=self._kernels.in_parts(True))
        return local

    def _whole(self, local: torch.Tensor) -> torch.Tensor:
        """Return memory for all rows of the rank's heads."""
        return local.new_empty((len(local), local.shape[1] // self._world_size, self._length, local.shape[3]))

    def _run(
        self,
        to_heads: tuple[_Tensors, _Tensors],
        compute: Callable[[Part], None],
        to_rows: tuple[_Tensors, _Tensors],
        in_parts: bool,
    ) -> None:
        """Exchange rows, compute parts that have come, each alone or all together, and exchange results."""
        begun = [[self._to_heads(part, x, to) for x, to in zip(*to_heads, strict=True)] for part in self._parts]
        ends: list[Callable[[], None]] = []

        def send(part: Part) -> None:
            ends.extend(self._to_rows(part, x, to) for x, to in zip(*to_rows, strict=True))

        for part, arrived in zip(self._parts, begun, strict=True):
            for finish in arrived:
                finish()
            if in_parts:
                compute(part)
                send(part)
        if not in_parts:
            compute(self._all)
            for part in self._parts:
                send(part)
        for finish in ends:
            finish()

    def _to_heads(self, part: Part, local: torch.Tensor, to: torch.Tensor) -> Callable[[], None]:
        """Begin to exchange local rows of all heads for all rows of a part; the result waits for them."""
        there, send = part.of(to), [part.of(x).contiguous() for x in local.chunk(self._world_size, 1)]
        receive = [self._rows_of(there, rank) for rank in range(self._world_size)]
        finish = self._exchange([x for x, _ in receive], send)

        def unpack() -> None:
            finish()
            for runs, (x, in_place) in zip(self._runs, receive, strict=True):
                for of_whole, of_rank in () if in_place else runs:
                    there[:, :, of_whole] = x[:, :, of_rank]

        return unpack

    def _to_rows(self, part: Part, whole: torch.Tensor, to: torch.Tensor) -> Callable[[], None]:
        """Begin to exchange all rows of a part for local rows of all heads; the result waits for them."""
        there, targets = part.of(whole), [part.of(x) for x in to.chunk(self._world_size, 1)]
        receive = [x if x.is_contiguous() else x.new_empty(x.shape) for x in targets]
        send = []
        for rank, runs in enumerate(self._runs):
            x, in_place = self._rows_of(there, rank)
            for of_whole, of_rank in () if in_place else runs:
                x[:, :, of_rank] = there[:, :, of_whole]
            send.append(x)
        finish = self._exchange(receive, send)

        def unpack() -> None:
            finish()
            for x, target in zip(receive, targets, strict=True):
                if x is not target:
                    target.copy_(x)

        return unpack

    def _rows_of(self, there: torch.Tensor, rank: int) -> tuple[torch.Tensor, bool]:
        """Return memory for a rank's rows of a part, and whether it is that of the part."""
        runs = self._runs[rank]
        if len(runs) == 1 and isinstance(runs[0][0], slice):
            rows = there[:, :, runs[0][0]]
            if rows.is_contiguous():
                return rows, True
        return there.new_empty((*there.shape[:2], self._count[rank], there.shape[3])), False

    def _exchange(self, receive: Sequence[torch.Tensor], send: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Begin to send a tensor to each rank and to receive one, both contiguous; the result waits for them."""
        group = self._group()
        rank, ranks = dist.get_rank(group), range(self._world_size)
        try:
            if send[0].is_cuda:
                works = [dist.all_to_all(list(receive), list(send), group=group, async_op=True)]
            else:  # Gloo has no all-to-all of lists
                receive[rank].copy_(send[rank])
                operations = [
                    dist.P2POp(begin, each[peer], dist.get_global_rank(group, peer), group)
                    for begin, each in ((dist.irecv, receive), (dist.isend, send))
                    for peer in ranks
                    if peer != rank and each[peer].numel()
                ]
                works = dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:
            raise no_exchange(set(ranks) - {rank}) from error

        def finish() -> None:
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                raise no_exchange(set(ranks) - {rank}) from error

        return finish


def _slices(count: int) -> list[slice]:
    """Divide indices into at most :data:`_PARTS` slices."""
    bounds = np.linspace(0, count, min(count, _PARTS) + 1).astype(int).tolist()
    return [slice(*pair) for pair in pairwise(bounds)]
