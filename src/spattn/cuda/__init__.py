"""The CUDA backend: kernels compiled by nvcc at first use and launched through PyCUDA.

It uses the device's primary context. Importing this module touches no GPU and imports neither PyCUDA nor cuda-bindings.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from .._util.imports import whole_imports
from ..backends import Execution, Limits, PreparedBackward, PreparedForward, PreparedGroup
from ..choose.chooser import Sizes
from ..choose.group_plans import Member
from ..choose.machine_gpu import LARGEST_HEAD_DIM, SMS, cheapest, cost_ms, workers_of
from ..choose.specializations import DTYPES, ROWS, executes
from ..patterns import Full, Pattern
from ..patterns.dynamic import MaskedPattern
from ..planning import Plan
from ..planning.contract.validated import validated_for
from ..request.call import Call
from ..request.score import ScoreOperands
from ..schedule import few_queries
from . import families
from .driver import cache, compile, device
from .driver.errors import NO_DEVICE, CudaError
from .driver.launch import compile_early
from .host import dynamic_masks, execute, group, repeat, steps
from .host.dropout import words_request
from .sm80.backward.captured import CapturedGradients

__all__ = [
    "LIMITS",
    "CudaError",
    "accepts",
    "by_rows",
    "cheaper",
    "dense_ms",
    "execution",
    "forward",
    "info",
    "memory",
    "plan_for",
    "predicted_ms",
    "prepare_rows",
    "sm_count",
    "tile",
    "unavailable",
]

LIMITS = Limits(
    host_arrays=False, precisions=("tf32",), moves=True, groups=True, selects=True, compiles=True, rows=True
)

_works_in: int | None = None  # id of the process in which the backend was found to work
_log = logging.getLogger(__name__)


def unavailable() -> str | None:
    """Return why the backend cannot run here and how to fix it, or None if it can; creates no CUDA context."""
    global _works_in
    if _works_in != os.getpid():
        reason = _why_not()
        if reason is not None:
            return reason
        _works_in = os.getpid()
    return None


def _why_not() -> str | None:
    try:
        with whole_imports:
            import pycuda.driver  # noqa: F401
            from cuda.bindings import driver  # noqa: F401
    except ImportError as error:
        if "libcuda" in str(error):
            return f"no NVIDIA driver was found ({error}); install one, or use backend='cpu'"
        if "undefined symbol: cu" in str(error):
            return f"the NVIDIA driver is older than PyCUDA needs ({error}); update it, or use backend='cpu'"
        return f"{error}; pip install pycuda cuda-bindings"
    try:
        number = device.count()
    except RuntimeError as error:
        if not isinstance(error, CudaError) or error.code != NO_DEVICE:
            return str(error)
        number = 0
    if number == 0:
        return "the driver sees no GPU; check nvidia-smi and CUDA_VISIBLE_DEVICES"
    gpu = device.get()
    if gpu.capability < device.OLDEST_ARCHITECTURE:
        has, needs = (".".join(map(str, pair)) for pair in (gpu.capability, device.OLDEST_ARCHITECTURE))
        return f"{gpu.name} has compute capability {has}, the kernels need {needs} or later; use backend='cpu'"
    if compile.find_nvcc() is None and not cache.names("") and not cache.SHIPPED.is_dir():
        return (
            "nvcc was not found and no kernel is in the cache; pip install 'spattn[nvcc]' (for drivers of CUDA 13), "
            "install the CUDA toolkit or set SPATTN_NVCC, or copy a "
            "cache that python -m spattn.cuda.prebuild filled elsewhere and set SPATTN_CACHE_DIR"
        )
    return None


def forward(q: Any, k: Any, v: Any, plan: Plan, scale: float, *, precision: str | None = None) -> tuple[Any, Any]:
    """Softmax attention over the pairs of a plan; see :func:`spattn.attention` for the arguments.

    Device arrays are used in place, on the caller's current stream, without synchronization. Host arrays are copied to
    the device and the results back. At level DEBUG, the logger ``spattn.cuda`` reports the chosen kernels and why a
    call fell back to the portable ones; cached dispatches of :func:`spattn.attention` log nothing.

    Raises
    ------
    TypeError, ValueError
        If `plan` is not a Plan, is invalid, or was made for other lengths, batch entries or heads.
    MemoryError
        If the GPU is out of memory; the message states the bytes needed and free.
    CudaError
        If a CUDA call fails; the message states whether the process must restart.
    RuntimeError
        In a process forked after CUDA was initialised.
    """
    call = Call.of(q, k, v, scale=scale, precision=precision)
    return prepare(call, plan)(q, k, v, call.scale)


def prepare(call: Call, plan: Plan, staging: Any = None) -> PreparedForward:
    """Return a cached dispatch of calls that differ only in values, addresses, stream and scale; for length-polymorphic
    plans also in `kv_len` and the strides of k and v. With `staging`, only for the current stream: see
    :func:`.driver.buffer.upload`."""
    plan = validated_for(plan, call.batch, call.heads_q, call.q_len, call.kv_len)
    if 0 in call.out_shape or call.kv_len == 0:
        return execute.nothing(call)
    gpu = device.get(call.kind.ordinal(call.q))
    family = families.executing(families.of_call(call, gpu), plan)
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug(
            "%s kernels: %s, head_dim %d and %d, tiles of %d × %d, %s",
            family.name,
            call.dtype,
            call.head_dim,
            call.head_dim_v,
            plan.block_q,
            plan.block_kv,
            gpu.name,
        )
    if call.score is not None and call.score.dropout is not None:
        compile_early(gpu, [words_request(gpu)])
    return repeat.forward(call, plan, family, gpu, _forward_again, staging)


def _forward_again(
    q: Any, k: Any, v: Any, plan: Plan, scale: float, *, precision: str | None, score: ScoreOperands | None
) -> tuple[Any, Any]:
    """Run a call again after SPATTN_CUDA_KERNEL has changed; make a new plan if the kernels now chosen need one."""
    call = replace(Call.of(q, k, v, scale=scale, precision=precision), score=score)
    if plan.pattern is not None and not accepts(plan, call):
        plan = plan_for(plan.pattern, call)
    return prepare(call, plan)(q, k, v, scale, *(() if score is None else (score,)))


def prepare_backward(call: Call, plan: Plan) -> PreparedBackward:
    """Return a cached dispatch of the gradients, with the forward's plan."""
    plan = validated_for(plan, call.batch, call.heads_q, call.q_len, call.kv_len)
    if 0 in call.rows or call.kv_len == 0:
        return execute.no_gradients(call)
    return repeat.backward(call, plan, *_gradients(call, plan))


