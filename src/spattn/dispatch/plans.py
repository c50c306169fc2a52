"""Select the backend and the plan of a call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..backends import Backend, load
from ..patterns import Pattern
from ..patterns.conversion import UNKNOWN, Sizes, as_pattern, key_padding_of
from ..planning import Plan, validate
from ..request.call import Call

if TYPE_CHECKING:
    from ..request.layout import Layout

__all__ = ["backend_for", "check_grid", "check_memory", "find_plan", "name_for", "resolve"]


def name_for(call: Call, backend: str) -> str:
    return backend if backend != "auto" else "cpu" if call.device == "cpu" else "cuda"


def backend_for(call: Call, backend: str) -> Backend:
    """Return the backend for a call; raise ValueError if the named backend does not support it."""
    name = name_for(call, backend)
    module = load(name)
    if call.precision is not None and call.precision not in module.LIMITS.precisions:
        raise ValueError(f"precision: {call.precision!r} is not supported by backend {name!r}; use backend='cuda'")
    if module.LIMITS.host_arrays and call.device != "cpu":
        raise ValueError(f"q: backend {name!r} requires host arrays, got an array on {call.device}")
    return module


def find_plan(
    module: Backend, pattern: Any, call: Call, max_bytes: int | None = None, *, backward: bool = False
) -> Plan:
    """Return the plan of a Pattern, or a given Plan, for a call on a backend, or for the gradients of the call."""
    check_grid(call.layout, pattern)
    check_memory(module, call, backward)
    if isinstance(pattern, Plan):
        if (pattern.q_len, pattern.kv_len) != (call.q_len, call.kv_len):
            raise ValueError(
                f"pattern: expected a plan for lengths {call.q_len} × {call.kv_len}, "
                f"got a plan for {pattern.q_len} × {pattern.kv_len}"
            )
        validate(pattern)
        pattern = _plan_or_pattern(pattern, module, call, backward)
        if isinstance(pattern, Plan):
            return pattern
    return module.plan_for(pattern, call, max_bytes, backward=backward)


def check_memory(module: Backend, call: Call, backward: bool = False) -> None:
    """Raise MemoryError if the results of a call exceed the memory of its device."""
    needed, most = call.result_bytes(backward), module.memory(call)
    if needed > most:
        raise MemoryError(f"q, k, v: the results need {needed} bytes, more than the {most} bytes of memory")


def _plan_or_pattern(plan: Plan, module: Backend, call: Call, backward: bool) -> Plan | Pattern:
    """Return the plan if the backend accepts it, otherwise its pattern, which the caller plans again."""
    index = plan.variant
    if index.shape[0] not in (1, call.batch) or index.shape[1] not in (1, call.heads_q):
        raise ValueError(
            f"pattern: expected a plan for batch={call.batch} and heads={call.heads_q}, "
            f"got batch={index.shape[0]} and heads={index.shape[1]}"
        )
    if module.accepts(plan, call, backward=backward):
        return plan
    if plan.pattern is None:
        order = "gathered keys and " if plan.gathered else "permuted tokens and " if plan.ordered else ""
        raise ValueError(
            "pattern: the backend does not support this plan, and it has no pattern to replan; it has "
            f"{order}tiles of {plan.block_q} × {plan.block_kv}"
        )
    return plan.pattern


def check_grid(layout: Layout, pattern: Any) -> None:
    """Raise ValueError if the arrays have a grid other than the pattern's."""
    if layout.grid:
        own = pattern.pattern if isinstance(pattern, Plan) else pattern
        layout.check_grid(own.grids() if isinstance(own, Pattern) else frozenset())


def resolve(pattern: Any, sizes: Sizes = UNKNOWN, key_padding: Any = None) -> Pattern | Plan:
    """Convert the `pattern` and `key_padding` arguments of a call to a Pattern or a Plan.

    `sizes` are batch, heads_q, q_len and kv_len of the call; None if unknown.
    """
    if isinstance(pattern, Plan):
        if key_padding is not None:
            raise TypeError(
                "key_padding: a Plan has fixed pairs; write spattn.plan_for(pattern, q, k, v, key_padding=...)"
            )
        return pattern
    own = as_pattern(pattern, sizes)
    return own if key_padding is None else own & key_padding_of(key_padding, sizes)
