"""PyTorch custom operators for attention and its gradients, with tracing, autograd, autocast and vmap.

Operators take tensors and plain values, so they take a pattern in serialized form. A mask tensor stays a tensor,
because its values are unknown during tracing: `allowed` is a padding mask (batch, kv_len), or a mask of pairs
(batch or 1, heads or 1, q_len, kv_len).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.bias import CausalBias

from ..arrays import compiling, traced
from ..arrays.torch_gradients import without_repeats
from ..patterns import Pattern, from_json
from ..patterns.conversion import check_mask, check_padding, is_key_padding
from ..planning import Plan
from ..request.call import check_options
from ..request.layout import DEFAULT, Layout
from . import calls, torch_scores
from .plans import resolve
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
    pattern_of,
)
from .torch_text import operands_of, text_of

__all__ = ["attend", "attention", "attention_backward", "draw_seed"]

_FULL = '{"pattern":"full"}'


@torch.library.custom_op(  # type: ignore[untyped-decorator]
    "spattn::attention",
    mutates_args=(),
    device_types=DEVICES,
    schema=f"(Tensor q, Tensor k, Tensor v, {OPTIONS}, str? precision, {ARRAYS}) -> (Tensor out, Tensor lse)",
)
def _forward(
    q: Any,
    k: Any,
    v: Any,
    pattern: str,
    allowed: Any,
    scale: float | None,
    backend: str,
    precision: str | None,
    arrays: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    own = joined(pattern, allowed, arrays)
    with torch.no_grad():
        out, lse = calls.attention(q, k, v, own, scale=scale, backend=backend, return_lse=True, precision=precision)
    return in_order_of(q, out), lse


@torch.library.custom_op(  # type: ignore[untyped-decorator]
    "spattn::attention_backward",
    mutates_args=(),
    device_types=DEVICES,
    schema="(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{OPTIONS}, str? precision=None, {ARRAYS}) -> (Tensor dq, Tensor dk, Tensor dv)",
)
def _backward(
    dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, pattern: str, allowed: Any, *options: Any
) -> tuple[torch.Tensor, ...]:
    named = dict(zip(("scale", "backend", "precision", "arrays"), options, strict=False))  # PyTorch omits defaults
    own = joined(pattern, allowed, named.pop("arrays", None))
    with torch.no_grad():
        gradients = calls.attention_backward(without_repeats(dout), q, k, v, out, lse, own, dlse=dlse, **named)
    return tuple(in_order_of(like, x) for like, x in zip((q, k, v), gradients, strict=True))


_forward.register_fake(empty_results)


@_backward.register_fake  # type: ignore[untyped-decorator]
def _(dout: Any, dlse: Any, q: Any, k: Any, v: Any, *others: Any) -> tuple[torch.Tensor, ...]:
    return tuple(empty_like(x, tuple(x.shape)) for x in (q, k, v))


# -- autograd, autocast and vmap ---------------------------------------------------------------------------------------


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, pattern, allowed, *options = inputs
    arrays, ctx.of_arrays = given_arrays(options[3:])
    options = options[:3]
    ctx.save_for_backward(q, k, v, *output, allowed, *arrays)
    ctx.pattern, ctx.options = pattern, options
    ctx.set_materialize_grads(False)  # the gradient of an unused lse stays None, which saves work


def _differentiate(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
    *operands, allowed = (saved := ctx.saved_tensors)[:6]
    arrays = list(saved[6:])
    dout = torch.zeros_like(operands[3]) if dout is None else dout  # out is unused
    gradients = torch.ops.spattn.attention_backward(
        dout, dlse, *operands, ctx.pattern, allowed, *ctx.options, arrays or None
    )
    return *gradients, None, None, None, None, None, *ctx.of_arrays


_forward.register_autograd(_differentiate, setup_context=_remember)


cast_under_autocast("attention")
over_a_batch(_forward, 3)
over_a_batch(_backward, 7)


# -- spattn.attention() under tracing ----------------------------------------------------------------------------------


def attention(
    q: Any,
    k: Any,
    v: Any,
    pattern: Any = "full",
    *,
    scale: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    precision: str | None = None,
    layout: str = DEFAULT,
    key_padding: Any = None,
    **modified: Any,
) -> Any:
    """Implement :func:`spattn.attention` while PyTorch traces the call.

    `modified` may have score=, sinks=, dropout_p= and seed=.
    """
    check_options(backend, return_lse, precision, layout)
    options = {"backend": backend, "return_lse": return_lse, "precision": precision, "layout": layout}
    options["key_padding"] = key_padding
    modified = _without_defaults(modified)
    text, arrays, allowed = _described((q, k, v), pattern, key_padding, scale)
    if text is None:
        return _without_text_or_tensors(_eager, q, k, v, pattern, scale=scale, **options, **modified)
    given = _layout_of(layout, q, k, v, text)
    operands = [given.view(x) for x in (q, k, v)]
    _check_masks(pattern, key_padding, *operands[:2])
    out, lse = _operator(operands, text, allowed, (scale, backend, precision), arrays, **modified)
    return (given.back(out), given.back(lse)) if return_lse else given.back(out)


def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    pattern: Any = "full",
    *,
    dlse: Any = None,
    scale: float | None = None,
    backend: str = "auto",
    precision: str | None = None,
    layout: str = DEFAULT,
    key_padding: Any = None,
    **modified: Any,
) -> Any:
    """Implement :func:`spattn.attention_backward` while PyTorch traces the call."""
    check_options(backend, precision=precision, layout=layout)
    options = {"dlse": dlse, "scale": scale, "backend": backend, "precision": precision, "layout": layout}
    options["key_padding"] = key_padding
    modified = _without_defaults(modified)
    text, arrays, allowed = _described((q, k, v), pattern, key_padding, scale)
    if text is None:
        return _without_text_or_tensors(_eager_backward, dout, q, k, v, out, lse, pattern, **options, **modified)
    given = _layout_of(layout, q, k, v, text)
    operands = [given.view(x) for x in (dout, dlse, q, k, v, out, lse)]
    _check_masks(pattern, key_padding, *operands[2:4])
    if modified:
        dq, dk, dv, *more = torch_scores.gradients(
            *operands, text, allowed, scale, backend, precision, arrays or None, **modified
        )
        return given.back(dq), given.back(dk), given.back(dv), *more
    gradients = torch.ops.spattn.attention_backward(*operands, text, allowed, scale, backend, precision, arrays or None)
    return tuple([given.back(x) for x in gradients])


def _without_defaults(modified: dict[str, Any]) -> dict[str, Any]:
    """Return what a call has of score=, sinks=, and dropout_p= with seed=."""
    dropout = ("dropout_p", "seed") if modified.get("dropout_p", 0.0) != 0.0 else ()
    return {name: modified[name] for name in ("score", "sinks", *dropout) if modified.get(name) is not None}


def _operator(
    operands: list[Any], text: str, allowed: Any, options: tuple[Any, ...], arrays: Any = (), **modified: Any
) -> tuple[Any, Any]:
    """Return out and lse of the operator of a call."""
    found: tuple[Any, Any]
    if modified:
        captured = torch_scores.captured_by(*operands[:2], **modified)
        found = torch.ops.spattn.scored_attention(*operands, *captured, text, allowed, *options, list(arrays) or None)
    else:
        found = torch.ops.spattn.attention(*operands, text, allowed, *options, list(arrays) or None)
    return found


def _check_masks(pattern: Any, key_padding: Any, q: Any, k: Any) -> None:
    sizes = *q.shape[:3], k.shape[2]
    if isinstance(pattern, torch.Tensor):
        check_mask(tuple(pattern.shape), sizes)
    if isinstance(key_padding, torch.Tensor):
        check_padding(tuple(key_padding.shape), sizes)
    for name, mask in (("pattern", pattern), ("key_padding", key_padding)):
        if isinstance(mask, torch.Tensor) and mask.requires_grad:
            raise TypeError(f"{name}: a mask has no gradient; write score=spattn.score.bias(mask) for one")


def _layout_of(name: str, q: Any, k: Any, v: Any, text: str) -> Layout:
    """Return the named layout, with the pattern's grid if the tensors have one."""
    given = Layout.of(name, q, k, v)
    given.check_grid(_grids_of(text))
    return given


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _grids_of(text: str) -> tuple[tuple[int, ...], ...]:
    return () if text[0] == "[" else tuple(from_json(text).grids())  # operands_of() refuses operands with a grid