def compile_backward(call: Call, plan: Plan) -> None:
    """Let threads compile the kernels of the gradients of a call that are in no cache; see :func:`prepare_backward`."""
    plan = validated_for(plan, call.batch, call.heads_q, call.q_len, call.kv_len)
    if 0 not in call.rows and call.kv_len > 0:
        execute.Backward(call, plan, *_gradients(call, plan)).compile_early(call)


def _gradients(call: Call, plan: Plan) -> tuple[device.Device, Callable[[], families.Family], CapturedGradients | None]:
    """Return the arguments of :class:`~spattn.cuda.host.execute.Backward` after the plan."""
    gpu = device.get(call.kind.ordinal(call.q))
    sizes = call.dtype, call.head_dim, call.head_dim_v

    def choose() -> families.Family:
        return families.executing(families.of(gpu, *sizes), plan, backward=True)

    choose()  # raises ValueError if no family executes the plan
    captured = CapturedGradients(call) if call.score is not None and True in call.score.wanted else None
    return gpu, choose, captured


def memory(call: Call) -> int:
    """Return the total memory, in bytes, of the call's GPU."""
    return device.get(call.kind.ordinal(call.q)).total_bytes


def plan_for(pattern: Pattern, call: Call, max_bytes: int | None = None, *, backward: bool = False) -> Plan:
    """Plan in the device's tile shape; split long key tile lists so that the work items occupy all SMs.

    A forward on compute capability 9.0 gets another plan if the cost model predicts less time for it. A few queries of
    most patterns are planned by their rows.
    """
    gpu = device.get(call.kind.ordinal(call.q))
    family = families.of_call(call, gpu)  # checks the head dimensions
    if not backward and by_rows(pattern, call, call.kv_len):
        workers, rows = steps.shape_of(call, gpu)
        return few_queries.plan_for(pattern, call, workers, max_bytes, rows)
    return family.plan_for(pattern, call, gpu, max_bytes, backward)


