"""Attention over local shards of a sequence."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import weakref
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from .. import attention as attention_of_one
from .. import attention_backward
from .._util.cached import BoundedCache
from ..arrays import autocast, dtype_name
from ..cpu import FAR_LSE
from ..cuda import families
from ..cuda.driver import device
from ..dispatch import scores
from ..dispatch.calls import backward_with_score
from ..dispatch.plans import resolve
from ..dispatch.scores import Given
from ..patterns import Pattern
from ..patterns.base.check import integer
from ..patterns.base.composition import per_entry
from ..planning import Plan
from ..request.call import Call
from ..request.score import Portion
from ..schedule.shard import LOCAL, Sharding, backward_part, forward_stages, lists_of_tables
from ._agreement import DIGEST, agree, compare, digest, digest_of_plan, gathered
from ._by_heads import ByHeads, OnCpu, OnHopper
from ._exchange import exchange, scatter, whole
from ._on_gpu import OnGpu, readable
from ._plans import Shape, Transfer, call_of, key_transfers, row_transfers, whole_plan
from ._shardings import checked, named
from ._simulation import heads_are_fewer_bytes, shard
from ._traffic import EXCHANGES, HEADS, NETWORKS, fastest, of_rank, of_ranks

__all__ = ["attention"]

_MOST_JOBS = 64  # per group
_jobs: weakref.WeakKeyDictionary[Any, BoundedCache] = weakref.WeakKeyDictionary()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: Any = "full",
    group: Any = None,
    *,
    length: int | None = None,
    sharding: Sharding | str = "contiguous",
    exchange: str = "auto",
    scale: float | None = None,
    score: Any = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
) -> torch.Tensor:
    """Compute attention over a sequence whose rows are on several ranks, forward and backward.

    Parameters
    ----------
    q : (batch, heads_q, n, head_dim) tensor
        Local rows of the queries; or a DTensor whose batch, heads or sequence are sharded. GPUs need float16 or
        bfloat16, compute capability 9.0 and a group with NCCL.
    k, v : (batch, heads_kv, n, …) tensor
        The same rows of keys and values.
    pattern : Pattern, Plan, array or str, optional
        Allowed pairs of the whole sequence, as in :func:`spattn.attention`.
    group : ProcessGroup or DeviceMesh, optional
        The ranks; by default all. A mesh must have one dimension. Not needed for DTensors.
    length : int, optional
        Length of the whole sequence. By default n times the number of ranks, or that of the DTensor.
    sharding : Sharding or str, optional
        Which rank has which rows, as returned by :func:`shard` or as its argument. A DTensor is "contiguous".
    exchange : {"auto", "point_to_point", "all_to_all", "all_gather", "heads"}, optional
        What travels, and how. "heads": all rows of some heads go to each rank, which computes these heads; the results
        go back. The number of ranks must divide that of key-value heads, and the pattern must be the same for all
        heads and batch entries. The others: the rows that a rank needs; GPUs have "point_to_point" alone. "auto": on
        GPUs "heads" where it is possible and rows would be more bytes on four ranks, else "point_to_point", also if
        partial sums travel instead of rows; on CPUs the exchange of rows for which :func:`simulate` predicts the least
        time.
    scale : float, optional
        As in :func:`spattn.attention`.
    score, sinks, dropout_p, seed : optional
        As in :func:`spattn.attention`, the same on all ranks; positions are those of the whole sequence. Not supported
        on GPUs, nor with ``exchange="heads"``.

    Returns
    -------
    tensor
        (batch, heads_q, n, head_dim_v), the local rows of the output; a DTensor if q is one.

    Raises
    ------
    ValueError
        On every rank, if arguments differ between ranks; the next call works. A rank that refuses its own arguments
        raises the error of :func:`spattn.attention`, and the others ValueError. On GPUs, arguments are compared once
        for each group, pattern, shape and dtype; always with the environment variable ``SPATTN_CHECK_RANKS=1``.
        In the backward pass on CPUs, where rows travel, if the lse of a row exceeds 16384 (float32): its gradients need
        all of its keys on one rank.
    TypeError
        If q, k or v is not a tensor.
    RuntimeError
        If a rank does not answer within the timeout of the process group.

    Notes
    -----
    Output and gradients have the same bits for any sharding and number of ranks: those of :func:`spattn.attention` in
    one process on the same kind of processor. Where rows travel between GPUs, dq has bits of its own.

    Where rows travel, the forward pass receives the keys and values that the rank's rows attend to:
    (head_dim + head_dim_v) elements per key-value head and key. The backward pass receives q, out, the gradient of out
    and lse of the rows that attend to the rank's keys: (head_dim + 2 head_dim_v) elements and a float per query head
    and row. On GPUs also partial sums travel, of rows whose keys are split among work items, which are added in the
    order of one process. Tiles whose queries and keys are on two ranks are visited twice: for dq, and for dk and dv.
    With ``exchange="heads"``, a rank receives q, k and v, then out; backward the gradient of out, then dq, dk and dv:
    the share 1 - 1 / ranks of the bytes of its own rows.

    The gradients of sinks and of arrays that the score function captures are parts: each element is complete on one
    rank, with the bits of one process, and 0 on the others. As for any parameter that all ranks hold, sum the gradients
    over the ranks; of DTensors, over the dimensions of the mesh that shard q. The terms of a tile are added on one
    rank, which receives its other rows and their keys.

    The bits may differ where a NaN or an infinity is at an allowed pair.
    """
    options = {"scale": scale, "score": score, "sinks": sinks, "dropout_p": dropout_p, "seed": seed}
    options["exchange"] = exchange
    if isinstance(q, DTensor):
        return _on_dtensors(q, k, v, pattern, length, sharding, options)
    group = group.get_group() if hasattr(group, "get_group") else dist.group.WORLD if group is None else group
    if group is None:
        raise ValueError("group: no process group; call torch.distributed.init_process_group first")
    if dist.get_rank(group) < 0:
        raise ValueError("group: this rank is not in the group")
    q, k, v = autocast(q, k, v) or (q, k, v)
    make = functools.partial(_make, q, k, v, pattern, group, length, sharding, options)
    jobs, key = _jobs.setdefault(group, BoundedCache(_MOST_JOBS)), None
    on_gpu, always = getattr(q, "is_cuda", False), os.environ.get("SPATTN_CHECK_RANKS") == "1"
    job: _Job | None = None
    with contextlib.suppress(Exception):  # which make() raises again, when the others know
        key = _key(q, k, v, pattern, length, sharding, options)
        known = None if always else jobs.get(key)
        if known is not None:
            job = known if on_gpu else known._replace(group=group).of(q, k, v, options)

    def describe() -> dict[str, Any]:
        nonlocal job
        job = make()
        return job.described

    if not on_gpu:
        agree(group, None if job is None else job.digest, describe)
        assert job is not None
        if not job.exchange:  # on all ranks: they made it together
            job = job._replace(exchange=job.chosen(gathered(group, of_rank(job.transfers(), (k, v))), (k, v)))
    elif job is None:  # a comparison would let the host wait for the GPU
        compare(group, describe)
    assert job is not None
    if key is not None:
        # A kept job must not keep its group, or arrays.
        jobs.keep(key, job._replace(group=None, options={}, given=None, described={}))
    if job.by_heads is not None:
        return _ByHeads.apply(q, k, v, job)
    if job.on_gpu is not None:
        return _OfGpu.apply(q, k, v, job)
    return _Attention.apply(q, k, v, job, *(() if job.given is None else job.given.captured))


class _Job(NamedTuple):
    """A call of all ranks, as one rank sees it."""

    group: Any
    rank: int
    sharding: Sharding
    shape: Shape
    call: Call
    pattern: Any
    plan: Plan
    options: dict[str, Any]
    given: Given | None
    wanted: tuple[bool, ...]  # which of given.captured need gradients
    sm_count: int | None  # of a GPU: items depend on it
    on_gpu: OnGpu | None
    by_heads: ByHeads | None
    described: dict[str, Any]  # what all ranks must agree on
    exchange: str  # of the forward pass, on CPUs; or HEADS

    def of(self, q: Any, k: Any, v: Any, options: dict[str, Any]) -> _Job:
        """Return the job of a call with these options."""
        given = _given(self.call, q, k, v, options)
        wanted = () if given is None else tuple(map(_wants_gradient, given.captured))
        found = self._replace(options=options, given=given, wanted=wanted)
        return found._replace(described=found._describe(any(map(_wants_gradient, (q, k, v)))))

    def chosen(self, ranks: Sequence[bytes], local: Sequence[torch.Tensor]) -> str:
        """Return how rows of `local` travel, from :func:`of_rank` of all ranks."""
        given = str(self.options["exchange"])
        return fastest(of_ranks(ranks, self.sharding, local).seconds(*NETWORKS["cpu"])) if given == "auto" else given

    def transfers(self) -> tuple[Transfer, ...]:
        """Return the transfers of the forward pass."""
        of, of_tables = self.shape, None
        if any(self.wanted[1:]):
            of_tables = whole_plan(self.pattern, self.call, backward=True)
        return key_transfers(self.plan, self.sharding, self.rank, of.batch, of.heads_q, of.heads_kv, of_tables)

    @property
    def rows(self) -> torch.Tensor:
        return torch.from_numpy(self.sharding.rows(self.rank))

    @property
    def digest(self) -> bytes:
        """Digest of what all ranks must agree on."""
        return bytes.fromhex(digest(*self.described.items()))

    def _describe(self, needs_gradients: bool) -> dict[str, Any]:
        given, shape = None if self.given is None else self.given.operands, self.shape
        return {
            "q, k, v: shape of the whole sequence": tuple(shape),
            "q, k, v: dtype": self.call.dtype,
            "q, k, v: number of SMs": self.sm_count,
            "scale": self.call.scale,
            "pattern: digest of the plan": digest_of_plan(self.plan),
            "sharding: digest": digest(*self.sharding),
            "exchange": self.options["exchange"],
            "dropout_p": float(self.options["dropout_p"]),
            "seed": None if given is None or given.dropout is None else given.dropout.seed,
            "score: digest": None
            if given is None or self.options["score"] is None
            else digest(given.program, given.parameters, *given.tables),
            "sinks: digest": None if given is None or given.sinks is None else digest(given.sinks),
            "q, k, v: whether one needs gradients": needs_gradients,
            "sinks, score: which arrays need gradients": self.wanted,
        }


def _make(
    q: Any, k: Any, v: Any, pattern: Any, group: Any, length: int | None, sharding: Any, options: dict[str, Any]
) -> _Job:
    """Check the arguments of a rank and plan its call."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: expected a torch tensor or a DTensor, got {type(x).__name__}")
    local = Call.of(q, k, v, scale=options["scale"])
    scored = options["score"] is not None or options["sinks"] is not None or options["dropout_p"] != 0.0
    if options["exchange"] not in ("auto", *EXCHANGES, HEADS):
        names = ", ".join(map(repr, (*EXCHANGES, HEADS)))
        raise ValueError(f"exchange: expected 'auto' or one of {names}; got {options['exchange']!r}")
    if local.device != "cpu" and options["exchange"] not in ("auto", "point_to_point", HEADS):
        raise ValueError(f"exchange: on GPUs, rows travel point-to-point, or heads; got {options['exchange']!r}")
    if local.device != "cpu" and scored:
        raise ValueError("score, sinks, dropout_p: not supported by distributed attention on GPUs")
    if not local.batch:
        raise ValueError(f"q: expected at least one batch entry, got shape {tuple(q.shape)}")
    if local.q_len != local.kv_len:
        raise ValueError(f"k: expected the rows of q, {local.q_len}, got {local.kv_len}")
    length = local.q_len * world_size if length is None else integer("length", length, 1)
    shape = Shape(local.batch, local.heads_q, local.heads_kv, length, local.head_dim, local.head_dim_v)
    call = call_of(shape, local.dtype, local.scale, local.device)
    pattern = resolve(pattern, call.sizes)  # a mask is copied: the backward pass plans it again
    plan = whole_plan(pattern, call)
    if isinstance(sharding, Sharding):
        sharding = checked(sharding)
    else:
        if sharding == "auto":
            sharding = shard(pattern, shape[:5], world_size, dtype=local.dtype)
        else:
            sharding = named(sharding, shape, world_size, plan)
    if (sharding.length, sharding.world_size) != (length, world_size):
        raise ValueError(
            f"sharding: expected {length} rows on {world_size} ranks, got {sharding.length} on {sharding.world_size}"
        )
    if local.q_len != len(sharding.rows(rank)):
        raise ValueError(
            f"q: expected {len(sharding.rows(rank))} of {length} rows on rank {rank}, got {local.q_len}; "
            "pass length= for shards of different lengths"
        )
    plan_backward = functools.cache(functools.partial(whole_plan, pattern, call, backward=True))
    gpu = None if local.device == "cpu" else device.get(call.kind.ordinal(call.q))
    sm_count = None if gpu is None else gpu.sm_count
    on_gpu, by_heads = None, None
    family = None if gpu is None else families.of_call(call, gpu)
    if _heads_travel(options["exchange"], plan, shape, world_size, call, family, scored):
        kernels: OnCpu | OnHopper
        if gpu is None or family is None:
            kernels = OnCpu(plan, plan_backward, call)
        else:
            kernels = OnHopper(plan, plan_backward, call, world_size, gpu, family)
        by_heads = ByHeads(group, sharding, shape, q.device, kernels)
    elif gpu is not None and family is not None:
        on_gpu = OnGpu(group, rank, sharding, shape, call, plan, plan_backward, gpu, family)
    kind = "" if by_heads is None else HEADS
    made = _Job(group, rank, sharding, shape, call, pattern, plan, {}, None, (), sm_count, on_gpu, by_heads, {}, kind)
    return made.of(q, k, v, options)