def _described(
    operands: tuple[Any, ...], pattern: Any, key_padding: Any, scale: Any
) -> tuple[str | None, list[Any], Any]:
    """Return the operator's arguments (serialized pattern, its arrays, mask tensor); no text if no operator applies.

    Under torch.compile, the function first checks types, because Dynamo traces NumPy arrays and scalars as tensors.
    """
    is_mask = _is_mask(pattern)
    if torch.compiler.is_dynamo_compiling() and not (
        all(isinstance(x, torch.Tensor) for x in operands)
        and (is_mask or isinstance(pattern, (Pattern, Plan, str, type)))
        and (scale is None or isinstance(scale, (int, float)))
    ):
        return None, [], None
    has_grid = operands[0].ndim > 4
    allowed = pattern[(None,) * (4 - pattern.ndim)] if is_mask and pattern.ndim in (2, 3) else pattern
    if key_padding is None:
        return (_FULL, [], allowed) if is_mask else (*operands_of(pattern, has_grid), None)
    if isinstance(pattern, Plan):
        return None, [], None
    if is_key_padding(key_padding):
        if is_mask:
            return *operands_of(key_padding, has_grid), allowed
        joint = pattern & key_padding if isinstance(pattern, Pattern) else key_padding & pattern
        return *operands_of(joint, has_grid), None
    if not isinstance(key_padding, torch.Tensor):
        return None, [], None
    valid = key_padding[None] if key_padding.ndim == 1 else key_padding
    if valid.ndim == 4:
        valid = valid[:, 0, 0]
    if not is_mask:
        return *operands_of(pattern, has_grid), valid
    if torch.bool in (pattern.dtype, valid.dtype) and pattern.dtype == valid.dtype:
        return _FULL, [], allowed & valid[:, None, None]
    return None, [], None


