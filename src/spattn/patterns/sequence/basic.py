"""Elementary patterns, the operands of most compositions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..._util.index_checks import q_offset
from ...index_set import Runs
from ..base.check import REACH, Count, Positive, integer, reach
from ..base.class_registry import register
from ..base.pattern import Part, Pattern
from ..hints.closed_forms import (
    NO_KEY_AHEAD,
    Bands,
    Ends,
    Lattice,
    Place,
    Program,
    column_lattices,
    run,
    same_keys,
    union,
)

__all__ = ["BlockLocal", "Causal", "Columns", "Full", "Sinks", "Stride", "always", "residue_parts"]

_MOST_COLUMNS = 64  # of a row program; more are set by periods


def always(positions: Any) -> Any:
    """Return True at every position, to broadcast a one-sided predicate to both sides."""
    return 0 * positions == 0


@register("full")
@dataclass(frozen=True)
class Full(Pattern):
    """Dense attention: every query attends to every key.

    For short sequences, and as a dense baseline.
    """

    translation_invariant = True

    def allows(self, q: Any, k: Any) -> Any:
        return always(q) & always(k)

    def runs(self, q: np.ndarray, kv_len: int) -> Runs:
        return Runs.span(np.zeros_like(q), kv_len, kv_len)

    def _row_program(self) -> Program:
        return union(run(Place(0), Place(REACH)))

    def ends(self, q_len: int) -> Ends:
        return Ends(0, 0, between=True)


@register("causal")
@dataclass(frozen=True)
class Causal(Pattern):
    """Causal attention: each query attends to its own key and to every earlier key.

    For autoregressive language models, and to make other patterns causal: ``Causal() & BlockLocal(512)``.

    Notes
    -----
    If q_len > kv_len, queries before position 0 attend to no key.
    """

    translation_invariant = True

    def allows(self, q: Any, k: Any) -> Any:
        return k <= q

    def runs(self, q: np.ndarray, kv_len: int) -> Runs:
        return Runs.span(np.zeros_like(q), q + 1, kv_len)

    def _row_program(self) -> Program:
        return union(run(Place(0), Place(1, 1)))

    def ends(self, q_len: int) -> Ends:
        return Ends(0, q_len, between=True)

    def _bands(self, first: int, stop: int) -> tuple[Bands, ...]:
        return (NO_KEY_AHEAD,)


@register("block_local", example=((8,), 32), typical=((512,), 16384))
@dataclass(frozen=True)
class BlockLocal(Pattern):
    """Block-local attention: each query attends to the keys of its own block of `block` tokens.

    For inputs that consist of independent chunks of equal length.

    Parameters
    ----------
    block : int
        Tokens per block.
    offset : int, optional
        Position at which one block starts, e.g. after padding; other blocks precede and follow it.
    """

    block: Positive
    offset: Count = 0

    def _within_reach(self) -> tuple[int, int]:
        """Return block and offset, clipped for int64 arithmetic; valid positions stay in the same blocks."""
        block, offset = reach(self.block), self.offset % self.block
        return block, offset if offset < REACH // 2 else max(offset - self.block, -REACH // 2)

    def allows(self, q: Any, k: Any) -> Any:
        block, offset = self._within_reach()
        return (q - offset) // block == (k - offset) // block

    def runs(self, q: np.ndarray, kv_len: int) -> Runs:
        block, offset = self._within_reach()
        first = (q - offset) // block * block + offset
        return Runs.span(first, first + block, kv_len)

    def _row_program(self) -> Program:
        block, offset = self._within_reach()
        return union(run(Place(0, block, offset), Place(block, block, offset)))


@register("sinks")
@dataclass(frozen=True)
class Sinks(Pattern):
    """Attention sinks: every query attends to the first `count` keys.

    For streaming generation, together with a window: trained models rely on the first tokens.

    Parameters
    ----------
    count : int
        Number of keys.

    Notes
    -----
    StreamingLLM's mask is ``(Sinks(4) | SlidingWindow(w, 0)) & Causal()``.

    References
    ----------
    Xiao, Tian, Chen, Han, Lewis. Efficient Streaming Language Models with Attention Sinks. arXiv:2309.17453.
    """

    count: Count

    def allows(self, q: Any, k: Any) -> Any:
        return always(q) & (k < reach(self.count))

    def runs(self, q: np.ndarray, kv_len: int) -> Runs:
        return Runs.span(np.zeros_like(q), reach(self.count), kv_len)

    def _row_program(self) -> Program:
        return union(run(Place(0), Place(reach(self.count))))

    def _bands(self, first: int, stop: int) -> tuple[Bands, ...]:
        return (same_keys(np.zeros(1, np.int64), np.array([reach(self.count)])),)

    def ends(self, q_len: int) -> Ends:
        return Ends(self.count, 0)


@register("stride", typical=((128,), 16384))
@dataclass(frozen=True)
class Stride(Pattern):
    """Strided attention: each query attends to the keys with ``(p - j) % stride == offset``.

    For periodic series, and for the long-range component of factorized attention.

    Parameters
    ----------
    stride : int
        Distance between consecutive keys in tokens.
    offset : int, optional
        Distance from the query back to its nearest key, ``0 <= offset < stride``.
    """

    stride: Positive
    offset: Count = 0
    translation_invariant = True

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("offset", self.offset, 0, self.stride - 1)

    def _within_reach(self) -> tuple[int, int]:
        """Return stride and offset, clipped for int64 arithmetic.

        With a clipped stride, only the nearest key before a query and the nearest key after it can be in the sequence.
        """
        stride, far = reach(self.stride), REACH // 2
        return stride, self.offset if self.offset < far else max(self.offset - self.stride + stride, far)

    def allows(self, q: Any, k: Any) -> Any:
        stride, offset = self._within_reach()
        # Both sides are constant on residue classes; interval arithmetic on (q - k) % stride would miss that.
        return (q - offset) % stride == k % stride

    def runs(self, q: np.ndarray, kv_len: int) -> Runs:
        stride, offset = self._within_reach()
        return Runs.stepped((q - offset) % stride, kv_len, stride, kv_len)

    def _row_program(self) -> Program:
        stride, offset = self._within_reach()
        before = -(-REACH // stride) * stride  # to a key of the same residue before the sequence
        return union(run(Place(-offset - before, 1), Place(REACH), stride))

    def parts(self, q_len: int, kv_len: int) -> tuple[Part, ...]:
        return (Part(self),) if self.stride == 1 else residue_parts(self, *self._within_reach(), q_len, kv_len)

    @classmethod
    def random(cls, draw: Any, sizes: Any) -> tuple[Pattern, Any]:
        stride = draw.size(1, sizes.kv_len + 2)
        near_the_end = stride - 1 - draw.integer(0, min(stride - 1, sizes.kv_len))
        return cls(stride, draw.choice([draw.integer(0, stride - 1), near_the_end])), sizes


@register("columns", example=((8, 5, 8), 32), typical=((128, 120, 128), 16384))
@dataclass(frozen=True)
class Columns(Pattern):
    """Periodic columns: every query attends to the keys with ``start <= j % period < stop``.

    For summary tokens at fixed offsets in every period.

    Parameters
    ----------
    period : int
        Keys per period.
    start, stop : int
        Columns of each period, ``0 <= start < stop <= period``.
    """

    period: Positive
    start: Count
    stop: Positive

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("start", self.start, 0, self.period - 1)
        integer("stop", self.stop, self.start + 1, self.period)

    def _within_reach(self) -> tuple[int, int, int]:
        return reach(self.period), reach(self.start), reach(self.stop)

    def allows(self, q: Any, k: Any) -> Any:
        period, start, stop = self._within_reach()
        column = k % period
        return always(q) & (start <= column) & (column < stop)

    def runs(self, q: np.ndarray, kv_len: int) -> Runs:
        return column_runs(*self._within_reach(), np.full_like(q, kv_len), kv_len)

    def _row_program(self) -> Program | None:
        period, start, stop = self._within_reach()
        if stop - start > _MOST_COLUMNS:
            return None
        return union(*(run(Place(column), Place(REACH), period) for column in range(start, stop)))

    def parts(self, q_len: int, kv_len: int) -> tuple[Part, ...]:
        return tuple(Part(self, None, keys) for keys in column_lattices(*self._within_reach(), kv_len))

    @classmethod
    def random(cls, draw: Any, sizes: Any) -> tuple[Pattern, Any]:
        period = draw.size(1, sizes.kv_len + 2)
        start = draw.integer(0, period - 1)
        return cls(period, start, draw.integer(start + 1, period)), sizes


def column_runs(period: int, start: int, stop: int, end: np.ndarray, kv_len: int) -> Runs:
    """Return the keys ``start <= j % period < stop`` below each `end`.

    The runs are columns or periods, whichever are fewer.
    """
    periods = -(-kv_len // period)
    if stop - start <= periods:
        first, step = np.arange(start, stop), period
        last = np.broadcast_to(end[:, None], (len(end), len(first)))
    else:
        first, step = np.arange(periods) * period + start, 1
        last = np.minimum(end[:, None], first + (stop - start))
    count = np.maximum(-((first - np.minimum(last, kv_len)) // step), 0)
    return Runs(np.broadcast_to(first, count.shape), np.full_like(count, step), count)


def residue_parts(pattern: Pattern, stride: int, offset: int, q_len: int, kv_len: int) -> tuple[Part, ...]:
    """Return parts that pair each residue class of queries modulo `stride` with the class of keys `offset` before it.

    The pattern must depend only on distances. Classes with equal extents and equal distance between their first query
    and first key share one part with shifts, so there are at most four parts. Classes of one key need no views.
    """
    if stride >= kv_len:
        return (Part(pattern),)
    groups: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for first in range(min(stride, q_len)):
        query = q_offset(q_len, kv_len) + first
        key = (query - offset) % stride
        queries, keys = -((first - q_len) // stride), -((key - kv_len) // stride)
        if keys > 0:
            groups.setdefault((queries, keys, query - key), []).append((query, key))
    return tuple(
        Part(
            pattern,
            Lattice(first[0][0], (stride,), (queries,)),
            Lattice(first[0][1], (stride,), (keys,)),
            tuple((query - first[0][0], key - first[0][1]) for query, key in first),
        )
        for (queries, keys, _), first in groups.items()
    )
