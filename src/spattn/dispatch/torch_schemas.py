"""What PyTorch's custom operators share: schemas, patterns with a mask tensor, strides of results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..arrays import autocast, to_host
from ..arrays.operand import Operand, memory_order
from ..patterns import Full, Pattern
from ..patterns.base.in_graphs import restored, stand_in
from ..patterns.conversion import as_pattern, key_padding_of

__all__ = [
    "ARRAYS",
    "DEVICES",
    "OPTIONS",
    "cast_under_autocast",
    "empty_like",
    "empty_results",
    "given_arrays",
    "in_order_of",
    "joined",
    "over_a_batch",
    "pattern_of",
]

DEVICES = ("cpu", "cuda")
OPTIONS = "str pattern, Tensor? allowed, float? scale, str backend"  # of schemas

_library = torch.library.Library("spattn", "FRAGMENT")  # its deletion would unregister the kernels


ARRAYS = "Tensor[]? arrays=None"  # operands of the pattern, last in schemas


def joined(text: str, allowed: torch.Tensor | None, arrays: Sequence[torch.Tensor] | None = None) -> Pattern:
    """Return the intersection of the serialized pattern, with its operands, and the mask tensor."""
    pattern = restored(text, [to_host(x.detach()) for x in arrays or ()])
    if allowed is None:
        return pattern
    also = pattern_of(allowed)
    return also if isinstance(pattern, Full) else pattern & also


def given_arrays(rest: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Return the arrays in the last inputs of an operator, and their gradients: none for None, which PyTorch omits."""
    arrays = (rest[0] if rest else None) or ()
    return arrays, [[None] * len(arrays)] if arrays else []


def pattern_of(allowed: torch.Tensor) -> Pattern:
    """Return the pattern of a mask tensor: of key padding if it has two axes, else of pairs."""
    return key_padding_of(allowed) if allowed.ndim == 2 else as_pattern(allowed)


def empty_like(like: torch.Tensor, shape: tuple[int, ...], **options: Any) -> torch.Tensor:
    """Return an empty tensor whose axes have the memory order of `like`."""
    order = memory_order(Operand(0, tuple(like.shape), like.stride()))
    return torch.empty_permuted(shape, order, **{"dtype": like.dtype, "device": like.device} | options)


def empty_results(q: Any, k: Any, v: Any, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return empty out and lse: the fake kernel of a forward."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return empty_like(q, (*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=wide)


def in_order_of(like: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return `x` with the strides of the fake kernel, which backends do not follow for unusual operand strides."""
    wanted = empty_like(like, tuple(x.shape), device="meta").stride()
    if x.stride() == wanted:
        return x
    if all(size == 1 or a == b for size, a, b in zip(x.shape, x.stride(), wanted, strict=True)):
        return x.as_strided(x.shape, wanted)  # the stride of an axis of size 1 is arbitrary
    # empty_like() does not preserve the strides of axes of size 1.
    return torch.empty_strided(x.shape, wanted, dtype=x.dtype, device=x.device).copy_(x)


def cast_under_autocast(name: str) -> None:
    """Register casts of q, k and v, as ``scaled_dot_product_attention`` has them, for the forward operator `name`.

    Other operands keep their dtypes. ``torch.library.register_autocast`` supports only one dtype.
    """
    operator = getattr(torch.ops.spattn, name)

    def call(q: Any, k: Any, v: Any, *others: Any) -> Any:
        cast = autocast(q, k, v)
        with torch._C._DisableAutocast():
            return operator(*(cast or (q, k, v)), *others)

    for device in DEVICES:
        _library.impl(name, call, f"Autocast{device.upper()}")


def over_a_batch(
    operator: Any, tensors: int, pattern_at: int | None = None, alone: Callable[..., bool] | None = None
) -> None:
    """Register a vmap rule that folds the mapped axis into the batch axis; it rejects patterns with a batch axis.

    Parameters
    ----------
    operator : custom operator
    tensors : int
        Number of arguments with a batch axis, the first ones.
    pattern_at : int, optional
        Index of the serialized pattern, which the mask tensor follows; by default, `tensors`.
    alone : callable, optional
        ``alone(dims, *arguments)`` returns whether each entry needs a call of its own.
    """
    at = tensors if pattern_at is None else pattern_at

    def fold(info: Any, dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        pattern, allowed = arguments[at : at + 2]
        whole = len(arguments) == len(operator._opoverload._schema.arguments)  # PyTorch omits defaults
        arrays, mapped = (arguments[-1], dims[-1]) if whole and arguments[-1] else ((), ())
        differs = allowed is not None and (dims[at + 1] is not None or allowed.shape[0] != 1)
        own = None if any(dim is not None for dim in mapped) else stand_in(pattern, arrays)
        if differs or (own is not None and own.sizes()[0] != 1):
            raise ValueError(
                "pattern: must not differ between batch entries under torch.func.vmap, got "
                f"{'a mask tensor with a batch axis' if differs else own}"
            )
        size = info.batch_size
        if own is None or (alone is not None and alone(dims, *arguments)):
            found = zip(*(operator(*_entry(arguments, dims, n)) for n in range(size)), strict=True)
            results = [torch.stack(x) for x in found]
        else:
            given: list[Any] = [
                x if x is None else x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
                for x, dim in zip(arguments[:tensors], dims, strict=False)
            ]
            entries = given[-1].shape[1]
            folded = [None if x is None else x.flatten(0, 1) for x in given]
            results = [x.unflatten(0, (size, entries)) for x in operator(*folded, *arguments[tensors:])]
        like = list if str(operator._opoverload._schema.returns[0].type) == "List[Tensor]" else tuple
        return like(results), like([0] * len(results))

    operator.register_vmap(fold)


def _entry(arguments: Any, dims: Any, at: int) -> list[Any]:
    """Return the arguments of one entry of a mapped call."""
    return [
        _entry(x, dim, at) if isinstance(x, (list, tuple)) else x if dim is None else x.select(dim, at)
        for x, dim in zip(arguments, dims, strict=True)
    ]
