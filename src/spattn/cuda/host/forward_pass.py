"""Arguments of a forward pass, shared by all kernel families."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...arrays.operand import Operand
from ...planning.contract.types import Plan
from ...schedule.shard import Stage
from ..driver.device import Device
from .score import IDENTITY, BoundScore

_SMALLEST_SCALE = float(np.finfo(np.float32).tiny)


@dataclass(slots=True)
class ForwardPass:
    """Validated arguments and allocated outputs of a forward pass.

    Attributes
    ----------
    stream : int
        Raw handle of the stream of all kernels and copies.
    lse : int
        Address of contiguous (batch, heads_q, q_len) float32, float64 for float64 inputs; 0 if not requested.
    allocate : callable
        Map bytes to an address that is valid on `stream` until the call's last kernel ends.
    precision : {None, "tf32"}
        Precision of the products; None is that of `dtype`.
    score : BoundScore
        Score function and sinks.
    packed : int
        Number of query heads packed into each head of `q` and `out`; 1 without packing.
    staging : module or None
        PyTorch, if the plan's tables are copied in stream order: see :func:`.driver.buffer.upload`.
    stage : Stage or None
        The part of the plan to compute, for arrays whose rows of other tiles are undefined; None for all.
    """

    device: Device
    stream: int
    plan: Plan
    q: Operand
    k: Operand
    v: Operand
    out: Operand
    lse: int
    dtype: str
    scale: float
    allocate: Callable[[int], int]
    precision: str | None = None
    score: BoundScore = IDENTITY
    packed: int = 1
    staging: Any = None
    stage: Stage | None = None

    @property
    def sinks(self) -> int:
        """Address of the sinks; 0 without sinks."""
        return self.score.sinks

    def aligned(self, itemsize: int) -> bool:
        """True if every row of every array is 16-byte aligned."""
        return (
            is_aligned(self.q, itemsize)
            and is_aligned(self.k, itemsize)
            and is_aligned(self.v, itemsize)
            and is_aligned(self.out, itemsize)
        )

    def partial_bytes(self) -> tuple[int, int]:
        """Return the bytes of split-KV partial rows, and of rows and lse together; (0, 0) if the plan has none."""
        batch, heads_q = self.q.shape[:2]
        rows = batch * heads_q * self.plan.slots * self.plan.block_q
        return partial_bytes(rows, self.v.shape[3], 8 if self.dtype == "float64" else 4)

    def workspace(self) -> tuple[int, int]:
        """Allocate split-KV partials; return the addresses of their rows and lse, (0, 0) if the plan has none."""
        if self.plan.slots == 0:
            return 0, 0
        of_rows, total = self.partial_bytes()
        partial = self.allocate(total)
        return partial, partial + of_rows


def partial_bytes(rows: int, head_dim_v: int, itemsize: int) -> tuple[int, int]:
    """Return the bytes of partial rows, and of rows and lse together."""
    of_rows = -(-rows * head_dim_v * itemsize // 256) * 256
    return of_rows, of_rows + rows * itemsize


@functools.lru_cache(maxsize=64)
def fold_scale(scale: float) -> tuple[float, int]:
    """Return the scale's magnitude in base 2, and its sign. Kernels apply the sign before the mask: a factor of 0 or −1
    would change the mask's −∞.

    A magnitude below float32's normal range counts as zero: it changes scores by less than rounding.
    """
    magnitude = abs(scale) * math.log2(math.e)
    if magnitude < _SMALLEST_SCALE:
        return 1.0, 0
    return magnitude, 1 if scale > 0 else -1


def is_aligned(x: Operand, itemsize: int) -> bool:
    """True if every row of an array is 16-byte aligned."""
    batch, head, row, column = x.strides
    if column != 1 or (x.pointer | x.shape[3] * itemsize) % 16:
        return False
    if (batch | head | row) * itemsize % 16 == 0:
        return True
    return all(stride * itemsize % 16 == 0 for stride, size in zip(x.strides[:3], x.shape, strict=False) if size > 1)
