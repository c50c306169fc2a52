"""Masks given key by key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ._check import assign, flag
from ._content import frozen_array
from ._pattern import Pattern
from ._predicate import apply
from ._registry import register
from .arrays import ArrayPattern

__all__ = ["ColumnIntervals"]


@register("column_intervals")
@dataclass(frozen=True, eq=False, repr=False)
class ColumnIntervals(ArrayPattern):
    """Every query but one or two intervals of them for each key.

    For masks described key by key, in memory that grows with the length alone.

    Parameters
    ----------
    start, stop : int arrays (kv_len,), (heads, kv_len) or (batch, heads, kv_len)
        Query positions ``start[j] <= p < stop[j]`` do not attend to key j; copied. Where q_len = kv_len positions are
        FlashMask's rows.
    start2, stop2 : int arrays of the same shape, optional
        A second interval.
    causal : bool, optional
        Whether only keys up to the query's are allowed.

    Raises
    ------
    TypeError
        If the arrays are not of integers or masked arrays, or `causal` is not a bool.
    ValueError
        If the arrays' shapes differ or have not one to three axes, a number does not fit into int64, or only one of
        `start2` and `stop2` is given; from :meth:`bind`, if there is not one interval a key; from :meth:`allows`, if
        :meth:`at` has not chosen among several batch entries and heads.

    References
    ----------
    Wang et al. FlashMask. arXiv:2410.01359.
    """

    start: np.ndarray
    stop: np.ndarray
    start2: np.ndarray | None = None
    stop2: np.ndarray | None = None
    causal: bool = False
    own_axes = 1

    def __post_init__(self) -> None:
        if (self.start2 is None) != (self.stop2 is None):
            raise ValueError("start2, stop2: expected both or neither, got one of them")
        for name in ("start", "stop") if self.start2 is None else ("start", "stop", "start2", "stop2"):
            assign(self, **{name: frozen_array(name, getattr(self, name), np.int64, (1, 2, 3))})
            if getattr(self, name).shape != self.start.shape:
                raise ValueError(f"{name}: expected shape {self.start.shape}, got {getattr(self, name).shape}")
        assign(self, causal=flag("causal", self.causal))

    def bind(self, q_len: int, kv_len: int) -> Pattern:
        if self.start.shape[-1] != kv_len:
            raise ValueError(f"start: expected shape (..., {kv_len}), got {self.start.shape}")
        return self

    def _masked(self, start: np.ndarray, stop: np.ndarray, q: Any, k: Any) -> Any:
        def of(bounds: np.ndarray) -> Any:
            bounds = self._only(bounds)
            return apply(lambda j: bounds[np.clip(j, 0, len(bounds) - 1)], k)

        return (of(start) <= q) & (q < of(stop))

    def allows(self, q: Any, k: Any) -> Any:
        allowed = ~self._masked(self.start, self.stop, q, k)
        if self.start2 is not None and self.stop2 is not None:
            allowed = allowed & ~self._masked(self.start2, self.stop2, q, k)
        return allowed & (k <= q) if self.causal else allowed

    @classmethod
    def example(cls) -> tuple[Pattern, int]:
        key = np.arange(32)
        return cls((key // 8 + 1) * 8, np.where(key % 8 == 0, 0, 32), causal=True), 32

    @classmethod
    def typical(cls) -> tuple[Pattern, int]:
        key = np.arange(4096)
        return cls((key // 512 + 1) * 512, np.full(4096, 4096), causal=True), 4096

    @classmethod
    def random(cls, draw: Any, sizes: Any) -> tuple[Pattern, Any]:
        shape = draw.choice([2, 4]), *cls._leading(draw, sizes, sizes.heads_q), sizes.kv_len
        names = ("start", "stop", "start2", "stop2")
        bounds = dict(zip(names, draw.integers(shape, -2, sizes.kv_len + 2), strict=False))
        return cls(**bounds, causal=draw.flag()), sizes
