"""The elementary patterns; most others are compositions of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...index_set import Runs
from ..base.check import REACH, integer, reach
from ..base.parameters import Count, Positive
from ..base.pattern import Part, Pattern
from ..base.registry import register
from ..hints.bands import NO_KEY_AHEAD, Bands, same_keys
from ..hints.lattice import Ends, column_lattices
from ..hints.parts import residue_parts

__all__ = ["BlockLocal", "Causal", "Columns", "Full", "Sinks", "Stride"]


def always(positions: Any) -> Any:
    """True at every position: gives a predicate of one side the shape of both."""
    return 0 * positions == 0


@register("full")
@dataclass(frozen=True)
class Full(Pattern):
    """Every key: dense attention.

    For short sequences, and as the dense baseline of a comparison.
    """

    translation_invariant = True

    def allows(self, q: Any, k: Any) -> Any:
        return always(q) & always(k)

    def runs(self, q: np.ndarray, kv_len: int) -> Runs:
        return Runs.span(np.zeros_like(q), kv_len, kv_len)

    def ends(self, q_len: int) -> Ends:
        return Ends(0, 0, between=True)


@register("causal")
@dataclass(frozen=True)
class Causal(Pattern):
    """The query's own key and every key before it.

    For language models that generate; others become causal by it: ``Causal() & BlockLocal(512)``.
    """

    translation_invariant = True

    def allows(self, q: Any, k: Any) -> Any:
        return k <= q

    def runs(self, q: np.ndarray, kv_len: int) -> Runs:
        return Runs.span(np.zeros_like(q), q + 1, kv_len)

    def ends(self, q_len: int) -> Ends:
        return Ends(0, q_len, between=True)

    def _bands(self, first: int, stop: int) -> tuple[Bands, ...]:
        return (NO_KEY_AHEAD,)


@register("block_local")
@dataclass(frozen=True)
class BlockLocal(Pattern):
    """Keys of the query's own block of `block` tokens.

    For inputs that come in chunks of equal length, none of which needs another.

    Parameters
    ----------
    block : int
        Tokens of a block.
    offset : int, optional
        Where a block starts, as after padding; others start a block's length before it and after it.

    Raises
    ------
    TypeError
        If a parameter is not an integer.
    ValueError
        If `block` is less than 1, or `offset` negative.
    """

    block: Positive
    offset: Count = 0

    def _within_reach(self) -> tuple[int, int]:
        """Block and offset; an offset out of reach leaves every position in blocks before it."""
        block, offset = reach(self.block), self.offset % self.block
        return block, offset if offset < REACH // 2 else max(offset - self.block, -REACH // 2)

    def allows(self, q: Any, k: Any) -> Any:
        block, offset = self._within_reach()
        return (q - offset) // block == (k - offset) // block

    def runs(self, q: np.ndarray, kv_len: int) -> Runs:
        block, offset = self._within_reach()
        first = (q - offset) // block * block + offset
        return Runs.span(first, first + block, kv_len)

    @classmethod
    def example(cls) -> tuple[Pattern, int]:
        return cls(8), 32

    @classmethod
    def typical(cls) -> tuple[Pattern, int]:
        return cls(512), 16384


@register("sinks")
@dataclass(frozen=True)
class Sinks(Pattern):
    """The first `count` keys.

    For streaming generation together with a window: trained models rely on the first tokens.

    Parameters
    ----------
    count : int
        How many of the first keys.

    Raises
    ------
    TypeError
        If `count` is not an integer.
    ValueError
        If it is negative.

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

    def _bands(self, first: int, stop: int) -> tuple[Bands, ...]:
        return (same_keys(np.zeros(1, np.int64), np.array([reach(self.count)])),)

    def ends(self, q_len: int) -> Ends:
        return Ends(self.count, 0)


