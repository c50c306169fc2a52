"""Attention and its gradients as operators of PyTorch: what graphs hold, and what transformations go through.

Operators take tensors and plain values, so a pattern travels as text. A mask, or padding, that is a tensor itself stays
one, because its values are unknown while a graph is traced: `allowed` is (batch, kv_len) of padding, or (batch or 1,
heads or 1, q_len, kv_len) of pairs.
"""

from __future__ import annotations

from typing import Any

import torch

from ..arrays import autocast, compiling, traced
from ..arrays.operand import Operand, memory_order
from ..arrays.torch_gradients import without_repeats
from ..patterns import Full, KeyPadding, Mask, Pattern, from_json
from ..planning import Plan
from ..request.call import check_options
from ..request.layout import DEFAULT, Layout
from . import calls
from .plans import as_pattern, check_mask
from .torch_text import text_of

__all__ = ["attend", "attention", "attention_backward"]

_FULL = '{"pattern":"full"}'
_DEVICES = ("cpu", "cuda")
_OPTIONS = "str pattern, Tensor? allowed, float? scale, str backend"


@torch.library.custom_op(  # type: ignore[untyped-decorator]
    "spattn::attention",
    mutates_args=(),
    device_types=_DEVICES,
    schema=f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}, str? precision) -> (Tensor out, Tensor lse)",
)
def _forward(
    q: Any, k: Any, v: Any, pattern: str, allowed: Any, scale: float | None, backend: str, precision: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        out, lse = calls.attention(
            q, k, v, _joined(pattern, allowed), scale=scale, backend=backend, return_lse=True, precision=precision
        )
    return _in_order_of(q, out), lse


@torch.library.custom_op(  # type: ignore[untyped-decorator]
    "spattn::attention_backward",
    mutates_args=(),
    device_types=_DEVICES,
    schema="(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_OPTIONS}, str? precision=None) -> (Tensor dq, Tensor dk, Tensor dv)",
)
def _backward(
    dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, pattern: str, allowed: Any, *options: Any
) -> tuple[torch.Tensor, ...]:
    named = dict(zip(("scale", "backend", "precision"), options, strict=False))  # a precision of None is left out
    with torch.no_grad():
        gradients = calls.attention_backward(
            without_repeats(dout), q, k, v, out, lse, _joined(pattern, allowed), dlse=dlse, **named
        )
    return tuple(_in_order_of(like, x) for like, x in zip((q, k, v), gradients, strict=True))


def _joined(text: str, allowed: torch.Tensor | None) -> Pattern:
    """What an operator computes: the text's pattern, where a tensor of padding or pairs allows it too."""
    pattern = from_json(text)
    if allowed is None:
        return pattern
    also = _padding(allowed) if allowed.ndim == 2 else Mask(allowed)
    return also if isinstance(pattern, Full) else pattern & also


def _padding(valid: torch.Tensor) -> KeyPadding:
    """Padding as layers are given it: as bools, or as a mask that is added to logits."""
    return KeyPadding.from_additive(valid) if valid.is_floating_point() else KeyPadding(valid)


def _empty(like: torch.Tensor, shape: tuple[int, ...], **options: Any) -> torch.Tensor:
    """A new tensor whose axes lie in memory as those of `like` do."""
    order = memory_order(Operand(0, tuple(like.shape), like.stride()))
    return torch.empty_permuted(shape, order, **{"dtype": like.dtype, "device": like.device} | options)


def _in_order_of(like: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A result as the graph expects it to lie in memory; backends differ for operands of unusual strides."""
    wanted = _empty(like, tuple(x.shape), device="meta").stride()
    if x.stride() == wanted:
        return x
    if all(size == 1 or a == b for size, a, b in zip(x.shape, x.stride(), wanted, strict=True)):
        return x.as_strided(x.shape, wanted)  # axes of one element have no stride of their own
    # not empty_like(): it chooses strides of its own for axes of one element
    return torch.empty_strided(x.shape, wanted, dtype=x.dtype, device=x.device).copy_(x)


@_forward.register_fake  # type: ignore[untyped-decorator]
def _(q: Any, k: Any, v: Any, *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return _empty(q, (*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=wide)


@_backward.register_fake  # type: ignore[untyped-decorator]
def _(dout: Any, dlse: Any, q: Any, k: Any, v: Any, *others: Any) -> tuple[torch.Tensor, ...]:
    return tuple(_empty(x, tuple(x.shape)) for x in (q, k, v))


# -- gradients and batches of calls ------------------------------------------------------------------------------------


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, pattern, allowed, *options = inputs
    ctx.save_for_backward(q, k, v, *output, allowed)
    ctx.pattern, ctx.options = pattern, options
    ctx.set_materialize_grads(False)  # the gradient of an lse that nobody used is None, which costs nothing


def _differentiate(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
    *operands, allowed = ctx.saved_tensors
    dout = torch.zeros_like(operands[3]) if dout is None else dout  # nobody used out
    gradients = torch.ops.spattn.attention_backward(dout, dlse, *operands, ctx.pattern, allowed, *ctx.options)
    return *gradients, None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_remember)


_library = torch.library.Library("spattn", "FRAGMENT")  # keeps what is registered as long as it lives


def _under_autocast(q: Any, k: Any, v: Any, *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast as for ``scaled_dot_product_attention``; ``torch.library.register_autocast`` casts to one fixed dtype."""
    cast = autocast(q, k, v)
    with torch._C._DisableAutocast():
        return torch.ops.spattn.attention(*(cast or (q, k, v)), *options)


for _device in _DEVICES:
    _library.impl("attention", _under_autocast, f"Autocast{_device.upper()}")


def _over_a_batch(operator: Any, tensors: int) -> None:
    """A batch of calls is one call with more batch entries, in which no pattern may tell them apart."""

    def fold(info: Any, dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        pattern, allowed = arguments[tensors : tensors + 2]
        per_head = allowed is not None and (dims[tensors + 1] is not None or allowed.shape[0] != 1)
        if per_head or from_json(pattern).sizes()[0] != 1:
            raise ValueError(
                "pattern: expected one that tells no batch entries apart under torch.func.vmap, got "
                f"{'a tensor of several' if per_head else from_json(pattern)}"
            )
        size = info.batch_size
        given: list[Any] = [
            x if x is None else x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip(arguments[:tensors], dims, strict=False)
        ]
        entries = given[-1].shape[1]
        folded = [None if x is None else x.flatten(0, 1) for x in given]
        results = operator(*folded, *arguments[tensors:])
        return tuple(x.unflatten(0, (size, entries)) for x in results), (0,) * len(results)

    operator.register_vmap(fold)


_over_a_batch(_forward, 3)
_over_a_batch(_backward, 7)


# -- what takes the place of spattn.attention() ------------------------------------------------------------------------


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
) -> Any:
    """:func:`spattn.attention` where PyTorch follows calls."""
    check_options(backend, return_lse, precision, layout)
    text, allowed = _described((q, k, v), pattern, scale)
    if text is None:
        options = {"backend": backend, "return_lse": return_lse, "precision": precision, "layout": layout}
        return _without_text_or_tensors(_eager, q, k, v, pattern, scale=scale, **options)
    given = _layout_of(layout, q, k, v, text)
    operands = [given.view(x) for x in (q, k, v)]
    _check_mask(allowed, pattern, *operands[:2])
    out, lse = torch.ops.spattn.attention(*operands, text, allowed, scale, backend, precision)
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
) -> Any:
    """:func:`spattn.attention_backward` where PyTorch follows calls."""
    check_options(backend, precision=precision, layout=layout)
    text, allowed = _described((q, k, v), pattern, scale)
    if text is None:
        options = {"dlse": dlse, "scale": scale, "backend": backend, "precision": precision, "layout": layout}
        return _without_text_or_tensors(_eager_backward, dout, q, k, v, out, lse, pattern, **options)
    given = _layout_of(layout, q, k, v, text)
    operands = [given.view(x) for x in (dout, dlse, q, k, v, out, lse)]
    _check_mask(allowed, pattern, *operands[2:4])
    gradients = torch.ops.spattn.attention_backward(*operands, text, allowed, scale, backend, precision)
    return tuple([given.back(x) for x in gradients])


def _check_mask(allowed: Any, pattern: Any, q: Any, k: Any) -> None:
    if allowed is not None:
        check_mask(tuple(pattern.shape), (*q.shape[:3], k.shape[2]))


def _layout_of(name: str, q: Any, k: Any, v: Any, text: str) -> Layout:
    """The layout of this name, with the grid that the tensors have: that of the pattern, or none."""
    given = Layout.of(name, q, k, v)
    given.check_grid(_grids_of(text))
    return given


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _grids_of(text: str) -> tuple[tuple[int, ...], ...]:
    return tuple(from_json(text).grids())


def _described(operands: tuple[Any, ...], pattern: Any, scale: Any) -> tuple[str | None, torch.Tensor | None]:
    """A pattern as operators take it: its text, and the tensor that it is instead; no text where there is no operator.

    What NumPy makes is something else than it seems to be while torch.compile is tracing.
    """
    is_mask = isinstance(pattern, torch.Tensor) and pattern.dtype == torch.bool
    if torch.compiler.is_dynamo_compiling() and not (
        all(isinstance(x, torch.Tensor) for x in operands)
        and (is_mask or isinstance(pattern, (Pattern, Plan, str)))
        and (scale is None or isinstance(scale, (int, float)))
    ):
        return None, None
    if is_mask:
        return _FULL, pattern[(None,) * (4 - pattern.ndim)] if pattern.ndim in (2, 3) else pattern
    return text_of(pattern), None


def _eager(*arguments: Any, **options: Any) -> Any:
    """The call on concrete tensors; as an operator where PyTorch traces them."""
    if compiling():
        return attention(*arguments, **options)
    found = calls.attention(*arguments, gradients=_eager_backward, **options)
    return attention(*arguments, **options) if found is NotImplemented else found


def _eager_backward(*arguments: Any, **options: Any) -> Any:
    """Gradients of :func:`_eager`."""
    found = calls.attention_backward(*arguments, **options)
    return attention_backward(*arguments, **options) if found is NotImplemented else found


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _without_text_or_tensors(function: Any, *arguments: Any, **options: Any) -> Any:
    """A call between two graphs of torch.compile. Nothing else that follows calls can do without operators."""
    if traced(arguments[0]):
        pattern = arguments[-1]
        if not isinstance(pattern, Plan):
            pattern = as_pattern(pattern)  # unless it is none at all
        raise TypeError(
            "pattern: expected one that has a text, as graphs hold it: of a class that is registered, with parameters "
            f"that from_json() reads back; got {pattern!r}"
        )
    return function(*arguments, **options)


# -- in a layer --------------------------------------------------------------------------------------------------------


def attend(q: Any, k: Any, v: Any, valid: Any, text: str | None, pattern: Pattern) -> Any:
    """Attention over a pattern and, unless `valid` is None, the keys that are no padding.

    The pattern's text is given beside it: torch.compile then compares patterns of layers by what they are, and not as
    the objects that they are.
    """
    if text is not None and (torch.compiler.is_dynamo_compiling() or traced(q)):
        return torch.ops.spattn.attention(q, k, v, text, valid, None, "auto", None)[0]
    if valid is None:
        return _eager(q, k, v, pattern)
    return _without_text_or_tensors(_attend_padded, q, k, v, valid, pattern)


def _attend_padded(q: Any, k: Any, v: Any, valid: Any, pattern: Pattern) -> Any:
    return _eager(q, k, v, pattern & _padding(valid))
