"""Attention as a torch.autograd.Function, imported when a gradient is first required."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Recorded", "without_repeats"]


class Recorded(torch.autograd.Function):  # type: ignore[misc]
    """Attention with recorded gradients: ``apply(backward, forward, q, k, v, scale)`` returns out and lse.

    It calls ``forward(q, k, v, scale)``, and later ``backward(dout, q, k, v, out, lse, dlse=, scale=)``. With a score
    function, sinks or dropout, the arguments are (…, scale, given, sinks, *tables): a
    :class:`spattn.dispatch.scores.Given` and its captured arrays, of which tensors may get gradients. The calls are
    then ``forward(q, k, v, scale, given.operands)`` and ``backward(…, given=given, wanted=)``.
    """

    @staticmethod
    def forward(
        ctx: Any, backward: Callable[..., Any], forward: Callable[..., Any], *operands: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, scale, *score = operands
        out, lse = forward(q, k, v, scale, *(given.operands for given in score[:1]))
        ctx.backward_of, ctx.scale, ctx.given = backward, scale, score[0] if score else None
        # Saved, so that PyTorch raises an error if the caller changes a captured tensor before the backward pass.
        captured = [x for x in score[1:] if isinstance(x, torch.Tensor)]
        ctx.save_for_backward(q, k, v, out, lse, *captured)
        ctx.set_materialize_grads(False)  # the gradient of an unused lse stays None
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse, *_ = ctx.saved_tensors
        if dout is None:  # out is unused
            dout = torch.zeros_like(out)
        again = torch.is_grad_enabled()  # create_graph=True
        gradients = (_Once.apply if again else _gradients)(
            ctx.backward_of,
            without_repeats(dout),
            q,
            k,
            v,
            out,
            lse,
            dlse,
            ctx.scale,
            ctx.given,
            ctx.needs_input_grad[7:],
        )
        return None, None, *gradients[:3], None, *((None, *gradients[3:]) if ctx.given is not None else ())


class _Once(torch.autograd.Function):  # type: ignore[misc]
    """Gradients that raise an error if they are differentiated.

    PyTorch's ``once_differentiable`` raises only if `dout` requires a gradient.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor, ...]:
        return _gradients(*arguments)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Any, ...]:
        raise RuntimeError("spattn.attention is not twice differentiable; create_graph=True is not supported")


def _gradients(backward: Callable[..., tuple[torch.Tensor, ...]], *operands: Any) -> tuple[torch.Tensor, ...]:
    *arrays, dlse, scale, given, wanted = operands
    if given is None:
        return backward(*arrays, dlse=dlse, scale=scale)
    of_sinks, *of_tables = wanted
    dq, dk, dv, dtables, dsinks = backward(*arrays, dlse=dlse, scale=scale, given=given, wanted=tuple(of_tables))
    return dq, dk, dv, dsinks if of_sinks else None, *dtables


def without_repeats(dout: torch.Tensor) -> torch.Tensor:
    """Materialize a broadcast gradient, such as that of a sum: TMA cannot read zero strides."""
    return dout.contiguous() if 0 in dout.stride() else dout
