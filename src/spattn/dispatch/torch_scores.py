"""PyTorch custom operators for attention with a score function or sinks.

The expression of the score function is an attribute, `score` (None is the identity). What it captures are operands:
`captured` are its arrays, `floats` and `integers` its numbers.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..arrays import dtype_name
from ..arrays.torch_gradients import without_repeats
from ..score.compiled import tensor_in_graph, trace_in_graph
from ..score.recorder import Sizes
from ..score.serialized import from_json as graph_of
from ..score.serialized import restore
from . import calls
from .scores import read
from .torch_schemas import (
    DEVICES,
    OPTIONS,
    cast_under_autocast,
    empty_like,
    empty_results,
    in_order_of,
    joined,
    over_a_batch,
)

__all__ = ["attention", "attention_backward", "captured_by", "gradients"]

_SCORE = "Tensor? sinks, Tensor[] captured, float[] floats, SymInt[] integers, str? score"


@torch.library.custom_op(  # type: ignore[untyped-decorator]
    "spattn::scored_attention",
    mutates_args=(),
    device_types=DEVICES,
    schema=f"(Tensor q, Tensor k, Tensor v, {_SCORE}, {OPTIONS}, str? precision) -> (Tensor out, Tensor lse)",
)
def attention(q: Any, k: Any, v: Any, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute out and lse."""
    modified, (pattern, allowed, scale, backend, precision) = _restored(*others[:5]), others[5:]
    options = {"scale": scale, "backend": backend, "precision": precision, **modified}
    with torch.no_grad():
        out, lse = calls.attention(q, k, v, joined(pattern, allowed), return_lse=True, **options)
    return in_order_of(q, out), lse


@torch.library.custom_op(  # type: ignore[untyped-decorator]
    "spattn::scored_attention_backward",
    mutates_args=(),
    device_types=DEVICES,
    schema="(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_SCORE}, bool[] wanted, {OPTIONS}, str? precision) -> Tensor[]",
)
def attention_backward(
    dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *others: Any
) -> list[torch.Tensor]:
    """Compute dq, dk, dv, the gradients of the `wanted` captured arrays, and that of the sinks if there are any."""
    modified, wanted, (pattern, allowed, scale, backend, precision) = _restored(*others[:5]), others[5], others[6:]
    options = {"dlse": dlse, "scale": scale, "backend": backend, "precision": precision}
    arrays = without_repeats(dout), q, k, v, out, lse, joined(pattern, allowed)
    with torch.no_grad():
        given = read(modified["score"], modified["sinks"], None, q, k, v, backend, "bhsd", backward=True)
        if given is None:  # the identity without sinks
            found = calls.attention_backward(*arrays, **options)
        else:
            dq, dk, dv, dtables, dsinks = calls.backward_with_score(
                *arrays, given=given, wanted=tuple(wanted), layout="bhsd", **options
            )
            rest = [x for x in dtables if x is not None] + ([] if dsinks is None else [dsinks])
            found = dq, dk, dv, *(x.contiguous() for x in rest)
    return [*map(in_order_of, (q, k, v), found[:3]), *found[3:]]


def _restored(sinks: Any, captured: Any, floats: Any, integers: Any, score: str | None) -> dict[str, Any]:
    function = None if score is None else restore(score, floats, integers, captured)
    return {"score": function, "sinks": sinks}


attention.register_fake(empty_results)


@attention_backward.register_fake  # type: ignore[untyped-decorator]
def _(dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *others: Any) -> list[torch.Tensor]:
    sinks, captured, wanted = others[0], others[1], others[5]
    more = [x for x, own in zip(captured, wanted, strict=True) if own] + ([] if sinks is None else [sinks])
    return [*(empty_like(x, tuple(x.shape)) for x in (q, k, v)), *(x.new_empty(x.shape) for x in more)]