def by_rows(pattern: Pattern, call: Call, kv_len: int) -> bool:
    """Implement :meth:`.backends.RowsBackend.by_rows`."""
    return few_queries.serves(pattern, call.q_len, kv_len, call.batch, call.heads_q)


def prepare_rows(call: Call) -> Callable[[Pattern], PreparedForward]:
    """Implement :meth:`.backends.RowsBackend.prepare_rows`."""
    return steps.for_all_patterns(call, device.get(call.kind.ordinal(call.q)), prepare)


def together(calls: Mapping[int, tuple[Call, Plan, bool]]) -> list[dict[int, Plan]]:
    """Return the groups of calls that can share a launch, each as {call index: plan}; log the other calls.

    `calls` maps an index to a call, its plan and whether that plan must be kept. The calls of a group share device,
    dtype and class of head dimensions. Only the Hopper kernels have grouped launches.
    """
    found: dict[tuple[Any, ...], dict[int, Member]] = {}
    for number, (call, plan, kept) in calls.items():
        ordinal = call.kind.ordinal(call.q)
        family = None if ordinal is None else families.of_call(call, device.get(ordinal))
        why = group.why_alone(call, plan if kept else None, family)
        if why is not None:
            group.say_alone(number, why)
            continue
        launcher = families.launcher_of(call)
        key = launcher, ordinal, *launcher.group_key(call.dtype, call.head_dim, call.head_dim_v)
        each = workers_of(call.batch, call.heads_q, device.get(ordinal).sm_count)
        found.setdefault(key, {})[number] = Member(call, plan, kept, each)
    several = {key: members for key, members in found.items() if len(members) > 1}
    return [launcher.plans(members, device.get(ordinal)) for (launcher, ordinal, *_), members in several.items()]


def prepare_group(calls: Mapping[int, tuple[Call, Plan]]) -> PreparedGroup:
    """Return a cached dispatch of calls grouped by :func:`together`."""
    own = {}
    for number, (call, plan) in calls.items():
        own[number] = call, validated_for(plan, call.batch, call.heads_q, call.q_len, call.kv_len)
    first, _ = next(iter(own.values()))
    return group.Group(own, families.launcher_of(first), device.get(first.kind.ordinal(first.q)))


def prepare_masked(call: Call, chosen: MaskedPattern) -> PreparedForward:
    """Return a cached dispatch of calls with a dynamic mask; each call reads the mask's device arrays."""
    gpu = device.get(call.kind.ordinal(call.q))
    launcher = families.of_call(call, gpu).launcher
    if launcher is None:
        raise ValueError(
            "pattern: a selection needs float16 or bfloat16, head_dim a multiple of 8 and compute capability 9.0, got "
            f"{call.dtype}, {call.head_dim} and {call.head_dim_v} on {gpu.name}; use to_host()"
        )
    return dynamic_masks.prepare(call, chosen, launcher, gpu)


