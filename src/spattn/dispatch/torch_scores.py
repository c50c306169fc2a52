"""PyTorch custom operators for attention with a score function, sinks or dropout.

The expression of the score function is an attribute, `score` (None is the identity). What it captures are operands:
`captured` are its arrays, `floats` and `integers` its numbers. The seed of dropout is an operand, too.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from ..arrays import dtype_name
from ..arrays.torch_gradients import without_repeats
from ..request.dropout import Dropout
from ..score.compiled import tensor_in_graph, trace_in_graph
from ..score.recorder import Sizes
from ..score.serialized import from_json as graph_of
from ..score.serialized import restore
from . import calls
from .scores import dropout_of, read
from .torch_schemas import (
    ARRAYS,
    DEVICES,
    OPTIONS,
    cast_under_autocast,
    empty_like,
    empty_results,
    given_arrays,
    in_order_of,
    joined,
    over_a_batch,
)

__all__ = ["attention", "attention_backward", "captured_by", "gradients"]

_MODIFIED = (
    "Tensor? sinks, Tensor[] captured, float[] floats, SymInt[] integers, str? score, Tensor? seed, float dropout_p"
)
_COUNT = 7  # arguments in _MODIFIED
_INTEGERS = (
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)


@torch.library.custom_op(  # type: ignore[untyped-decorator]
    "spattn::scored_attention",
    mutates_args=(),
    device_types=DEVICES,
    schema=f"(Tensor q, Tensor k, Tensor v, {_MODIFIED}, {OPTIONS}, str? precision, {ARRAYS}) "
    "-> (Tensor out, Tensor lse)",
)
def attention(q: Any, k: Any, v: Any, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute out and lse."""
    modified, (pattern, allowed, scale, backend, precision, *arrays) = _restored(*others[:_COUNT]), others[_COUNT:]
    options = {"scale": scale, "backend": backend, "precision": precision, **modified}
    with torch.no_grad():
        out, lse = calls.attention(q, k, v, joined(pattern, allowed, *arrays), return_lse=True, **options)
    return in_order_of(q, out), lse


@torch.library.custom_op(  # type: ignore[untyped-decorator]
    "spattn::scored_attention_backward",
    mutates_args=(),
    device_types=DEVICES,
    schema="(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_MODIFIED}, bool[] wanted, {OPTIONS}, str? precision, {ARRAYS}) -> Tensor[]",
)
def attention_backward(
    dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *others: Any
) -> list[torch.Tensor]:
    """Compute dq, dk, dv, the gradients of the `wanted` captured arrays, and that of the sinks if there are any."""
    modified, (wanted, pattern, allowed, *rest) = _restored(*others[:_COUNT]), others[_COUNT:]
    scale, backend, precision, *operands = rest
    options = {"dlse": dlse, "scale": scale, "backend": backend, "precision": precision}
    arrays = without_repeats(dout), q, k, v, out, lse, joined(pattern, allowed, *operands)
    with torch.no_grad():
        dropout = dropout_of(modified["dropout_p"], modified["seed"], q)
        given = read(modified["score"], modified["sinks"], dropout, q, k, v, backend, "bhsd", backward=True)
        if given is None:  # nothing is modified
            found = calls.attention_backward(*arrays, **options)
        else:
            dq, dk, dv, dtables, dsinks = calls.backward_with_score(
                *arrays, given=given, wanted=tuple(wanted), layout="bhsd", **options
            )
            rest = [x for x in dtables if x is not None] + ([] if dsinks is None else [dsinks])
            found = dq, dk, dv, *(x.contiguous() for x in rest)
    return [*map(in_order_of, (q, k, v), found[:3]), *found[3:]]


def _restored(
    sinks: Any, captured: Any, floats: Any, integers: Any, score: str | None, seed: Any, dropout_p: float
) -> dict[str, Any]:
    function = None if score is None else restore(score, floats, integers, captured)
    return {"score": function, "sinks": sinks, "dropout_p": dropout_p, "seed": seed}


attention.register_fake(empty_results)


@attention_backward.register_fake  # type: ignore[untyped-decorator]
def _(dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *others: Any) -> list[torch.Tensor]:
    sinks, captured, wanted = others[0], others[1], others[_COUNT]
    more = [x for x, own in zip(captured, wanted, strict=True) if own] + ([] if sinks is None else [sinks])
    return [*(empty_like(x, tuple(x.shape)) for x in (q, k, v)), *(x.new_empty(x.shape) for x in more)]


# -- autograd, autocast and vmap ---------------------------------------------------------------------------------------


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, sinks, captured, floats, integers, score, seed, dropout_p, pattern, allowed, *options = inputs
    arrays, ctx.of_arrays = given_arrays(options[3:])
    options = options[:3]
    ctx.save_for_backward(q, k, v, *output, sinks, seed, allowed, *captured, *arrays)
    ctx.arrays = len(arrays)
    ctx.numbers, ctx.dropout_p, ctx.options = (floats, integers, score), dropout_p, (pattern, *options)
    ctx.set_materialize_grads(False)  # the gradient of an unused lse stays None, which saves work


