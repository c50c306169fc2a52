"""Relative position biases of neighborhood attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..composition import ScoreFunction
from ..functions import take
from ..recorder import constant
from ._numbers import check_size, check_table
from ._positions import check_sizes, coordinates

__all__ = ["natten_rpb"]


@dataclass(frozen=True, eq=False, repr=False)
class natten_rpb(ScoreFunction):
    """Add NATTEN's relative position bias (``rpb``) to the pairs of a neighborhood.

    Parameters
    ----------
    table : (heads_q, 2 * kernel_size - 1, ...) array of floats
        One, two or three axes of distances. It gets a gradient.
    kernel_size : int or tuple of int
        Odd extents of the neighborhood.
    dilation : int or tuple of int
        Distance of neighbors.
    shape : tuple of int, optional
        Extents of the grid of tokens, in row-major order; needed for two or three axes.

    Raises
    ------
    ValueError
        If the table's shape does not fit, or a kernel size is even.

    Notes
    -----
    Along each axis the entry is ``(key - query) // dilation + kernel_size - 1`` [1]_, also for windows that are shifted
    at the borders. Pairs outside of the neighborhood have no entry: use ``patterns.Neighborhood`` with the same
    parameters. NATTEN has no ``rpb`` since version 0.20.

    References
    ----------
    .. [1] A. Hassani et al., "Neighborhood attention transformer", CVPR 2023.

    Examples
    --------
    >>> import numpy as np
    >>> from spattn.score import natten_rpb
    >>> function = natten_rpb(np.arange(13.0)[None], kernel_size=7)
    >>> float(function(0.0, b=0, h=0, q=10, k=7))
    3.0
    """

    table: Any
    kernel_size: int | tuple[int, ...]
    dilation: int | tuple[int, ...] = 1
    shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_table("table", self.table)
        axes = self.table.ndim - 1
        kernel = check_sizes("kernel_size", self._each(self.kernel_size), axes)
        check_sizes("dilation", self._each(self.dilation), axes)
        if any(n % 2 == 0 for n in kernel):
            raise ValueError(f"kernel_size: expected odd integers, got {self.kernel_size}")
        if axes > 1 or self.shape is not None:
            check_sizes("shape", self.shape, axes)
        if tuple(self.table.shape[1:]) != tuple(2 * n - 1 for n in kernel):
            expected = ", ".join(str(2 * n - 1) for n in kernel)
            raise ValueError(f"table: expected shape (heads_q, {expected}), got {tuple(self.table.shape)}")

    def _each(self, value: Any) -> Any:
        return value if isinstance(value, (tuple, list)) else (value,) * (self.table.ndim - 1)

    def __call__(self, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        check_size("natten_rpb", self.table, 0, score)
        of_query, of_key = (
            ([q], [k]) if self.shape is None else (coordinates(q, self.shape), coordinates(k, self.shape))
        )
        axes = zip(of_query, of_key, self._each(self.kernel_size), self._each(self.dilation), strict=True)
        return score + take(self.table, h, *((y - x) // constant(d) + constant(n - 1) for x, y, n, d in axes))