def predicted_ms(plan: Plan, batch: int, heads: int, head_dim: int, head_dim_v: int, dtype: str) -> float:
    """Predict a forward's time with this plan on an H200, in ms, without host time.

    Raises
    ------
    ValueError
        If the cost model does not cover such calls.
    """
    _check_measured(plan, max(head_dim, head_dim_v), dtype)
    return cost_ms(plan, Sizes(batch, heads, heads, head_dim, head_dim_v), SMS)


def dense_ms(q_len: int, kv_len: int, batch: int, heads: int, head_dim: int, head_dim_v: int, dtype: str) -> float:
    """Predict the time of dense attention on an H200, in ms, without host time."""
    sizes = batch, heads, head_dim, head_dim_v
    dense = cheapest(Full(), q_len, kv_len, Sizes(batch, heads, *sizes[1:]), SMS)
    return predicted_ms(dense, *sizes, dtype)


def cheaper(plan: Plan, batch: int, heads: int, head_dim: int, head_dim_v: int, dtype: str) -> Plan | None:
    """Return the same pattern's plan with the lowest predicted time, or None if `plan` is as fast."""
    if plan.pattern is None:
        return None
    sizes = batch, heads, head_dim, head_dim_v
    other = cheapest(plan.pattern, plan.q_len, plan.kv_len, Sizes(batch, heads, *sizes[1:]), SMS)
    return other if predicted_ms(other, *sizes, dtype) < predicted_ms(plan, *sizes, dtype) else None


def _check_measured(plan: Plan, head_dim: int, dtype: str) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"dtype: the GPU cost model requires {' or '.join(DTYPES)}, got {dtype}")
    if head_dim > LARGEST_HEAD_DIM:
        raise ValueError(f"head_dim {head_dim} is not covered by the GPU cost model (max {LARGEST_HEAD_DIM})")
    if not executes(*plan.tile) or (plan.ordered and plan.block_q > ROWS):
        raise ValueError(
            f"plan: the GPU cost model requires tiles of 64 keys and of 192, 128 or at most 64 queries, got {plan!r}"
        )


def accepts(plan: Plan, call: Call, *, backward: bool = False) -> bool:
    """True if :func:`prepare`, or with `backward` :func:`prepare_backward`, accepts the plan."""
    return families.accepts(call, device.get(call.kind.ordinal(call.q)), plan, backward)


def execution(call: Call, plan: Plan) -> Execution:
    """Return how :func:`prepare` would execute a plan."""
    gpu = device.get(call.kind.ordinal(call.q))
    family = families.executing(families.of_call(call, gpu), plan)
    return Execution(
        f"{family.name} kernels on {gpu.name}",
        families.arithmetic(family.name, call.dtype, call.precision),
        gpu.sm_count,
        f"SMs for {len(plan.work)} work items",
        families.advice(call.dtype, call.precision),
    )


def tile(dtype: str, head_dim: int, head_dim_v: int | None = None, ordinal: int | None = None) -> tuple[int, int]:
    """Return the tile shape (block_q, block_kv), in tokens, for plans on a device."""
    gpu = device.get(ordinal)
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    return families.of(gpu, dtype, head_dim, head_dim_v).tile(gpu, dtype, max(head_dim, head_dim_v))


def sm_count(ordinal: int | None = None) -> int:
    """Return the number of SMs of a device."""
    return device.get(ordinal).sm_count


def info() -> dict[str, object]:
    """Return device, driver and compiler facts for :func:`spattn.show_versions`."""
    from cuda.bindings import driver

    gpu = device.get()
    version = int(driver.cuDriverGetVersion()[1])
    return {
        "GPUs": device.count(),
        "GPU": f"{gpu.name}, compute capability {gpu.capability[0]}.{gpu.capability[1]}, {gpu.sm_count} SMs",
        "driver": f"CUDA {version // 1000}.{version % 1000 // 10}",
        "nvcc": str(compile.find_nvcc() or "not found: only kernels of the wheel and in the cache can run"),
        "kernel cache": str(cache.folder()),
        **({} if (note := families.note(gpu)) is None else {"kernels": note}),
    }
