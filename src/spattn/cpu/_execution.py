"""How the CPU executes a call, in words: arithmetic of the kernels, and the number of threads with its reason."""

from __future__ import annotations

import os

from .._util import limits as _limits
from ..choose.machine_cpu import few_of
from ..planning import Plan
from ..request.call import Call
from . import _core, _threads

__all__ = ["arithmetic", "threads_of"]

_BY_ISA = {
    ("amx", "bfloat16"): "bfloat16 products by AMX tiles, float32 sums",
    ("amx", "float16"): "float16 as two bfloat16 terms, by AMX tiles, float32 sums",
    ("avx512bf16", "bfloat16"): "bfloat16 products by AVX512-BF16 (vdpbf16ps), float32 sums",
}


def arithmetic(isa: str, call: Call, plan: Plan) -> str:
    """Return the arithmetic of the forward's matrix products."""
    if call.dtype in ("float32", "float64"):
        return f"{call.dtype} multiply-adds"
    few = call.q_len <= _core.FEW_QUERIES or plan.block_q <= few_of(isa, call.dtype)
    widened = f"{call.dtype} widened to float32"
    return widened if few else _BY_ISA.get((isa, call.dtype), widened)


def threads_of(useful: int) -> tuple[int, str]:
    """Return the thread count of a call with enough work for `useful` threads, and the reason."""
    used, most = _threads.team_size(useful), _threads.num_threads()
    if useful <= 1:
        return used, "thread: the call is too small to amortize the start of others"
    if used < min(useful, most):
        return used, f"of {most} threads, because other processes occupy cores"
    if useful < most:
        return used, f"of {most} threads, because the call has no more parallel tasks"
    return used, f"thread{'s' * (used != 1)}: {_limit()}"


def _limit() -> str:
    """Return which setting determines the maximum number of threads."""
    if not _core.OPENMP:
        return "the build has no OpenMP"
    if os.getpid() != _threads.IMPORTED_BY:
        return "a forked child uses one"
    if (asked := _threads.requested()) is not None:
        return f"set by {asked}"
    if b"OMP_NUM_THREADS" in _limits.environment:
        return "set by OMP_NUM_THREADS or threadpoolctl"
    return f"all {_limits.processors()} processors of this process"
