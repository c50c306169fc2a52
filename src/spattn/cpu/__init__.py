"""The CPU backend: a Cython/OpenMP core over kernels compiled once per instruction set."""

from __future__ import annotations

import functools
import os

import numpy as np

from ..patterns import Pattern
from ..plan import Plan, plan
from ..plan._sealed import Sealed, sealed_for
from . import _core, _nonfinite
from ._order import neighbours_together
from ._threads import num_threads
from ._units import units
from ._workspace import free_workspaces

__all__ = ["HOST_ARRAYS", "TILE", "accepts", "backward", "forward", "free_workspaces", "info", "instruction_sets",
           "num_threads", "plan_for", "unavailable"]  # fmt: skip

HOST_ARRAYS = True

TILE = (48, 64)
"""Queries and keys of a tile. 48 queries are three AVX-512 vectors, as wide as a register block of the scores, and
eight register blocks of the output; with 64 keys the operands of either product stay in a 48 KiB first-level cache."""
_AMX_TILE = (64, 64)  # two panels of queries, each two tiles of AMX wide

_MAX_HEAD_DIM = 256
_PARALLEL_TASKS = 16  # (batch, head) tasks times pieces that planning aims at, whatever the machine's threads
_FLOPS_PER_THREAD = 4e6  # starting a thread pays off from about this much work


def instruction_sets() -> tuple[str, ...]:
    """Instruction sets that this build has and this machine can run, best first.

    Returns
    -------
    tuple of str
        Among "amx", "avx512bf16", "avx512", "avx2" and "baseline", which is always there.

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
        raise ValueError(f"SPATTN_ISA: expected one of {', '.join(instruction_sets())}, which run here; got {name!r}")
    return name


def unavailable() -> str | None:
    """None: the CPU is always there.

    Returns
    -------
    None
    """
    return None


def info() -> dict[str, object]:
    """Facts for :func:`spattn.show_versions`.

    Returns
    -------
    dict
        Instruction sets, the one in use, threads, whether OpenMP is there.
    """
    return {
        "instruction sets": ", ".join(instruction_sets()),
        "in use": _default_isa(),
        "threads": num_threads(),
        "OpenMP": "yes" if _core.OPENMP else "no (single-threaded build)",
    }


def plan_for(pattern: Pattern, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Plan:
    """The plan with this backend's tile shape.

    Long lists are split by shape alone, so that results do not depend on the number of threads.

    Parameters
    ----------
    pattern : Pattern
        What is allowed.
    q, k, v : arrays
        As for :func:`forward`.

    Returns
    -------
    Plan

    Raises
    ------
    ValueError
        If the pattern does not fit the shapes.
    """
    batch, heads, q_len = q.shape[:3]
    workers = max(1, _PARALLEL_TASKS // max(1, batch * heads))
    tile = _AMX_TILE if _default_isa() == "amx" and q.dtype.itemsize == 2 else TILE
    return plan(pattern, q_len, k.shape[2], batch=batch, heads=heads, tile=tile, workers=workers)


def accepts(made: Plan, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> bool:
    """Whether :func:`forward` can execute a plan: one of any tile shape.

    Parameters
    ----------
    made : Plan
        Made by anybody.
    q, k, v : arrays
        As for :func:`forward`.

    Returns
    -------
    bool
    """
    return True


def forward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, plan: Plan, scale: float, *, isa: str | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Softmax attention over a plan's pairs.

    Parameters
    ----------
    q : (batch, heads_q, q_len, head_dim) array of float32 | float64 | float16 | bfloat16
        Any strides, as for `k` and `v`. ``1 <= head_dim <= 256``.
    k : (batch, heads_kv, kv_len, head_dim) array
        Same dtype; ``heads_q % heads_kv == 0``.
    v : (batch, heads_kv, kv_len, head_dim_v) array
        Same dtype; ``1 <= head_dim_v <= 256``.
    plan : Plan
        For these lengths and heads. Checked at its first use, unless :func:`spattn.plan` made it.
    scale : float
        Factor of the logits.
    isa : str, optional
        One of :func:`instruction_sets`; default the environment variable ``SPATTN_ISA``, else the best one.

    Returns
    -------
    out : (batch, heads_q, q_len, head_dim_v) array
        In q's dtype and memory order.
    lse : (batch, heads_q, q_len) array of float32 (float64 for float64 inputs)
        Log-sum-exp of each row's logits, natural logarithm; -inf for a row that attends to nothing.

    Raises
    ------
    ValueError
        If shapes do not fit each other or the plan, the plan is not sound, or `isa` cannot run here.
    TypeError
        If the dtypes differ or are not supported.
    MemoryError
        If the workspace cannot be allocated.

    Notes
    -----
    Bitwise repeatable, for any number of threads. Extra memory is O(batch · heads · q_len · head_dim_v) for rows that
    several work items share, and under two megabytes per thread, most of it for packed keys and values. Up to 64 MiB
    of it are kept for later calls: see :func:`free_workspaces`.
    """
    plan = _check(q, k, v, plan)
    out = np.empty_like(q, shape=(*q.shape[:3], v.shape[3]), subok=False)
    lse = np.empty(q.shape[:3], np.float64 if q.dtype == np.float64 else np.float32)
    if out.size or lse.size:
        work, threads = neighbours_together(plan), _threads_for(q, v, plan)
        arguments = q, k, v, out, lse, plan, work, scale, isa or _default_isa(), threads
        if _core.forward(*arguments) and (instead := _nonfinite.without(v)):
            _core.forward(*arguments, instead)
    return out, lse


