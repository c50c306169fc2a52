"""Attention as PyTorch's autograd records it; imported when the first gradient is wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Recorded", "without_repeats"]


class Recorded(torch.autograd.Function):  # type: ignore[misc]
    """``apply(backward, forward, q, k, v, scale)`` is ``forward(q, k, v, scale)``, which are out and lse, on record.

    `backward` takes (dout, q, k, v, out, lse) and ``dlse=`` and ``scale=``.
    """

    @staticmethod
    def forward(
        ctx: Any, backward: Callable[..., Any], forward: Callable[..., Any], *operands: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        *arrays, scale = operands
        out, lse = forward(*operands)
        ctx.save_for_backward(*arrays, out, lse)
        ctx.backward_of, ctx.scale = backward, scale
        ctx.set_materialize_grads(False)  # the gradient of an lse that nobody used is None, which costs nothing
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        if dout is None:  # nobody used out
            dout = torch.zeros_like(out)
        again = torch.is_grad_enabled()  # create_graph=True
        gradients = (_Once.apply if again else _gradients)(
            ctx.backward_of, without_repeats(dout), q, k, v, out, lse, dlse, ctx.scale
        )
        return None, None, *gradients, None


class _Once(torch.autograd.Function):  # type: ignore[misc]
    """Gradients on record, so that whoever differentiates them is told that they have none. PyTorch's
    ``once_differentiable`` would say so only where `dout` requires a gradient."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor, ...]:
        return _gradients(*arguments)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Any, ...]:
        raise RuntimeError("attention: expected a first derivative, got a second one, which there is not")


def _gradients(backward: Callable[..., tuple[torch.Tensor, ...]], *operands: Any) -> tuple[torch.Tensor, ...]:
    *arrays, dlse, scale = operands
    return backward(*arrays, dlse=dlse, scale=scale)


def without_repeats(dout: torch.Tensor) -> torch.Tensor:
    """A gradient whose elements lie apart: a Hopper GPU, which copies tiles by itself, cannot read that of a sum."""
    return dout.contiguous() if 0 in dout.stride() else dout
