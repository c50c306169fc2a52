"""The CUDA backend: kernels compiled by nvcc at first use, run through PyCUDA in the primary context.

Importing this module touches no GPU and imports neither PyCUDA nor cuda-bindings.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from .._util.imports import whole_imports
from ..backends import Limits, PreparedBackward, PreparedForward, PreparedGroup
from ..choose import gpu as _choice
from ..choose.features_gpu import Sizes
from ..choose.machine_gpu import LARGEST_HEAD_DIM, SMS, price_ms
from ..choose.sharing import Member, shared
from ..choose.specializations import DTYPES, ROWS
from ..patterns import Full, Pattern
from ..patterns.dynamic import Selected
from ..planning import Plan
from ..planning.contract.validated import sealed_for
from ..request.call import Call
from ..schedule import compiler
from . import execute, group, hopper, hopper_backward, portable, portable_backward, repeat, selected
from .driver import cache, compile, device
from .driver.errors import NO_DEVICE, CudaError
from .hopper.group import kind_of_group

__all__ = [
    "LIMITS",
    "CudaError",
    "accepts",
    "cheaper",
    "dense_ms",
    "forward",
    "info",
    "memory",
    "plan_for",
    "predicted_ms",
    "sm_count",
    "tile",
    "unavailable",
]

LIMITS = Limits(host_arrays=False, precisions=("tf32",), moves=True, groups=True, selects=True)

_works_in: int | None = None  # the process in which the backend was found to work
_log = logging.getLogger(__name__)


def unavailable() -> str | None:
    """Why the backend cannot run here, with what fixes it; None when it can. Creates no CUDA context."""
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
    if compile.find_nvcc() is None and not cache.names(""):
        return (
            "nvcc was not found and no kernel is in the cache; install the CUDA toolkit or set SPATTN_NVCC, or copy a "
            "cache that python -m spattn.cuda.prebuild filled elsewhere and set SPATTN_CACHE_DIR"
        )
    return None


def forward(q: Any, k: Any, v: Any, plan: Plan, scale: float, *, precision: str | None = None) -> tuple[Any, Any]:
    """Softmax attention over a plan's pairs; see :func:`spattn.attention` for the arguments.

    Device arrays are worked on where they lie, on the stream that the caller's library has current, without waiting for
    it. Host arrays are copied up and back. The logger ``spattn.cuda`` says on level DEBUG which kernels were chosen,
    and why they left a call to the portable ones; repeats of a call of :func:`spattn.attention` say nothing.

    Raises
    ------
    TypeError, ValueError
        If `plan` is not a Plan, not sound, or made for other lengths, batch entries or heads.
    MemoryError
        If the GPU is out of memory, with the bytes needed and free.
    CudaError
        If a CUDA call fails; its message says when the process must restart.
    RuntimeError
        In a process forked after CUDA was used.
    """
    call = Call.of(q, k, v, scale=scale, precision=precision)
    return prepare(call, plan)(q, k, v, call.scale)


def prepare(call: Call, plan: Plan) -> PreparedForward:
    """What computes this call, and every other that differs from it in values, addresses, stream and scale alone, or in
    the number of keys and their strides where the plan moves.

    Raises
    ------
    TypeError, ValueError
        If `plan` is not a Plan, not sound, made for other lengths, batch entries or heads, or of tiles that no kernel
        has.
    """
    plan = sealed_for(plan, call.batch, call.heads_q, call.q_len, call.kv_len)
    if 0 in call.out_shape or call.kv_len == 0:
        return execute.Nothing(call)
    ordinal = call.kind.ordinal(call.q)
    gpu = device.get(ordinal)
    kernels = _kernels(gpu, call.dtype, call.head_dim, call.head_dim_v)
    if not kernels.accepts(plan.block_q, plan.block_kv):
        kernels = portable
    if not kernels.accepts(plan.block_q, plan.block_kv):
        raise ValueError(f"plan: no kernel has tiles of {plan.block_q} × {plan.block_kv}; use spattn.cuda.tile()")
    if kernels is not hopper:
        _check_order(plan)
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug(
            "%s kernels: %s, head_dim %d and %d, tiles of %d × %d, %s",
            kernels.__name__.rpartition(".")[2],
            call.dtype,
            call.head_dim,
            call.head_dim_v,
            plan.block_q,
            plan.block_kv,
            gpu.name,
        )
    if ordinal is None:
        return execute.FromHost(call, plan, kernels, gpu, _forward_again)
    return repeat.on_device(call, plan, kernels, gpu, _forward_again)


def _forward_again(q: Any, k: Any, v: Any, plan: Plan, scale: float, *, precision: str | None) -> tuple[Any, Any]:
    """A call that was prepared for other kernels than the environment asks for now, with another plan of the pattern
    where these cannot execute its own."""
    call = Call.of(q, k, v, scale=scale, precision=precision)
    if plan.pattern is not None and not accepts(plan, call):
        plan = plan_for(plan.pattern, call)
    return prepare(call, plan)(q, k, v, scale)


def prepare_backward(call: Call, plan: Plan) -> PreparedBackward:
    """The same of its gradients. They take the forward's plan: its tiles are those of both.

    Raises
    ------
    TypeError, ValueError
        As :func:`prepare`.
    """
    plan = sealed_for(plan, call.batch, call.heads_q, call.q_len, call.kv_len)
    _check_order(plan)
    if 0 in call.rows or call.kv_len == 0:
        return execute.NoGradients(call)
    gpu = device.get(call.kind.ordinal(call.q))
    if not portable.accepts(plan.block_q, plan.block_kv):
        raise ValueError(f"plan: no kernel has tiles of {plan.block_q} × {plan.block_kv}; use spattn.cuda.tile()")

    def choose() -> ModuleType:
        family = _kernels(gpu, call.dtype, call.head_dim, call.head_dim_v)
        fits = family is hopper and hopper_backward.accepts(plan.block_q, plan.block_kv)
        return hopper_backward if fits else portable_backward

    return repeat.gradients(call, plan, gpu, choose)


def memory(call: Call) -> int:
    """Bytes of the memory of the GPU that the call runs on."""
    return device.get(call.kind.ordinal(call.q)).total_bytes


def plan_for(pattern: Pattern, call: Call, max_bytes: int | None = None, *, backward: bool = False) -> Plan:
    """The plan with the tile shape of this device's kernels. Long lists are split so that one head's work, times the
    heads, occupies every SM. A forward on compute capability 9.0 takes another one that is priced below it."""
    gpu = device.get(call.kind.ordinal(call.q))
    each = _choice.workers_of(call.batch, call.heads_q, gpu.sm_count)
    if not backward and _kernels(gpu, call.dtype, call.head_dim, call.head_dim_v) is hopper:
        return _choice.chosen(pattern, call, each, max_bytes, gpu.sm_count)
    return _plan(gpu, pattern, call, each, max_bytes)


def _plan(gpu: device.Device, pattern: Pattern, call: Call, each: int, max_bytes: int | None) -> Plan:
    shape = tile(call.dtype, call.head_dim, call.head_dim_v, gpu.ordinal)
    return compiler.plan_for(pattern, call, shape, each, max_bytes, tile_by_tile=True)


def together(calls: Mapping[int, tuple[Call, Plan, bool]]) -> list[dict[int, Plan]]:
    """Which calls, by their numbers, run together, with the plans that they have there; those that are in no group run
    by themselves, as the log says. Of each is known the plan that it would have by itself, and whether it has to keep
    that.

    Calls of one device, dtype and class of head dimensions run together, on GPUs with the Hopper kernels.
    """
    found: dict[tuple[Any, ...], dict[int, Member]] = {}
    for number, (call, plan, kept) in calls.items():
        ordinal = call.kind.ordinal(call.q)
        gpu = None if ordinal is None else device.get(ordinal)
        on_hopper = gpu is not None and _kernels(gpu, call.dtype, call.head_dim, call.head_dim_v) is hopper
        why = group.why_alone(call, plan if kept else None, on_hopper)
        if why is not None:
            group.say_alone(number, why)
            continue
        kind = ordinal, *kind_of_group(call.dtype, call.head_dim, call.head_dim_v)
        each = _choice.workers_of(call.batch, call.heads_q, device.get(ordinal).sm_count)
        found.setdefault(kind, {})[number] = Member(call, plan, kept, each)
    several = {kind: members for kind, members in found.items() if len(members) > 1}
    return [shared(members, device.get(ordinal).sm_count) for (ordinal, *_), members in several.items()]


def prepare_group(calls: Mapping[int, tuple[Call, Plan]]) -> PreparedGroup:
    """What computes calls that :func:`together` has put together, and others that differ from them in values,
    addresses, stream and scale alone.

    Raises
    ------
    TypeError, ValueError
        As :func:`prepare`.
    """
    own = {}
    for number, (call, plan) in calls.items():
        own[number] = call, sealed_for(plan, call.batch, call.heads_q, call.q_len, call.kv_len)
        _check_order(plan)
    first, _ = next(iter(own.values()))
    return group.Group(own, device.get(first.kind.ordinal(first.q)))


def prepare_selected(call: Call, chosen: Selected) -> PreparedForward:
    """What computes this call, and every other that differs from it in values, addresses, stream and scale alone, over
    what the selection's arrays allow at that time.

    Raises
    ------
    TypeError
        If the arrays of the selection are of another kind than q.
    ValueError
        If they are on another device, or made for other lengths, batch entries or heads; if no kernel takes such
        calls.
    """
    gpu = device.get(call.kind.ordinal(call.q))
    if _kernels(gpu, call.dtype, call.head_dim, call.head_dim_v) is not hopper:
        raise ValueError(
            "pattern: a selection needs float16 or bfloat16, head_dim a multiple of 8 and compute capability 9.0, got "
            f"{call.dtype}, {call.head_dim} and {call.head_dim_v} on {gpu.name}; to_host() makes a pattern of it"
        )
    return selected.prepare(call, chosen, gpu)


def predicted_ms(plan: Plan, batch: int, heads: int, head_dim: int, head_dim_v: int, dtype: str) -> float:
    """What a forward with a plan would take on an H200, without the host's time.

    Raises
    ------
    ValueError
        If calls like this one were not measured.
    """
    _check_measured(plan, max(head_dim, head_dim_v), dtype)
    return price_ms(plan, Sizes(batch, heads, heads, head_dim, head_dim_v), SMS)


def dense_ms(q_len: int, kv_len: int, batch: int, heads: int, head_dim: int, head_dim_v: int, dtype: str) -> float:
    """The same of attention over all pairs."""
    sizes = batch, heads, head_dim, head_dim_v
    dense = _choice.cheapest(Full(), q_len, kv_len, Sizes(batch, heads, *sizes[1:]), SMS)
    return predicted_ms(dense, *sizes, dtype)


def cheaper(plan: Plan, batch: int, heads: int, head_dim: int, head_dim_v: int, dtype: str) -> Plan | None:
    """The plan that would be chosen for the same pattern where it is priced below this one, None where it is not."""
    if plan.pattern is None:
        return None
    sizes = batch, heads, head_dim, head_dim_v
    other = _choice.cheapest(plan.pattern, plan.q_len, plan.kv_len, Sizes(batch, heads, *sizes[1:]), SMS)
    return other if predicted_ms(other, *sizes, dtype) < predicted_ms(plan, *sizes, dtype) else None


def _check_measured(plan: Plan, head_dim: int, dtype: str) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected {' or '.join(DTYPES)} for a price on a GPU, got {dtype}")
    if head_dim > LARGEST_HEAD_DIM:
        raise ValueError(f"head_dim: expected at most {LARGEST_HEAD_DIM} for a price on a GPU, got {head_dim}")
    if not hopper.accepts(plan.block_q, plan.block_kv) or (plan.ordered and plan.block_q > ROWS):
        raise ValueError(f"plan: expected tiles of up to 64 queries, or of 128 in order, and 64 keys, got {plan!r}")


def _check_order(plan: Plan) -> None:
    if plan.ordered:
        raise ValueError("plan: expected one of tokens in their order, got one whose places are looked up")


def accepts(plan: Plan, call: Call, *, backward: bool = False) -> bool:
    """Whether :func:`prepare`, or :func:`prepare_backward`, takes a plan."""
    gpu, head_dim = device.get(call.kind.ordinal(call.q)), max(call.head_dim, call.head_dim_v)
    if _kernels(gpu, call.dtype, call.head_dim, call.head_dim_v) is hopper:
        if backward:  # the portable kernels take longer than another plan
            return hopper_backward.accepts(plan.block_q, plan.block_kv) and not plan.ordered
        if hopper.accepts(plan.block_q, plan.block_kv):
            return True
    if plan.ordered:
        return False
    return portable.accepts(plan.block_q, plan.block_kv) and portable.fits(gpu, plan.block_q, call.dtype, head_dim)


def tile(dtype: str, head_dim: int, head_dim_v: int | None = None, ordinal: int | None = None) -> tuple[int, int]:
    """(block_q, block_kv) in tokens that plans for a device should have."""
    gpu = device.get(ordinal)
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    return _kernels(gpu, dtype, head_dim, head_dim_v).tile(gpu, dtype, max(head_dim, head_dim_v))


def sm_count(ordinal: int | None = None) -> int:
    """Number of SMs of a device."""
    return device.get(ordinal).sm_count


def info() -> dict[str, object]:
    """Facts for :func:`spattn.show_versions`."""
    from cuda.bindings import driver

    gpu = device.get()
    version = int(driver.cuDriverGetVersion()[1])
    return {
        "GPUs": device.count(),
        "GPU": f"{gpu.name}, compute capability {gpu.capability[0]}.{gpu.capability[1]}, {gpu.sm_count} SMs",
        "driver": f"CUDA {version // 1000}.{version % 1000 // 10}",
        "nvcc": str(compile.find_nvcc() or "not found: only kernels in the cache can run"),
        "kernel cache": str(cache.folder()),
    }


def _kernels(gpu: device.Device, dtype: str, head_dim: int, head_dim_v: int) -> ModuleType:
    """The kernels for a problem. A module of kernels has ``tile(device, dtype, head_dim)``, ``accepts(block_q,
    block_kv)`` and ``forward(call)``. ``SPATTN_CUDA_KERNEL=portable`` keeps to those that run everywhere."""
    return _choose(execute.chosen_kernels(), gpu, dtype, head_dim, head_dim_v)


@functools.cache
def _choose(choice: str, gpu: device.Device, dtype: str, head_dim: int, head_dim_v: int) -> ModuleType:
    if choice not in ("auto", "portable"):
        raise ValueError(f"SPATTN_CUDA_KERNEL: expected 'auto' or 'portable', got {choice!r}")
    for name, size in (("head_dim", head_dim), ("head_dim_v", head_dim_v)):
        if not 1 <= size <= portable.LARGEST_HEAD_DIM:
            raise ValueError(f"{name}: expected 1 … {portable.LARGEST_HEAD_DIM}, got {size}")
    if choice == "auto" and hopper.supports(gpu, dtype, head_dim, head_dim_v):
        return hopper
    return portable