# -- autograd, autocast and vmap ---------------------------------------------------------------------------------------


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, sinks, captured, *numbers, pattern, allowed, scale, backend, precision = inputs
    ctx.save_for_backward(q, k, v, *output, sinks, allowed, *captured)
    ctx.numbers, ctx.options = numbers, (pattern, scale, backend, precision)
    ctx.set_materialize_grads(False)  # the gradient of an unused lse stays None, which saves work


def _differentiate(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, sinks, allowed, *captured = ctx.saved_tensors  # read once: checkpoints refuse a second time
    dout = torch.zeros_like(out) if dout is None else dout  # out is unused
    wanted = [own and x.is_floating_point() for own, x in zip(ctx.needs_input_grad[4], captured, strict=True)]
    pattern, *options = ctx.options
    dq, dk, dv, *rest = torch.ops.spattn.scored_attention_backward(
        dout, dlse, q, k, v, out, lse, sinks, captured, *ctx.numbers, wanted, pattern, allowed, *options
    )
    dsinks, found = None if sinks is None else rest.pop(), iter(rest)
    dcaptured = [next(found) if own else None for own in wanted]
    # PyTorch takes an empty list for one of tensors, which has a list of gradients.
    of_numbers: list[Any] = [None if numbers else [] for numbers in ctx.numbers[:2]]
    return dq, dk, dv, dsinks, dcaptured, *of_numbers, *[None] * 6


attention.register_autograd(_differentiate, setup_context=_remember)


cast_under_autocast("scored_attention")


def _differs(dims: tuple[Any, ...], *arguments: Any, tensors: int) -> bool:
    """Whether one call on all entries would mix captured arrays, or batch indices, of several entries."""
    sinks, captured, score = arguments[tensors], arguments[tensors + 1], arguments[tensors + 4]
    if dims[tensors] is not None or any(x is not None for x in dims[tensors + 1]):
        return True
    if score is not None and "b" in {step.name for step in graph_of(score).operations}:
        return True
    return tensors == _OF_BACKWARD and (sinks is not None or bool(captured))  # gradients would be sums over the entries


_OF_FORWARD, _OF_BACKWARD = 3, 7  # tensors with a batch axis
over_a_batch(attention, _OF_FORWARD, _OF_FORWARD + 5, functools.partial(_differs, tensors=_OF_FORWARD))
over_a_batch(attention_backward, _OF_BACKWARD, _OF_BACKWARD + 6, functools.partial(_differs, tensors=_OF_BACKWARD))


# -- operands of the operators -----------------------------------------------------------------------------------------


def captured_by(score: Any, sinks: Any, q: Any, k: Any) -> tuple[Any, ...]:
    """Return the arguments of the operators that hold a score function and sinks."""
    batch, heads, q_len, _ = q.shape
    if sinks is not None:
        sinks = _checked_sinks(sinks, heads, q)
    if score is None:
        return sinks, [], [], [], None
    text, floats, integers, tables = trace_in_graph(score, Sizes(batch, heads, q_len, k.shape[2]), q.device)
    return sinks, tables, floats, integers, text


def _checked_sinks(sinks: Any, heads: int, q: Any) -> Any:
    sinks = tensor_in_graph("sinks", sinks, q.device)
    if not sinks.is_floating_point():
        raise TypeError(f"sinks: expected an array of floats, got {dtype_name(sinks)}")
    if sinks.ndim != 1 or sinks.shape[0] != heads:
        raise ValueError(f"sinks: expected shape ({heads},), got {tuple(sinks.shape)}")
    return sinks


def gradients(
    dout: Any,
    dlse: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *options: Any,
    score: Any = None,
    sinks: Any = None,
) -> tuple[Any, ...]:
    """Return the results of :func:`spattn.attention_backward`."""
    captured = captured_by(score, sinks, q, k)
    wanted = [x.is_floating_point() for x in captured[1]]
    dq, dk, dv, *more = torch.ops.spattn.scored_attention_backward(
        dout, dlse, q, k, v, out, lse, *captured, wanted, *options
    )
    dsinks = () if sinks is None else (more.pop(),)
    return dq, dk, dv, *(() if score is None else (tuple(more),)), *dsinks