def backward(
    dout: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray, lse: np.ndarray, plan: Plan,
    scale: float, *, isa: str | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of ``Σ dout · out`` with respect to q, k and v.

    Parameters
    ----------
    dout : (batch, heads_q, q_len, head_dim_v) array
        Of q's dtype. Any strides, as for all of them.
    q, k, v : arrays
        As for :func:`forward`.
    out, lse : arrays
        What :func:`forward` returned for them.
    plan, scale, isa
        As for :func:`forward`.

    Returns
    -------
    dq, dk, dv : arrays
        Shaped as q, k and v, in their dtype and memory order. 0 for rows with ``lse = -inf``.

    Raises
    ------
    ValueError, TypeError, MemoryError
        As :func:`forward`.

    Notes
    -----
    Bitwise repeatable, for any number of threads. Extra memory is O(batch · heads · (q_len + kv_len) · head_dim).
    """
    plan = _check(q, k, v, plan)
    _check_results(q, v, dout, out, lse)
    dq, dk, dv = (np.empty_like(x, subok=False) for x in (q, k, v))
    if q.size:
        split = units(plan, *q.shape[:2], k.shape[1])
        threads = _threads_for(q, v, plan)
        arguments = dout, q, k, v, out, lse, dq, dk, dv, plan, split, scale, isa or _default_isa(), threads
        if _core.backward(*arguments) and (instead := _nonfinite.without(k)):
            _core.backward(*arguments, instead)
    else:
        dk[...], dv[...] = 0, 0
    return dq, dk, dv


def _threads_for(q, v, plan) -> int:
    pairs = q.shape[0] * q.shape[1]
    rows = min(plan.block_q, plan.q_len)  # of a tile, with queries
    flops = 2.0 * pairs * plan.tiles / plan.variants * rows * plan.block_kv * (q.shape[3] + v.shape[3])
    useful = 1 + int(flops / _FLOPS_PER_THREAD)
    tasks = pairs * max(len(plan.work), -(-max(plan.q_len, plan.kv_len) // 64))  # no pass of a call has more
    return min(num_threads(), tasks) if useful > 1 else 1


def _check(q, k, v, plan) -> Sealed:
    """Whatever the kernels rely on to stay inside of the arrays; returns the plan to execute."""
    if q.dtype.name not in _core.DTYPES or not q.dtype.isnative:  # the name does not tell the byte order
        raise TypeError(f"q: expected one of {', '.join(_core.DTYPES)}, got {q.dtype}")
    batch, heads_q, q_len, head_dim = q.shape
    heads_kv, kv_len, head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    length = batch, heads_kv, kv_len
    for name, x, shape in (("k", k, (*length, head_dim)), ("v", v, (*length, head_dim_v))):
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: expected dtype {q.dtype} like q, got {x.dtype}")
        if x.shape != shape:
            raise ValueError(f"{name}: expected shape {shape}, got {x.shape}")
    if heads_q and (not heads_kv or heads_q % heads_kv):
        raise ValueError(f"k: expected a number of heads that divides {heads_q}, got {heads_kv}")
    if not 1 <= head_dim <= _MAX_HEAD_DIM or not 1 <= head_dim_v <= _MAX_HEAD_DIM:
        raise ValueError(f"head_dim: expected 1 to {_MAX_HEAD_DIM}, got {head_dim} and {head_dim_v} (v)")
    return sealed_for(plan, batch, heads_q, q_len, kv_len)


def _check_results(q, v, dout, out, lse) -> None:
    """The same for the backward's further arrays."""
    rows = q.shape[:3]
    statistic = np.dtype(np.float64 if q.dtype == np.float64 else np.float32)
    shape = (*rows, v.shape[3])
    for name, x, dtype, expected in (
        ("dout", dout, q.dtype, shape), ("out", out, q.dtype, shape), ("lse", lse, statistic, rows),
    ):  # fmt: skip
        if x.dtype != dtype:
            raise TypeError(f"{name}: expected dtype {dtype}, got {x.dtype}")
        if x.shape != expected:
            raise ValueError(f"{name}: expected shape {expected}, got {x.shape}")
