"""Select the backend and the plan of a call."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from .._util.imports import whole_imports
from ..arrays import check_plain, dtype_name, namespace_of
from ..backends import Backend, load
from ..patterns import Mask, Pattern
from ..patterns.base.class_registry import pattern_class
from ..patterns.base.pattern import Deferred
from ..planning import Plan, validate
from ..request.call import Call

if TYPE_CHECKING:
    from ..request.layout import Layout

__all__ = ["as_pattern", "backend_for", "check_grid", "check_mask", "find_plan", "name_for"]

Sizes = tuple[int | None, int | None, int | None, int | None]


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
    """Return the plan of `pattern` for a call on a backend, or for the gradients of the call."""
    check_grid(call.layout, pattern)
    needed, most = call.result_bytes(backward), module.memory(call)
    if needed > most:
        raise MemoryError(f"q, k, v: the results need {needed} bytes, more than the {most} bytes of memory")
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
    return module.plan_for(as_pattern(pattern, call.sizes), call, max_bytes, backward=backward)


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
        own = (
            pattern_class(pattern)()
            if isinstance(pattern, str)
            else pattern.pattern
            if isinstance(pattern, Plan)
            else pattern
        )
        layout.check_grid(own.grids() if isinstance(own, Pattern) else frozenset())


def as_pattern(pattern: Any, sizes: Sizes = (None, None, None, None)) -> Pattern:
    """Convert the `pattern` argument of attention(), other than a Plan, to a Pattern.

    `sizes` are batch, heads_q, q_len and kv_len of the call; None if unknown.
    """
    if isinstance(pattern, Deferred):  # after a graph break
        with whole_imports:
            from ..patterns.base.in_graphs import resolved

        made: Pattern = resolved(pattern)
        return made
    if isinstance(pattern, Pattern):
        return pattern
    if isinstance(pattern, str):
        return _named(pattern)
    kind = namespace_of(pattern)
    if kind is not None and dtype_name(pattern) == "bool" and not _is_sparse(pattern):
        check_plain("pattern", pattern)
        check_mask(tuple(pattern.shape), sizes)
        return Mask(kind.to_host(pattern))
    hint = _hint(pattern)
    if hint is not None:
        raise TypeError(f"pattern: {hint}")
    expected = "expected a Pattern, a registered name, a Plan or a bool array"
    raise TypeError(f"pattern: {expected}, got {type(pattern).__name__}")


def _named(name: str) -> Pattern:
    """Create the pattern registered as `name`, which must need no parameters."""
    cls = pattern_class(name)
    needed = [p.name for p in inspect.signature(cls).parameters.values() if p.default is p.empty]
    if needed:
        given = ", ".join(f"{parameter}=..." for parameter in needed)
        raise TypeError(f'pattern: "{name}" has parameters: pass spattn.patterns.registry.get("{name}", {given})')
    made: Pattern = cls()
    return made


def _is_sparse(array: Any) -> bool:
    """Return True for a sparse tensor of PyTorch."""
    return str(getattr(array, "layout", "")).startswith("torch.sparse")


def _hint(pattern: Any) -> str | None:
    """Return how to convert an argument that is no pattern, or None if there is no hint."""
    interop = "convert it by spattn.patterns.interop."
    if pattern is None:
        return 'got None; for all pairs, pass "full"'
    if callable(pattern) and getattr(pattern, "__module__", "").startswith("spattn."):
        return f"got {getattr(pattern, '__name__', pattern)} itself; call it to create a pattern"
    if inspect.isfunction(pattern):
        return f"got a function; if it is a mask_mod of FlexAttention, {interop}from_mask_mod(function)"
    if type(pattern).__name__ == "BlockMask":
        return f"got a BlockMask; {interop}from_block_mask(mask)"
    if type(pattern).__module__.startswith("scipy.sparse"):
        return f"got a sparse array of SciPy; {interop}from_scipy(matrix)"
    if namespace_of(pattern) is None:
        return None
    if _is_sparse(pattern):
        return f"got a sparse tensor; {interop}from_torch_sparse(tensor)"
    dtype = dtype_name(pattern)
    if "float" in dtype:
        return f"got an array of {dtype}; if it is added to the scores as 0 or -inf, pass the mask array == 0"
    return f"got an array of {dtype}; a mask must be bool: pass array != 0"


def check_mask(shape: tuple[int, ...], sizes: Sizes) -> None:
    """Raise ValueError unless a bool mask has all rows and columns and its leading axes broadcast to q's."""
    batch, heads, q_len, kv_len = sizes
    if len(shape) < 2:
        return  # Mask raises the error
    got = f"pattern: a bool mask must have shape ([[batch,] heads,] q_len, kv_len), got {shape}"
    if 1 in shape[-2:] and None not in (q_len, kv_len) and shape[-2:] != (q_len, kv_len):
        hint = "np.broadcast_to(mask, shape)"
        if shape[-2] == 1 and shape[-1] == kv_len:
            hint = "spattn.patterns.KeyPadding(mask) for key padding"
        raise ValueError(f"{got}; its last axes do not broadcast to {q_len} queries and {kv_len} keys: use {hint}")
    for name, size, wanted in zip(("heads", "batch"), shape[-3::-1], (heads, batch), strict=False):
        if wanted is None or size in (1, wanted):
            continue
        hints = []
        if len(shape) == 3 and batch in (None, size):
            hints.append("insert an axis for one mask per batch entry: mask[:, None]")
        if name == "heads" and size and wanted % size == 0:
            hints.append("use spattn.patterns.Mask(mask) for one mask per group of heads")
        expected = f"expected {wanted} {name}" + (" or 1" if wanted != 1 else "")
        raise ValueError("; ".join([f"{got}: {expected}", *hints]))
