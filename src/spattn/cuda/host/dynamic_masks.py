"""Calls with a dynamic mask: validate, plan, and run the kernels that select tiles."""

from __future__ import annotations

from typing import Any, NoReturn

from ...arrays import dtype_name, namespace_of
from ...arrays.operand import Operand
from ...backends import PreparedForward
from ...choose.machine_gpu import BLOCKS, pieces_of, workers_of
from ...choose.specializations import ROWS, TILE
from ...patterns.dynamic import DynamicMask, Form, MaskedPattern
from ...planning import Plan
from ...request.call import Call
from ...schedule import compiler
from ..driver.device import Device
from . import execute
from .family import Launcher, MaskSource
from .forward_pass import ForwardPass

__all__ = ["prepare"]

_MANY = 4  # query tiles per resident CTA; from here on, lists are not split


def prepare(call: Call, selected: MaskedPattern, launcher: Launcher, device: Device) -> PreparedForward:
    """Return a cached dispatch of calls that differ only in values, addresses, stream and scale."""
    form = check(call, selected.selection)
    if 0 in call.out_shape or call.kv_len == 0:
        return execute.nothing(call)
    plan = _plan(call, selected, form, device.sm_count)
    arrays = selected.selection.arrays()
    sources = tuple(MaskSource(_with_axes(call.kind.operand(x)), dtype_name(x) == "int64") for x in arrays)

    def forward(run: ForwardPass, kept: object = arrays) -> None:  # the default argument keeps the arrays allocated
        launcher.forward_masked(run, form, sources)

    return execute.Forward(call, plan, forward, device, _never_again)


def check(call: Call, selection: DynamicMask) -> Form:
    """Return the form of a dynamic mask; raise if it does not match the call."""
    form = selection.form()
    for x in selection.arrays():
        kind = namespace_of(x)
        if kind is not call.kind or kind is None:
            raise TypeError(f"pattern: expected a selection of {call.kind.name} arrays like q, got {selection}")
        if kind.ordinal(x) != call.kind.ordinal(call.q):
            where = kind.device(x)
            raise ValueError(f"pattern: expected a selection on {call.device} like q, got one on {where}")
    if form.batch not in (1, call.batch):
        raise ValueError(f"pattern: expected a selection for {call.batch} batch entries, got one for {form.batch}")
    if not form.heads or call.heads_q % form.heads:
        heads = call.heads_q
        raise ValueError(f"pattern: expected a selection for a divisor of {heads} heads, got one for {form.heads}")
    selection.check(call.kv_len)
    return form


def _plan(call: Call, selected: MaskedPattern, form: Form, sms: int) -> Plan:
    """Plan the pattern in query tiles of 64 rows if the mask has query blocks that 128 does not divide, else of 128."""
    rows = ROWS if form.name == "blocks" and form.block_q % TILE[0] else TILE[0]
    tiles = call.batch * call.heads_q * -(-call.q_len // rows)
    each = 1 if tiles >= _MANY * BLOCKS * sms else workers_of(call.batch, call.heads_q, sms)
    pieces = pieces_of(call, rows, sms)
    return compiler.plan_for(selected.pattern, call, (rows, TILE[1]), each, tile_by_tile=True, pieces=pieces)


def _with_axes(x: Operand) -> Operand:
    """Prepend axes for batch entries and heads."""
    missing = 4 - len(x.shape)
    return Operand(x.pointer, (1,) * missing + x.shape, (0,) * missing + x.strides)


def _never_again(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError("SPATTN_CUDA_KERNEL has changed within a call")
