"""Masks given as intervals: of queries for each key, or of keys for each query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..._util.index_checks import LONGEST, q_offset
from ...index_set import Runs
from ..base.bound import Bound
from ..base.check import assign, flag, integer
from ..base.content import frozen_array
from ..base.pattern import Pattern
from ..base.predicate import apply
from ..base.registry import register
from ..listed.masks import ArrayPattern

__all__ = ["ColumnIntervals", "RowIntervals"]


class _Intervals(ArrayPattern):
    """Shared by the two: bounds, as integer arrays of one shape."""

    own_axes = 1

    def _take(self, *names: str) -> None:
        """Checks and copies the arrays of these fields."""
        shape = None
        for name in names:
            array = frozen_array(name, getattr(self, name), np.int64, (1, 2, 3))
            if shape not in (None, array.shape):
                raise ValueError(f"{name}: expected shape {shape}, got {array.shape}")
            assign(self, **{name: array})
            shape = array.shape


@register("column_intervals")
@dataclass(frozen=True, eq=False, repr=False)
class ColumnIntervals(_Intervals):
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

    def __post_init__(self) -> None:
        if (self.start2 is None) != (self.stop2 is None):
            raise ValueError("start2, stop2: expected both or neither, got one of them")
        self._take("start", "stop", *(() if self.start2 is None else ("start2", "stop2")))
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


@register("row_intervals")
@dataclass(frozen=True, eq=False, repr=False)
class RowIntervals(_Intervals):
    """One interval of keys for each query.

    For packed sequences whose queries and keys differ in number, and windows that differ from query to query.

    Parameters
    ----------
    start, stop : int arrays (q_len,), (heads, q_len) or (batch, heads, q_len)
        Row i attends to the keys ``start[i] <= j < stop[i]``; copied. Bounds may lie beyond the keys.
    kv_len : int, optional
        The number of keys that the bounds refer to; any number if it is None.

    Raises
    ------
    TypeError
        If the arrays are not of integers or masked arrays, or `kv_len` is not an integer.
    ValueError
        If the arrays' shapes differ or have not one to three axes, or a number does not fit into int64; from
        :meth:`bind`, if there is not one interval a query, or the number of keys is not `kv_len`; from :meth:`allows`,
        if :meth:`bind` has not fixed the lengths, or :meth:`at` not chosen among several batch entries and heads.

    Examples
    --------
    >>> RowIntervals([0, 0, 3], [2, 3, 5]).index_set(3, 5).to_dense().astype(int)
    array([[1, 1, 0, 0, 0],
           [1, 1, 1, 0, 0],
           [0, 0, 0, 1, 1]])
    """

    start: np.ndarray
    stop: np.ndarray
    kv_len: int | None = None

    def __post_init__(self) -> None:
        self._take("start", "stop")
        if self.kv_len is not None:
            assign(self, kv_len=integer("kv_len", self.kv_len, 0, LONGEST))

    def bind(self, q_len: int, kv_len: int) -> Pattern:
        if self.start.shape[-1] != q_len:
            raise ValueError(
                f"start: expected shape (..., {q_len}), one interval a query, got {self.start.shape}; "
                "cumulative lengths (cu_seqlens_q) must end with q_len"
            )
        if self.kv_len not in (None, kv_len):
            raise ValueError(
                f"kv_len: the intervals are of {self.kv_len} keys, got {kv_len}; "
                "cumulative lengths (cu_seqlens_k) must end with kv_len"
            )
        return _BoundRows(self, q_offset(q_len, kv_len))

    def allows(self, q: Any, k: Any) -> Any:
        self._only(self.start)
        raise ValueError("RowIntervals: its rows depend on the lengths; use .bind(q_len, kv_len)")

    def bounds(self, row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Start and stop of each row, and of one that is not there no key."""
        start, stop = (np.append(self._only(bounds), 0) for bounds in (self.start, self.stop))
        row = np.where((row < 0) | (row >= len(start) - 1), len(start) - 1, row)
        return start[row], stop[row]

    @classmethod
    def example(cls) -> tuple[Pattern, int]:
        row = np.arange(32)
        return cls(row // 8 * 4, row // 2 + 16), 32

    @classmethod
    def typical(cls) -> tuple[Pattern, int]:
        row = np.arange(4096)
        return cls(row // 1024 * 1024, row + 1), 4096

    @classmethod
    def random(cls, draw: Any, sizes: Any) -> tuple[Pattern, Any]:
        shape = 2, *cls._leading(draw, sizes, sizes.heads_q), sizes.q_len
        start, stop = draw.integers(shape, -2, sizes.kv_len + 2)
        return cls(start, stop, draw.choice([None, sizes.kv_len])), sizes


@dataclass(frozen=True)
class _BoundRows(Bound):
    """Row intervals at known lengths."""

    given: RowIntervals

    def allows(self, q: Any, k: Any) -> Any:
        start = apply(lambda q: self.given.bounds(q - self.first)[0], q)
        stop = apply(lambda q: self.given.bounds(q - self.first)[1], q)
        return (start <= k) & (k < stop)

    def runs(self, q: np.ndarray, kv_len: int) -> Runs:
        return Runs.span(*self.given.bounds(q - self.first), kv_len)
