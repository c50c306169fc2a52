"""Registry of kernel families, and the choice among them."""

from __future__ import annotations

import functools

from ..arrays import FLOAT8
from ..planning import Plan
from ..request.call import Call
from . import sm100
from .driver import device
from .host.execute import chosen_kernels
from .host.family import Family, Launcher
from .sm80.family import FAMILY as PORTABLE
from .sm80.forward import LARGEST_HEAD_DIM
from .sm90.family import Hopper, HopperFloat8, HopperFloat32

__all__ = ["FAMILIES", "Family", "accepts", "advice", "arithmetic", "executing", "launcher_of", "note", "of", "of_call"]

# In order of preference; the last supports every GPU.
FAMILIES: tuple[Family, ...] = (Hopper(PORTABLE), HopperFloat32(PORTABLE), PORTABLE)
FLOAT8_FAMILY = HopperFloat8(PORTABLE)  # the only one for float8


def of(gpu: device.Device, dtype: str, head_dim: int, head_dim_v: int) -> Family:
    """Return the kernel family for a problem; SPATTN_CUDA_KERNEL=portable forces the portable one."""
    return _of(chosen_kernels(), gpu, dtype, head_dim, head_dim_v)


def of_call(call: Call, gpu: device.Device) -> Family:
    """Return the kernel family for a call."""
    found = of(gpu, call.dtype, call.head_dim, call.head_dim_v)
    return found if call.q_len >= found.fewest_queries else PORTABLE


def launcher_of(call: Call) -> Launcher:
    """Return the launcher of a call's family, which must have one."""
    launcher = of_call(call, device.get(call.kind.ordinal(call.q))).launcher
    if launcher is None:
        raise ValueError(f"problems: no grouped launches for {call.dtype} on this device")
    return launcher


@functools.cache
def _of(choice: str, gpu: device.Device, dtype: str, head_dim: int, head_dim_v: int) -> Family:
    if choice not in ("auto", "portable"):
        raise ValueError(f"SPATTN_CUDA_KERNEL: expected 'auto' or 'portable', got {choice!r}")
    for name, size in (("head_dim", head_dim), ("head_dim_v", head_dim_v)):
        if not 1 <= size <= LARGEST_HEAD_DIM:
            raise ValueError(
                f"{name} {size} is not supported on CUDA (max {LARGEST_HEAD_DIM}); "
                "pass arrays on the CPU to backend='cpu'"
            )
    if dtype == FLOAT8:
        if choice == "auto" and FLOAT8_FAMILY.supports(gpu, dtype, head_dim, head_dim_v):
            return FLOAT8_FAMILY
        raise ValueError(
            "q: float8 needs the kernels for compute capability 9.0 and head dimensions that are multiples of 16, at "
            f"most 128; got {head_dim} and {head_dim_v} on {gpu.name}; convert q, k and v to bfloat16"
        )
    allowed = FAMILIES if choice == "auto" else FAMILIES[-1:]
    return next(family for family in allowed if family.supports(gpu, dtype, head_dim, head_dim_v))


def executing(family: Family, plan: Plan, backward: bool = False) -> Family:
    """Return the first of `family` and the portable family that executes the plan; raise ValueError if neither does."""
    for own in (family,) if family is FLOAT8_FAMILY else (family, PORTABLE):
        if own.accepts(plan, backward):
            return own
    if plan.ordered:
        raise ValueError("plan: ordered and gathered plans require the forward kernels of compute capability 9.0")
    raise ValueError(f"plan: no CUDA kernel has tiles of {plan.block_q} × {plan.block_kv}; use spattn.cuda.tile()")


def accepts(call: Call, gpu: device.Device, plan: Plan, backward: bool) -> bool:
    """True if the call's family executes the plan; in the forward, also if only the portable family does. In the
    backward, a new plan for the call's family is faster than the portable kernels."""
    family = of_call(call, gpu)
    return family.accepts(plan, backward) or (not backward and family is not FLOAT8_FAMILY and PORTABLE.accepts(plan))


def note(gpu: device.Device) -> str | None:
    """Return what users should know about a device's kernels, or None."""
    return sm100.missing(gpu)


def arithmetic(family: str, dtype: str, precision: str | None) -> str:
    """Return the arithmetic of the forward's matrix products in the kernels of a family."""
    if dtype == "float64":
        return "float64 multiply-adds on CUDA cores (FFMA kernels)"
    if dtype == "float32":
        if family == PORTABLE.name:
            return "TF32 tensor cores" if precision else "float32 as two TF32 terms, by tensor cores"
        return f"float32 as {'two' if precision else 'three'} bfloat16 terms, by tensor cores (WGMMA), float32 sums"
    return f"{dtype} tensor cores ({'mma.sync' if family == PORTABLE.name else 'WGMMA'}), float32 sums"


def advice(dtype: str, precision: str | None) -> str | None:
    """Return what the kernels of another dtype or precision use instead, or None."""
    if dtype == "float64":
        return "float64 on a GPU runs in FFMA kernels, without tensor cores; float32 arrays use tensor cores"
    if dtype == "float32" and precision is None:
        return (
            "float32 takes three TF32 products for each product, or six of bfloat16; precision='tf32' takes a third "
            "or half of them, with at least 11 significant bits"
        )
    return None