def _heads_travel(
    exchange: str,
    plan: Plan,
    shape: Shape,
    world_size: int,
    call: Call,
    family: families.Family | None,
    scored: bool,
) -> bool:
    """Return whether heads travel, which does not depend on the number of ranks if it divides that of heads."""
    launcher = None if family is None else family.launcher
    if exchange != HEADS and (exchange != "auto" or launcher is None):
        return False
    why = None
    if shape.heads_kv % world_size:
        why = f"needs a number of key-value heads that {world_size} ranks divide, got {shape.heads_kv}"
    elif plan.variant.size > 1:
        why = "needs the same pattern for all heads and batch entries"
    elif scored:
        why = "does not support score, sinks and dropout_p"
    if exchange == HEADS:
        if why is not None:
            raise ValueError(f"exchange: 'heads' {why}; pass exchange='auto'")
        return True
    if why is not None or launcher is None:
        return False
    # Where items are computed with the keys that they read, fewer rows travel than their pairs need.
    sizes = shape.batch, shape.heads_q, shape.heads_kv, shape.head_dim, shape.head_dim_v
    lent = launcher.placement(plan, sizes, named("contiguous", shape, 4, plan))
    return not lent and heads_are_fewer_bytes(plan, shape, call.dtype)


def _given(call: Call, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Given | None:
    """Return the score function, sinks and dropout of the whole call, for autograd as for local shards."""
    score, sinks, dropout_p, seed = (options[name] for name in ("score", "sinks", "dropout_p", "seed"))
    if score is None and sinks is None and dropout_p == 0.0:
        return None
    local, of = (q, k, v), (call.q, call.k, call.v)
    whole = [x.new_zeros(()).requires_grad_(x.requires_grad).expand(y.shape) for x, y in zip(local, of, strict=True)]
    dropout = scores.dropout_of(dropout_p, seed, whole[0]) if dropout_p != 0.0 else None
    given = scores.read(score, sinks, dropout, whole[0], whole[1], whole[2], "cpu", "bhsd")
    if given is not None:
        given.check(call)
    return given


def _wants_gradient(x: Any) -> bool:
    return torch.is_grad_enabled() and isinstance(x, torch.Tensor) and x.requires_grad


def _key(
    q: Any, k: Any, v: Any, pattern: Any, length: int | None, sharding: Any, options: dict[str, Any]
) -> tuple[Hashable, ...]:
    """Return what determines a job, except for sinks and dropout; raise TypeError if nothing that is hashable does."""
    if not isinstance(pattern, (Pattern, Plan, str)) or options["score"] is not None:
        raise TypeError
    arrays = tuple((dtype_name(x), tuple(x.shape), x.device) for x in (q, k, v))
    key = (
        pattern,
        arrays,
        length,
        sharding,
        *(options[name] for name in ("exchange", "scale", "dropout_p")),
        options["sinks"] is None,
    )
    hash(key)
    return key


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    """``apply(q, k, v, job, sinks, *tables)``: the local rows of the output."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, job: _Job, *captured: Any) -> torch.Tensor:
        rows, length = job.rows, job.shape.length
        keys, values = (whole(x, rows, length) for x in (k, v))
        finish = exchange(job.group, job.exchange, job.transfers(), (k, v), job.sharding, (keys, values))
        queries, options = whole(q, rows, length), _of_one({**job.options, "scale": job.call.scale})
        options |= {"backend": "cpu", "return_lse": True}
        found: tuple[torch.Tensor, ...] = ()
        for stage in forward_stages(job.plan, job.sharding, job.rank, sides=False):
            if stage.where != LOCAL:
                finish()
                finish = _nothing
            own = attention_of_one(queries, keys, values, stage.plan, **options)
            own = tuple(x[:, :, rows] for x in own)
            mine = torch.from_numpy(stage.rows[job.plan.variant])[:, :, rows]
            found = _select(mine, own, found) if found else own
        finish()
        out, lse = found
        # Saved, so that PyTorch raises an error if the caller changes a captured tensor before the backward pass.
        ctx.save_for_backward(q, k, v, keys, values, out, lse, *(x for x in captured if isinstance(x, torch.Tensor)))
        ctx.job = job
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, keys, values, out, lse, *_ = ctx.saved_tensors
        job: _Job = ctx.job
        of, rows, length = job.shape, job.rows, job.shape.length
        plan = whole_plan(job.pattern, job.call, backward=True)
        transfers = row_transfers(plan, job.sharding, job.rank, of.batch, of.heads_q, any(job.wanted[1:]))
        local = q, dout, out, lse[..., None]
        kind = job.chosen(_checked(job, lse, of_rank(transfers, local)), local)
        filled = tuple(whole(x, rows, length) for x in local)
        lses = filled[3].fill_(-math.inf)  # rows that are not here take no part
        lses[:, :, rows] = local[3]
        exchange(job.group, kind, transfers, local, job.sharding, filled)()
        own = backward_part(plan, job.sharding, job.rank)
        queries, douts, outs, _ = filled
        arrays = douts, queries, keys, values, outs, lses[..., 0]
        if job.given is None:
            found = attention_backward(*arrays, own, scale=job.call.scale, backend="cpu")
            return *(x[:, :, rows] for x in found), None
        given = job.given
        if any(job.wanted):
            lists = lists_of_tables(plan, job.sharding, job.rank)
            portion = Portion(
                job.sharding.owners() == job.rank, lists.items(own), functools.partial(scatter, job.group)
            )
            given = given._replace(operands=given.operands._replace(portion=portion))
        options = {"scale": job.call.scale, "backend": "cpu", "precision": None, "layout": "bhsd"}
        dq, dk, dv, dtables, dsinks = backward_with_score(*arrays, own, given=given, wanted=job.wanted[1:], **options)
        return *(x[:, :, rows] for x in (dq, dk, dv)), None, dsinks if job.wanted[0] else None, *dtables


class _OfGpu(torch.autograd.Function):  # type: ignore[misc]
    """``apply(q, k, v, job)``: the local rows of the output, on a GPU."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, job: _Job) -> torch.Tensor:
        assert job.on_gpu is not None
        q, k, v = map(readable, (q, k, v))
        out, lse, received = job.on_gpu.forward(q, k, v, job.call.scale)
        ctx.blocks = [block for block, _ in received]
        ctx.save_for_backward(q, k, v, out, lse, *(x for _, tensors in received for x in tensors))
        ctx.job = job
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse, *rows = ctx.saved_tensors
        received = list(zip(ctx.blocks, zip(rows[::2], rows[1::2], strict=True), strict=True))
        on_gpu = ctx.job.on_gpu
        return *on_gpu.backward(readable(dout), q, k, v, readable(out), lse, received, ctx.job.call.scale), None


class _ByHeads(torch.autograd.Function):  # type: ignore[misc]
    """``apply(q, k, v, job)``: the local rows of the output, if heads travel."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, job: _Job) -> torch.Tensor:
        assert job.by_heads is not None
        out, *saved = job.by_heads.forward(q, k, v)
        ctx.save_for_backward(*saved)
        ctx.job = job
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        job: _Job = ctx.job
        assert job.by_heads is not None
        if job.sm_count is None:
            _check_gradients(gathered(job.group, job.digest))
        return *job.by_heads.backward(dout, ctx.saved_tensors), None


def _of_one(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that :func:`spattn.attention` has, too."""
    return {name: x for name, x in options.items() if name != "exchange"}


def _nothing() -> None:
    """All messages have come."""


def _select(rows: torch.Tensor, chosen: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Return out and lse of one stage at its rows, and those of others elsewhere."""
    return tuple(
        torch.where(rows[..., None] if x.dim() == 4 else rows, x, y) for x, y in zip(chosen, others, strict=True)
    )


def _checked(job: _Job, lse: torch.Tensor, traffic: bytes) -> list[bytes]:
    """Return the traffic of all ranks; raise ValueError on every rank if they differentiate different calls.

    Also if an lse is too large: the float64 fallback needs all keys of its rows.
    """
    limit = FAR_LSE[lse.element_size()]
    far = ((lse.abs() > limit) & (lse != -math.inf)).any()
    found = gathered(job.group, bytes([bool(far)]) + job.digest + traffic)
    _check_gradients([x[1 : 1 + DIGEST] for x in found])
    ranks = [rank for rank, x in enumerate(found) if x[0]]
    if ranks:
        raise ValueError(
            f"attention: scores on ranks {ranks} exceed {limit:.4g}; gradients need all keys of a row on one rank: "
            "use exchange='heads', a smaller scale, float64, or spattn.attention in one process"
        )
    return [x[1 + DIGEST :] for x in found]


def _check_gradients(digests: Sequence[bytes]) -> None:
    """Raise ValueError on every rank if they differentiate different calls."""
    if len(set(digests)) > 1:
        raise ValueError("attention: ranks compute the gradients of different calls")


def _of_heads(q: DTensor, pattern: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the pattern and the options of the batch entries and heads of a rank."""
    mesh, batch, heads = q.device_mesh, q.shape[0], q.shape[1]
    at = compute_local_shape_and_global_offset(q.shape, mesh, q.placements)
    (entries, count, *_), (first_entry, first, *_) = at
    sinks = options["sinks"]
    options = options | {"sinks": None if sinks is None else sinks[first : first + count]}
    own = resolve(pattern, (batch, heads, q.shape[2], q.shape[2]))
    alike = own.sizes() == (1, 1) if isinstance(own, Pattern) else own.variant.shape == (1, 1)
    if alike:
        return own, options
    if not isinstance(own, Pattern):
        raise ValueError("pattern: a plan of several heads cannot be divided among ranks; pass its pattern")
    found, index = own.variants(batch, heads)
    index = np.broadcast_to(index, (batch, heads))[first_entry : first_entry + entries, first : first + count]
    if not index.size:
        return found[0], options
    rows = index[:1] if (index == index[:1]).all() else index
    return per_entry([[found[number] for number in row] for row in rows.tolist()]), options


def _on_dtensors(
    q: DTensor, k: Any, v: Any, pattern: Any, length: int | None, sharding: Any, options: dict[str, Any]
) -> DTensor:
    """Compute attention of DTensors whose sequence axis is sharded over one dimension of their mesh."""
    mesh, placements = q.device_mesh, q.placements
    for name, x in (("k", k), ("v", v)):
        if not isinstance(x, DTensor) or x.placements != placements or x.device_mesh != mesh:
            raise TypeError(f"{name}: expected a DTensor of q's mesh and placements, {placements}")
    of = [number for number, x in enumerate(placements) if x == Shard(2)]
    others = [x for x in placements if x not in (Shard(2), Replicate())]
    if len(of) > 1 or any(x not in (Shard(0), Shard(1)) for x in others):
        raise ValueError(
            f"q: expected Shard(2) on one dimension of the mesh, and Shard(0), Shard(1) or Replicate() on others; "
            f"got {placements}"
        )
    if others:  # ranks do not know which batch entries and heads they have
        if options["score"] is not None or options["dropout_p"]:
            raise ValueError("score, dropout_p: not supported with sharded batch entries or heads; use Replicate()")
        for number, x in enumerate(placements):
            if x == Shard(1) and k.shape[1] % mesh.size(number):
                raise ValueError(f"k: expected a number of heads that {mesh.size(number)} divides, got {k.shape[1]}")
        pattern, options = _of_heads(q, pattern, options)
    if sharding != "contiguous" or length not in (None, q.shape[2]):
        raise ValueError("sharding, length: a DTensor is 'contiguous' and has its own length")
    own_q, own_k, own_v = (x.to_local() for x in (q, k, v))
    if of and own_q.shape[0]:  # ranks without batch entries have nothing to exchange
        out = attention(own_q, own_k, own_v, pattern, mesh.get_group(of[0]), length=q.shape[2], **options)
    else:
        out = attention_of_one(own_q, own_k, own_v, pattern, **_of_one(options))
    shape = (*q.shape[:3], v.shape[3])
    stride = tuple(math.prod(shape[axis + 1 :]) for axis in range(4))
    return DTensor.from_local(out, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
