"""Tables of relative positions along one, two or three axes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..composition import ScoreFunction
from ..functions import clip, take
from ..recorder import constant
from ._numbers import check_size, check_table
from ._positions import check_sizes, coordinates

__all__ = ["relative_bias"]


@dataclass(frozen=True, eq=False, repr=False)
class relative_bias(ScoreFunction):
    """Add a table's entry for the distance ``key - query`` along each axis.

    Parameters
    ----------
    table : (heads_q, 2 * reach + 1, ...) array of floats
        One, two or three axes of distances; the middle of each is distance 0, and larger distances use its ends. It
        gets a gradient.
    shape : tuple of int, optional
        Extents of the grid of tokens, in row-major order; needed for two or three axes.

    Raises
    ------
    ValueError
        If an axis of distances has an even size, or `shape` does not have one extent per axis.

    Notes
    -----
    For one axis the bias of a pair is ``table[h, clip(k - q, -reach, reach) + reach]``. A table of 2 * kv_len - 1
    distances has an entry for each.

    Examples
    --------
    >>> import numpy as np
    >>> from spattn.score import relative_bias
    >>> function = relative_bias(np.array([[10.0, 20.0, 30.0]]))
    >>> [float(function(0.0, 0, 0, 5, k)) for k in (0, 4, 5, 6, 9)]
    [10.0, 10.0, 20.0, 30.0, 30.0]
    """

    table: Any
    shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_table("table", self.table)
        sizes = tuple(self.table.shape[1:])
        if not 1 <= len(sizes) <= 3 or any(n % 2 == 0 for n in sizes):
            raise ValueError(
                "table: expected shape (heads, 2 * reach + 1, ...) with one to three axes of distances, got "
                f"{tuple(self.table.shape)}"
            )
        if len(sizes) > 1 or self.shape is not None:
            check_sizes("shape", self.shape, len(sizes))

    def __call__(self, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        check_size("relative_bias", self.table, 0, score)
        of_query, of_key = (
            ([q], [k]) if self.shape is None else (coordinates(q, self.shape), coordinates(k, self.shape))
        )
        indices = []
        for query, key, size in zip(of_query, of_key, self.table.shape[1:], strict=True):
            indices.append(clip(key - query + constant(size // 2), 0, constant(size - 1)))
        return score + take(self.table, h, *indices)
