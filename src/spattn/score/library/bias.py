"""Additive biases given as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..composition import ScoreFunction
from ..functions import take
from ..recorder import Sizes
from ._numbers import check_table, rows, sizes_of

__all__ = ["bias"]


@dataclass(frozen=True, eq=False, repr=False)
class bias(ScoreFunction):
    """Add an array that broadcasts to (batch, heads_q, q_len, kv_len).

    Parameters
    ----------
    array : array of float32 | float64 | float16 | bfloat16
        At most four axes, aligned at the last one, each of the call's size or 1. It gets a gradient.

    Notes
    -----
    Rows of the array are rows of ``q``: row 0 belongs to the first query also if q_len differs from kv_len. Kernels
    read the array in place; a bias that is a formula of positions or a small table, such as :class:`alibi` or
    :class:`relative_bias`, needs less memory traffic.

    Examples
    --------
    >>> import numpy as np
    >>> from spattn.score import bias
    >>> bias(np.zeros((8, 1, 64), np.float32))
    bias(array=<float32 array of shape (8, 1, 64)>)
    """

    array: Any

    def __post_init__(self) -> None:
        check_table("array", self.array)
        if self.array.ndim > 4:
            raise ValueError(f"array: expected at most 4 axes, got shape {tuple(self.array.shape)}")

    def __call__(self, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        shape = tuple(self.array.shape)
        sizes = sizes_of(score)
        for n, axis in zip(shape[::-1], reversed(Sizes._fields), strict=False):
            if sizes is not None and n != 1 and n != getattr(sizes, axis):
                expected = tuple(getattr(sizes, name) for name in Sizes._fields)
                raise ValueError(f"bias: array of shape {shape} does not broadcast to {expected}")
        row = rows(score, q) if len(shape) > 1 and shape[-2] != 1 else None
        taken = [0 if n == 1 else index for n, index in zip(shape[::-1], (k, row, h, b), strict=False)]
        return score + take(self.array, *taken[::-1])
