"""Attention as PyTorch's autograd records it; imported when the first gradient is wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

__all__ = ["Recorded", "without_repeats"]


class Recorded(torch.autograd.Function):  # type: ignore[misc]
    """``apply(forward, backward, q, k, v)`` is ``forward(q, k, v)``, which are out and lse, with both on record.

    `backward` takes (dout, q, k, v, out, lse) and ``dlse=``. There is no second derivative, and PyTorch says so.
    """

    @staticmethod
    def forward(
        ctx: Any, forward: Callable[..., Any], backward: Callable[..., Any], *operands: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = forward(*operands)
        ctx.save_for_backward(*operands, out, lse)
        ctx.backward_of = backward
        ctx.set_materialize_grads(False)  # the gradient of an lse that nobody used is None, which costs nothing
        return out, lse

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        if dout is None:  # nobody used out
            dout = torch.zeros_like(out)
        return None, None, *ctx.backward_of(without_repeats(dout), q, k, v, out, lse, dlse=dlse)


def without_repeats(dout: torch.Tensor) -> torch.Tensor:
    """A gradient whose elements lie apart: a Hopper GPU, which copies tiles by itself, cannot read that of a sum."""
    return dout.contiguous() if 0 in dout.stride() else dout
