"""Interval masks: query intervals per key, or key intervals per query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..._util.index_checks import LONGEST, q_offset
from ...index_set import Runs
from ..base.check import assign, flag, integer
from ..base.class_registry import register
from ..base.content import ArrayPattern, Bound
from ..base.pattern import Pattern
from ..base.predicate import apply, row_or_last

if TYPE_CHECKING:
    from ..base.rows import AskedRows

__all__ = ["ColumnIntervals", "RowIntervals"]


_KEY_BOUNDS = ("start", "stop", "start2", "stop2")


@register(
    "column_intervals",
    example=lambda: (((k := np.arange(32)) // 8 * 8 + 8, np.where(k % 8 == 0, 0, 32), None, None, True), 32),
    typical=lambda: ((np.arange(4096) // 512 * 512 + 512, np.full(4096, 4096), None, None, True), 4096),
)
@dataclass(frozen=True, eq=False, repr=False)
class ColumnIntervals(ArrayPattern):
    """Column intervals: each key is masked for one or two intervals of queries.

    For masks given per key; memory is linear in the sequence length.

    Parameters
    ----------
    start, stop : int arrays (kv_len,), (heads, kv_len) or (batch, heads, kv_len)
        Queries at ``start[j] <= p < stop[j]`` do not attend to key j; copied. If q_len == kv_len, positions equal
        FlashMask's rows.
    start2, stop2 : int arrays of the same shape, optional
        A second interval per key; give both or neither.
    causal : bool, optional
        Whether keys after the query are masked.

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
        self._freeze(np.int64, *_KEY_BOUNDS[: 2 if self.start2 is None else 4])
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
    def random(cls, draw: Any, sizes: Any) -> tuple[Pattern, Any]:
        shape = draw.choice([2, 4]), *cls._leading(draw, sizes, sizes.heads_q), sizes.kv_len
        bounds = dict(zip(_KEY_BOUNDS, draw.integers(shape, -2, sizes.kv_len + 2), strict=False))
        return cls(**bounds, causal=draw.flag()), sizes


@register(
    "row_intervals",
    example=lambda: ((np.arange(32) // 8 * 4, np.arange(32) // 2 + 16), 32),
    typical=lambda: ((np.arange(4096) // 1024 * 1024, np.arange(4096) + 1), 4096),
)
@dataclass(frozen=True, eq=False, repr=False)
class RowIntervals(ArrayPattern):
    """Row intervals: each query attends to one interval of keys.

    For packed sequences with different query and key lengths, and for windows that vary by query.

    Parameters
    ----------
    start, stop : int arrays (q_len,), (heads, q_len) or (batch, heads, q_len)
        Row i attends to the keys ``start[i] <= j < stop[i]``; copied. Bounds may exceed ``[0, kv_len]``.
    kv_len : int, optional
        Required number of keys; None accepts any.

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

    own_axes = 1

    def __post_init__(self) -> None:
        self._freeze(np.int64, "start", "stop")
        if self.kv_len is not None:
            assign(self, kv_len=integer("kv_len", self.kv_len, 0, LONGEST))

    def bind(self, q_len: int, kv_len: int) -> Pattern:
        if self.start.shape[-1] != q_len:
            raise ValueError(
                f"start: expected shape (..., {q_len}), one interval per query, got {self.start.shape}; "
                "cumulative lengths (cu_seqlens_q) must end with q_len"
            )
        if self.kv_len not in (None, kv_len):
            raise ValueError(
                f"kv_len: expected {self.kv_len}, the number of keys of the intervals, got {kv_len}; "
                "cumulative lengths (cu_seqlens_k) must end with kv_len"
            )
        return _BoundRows(self, q_offset(q_len, kv_len))

    def allows(self, q: Any, k: Any) -> Any:
        self._only(self.start)
        raise ValueError("RowIntervals: its rows depend on the lengths; use .bind(q_len, kv_len)")

    def bounds(self, row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return start and stop of each row; rows out of range have no keys."""
        start, stop = (np.append(self._only(bounds), 0) for bounds in (self.start, self.stop))
        row = row_or_last(row, len(start) - 1)
        return start[row], stop[row]

    def _rows(self, asked: AskedRows) -> np.ndarray:
        if asked.q.shape[:2] != (1, 1):
            return super()._rows(asked)
        self.bind(asked.q_len, asked.kv_len)  # check the lengths
        shape = *self.sizes(), asked.q_len
        start, stop = self.start.reshape(shape), self.stop.reshape(shape)
        if not asked.is_whole:
            row = row_or_last(asked.q[0, 0] - q_offset(asked.q_len, asked.kv_len), asked.q_len)
            start, stop = (np.insert(x, asked.q_len, 0, axis=2)[..., row] for x in (start, stop))
        shape, first = start.shape, np.maximum(start, 0).reshape(-1, 1)
        count = np.maximum(np.minimum(stop, asked.kv_len), 0).reshape(-1, 1) - first  # faster than np.clip
        return asked.filled(Runs(first, np.ones_like(first), count)).reshape(*shape, -1)

    @classmethod
    def random(cls, draw: Any, sizes: Any) -> tuple[Pattern, Any]:
        shape = 2, *cls._leading(draw, sizes, sizes.heads_q), sizes.q_len
        start, stop = draw.integers(shape, -2, sizes.kv_len + 2)
        return cls(start, stop, draw.choice([None, sizes.kv_len])), sizes


@dataclass(frozen=True, repr=False)
class _BoundRows(Bound):
    given: RowIntervals

    def allows(self, q: Any, k: Any) -> Any:
        start = apply(lambda q: self.given.bounds(q - self.first)[0], q)
        stop = apply(lambda q: self.given.bounds(q - self.first)[1], q)
        return (start <= k) & (k < stop)

    def runs(self, q: np.ndarray, kv_len: int) -> Runs:
        return Runs.span(*self.given.bounds(q - self.first), kv_len)
