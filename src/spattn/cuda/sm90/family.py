"""Kernels for compute capability 9.0: TMA, WGMMA and persistent CTAs, for 16-bit types and the forward of float32.

They execute plans with tiles of 64 keys, and 192, 128 or at most 64 queries; if the head dimension leaves room, one
product covers two key tiles. Permuted and gathered tokens are copied row by row. The portable kernels replace them for
arrays that TMA cannot address (rows not 16-byte aligned, zero or negative strides), for plans of more than 240 tensor
maps, and for tiles of 192 queries of more than 128 features, with the same plan or, if they do not support its tile
shape, a new plan of its pattern.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from ...arrays import FLOAT8
from ...choose.group_plans import Member, shared
from ...choose.machine_gpu import chosen, pieces_of, workers_of
from ...choose.specializations import DTYPES, ROWS, TILE, WIDEST, executes, has_build, item_keys, terms_of
from ...patterns import Pattern
from ...planning import Plan
from ...request.call import Call
from ...schedule import compiler
from ...schedule.group import workers
from ...schedule.tensor_maps import MAPS, can_halve
from ..driver.device import Device
from ..driver.launch import Request
from ..host.backward_pass import BackwardPass
from ..host.family import Family, Launcher
from ..host.forward_pass import ForwardPass
from . import dynamic_masks
from .backward import prepared as backwards
from .forward import group as groups
from .forward import prepared as forwards
from .forward.steps import Steps
from .forward.terms import itemsizes_of
from .maps import ADDRESS_ALIGNMENT, readable

__all__ = ["Hopper", "HopperFloat8", "HopperFloat32"]

# float8 in tiles of WIDEST is 1.15 times as fast as in those of TILE for long items, 4 % slower in windows of ±256.
_LONG_ITEM = 1024  # keys of an item from which on tiles of WIDEST are taken
_MORE_PAIRS = 1.1  # unless they cover more than this multiple of the pairs
_log = logging.getLogger("spattn.cuda")


class Hopper:
    """See :class:`~spattn.cuda.host.family.Family` and :class:`~spattn.cuda.host.family.Launcher`.

    The family `fallback` computes calls whose arrays TMA cannot address.
    """

    name = "hopper"
    fewest_queries = 0
    dtypes: tuple[str, ...] = DTYPES
    largest_head_dim = 256
    divisor = 8  # of head dimensions: rows are multiples of 16 bytes

    def __init__(self, fallback: Family):
        self._fallback = fallback
        self.launcher: Launcher | None = self

    def supports(self, device: Device, dtype: str, head_dim: int, head_dim_v: int) -> bool:
        return (
            device.capability == (9, 0)
            and dtype in self.dtypes
            and all(dim % self.divisor == 0 and 0 < dim <= self.largest_head_dim for dim in (head_dim, head_dim_v))
        )

    def tile(self, device: Device, dtype: str, head_dim: int) -> tuple[int, int]:
        return TILE

    def accepts(self, plan: Plan, backward: bool = False) -> bool:
        if backward:
            return plan.tile == TILE and not plan.ordered
        return executes(*plan.tile) and (plan.block_q <= ROWS or can_halve(plan, plan.block_q // ROWS))

    def plan_for(self, pattern: Pattern, call: Call, device: Device, max_bytes: int | None, backward: bool) -> Plan:
        """Choose the plan of a forward by predicted time; a backward always has tiles of TILE."""
        each = workers_of(call.batch, call.heads_q, device.sm_count)
        if backward:
            return compiler.plan_for(pattern, call, TILE, each, max_bytes, tile_by_tile=True)
        return chosen(pattern, call, each, max_bytes, device.sm_count)

    def forward(self, call: ForwardPass) -> None:
        launches = forwards.prepare(call)
        addresses = call.q.pointer | call.k.pointer | call.v.pointer | call.out.pointer
        if launches is not None and addresses % ADDRESS_ALIGNMENT == 0:
            launches.run(call)
            return
        if call.stage is not None:
            raise ValueError(f"plan: the portable kernels compute no stages, and {why_not(call)}")
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("fall back to the portable kernels: %s", why_not(call))
        self._fallback.forward(self._for_fallback(call))

    def _for_fallback(self, call: ForwardPass) -> ForwardPass:
        """Return the call with a plan that the fallback executes, if necessary a new one of its pattern."""
        plan, device = call.plan, call.device
        if self._fallback.accepts(plan):
            return call
        if plan.pattern is None:
            why = why_not(call)
            raise ValueError(f"plan: the portable kernels do not support tiles of {plan.tile}, and {why}")
        batch, heads = call.q.shape[:2]
        tile = self._fallback.tile(device, call.dtype, max(call.q.shape[3], call.v.shape[3]))
        each = workers(2 * device.sm_count, batch * heads)
        sizes = plan.pattern, plan.q_len, call.k.shape[2]
        return replace(call, plan=compiler.plan(*sizes, batch=batch, heads=heads, tile=tile, workers=each))

    def backward(self, call: BackwardPass) -> int:
        ready = backwards.prepare(call)
        if ready is not None:
            return ready.run(call)
        if call.stage is not None:
            raise ValueError(
                "plan: the portable kernels compute no stages, and TMA cannot address the arrays, or the plan needs "
                "too many tensor maps"
            )
        _log.debug(
            "fall back to the portable kernels: TMA cannot address the arrays, or the plan needs too many tensor maps"
        )
        return self._fallback.backward(call)

    def backward_requests(self, call: BackwardPass) -> list[Request]:
        found = backwards.requests(call)
        return self._fallback.backward_requests(call) if found is None else found

    # Members of Launcher:
    alignment = ADDRESS_ALIGNMENT
    prepare = staticmethod(forwards.prepare)
    prepare_backward = staticmethod(backwards.prepare)
    group_key = staticmethod(groups.group_key)
    group = staticmethod(groups.group)
    steps = Steps
    forward_masked = staticmethod(dynamic_masks.forward)
    placement = staticmethod(forwards.placement)
    stages = staticmethod(backwards.stages)
    fuses = staticmethod(backwards.fuses)

    def plans(self, members: Mapping[int, Member], device: Device) -> dict[int, Plan]:
        return shared(members, device.sm_count)


class HopperFloat32(Hopper):
    """The forward for float32, whose kernels multiply bfloat16 terms; see sm90/terms.cuh.

    The family `fallback` computes gradients, and calls with plans without a specialization.
    """

    dtypes = ("float32",)
    largest_head_dim = 128
    fewest_queries = 256  # fewer queries read K and V hardly more often than the split into terms does

    def __init__(self, fallback: Family):
        super().__init__(fallback)
        self.launcher = None

    def accepts(self, plan: Plan, backward: bool = False) -> bool:
        return self._fallback.accepts(plan, True) if backward else super().accepts(plan)

    def plan_for(self, pattern: Pattern, call: Call, device: Device, max_bytes: int | None, backward: bool) -> Plan:
        if backward:
            return self._fallback.plan_for(pattern, call, device, max_bytes, backward)
        dims, terms = (call.head_dim, call.head_dim_v), terms_of(call.dtype, call.precision)
        rows = TILE[0] if has_build(TILE[0], dims, terms) else ROWS
        each = workers_of(call.batch, call.heads_q, device.sm_count)
        return chosen(pattern, call, each, max_bytes, device.sm_count, (rows, TILE[1]))

    def forward(self, call: ForwardPass) -> None:
        launches = forwards.prepare(call)
        if launches is not None and call.out.pointer % ADDRESS_ALIGNMENT == 0:
            launches.run(call)
            return
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("fall back to the portable kernels: %s", why_not(call))
        self._fallback.forward(self._for_fallback(call))

    def backward(self, call: BackwardPass) -> int:
        return self._fallback.backward(call)

    def backward_requests(self, call: BackwardPass) -> list[Request]:
        return self._fallback.backward_requests(call)


class HopperFloat8(Hopper):
    """The forward for float8_e4m3fn, whose kernels transpose values in shared memory; nothing replaces it."""

    dtypes = (FLOAT8,)
    largest_head_dim = 128
    divisor = 16

    def __init__(self, fallback: Family):
        super().__init__(fallback)
        self.launcher = None

    def accepts(self, plan: Plan, backward: bool = False) -> bool:
        tiles = (TILE,) if plan.ordered else (TILE, WIDEST)  # copies of rows leave three warpgroups too few registers
        return not backward and plan.tile in tiles and super().accepts(plan)

    def plan_for(self, pattern: Pattern, call: Call, device: Device, max_bytes: int | None, backward: bool) -> Plan:
        """Choose tiles of WIDEST for long items, unless they cover many more pairs or their boxes cannot be split."""
        sms = device.sm_count
        each = workers_of(call.batch, call.heads_q, sms)
        narrow, wide = (
            compiler.plan_for(
                pattern, call, tile, each, max_bytes, tile_by_tile=True, pieces=pieces_of(call, tile[0], sms)
            )
            for tile in (TILE, WIDEST)
        )
        more = wide.tiles * WIDEST[0] > _MORE_PAIRS * narrow.tiles * TILE[0]
        return narrow if more or item_keys(wide) < _LONG_ITEM or not self.accepts(wide) else wide

    def forward(self, call: ForwardPass) -> None:
        launches = forwards.prepare(call)
        pointers = (call.q.pointer, call.k.pointer, call.v.pointer, call.out.pointer)
        if launches is None or any(pointer % ADDRESS_ALIGNMENT for pointer in pointers):
            raise ValueError(f"{why_not(call)}; copy the array, or convert q, k and v to bfloat16")
        launches.run(call)

    def backward(self, call: BackwardPass) -> int:
        raise ValueError("q: float8 has no gradients; convert q, k and v to bfloat16")

    def backward_requests(self, call: BackwardPass) -> list[Request]:
        raise ValueError("q: float8 has no gradients; convert q, k and v to bfloat16")


def why_not(call: ForwardPass) -> str:
    """Return why the kernels cannot compute a call. TMA addresses only the output of float32."""
    dims, terms = (call.q.shape[3], call.v.shape[3]), terms_of(call.dtype, call.precision)
    if not has_build(call.plan.block_q, dims, terms, call.dtype == FLOAT8):
        return f"{terms} terms of {max(dims)} features have no tiles of {call.plan.tile}"
    itemsize_in, itemsize_out = itemsizes_of(call)
    for name in ("q", "k", "v", "out") if itemsize_out == 2 else ("out",):
        operand, itemsize = getattr(call, name), itemsize_out if name == "out" else itemsize_in
        if operand.pointer % ADDRESS_ALIGNMENT:
            return f"{name} starts at {operand.pointer:#x}, which is not {ADDRESS_ALIGNMENT}-byte aligned"
        if not readable(operand, itemsize):
            return (
                f"{name} has shape {operand.shape} and strides {operand.strides}: rows must be contiguous and 16-byte "
                "aligned, and strides positive"
            )
    return f"the plan needs more than {MAPS[-1]} tensor maps"
