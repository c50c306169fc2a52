"""Attention as PyTorch's autograd records it; imported when the first gradient is wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

__all__ = ["Recorded", "without_repeats"]


class Recorded(torch.autograd.Function):  # type: ignore[misc]
    """``apply(backward, forward, q, k, v, scale)`` is ``forward(q, k, v, scale)``, which are out and lse, on record.

    `backward` takes (dout, q, k, v, out, lse) and ``dlse=`` and ``scale=``. There is no second derivative, and PyTorch
    says so.
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
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        if dout is None:  # nobody used out
            dout = torch.zeros_like(out)
        dq, dk, dv = ctx.backward_of(without_repeats(dout), q, k, v, out, lse, dlse=dlse, scale=ctx.scale)
        return None, None, dq, dk, dv, None


def without_repeats(dout: torch.Tensor) -> torch.Tensor:
    """A gradient whose elements lie apart: a Hopper GPU, which copies tiles by itself, cannot read that of a sum."""
    return dout.contiguous() if 0 in dout.stride() else dout