def _is_mask(pattern: Any) -> bool:
    """Return whether `pattern` is a tensor that an operator takes: a plain one of bools or, if additive, of floats."""
    if not isinstance(pattern, torch.Tensor) or pattern.layout is not torch.strided:
        return False
    return pattern.dtype == torch.bool or (pattern.is_floating_point() and not isinstance(pattern, CausalBias))


def _eager(*arguments: Any, **options: Any) -> Any:
    """Run attention eagerly on concrete tensors, and through the operator on traced tensors."""
    if compiling():
        return attention(*arguments, **options)
    found = calls.attention(*arguments, gradients=_eager_backward, **options)
    return attention(*arguments, **options) if found is NotImplemented else found


def _eager_backward(*arguments: Any, **options: Any) -> Any:
    """Run the backward pass as :func:`_eager` runs the forward pass."""
    found = calls.attention_backward(*arguments, **options)
    return attention_backward(*arguments, **options) if found is NotImplemented else found


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _without_text_or_tensors(function: Any, *arguments: Any, **options: Any) -> Any:
    """Call without an operator: torch.compile breaks the graph here, and for other tracers this raises TypeError."""
    if traced(arguments[0]):
        if options.get("key_padding") is not None:
            raise TypeError(
                "key_padding: a PyTorch graph requires a tensor, and a serializable pattern or, with bools, a mask"
            )
        given = arguments[-1]
        pattern = resolve(given)  # raises TypeError if it is not a pattern
        if pattern is not given and text_of(pattern) is not None:
            raise TypeError(f"pattern: convert it before PyTorch traces the call; write {pattern!r}")
        raise TypeError(
            "pattern: a PyTorch graph requires a serializable pattern, of a registered class with parameters that "
            f"from_json() restores; got {pattern!r}"
        )
    return function(*arguments, **options)


# -- in a layer --------------------------------------------------------------------------------------------------------


def attend(q: Any, k: Any, v: Any, valid: Any, text: str | None, pattern: Pattern, **modified: Any) -> Any:
    """Compute attention over a pattern, restricted to the `valid` keys unless this is None.

    `modified` may have ``score=``, ``sinks=``, ``dropout_p=`` and ``seed=``. `text` is the serialized pattern, which
    lets torch.compile guard on the pattern's value and not on its identity.
    """
    if text is not None and (torch.compiler.is_dynamo_compiling() or traced(q)):
        return _operator([q, k, v], text, valid, (None, "auto", None), **modified)[0]
    if valid is None:
        return _eager(q, k, v, pattern, **modified)
    return _without_text_or_tensors(_attend_padded, q, k, v, valid, pattern, **modified)


def _attend_padded(q: Any, k: Any, v: Any, valid: Any, pattern: Pattern, **modified: Any) -> Any:
    return _eager(q, k, v, pattern if valid is None else pattern & pattern_of(valid), **modified)


def draw_seed() -> torch.Tensor:
    """Draw a seed of dropout from PyTorch's generator on the CPU, in each run of a graph.

    Gradient checkpoints restore the state of the generator.
    """
    return torch.randint(1 << 62, (), device="cpu")