def _differentiate(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
    # Read once: checkpoints refuse a second time.
    q, k, v, out, lse, sinks, seed, allowed, *rest = ctx.saved_tensors
    captured, arrays = rest[: len(rest) - ctx.arrays], rest[len(rest) - ctx.arrays :]
    dout = torch.zeros_like(out) if dout is None else dout  # out is unused
    wanted = [own and x.is_floating_point() for own, x in zip(ctx.needs_input_grad[4], captured, strict=True)]
    modified = sinks, captured, *ctx.numbers, seed, ctx.dropout_p
    pattern, *options = ctx.options
    dq, dk, dv, *rest = torch.ops.spattn.scored_attention_backward(
        dout, dlse, q, k, v, out, lse, *modified, wanted, pattern, allowed, *options, arrays or None
    )
    dsinks, found = None if sinks is None else rest.pop(), iter(rest)
    dcaptured = [next(found) if own else None for own in wanted]
    # PyTorch takes an empty list for one of tensors, which has a list of gradients.
    of_numbers: list[Any] = [None if numbers else [] for numbers in ctx.numbers[:2]]
    return dq, dk, dv, dsinks, dcaptured, *of_numbers, *[None] * 8, *ctx.of_arrays


attention.register_autograd(_differentiate, setup_context=_remember)


cast_under_autocast("scored_attention")


def _differs(dims: tuple[Any, ...], *arguments: Any, tensors: int) -> bool:
    """Whether one call on all entries would mix captured arrays, batch indices or dropped pairs of several entries."""
    sinks, captured, _, _, score, seed, _ = arguments[tensors : tensors + _COUNT]
    if seed is not None or dims[tensors] is not None or any(x is not None for x in dims[tensors + 1]):
        return True
    if score is not None and "b" in {step.name for step in graph_of(score).operations}:
        return True
    return tensors == _OF_BACKWARD and (sinks is not None or bool(captured))  # gradients would be sums over the entries


_OF_FORWARD, _OF_BACKWARD = 3, 7  # tensors with a batch axis
over_a_batch(attention, _OF_FORWARD, _OF_FORWARD + _COUNT, functools.partial(_differs, tensors=_OF_FORWARD))
over_a_batch(
    attention_backward, _OF_BACKWARD, _OF_BACKWARD + _COUNT + 1, functools.partial(_differs, tensors=_OF_BACKWARD)
)


# -- operands of the operators -----------------------------------------------------------------------------------------


def captured_by(
    q: Any, k: Any, score: Any = None, sinks: Any = None, dropout_p: float = 0.0, seed: Any = None
) -> tuple[Any, ...]:
    """Return the arguments of the operators that hold a score function, sinks and dropout."""
    batch, heads, q_len, _ = q.shape
    if sinks is not None:
        sinks = _checked_sinks(sinks, heads, q)
    if Dropout.of(dropout_p, None if seed is None else 0) is None:
        dropout = None, 0.0
    else:
        dropout = _seed_in_graph(seed, q.device), dropout_p
    if score is None:
        return sinks, [], [], [], None, *dropout
    text, floats, integers, tables = trace_in_graph(score, Sizes(batch, heads, q_len, k.shape[2]), q.device)
    return sinks, tables, floats, integers, text, *dropout


def _seed_in_graph(seed: Any, device: torch.device) -> torch.Tensor:
    """Return the seed as a tensor, which the kernels read; its value may differ in each run of the graph."""
    if isinstance(seed, (torch.Tensor, np.ndarray)):
        found = tensor_in_graph("seed", seed, device)
        if found.dtype not in _INTEGERS or found.numel() != 1:
            raise TypeError(f"seed: expected an integer, got {found.dtype} of shape {tuple(found.shape)}")
        return found.to(device)
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer, torch.SymInt)):
        raise TypeError(f"seed: expected an integer, got {type(seed).__name__}")
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed: must be in [0, 2**64), got {seed}")
    return torch.full((), seed, dtype=torch.int64 if seed < 1 << 63 else torch.uint64, device=device)


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
    **modified: Any,
) -> tuple[Any, ...]:
    """Return the results of :func:`spattn.attention_backward`; `modified` are arguments of :func:`captured_by`."""
    captured = captured_by(q, k, **modified)
    wanted = [x.is_floating_point() for x in captured[1]]
    dq, dk, dv, *more = torch.ops.spattn.scored_attention_backward(
        dout, dlse, q, k, v, out, lse, *captured, wanted, *options
    )
    dsinks = (more.pop(),) if "sinks" in modified else ()
    return dq, dk, dv, *((tuple(more),) if "score" in modified else ()), *dsinks
