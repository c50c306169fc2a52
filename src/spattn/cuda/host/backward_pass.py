"""Arguments of a backward pass, shared by all kernel families."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...arrays.namespace import numpy_dtype
from ...arrays.operand import Operand
from ...planning.contract.types import Plan
from ...schedule.shard_gradients import GradientStage
from ..driver.device import Device
from .forward_pass import is_aligned
from .score import IDENTITY, NO_SUMS, BoundScore, TableSums

__all__ = ["BackwardPass"]


@dataclass(slots=True)
class BackwardPass:
    """Validated arguments and allocated results of a backward pass.

    Attributes
    ----------
    stream : int
        Raw handle of the stream of all kernels and copies.
    lse, dlse : Operand
        (batch, heads_q, q_len) float32, float64 for float64 inputs; `dlse` is None for zero.
    dq, dk, dv : Operand
        Results.
    allocate : callable
        Map bytes to an address that is valid on `stream` until the call's last kernel ends.
    precision : {None, "tf32"}
        Precision of the products; None is that of `dtype`.
    score : BoundScore
        Score function and sinks.
    dsinks : int
        Address of the gradients of the sinks, (heads_q,) in the dtype of lse; 0 without sinks.
    table_sums : TableSums
        Accumulators of the gradients of captured arrays, which a fused backward may use.
    stage : GradientStage or None
        The part of the plan to compute, for arrays whose rows of other tiles are undefined; None for all.
    whole : (int, int, int) or None
        Batch entries, query heads and key-value heads of the call whose bits the results must have, if the arrays are
        some heads or entries of it.
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
    score: BoundScore = IDENTITY
    dsinks: int = 0
    table_sums: TableSums = NO_SUMS
    stage: GradientStage | None = None
    whole: tuple[int, int, int] | None = None

    @property
    def sinks(self) -> int:
        """Address of the sinks; 0 without sinks."""
        return self.score.sinks

    def aligned(self) -> bool:
        """True if every row of the operands is 16-byte aligned."""
        itemsize = numpy_dtype(self.dtype).itemsize
        return all(is_aligned(x, itemsize) for x in (self.q, self.k, self.v, self.dout))
