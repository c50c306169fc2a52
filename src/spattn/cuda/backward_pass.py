"""One backward pass: operands in device memory, the plan, and where the gradients go, for every family of kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..arrays.kind import numpy_dtype
from ..arrays.operand import Operand
from ..planning.contract.types import Plan
from .driver.device import Device
from .forward_pass import is_aligned

__all__ = ["BackwardPass"]


@dataclass(slots=True)
class BackwardPass:
    """One backward pass whose arguments have been checked and whose results exist.

    Attributes
    ----------
    stream : int
        Raw handle; everything is ordered on it.
    lse, dlse : Operand
        (batch, heads_q, q_len) float32, float64 for float64 inputs; `dlse` is None where it is zero.
    dq, dk, dv : Operand
        Where the gradients go.
    allocate : callable
        Bytes to the address of memory that may be used on `stream` until the call's last kernel.
    precision : {None, "tf32"}
        Of the products; None is that of `dtype`.
    """

    device: Device
    stream: int
    plan: Plan
    dout: Operand
    q: Operand
    k: Operand
    v: Operand
    out: Operand
    lse: Operand
    dlse: Operand | None
    dq: Operand
    dk: Operand
    dv: Operand
    dtype: str
    scale: float
    allocate: Callable[[int], int]
    precision: str | None = None

    def aligned(self) -> bool:
        """Whether every row that kernels multiply can be read 16 bytes at a time."""
        itemsize = numpy_dtype(self.dtype).itemsize
        return all(is_aligned(x, itemsize) for x in (self.q, self.k, self.v, self.dout))
