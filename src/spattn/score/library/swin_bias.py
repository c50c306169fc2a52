"""Relative position biases of Swin Transformers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..composition import ScoreFunction
from ..functions import take
from ..recorder import constant
from ._numbers import check_size, check_table
from ._positions import check_sizes, coordinates, flat

__all__ = ["swin_bias"]


@dataclass(frozen=True, eq=False, repr=False)
class swin_bias(ScoreFunction):
    """Add Swin's relative position bias to the pairs of a window.

    Parameters
    ----------
    table : ((2 * M0 - 1) * (2 * M1 - 1), heads_q) array of floats
        ``relative_position_bias_table`` of Swin's layers. For a window of three axes, the first size has three factors.
        It gets a gradient.
    window : tuple of int
        Extents (M0, M1) or (M0, M1, M2) of a window.
    shape : tuple of int, optional
        Extents of the grid if tokens are in the grid's row-major order, as for ``patterns.windowed``. None: the
        sequence consists of one or more windows, one after the other, each in row-major order.

    Raises
    ------
    ValueError
        If the table's shape does not fit the window.

    Notes
    -----
    With Δ the coordinates of the query minus those of the key, the bias is
    ``table[(Δ0 + M0 - 1) * (2 * M1 - 1) + Δ1 + M1 - 1, h]`` [1]_. Pairs of different windows have no entry: the pattern
    must forbid them. Swin's mask of shifted windows adds -100 rather than -inf to forbidden scores.

    References
    ----------
    .. [1] Z. Liu et al., "Swin Transformer: Hierarchical vision transformer using shifted windows", ICCV 2021.

    Examples
    --------
    >>> import numpy as np
    >>> from spattn.score import swin_bias
    >>> function = swin_bias(np.arange(169.0)[:, None], (7, 7))
    >>> float(function(0.0, b=0, h=0, q=0, k=0))
    84.0
    """

    table: Any
    window: tuple[int, ...]
    shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_table("table", self.table, 2)
        window = check_sizes("window", self.window)
        if self.shape is not None:
            check_sizes("shape", self.shape, len(window))
        entries = math.prod([2 * n - 1 for n in window])
        if self.table.shape[0] != entries:
            raise ValueError(f"table: expected shape ({entries}, heads_q), got {tuple(self.table.shape)}")

    def __call__(self, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        check_size("swin_bias", self.table, 1, score)
        if self.shape is None:
            tokens = constant(math.prod(self.window))
            q, k = q % tokens, k % tokens
        of_query, of_key = (coordinates(x, self.shape or self.window) for x in (q, k))
        indices = [x - y + constant(n - 1) for x, y, n in zip(of_query, of_key, self.window, strict=True)]
        return score + take(self.table, flat(indices, [2 * n - 1 for n in self.window]), h)
