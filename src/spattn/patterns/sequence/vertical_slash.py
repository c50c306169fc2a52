"""Causal key columns and diagonals (MInference's vertical-slash)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..._util.imports import whole_imports
from ...index_set import Runs
from ..base.check import MOST_RUNS, assign
from ..base.content import on_device
from ..base.parameters import Count
from ..base.pattern import Pattern
from ..base.predicate import member
from ..base.registry import register
from ..hints.bands import NO_KEY_AHEAD, Bands, same_keys
from .tokens import position_table, token_set

__all__ = ["VerticalSlash"]


@register(
    "vertical_slash",
    example=(((0, 1, 9), (0, 1, 2, 12)), 32),
    typical=lambda: ((tuple(range(64)), tuple(range(512))), 4096),
)
@dataclass(frozen=True)
class VerticalSlash(Pattern):
    """Causal key columns and diagonals: ``(j in columns or p - j in diagonals) and j <= p``.

    For long-prompt prefill, with columns and diagonals estimated from a sample of the queries.

    Parameters
    ----------
    columns : tuple of int
        Key positions.
    diagonals : tuple of int
        Distances ``p - j >= 0`` in tokens. Arrays on a GPU, (batch, heads, n) or without the leading axes, make a
        :class:`~spattn.patterns.dynamic.DynamicVerticalSlash`, which each call reads on the device.

    References
    ----------
    Jiang et al. MInference 1.0. arXiv:2407.02490.
    """

    columns: tuple[Count, ...]
    diagonals: tuple[Count, ...]

    def __new__(cls, columns: Any = None, diagonals: Any = None) -> Any:
        if on_device(columns) or on_device(diagonals):
            with whole_imports:
                from ..dynamic import DynamicVerticalSlash

            return DynamicVerticalSlash(columns, diagonals)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        super().__post_init__()
        assign(self, columns=token_set(self.columns), diagonals=token_set(self.diagonals))

    def allows(self, q: Any, k: Any) -> Any:
        columns, diagonals = map(position_table, (self.columns, self.diagonals))
        return (member(columns, k) | member(diagonals, q - k)) & (k <= q)

    def runs(self, q: np.ndarray, kv_len: int) -> Runs | None:
        columns, diagonals = map(position_table, (self.columns, self.diagonals))
        if len(q) * (len(columns) + len(diagonals)) > MOST_RUNS:
            return None
        new = np.diff(diagonals, prepend=-2) > 1  # adjacent diagonals form one run
        near, far = diagonals[new], diagonals[np.append(new[1:], True)[: len(diagonals)]]
        row = q[:, None]
        start = np.maximum(row - far, 0)
        bands = Runs(start, np.ones_like(start), np.maximum(np.minimum(row - near + 1, kv_len) - start, 0))
        alone = (columns <= row) & (columns < kv_len) & ~np.isin(row - columns, diagonals)
        start = np.broadcast_to(columns, alone.shape)
        return bands | Runs(start, np.ones_like(start), alone.astype(np.int64))

    def _bands(self, first: int, stop: int) -> tuple[Bands, ...]:
        columns, diagonals = map(position_table, (self.columns, self.diagonals))
        chosen = same_keys(columns, columns + 1, np.stack([diagonals, diagonals + 1], axis=1))
        return chosen, NO_KEY_AHEAD