@register("stride")
@dataclass(frozen=True)
class Stride(Pattern):
    """Keys at a distance of `offset` modulo `stride`: ``(p - j) % stride == offset``.

    For series with a known period, and as the far part of factorised attention.

    Parameters
    ----------
    stride : int
        Distance of neighbouring keys in tokens.
    offset : int, optional
        Distance of the query from its nearest key, ``0 <= offset < stride``.

    Raises
    ------
    TypeError
        If a parameter is not an integer.
    ValueError
        If `stride` is less than 1, or `offset` not in ``[0, stride)``.
    """

    stride: Positive
    offset: Count = 0
    translation_invariant = True

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("offset", self.offset, 0, self.stride - 1)

    def _within_reach(self) -> tuple[int, int]:
        """Stride and offset; of a stride out of reach only the keys `offset` before or ``stride - offset`` after."""
        stride, far = reach(self.stride), REACH // 2
        return stride, self.offset if self.offset < far else max(self.offset - self.stride + stride, far)

    def allows(self, q: Any, k: Any) -> Any:
        stride, offset = self._within_reach()
        # One side each: on a residue class both are constant, which interval arithmetic on p - j would not see.
        return (q - offset) % stride == k % stride

    def runs(self, q: np.ndarray, kv_len: int) -> Runs:
        stride, offset = self._within_reach()
        return Runs.stepped((q - offset) % stride, kv_len, stride, kv_len)

    def parts(self, q_len: int, kv_len: int) -> tuple[Part, ...]:
        return (Part(self),) if self.stride == 1 else residue_parts(self, *self._within_reach(), q_len, kv_len)

    @classmethod
    def random(cls, draw: Any, sizes: Any) -> tuple[Pattern, Any]:
        stride = draw.size(1, sizes.kv_len + 2)
        near_the_end = stride - 1 - draw.integer(0, min(stride - 1, sizes.kv_len))
        return cls(stride, draw.choice([draw.integer(0, stride - 1), near_the_end])), sizes

    @classmethod
    def typical(cls) -> tuple[Pattern, int]:
        return cls(128), 16384


@register("columns")
@dataclass(frozen=True)
class Columns(Pattern):
    """Keys in the columns ``[start, stop)`` of every `period` keys: ``start <= j % period < stop``.

    For summary tokens that stand at fixed places of every period.

    Parameters
    ----------
    period : int
        Keys of a period.
    start, stop : int
        Columns of each period, ``0 <= start < stop <= period``.

    Raises
    ------
    TypeError
        If a parameter is not an integer.
    ValueError
        If `period` is less than 1, or `start` and `stop` are not as above.
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

    def parts(self, q_len: int, kv_len: int) -> tuple[Part, ...]:
        return tuple(Part(self, None, keys) for keys in column_lattices(*self._within_reach(), kv_len))

    @classmethod
    def example(cls) -> tuple[Pattern, int]:
        return cls(8, 5, 8), 32

    @classmethod
    def typical(cls) -> tuple[Pattern, int]:
        return cls(128, 120, 128), 16384

    @classmethod
    def random(cls, draw: Any, sizes: Any) -> tuple[Pattern, Any]:
        period = draw.size(1, sizes.kv_len + 2)
        start = draw.integer(0, period - 1)
        return cls(period, start, draw.integer(start + 1, period)), sizes


def column_runs(period: int, start: int, stop: int, end: np.ndarray, kv_len: int) -> Runs:
    """The keys ``start <= j % period < stop`` below each row's `end`: by column or by period, whichever is fewer."""
    periods = -(-kv_len // period)
    if stop - start <= periods:
        first, step = np.arange(start, stop), period
        last = np.broadcast_to(end[:, None], (len(end), len(first)))
    else:
        first, step = np.arange(periods) * period + start, 1
        last = np.minimum(end[:, None], first + (stop - start))
    count = np.maximum(-((first - np.minimum(last, kv_len)) // step), 0)
    return Runs(np.broadcast_to(first, count.shape), np.full_like(count, step), count)
