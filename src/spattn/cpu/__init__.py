"""The CPU backend: a Cython/OpenMP core that calls C++ kernels, compiled once per instruction set."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from .._util import limits as _limits
from .._util.cached import BoundedCache
from ..arrays import NUMPY
from ..backends import Execution, Limits, PreparedBackward, PreparedForward
from ..choose.chooser import How, Sizes, cheapest
from ..choose.machine_cpu import Processor, processor
from ..patterns import Pattern
from ..planning import Plan
from ..planning.contract.validated import Validated, made_validated, moved, validated_for
from ..request.call import Call, check_results
from ..request.dropout import DropoutWords
from ..request.score import ScoreOperands
from ..schedule import few_queries
from ..schedule.gradients import units
from ..schedule.item_order import neighbours_together
from ..schedule.pack_heads import variant_of_groups
from . import _core, _nonfinite, _score
from ._execution import arithmetic, threads_of
from ._threads import num_threads, set_num_threads, team_size, threads
from ._workspace import free_workspaces

__all__ = [
    "FAR_LSE",
    "LIMITS",
    "TILE",
    "accepts",
    "backward",
    "by_rows",
    "cheaper",
    "dense_ms",
    "execution",
    "forward",
    "free_workspaces",
    "info",
    "instruction_sets",
    "memory",
    "num_threads",
    "plan_for",
    "predicted_ms",
    "prepare",
    "prepare_backward",
    "prepare_rows",
    "set_num_threads",
    "threads",
    "unavailable",
]

LIMITS = Limits(host_arrays=True, moves=True, grows=True, predicts=True, rows=True)

TILE = (48, 64)
"""Default tile, (queries, keys). 48 queries fill the three AVX-512 vectors of a register block of S, and eight register
blocks of O with six rows each. With 64 keys, the operands of either product fit a 48 KiB L1 cache.
"""
_AMX_TILE = (64, 64)  # the queries fill two panels of two AMX tiles

FAR_LSE = _core.FAR_LSE  # largest |lse|, by its bytes, up to which gradients do without the float64 fallback
_MAX_LENGTHS = 8  # maximum cached dispatches of a length-polymorphic plan whose tile lists grow, one per kv_len
_TWO_BYTES = ("float16", "bfloat16")
_PARALLEL_TASKS = 16  # target number of parallel tasks, batch · heads · splits; independent of the thread count
_FLOPS_PER_THREAD = 4e6  # minimum work that amortizes starting a thread


def instruction_sets() -> tuple[str, ...]:
    """Return the instruction sets that this build includes and this machine supports, best first.

    Returns
    -------
    tuple of str
        Among "amx", "avx512bf16", "avx512", "avx2" and "baseline", which only builds with ``-Disa=native`` leave out.

    Examples
    --------
    >>> import spattn.cpu
    >>> spattn.cpu.instruction_sets()[-1]
    'baseline'
    """
    return _core.table_names()


@functools.cache
def _default_isa() -> str:
    name = os.environ.get("SPATTN_ISA")
    if not name:
        return instruction_sets()[0]
    if name not in instruction_sets():
        raise ValueError(f"SPATTN_ISA: expected one of {', '.join(instruction_sets())} on this machine; got {name!r}")
    return name


def unavailable() -> str | None:
    """Return None: the CPU is always available."""
    return None


def memory(call: Call) -> int:
    """Return the memory limit of this process in bytes."""
    return _limits.memory()


def info() -> dict[str, object]:
    """Return the instruction sets, the one in use, the thread count and whether OpenMP is built in."""
    return {
        "instruction sets": ", ".join(instruction_sets()),
        "in use": _default_isa(),
        "threads": num_threads(),
        "OpenMP": "yes" if _core.OPENMP else "no (single-threaded build)",
    }


def plan_for(pattern: Pattern, call: Call, max_bytes: int | None = None, *, backward: bool = False) -> Plan:
    """Implement :meth:`.backends.Backend.plan_for`: return the tiling with the lowest predicted cost.

    A few queries of most patterns are planned by their rows. Otherwise, candidates are the default tile, boxes of
    queries, and one-query tiles, which the kernels compute pair by pair. The split of long key tile lists depends on
    shapes alone, so that results do not depend on the thread count.
    """
    if not backward and by_rows(pattern, call, call.kv_len):
        return few_queries.plan_for(pattern, call, workers_for(call), max_bytes)
    own = processor(_default_isa(), call.dtype, backward)
    how = How(_tile_for(call.dtype), None, workers_for(call), ordered=pattern._has_order)
    return cheapest(pattern, call.q_len, call.kv_len, Sizes.of(call), how, own, max_bytes)


def by_rows(pattern: Pattern, call: Call, kv_len: int) -> bool:
    """Implement :meth:`.backends.RowsBackend.by_rows`."""
    return few_queries.serves(pattern, call.q_len, kv_len, call.batch, call.heads_q)


def _machine(dtype: str) -> Processor:
    return processor(_default_isa(), dtype)


def _tile_for(dtype: str) -> tuple[int, int]:
    return _AMX_TILE if _default_isa() == "amx" and dtype in _TWO_BYTES else TILE


def workers_for(call: Call) -> int:
    """Return the number of parallel workers to plan for per head, independent of the machine's thread count."""
    return max(1, _PARALLEL_TASKS // max(1, call.batch * call.heads_q))


def predicted_ms(plan: Plan, batch: int, heads: int, head_dim: int, head_dim_v: int, dtype: str) -> float:
    """Return the predicted time in ms of a forward call on one thread of the benchmark machine.

    `heads` is the number of query heads; `dtype` is one of "float32", "float64", "float16" and "bfloat16".
    """
    return _machine(dtype).cost_ms(plan, Sizes(batch, heads, heads, head_dim, head_dim_v))


def dense_ms(q_len: int, kv_len: int, batch: int, heads: int, head_dim: int, head_dim_v: int, dtype: str) -> float:
    """Return the predicted time in ms of dense attention, under the conditions of :func:`predicted_ms`."""
    sizes = Sizes(batch, heads, heads, head_dim, head_dim_v)
    return _machine(dtype).dense_ms(q_len, kv_len, _tile_for(dtype), sizes)


def cheaper(plan: Plan, batch: int, heads: int, head_dim: int, head_dim_v: int, dtype: str) -> Plan | None:
    """Return a plan of the same pattern with boxes of queries if the cost model predicts that it is faster, or None."""
    return _machine(dtype).cheaper(plan, Sizes(batch, heads, heads, head_dim, head_dim_v))


def accepts(plan: Plan, call: Call, *, backward: bool = False) -> bool:
    """Return whether the CPU supports a plan: it supports every tile shape, but no gathered KV."""
    return not plan.gathered


def execution(call: Call, plan: Plan) -> Execution:
    """Implement :meth:`.backends.Backend.execution`."""
    isa = _default_isa()
    return Execution(f"{isa} kernels", arithmetic(isa, call, plan), *threads_of(_useful_threads(call, plan)))


def _check_places(plan: Plan) -> None:
    if plan.gathered:
        raise ValueError("plan: gathered KV is not supported on the CPU; plan with backend='cpu'")


def prepare(call: Call, plan: Plan, *, isa: str | None = None) -> PreparedForward:
    """Implement :meth:`.backends.Backend.prepare`; `isa` overrides ``SPATTN_ISA``."""
    own = validated_for(plan, call.batch, call.heads_q, call.q_len, call.kv_len)
    _check_places(own)
    isa = isa or _default_isa()
    together, execute, encoded = _heads_together(call, own), *_executor(call)
    least = own.least or 0 if own.growth is None else 0  # minimum kv_len that the core binds at run time; 0: never

    def at(plan: Validated) -> tuple[_core.Prepared, int]:
        """Return the core's cached dispatch for `plan.kv_len` keys and the number of threads with enough work."""
        work = neighbours_together(plan)
        return _core.Prepared(call, plan, work, together, isa, least, encoded), _useful_threads(call, plan)

    made, lengths = at(own), BoundedCache(_MAX_LENGTHS)

    def run(
        q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, score: ScoreOperands | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        here = made
        if own.growth is not None and (kv_len := k.shape[2]) != own.kv_len:
            here = lengths.get(kv_len) or lengths.keep(kv_len, at(moved(own, kv_len)))
        return execute(*here, q, k, v, scale, score)

    return run


def prepare_rows(call: Call) -> Callable[[Pattern], PreparedForward]:
    """Implement :meth:`.backends.RowsBackend.prepare_rows`."""
    isa, workers, (execute, encoded) = _default_isa(), workers_for(call), _executor(call)
    nothing = np.empty(0, call.kind.to_numpy(call.q).dtype)
    bare = replace(call, q=nothing, k=nothing, v=nothing, kind=NUMPY)  # keeps no array of the caller alive
    lately = BoundedCache(_MAX_LENGTHS)

    def at(pattern: Pattern, kv_len: int) -> tuple[_core.Prepared, int]:
        fields = few_queries.fields_of_rows(pattern, bare.q_len, kv_len, bare.batch, bare.heads_q, workers)
        plan = made_validated(pattern, fields)
        own = _core.Prepared(bare, plan, plan.work, _heads_together(bare, plan), isa, score=encoded)
        return own, _useful_threads(bare, plan)

    def bind(pattern: Pattern) -> PreparedForward:
        def run(
            q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, score: ScoreOperands | None = None
        ) -> tuple[np.ndarray, np.ndarray]:
            key = pattern, k.shape[2]
            return execute(*(lately.get(key) or lately.keep(key, at(*key))), q, k, v, scale, score)

        return run

    return bind


def _executor(call: Call) -> tuple[Callable[..., tuple[np.ndarray, np.ndarray]], Any]:
    """Return a function that executes prepared calls, and the encoded score program."""
    q = call.kind.to_numpy(call.q)
    shape, dtype, lse_dtype, rows = call.out_shape, q.dtype, np.dtype(call.lse_dtype), call.rows
    strides = np.empty_like(q, shape=shape, subok=False).strides
    operands = call.score
    encoded = operands and _score.encode(operands, call, backward=False)
    call = replace(call, q=None, k=None, v=None)  # a cached dispatch keeps no array of the caller alive
    del q

    def execute(
        prepared: _core.Prepared,
        useful: int,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        scale: float,
        score: ScoreOperands | None,
    ) -> tuple[np.ndarray, np.ndarray]:
        bound = _score.bind(encoded, call, operands, score) if encoded and operands else None
        out, lse = np.ndarray(shape, dtype, None, 0, strides), np.empty(rows, lse_dtype)
        if lse.size:
            arguments = prepared, q, k, v, out, lse, scale, team_size(useful)
            modified = bound, _sinks_of(score), _dropout_of(score, call, k.shape[2])
            if _core.forward(*arguments, None, *modified) and (instead := _nonfinite.without(v)):
                _core.forward(*arguments, instead, *modified)
        return out, lse

    return execute, encoded


def prepare_backward(call: Call, plan: Plan, *, isa: str | None = None, whole: int | None = None) -> PreparedBackward:
    """Implement :meth:`.backends.Backend.prepare_backward`; `isa` as for :func:`prepare`, `whole` as for
    :func:`.schedule.gradients.units`."""
    plan = validated_for(plan, call.batch, call.heads_q, call.q_len, call.kv_len)
    _check_places(plan)
    isa = isa or _default_isa()
    useful = _useful_threads(call, plan)
    for x in (call.q, call.k, call.v):  # raise MemoryError before the work is split into units
        np.empty_like(call.kind.to_numpy(x), subok=False)
    operands = call.score
    encoded = operands and _score.encode(operands, call, backward=True)
    if call.batch and call.heads_q:
        split = units(plan, call.batch, call.heads_q, call.heads_kv, whole)
        prepared = _core.Prepared(call, plan, split.work, 1, isa, score=encoded)

    def run(
        dout: np.ndarray,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        out: np.ndarray,
        lse: np.ndarray,
        dlse: np.ndarray | None,
        scale: float,
        score: ScoreOperands | None = None,
    ) -> tuple[Any, ...]:
        dq, dk, dv = (np.empty_like(x, subok=False) for x in (q, k, v))
        sinks, dropout = _sinks_of(score), _dropout_of(score, call, call.kv_len)
        dsinks = None if sinks is None else np.zeros((call.batch, call.heads_q, _core.SUM_WORDS), np.int64)
        portion = None if score is None else score.portion
        rows = None if portion is None else portion.rows

        def compute(bound: _score.Bound | None, whole: bool = True) -> None:
            if not q.size:
                dk[...], dv[...] = 0, 0
                return
            own_dq, own_dk, own_dv = (
                (dq, dk, dv) if whole else (np.empty_like(dq), np.empty_like(dk), np.empty_like(dv))
            )
            to = own_dq, own_dk, own_dv, scale, team_size(useful)
            arguments = prepared, split, dout, q, k, v, out, lse, dlse, *to
            modified = sinks, dsinks if whole else None, rows, dropout
            if _core.backward(*arguments, None, bound, *modified) and (instead := _nonfinite.without(k)):
                if bound:
                    _score.clear(bound)
                _core.backward(*arguments, instead, bound, *modified)

        if score is None:
            compute(None)
            return dq, dk, dv
        if encoded is None or operands is None:
            compute(None)
            dtables: tuple[np.ndarray | None, ...] = ()
        else:
            bound = _score.bind(encoded, call, operands, score)
            dtables = _score.gradients(encoded, operands, call, bound, compute, portion)
        of_sinks = None if dsinks is None else _score.sums(_score.added(dsinks), portion).astype(lse.dtype)
        return dq, dk, dv, dtables, of_sinks

    return run


def _sinks_of(score: ScoreOperands | None) -> np.ndarray | None:
    return None if score is None else score.sinks


def _dropout_of(score: ScoreOperands | None, call: Call, kv_len: int) -> DropoutWords | None:
    if score is None or score.dropout is None:
        return None
    return score.dropout.words(call.batch, call.heads_q, call.q_len, kv_len)


def forward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, plan: Plan, scale: float, *, isa: str | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Compute softmax attention over the pairs of a plan.

    Parameters
    ----------
    q : (batch, heads_q, q_len, head_dim) array of float32 | float64 | float16 | bfloat16
        Query; like `k` and `v`, with any strides. ``1 <= head_dim <= 1024``.
    k : (batch, heads_kv, kv_len, head_dim) array
        Same dtype; ``heads_q % heads_kv == 0``.
    v : (batch, heads_kv, kv_len, head_dim_v) array
        Same dtype; ``1 <= head_dim_v <= 1024``.
    plan : Plan
        Plan for these lengths and heads; validated at first use unless :func:`spattn.plan` created it.
    scale : float
        Scaling factor applied before the softmax.
    isa : str, optional
        One of :func:`instruction_sets`; defaults to the environment variable ``SPATTN_ISA``, then to the best one.

    Returns
    -------
    out : (batch, heads_q, q_len, head_dim_v) array
        In q's dtype and memory order.
    lse : (batch, heads_q, q_len) array of float32 (float64 for float64 inputs)
        Log-sum-exp of each row's scores, natural logarithm; -inf for a row without allowed keys.

    Raises
    ------
    ValueError
        If shapes do not fit each other or the plan, the plan is invalid or has gathered KV, or `isa` cannot run here.
    TypeError
        If the dtypes differ or are not supported.
    MemoryError
        If the workspace cannot be allocated.

    Notes
    -----
    Results are bitwise reproducible for any thread count. The workspace is O(batch · heads · q_len · head_dim_v) for
    split-KV partials, plus less than 2 MB per thread, mostly for packed keys and values. Up to 64 MiB of it stays
    cached for later calls: see :func:`free_workspaces`.
    """
    call = Call.of(q, k, v, scale=scale)
    return prepare(call, plan, isa=isa)(q, k, v, call.scale)


def backward(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    plan: Plan,
    scale: float,
    *,
    dlse: np.ndarray | None = None,
    isa: str | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute the gradients of ``Σ dout · out + Σ dlse · lse`` with respect to q, k and v.

    Parameters
    ----------
    dout : (batch, heads_q, q_len, head_dim_v) array
        Gradient of `out`, in q's dtype. All arrays may have any strides.
    q, k, v : arrays
        As for :func:`forward`.
    out, lse : arrays
        Results of :func:`forward` for q, k and v.
    plan, scale, isa
        As for :func:`forward`.
    dlse : (batch, heads_q, q_len) array, optional
        Gradient of `lse`, in its dtype; None means zeros.

    Returns
    -------
    dq, dk, dv : arrays
        Gradients with the shape, dtype and memory order of q, k and v; 0 for query rows with ``lse = -inf``.

    Raises
    ------
    ValueError, TypeError, MemoryError
        As :func:`forward`.

    Notes
    -----
    Results are bitwise reproducible for any thread count. The workspace is O(batch · heads · (q_len + kv_len) ·
    head_dim).
    """
    call = Call.of(q, k, v, scale=scale)
    check_results(call, dout, out, lse, dlse)
    dq, dk, dv = prepare_backward(call, plan, isa=isa)(dout, q, k, v, out, lse, dlse, call.scale)
    return dq, dk, dv


def _heads_together(call: Call, plan: Plan) -> int:
    """Return the query heads per task: the whole group if it has few rows and its heads share a variant, else 1."""
    few = call.group and (call.q_len <= _core.FEW_QUERIES or plan.block_q == 1)
    return call.group if few and variant_of_groups(plan.variant, call.group) is not None else 1


def _useful_threads(call: Call, plan: Plan) -> int:
    """Return the number of threads with enough work to amortize their start."""
    pairs = call.batch * call.heads_q
    rows = min(plan.block_q, plan.q_len)
    flops = 2.0 * pairs * plan.tiles / plan.variants * rows * plan.block_kv * (call.head_dim + call.head_dim_v)
    tasks = pairs * max(len(plan.work), -(-max(plan.q_len, plan.kv_len) // 64))  # upper bound for every pass
    return tasks if int(flops / _FLOPS_PER_THREAD) else 1
