"""DeepSpeed's sparsity configurations: layouts of blocks, made for a sequence length.

Inside an allowed block every pair is allowed, above the diagonal too, also where ``attention="unidirectional"``:
DeepSpeed adds an element-wise causal mask separately, which here is ``& Causal()``.

References
----------
DeepSpeed, ``deepspeed/ops/sparse_attention/sparsity_config.py``. https://www.deepspeed.ai/tutorials/sparse-attention
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from ..base.check import reach
from ..base.parameters import Count, Positive, Word
from ..base.pattern import Pattern
from ..base.registry import register
from ._deepspeed_layouts import (
    LayoutPattern,
    check_ranges,
    global_ranges,
    random_layout,
    random_ranges,
    window_layout,
)

__all__ = ["BSLongformer", "BigBird", "Dense", "Fixed", "LocalSlidingWindow", "Variable"]

Direction = Literal["bidirectional", "unidirectional"]


@register("deepspeed_dense")
@dataclass(frozen=True)
class Dense(LayoutPattern):
    """All blocks.

    For models configured with DeepSpeed's ``DenseSparsityConfig``.

    Parameters
    ----------
    block : int, optional
        Tokens of a block.

    Raises
    ------
    TypeError
        If `block` is not an integer.
    ValueError
        If `block` is less than 1; from :meth:`bind`, if `kv_len` is not a multiple of `block`.
    """

    block: Positive = 16

    def layout(self, n: int) -> np.ndarray:
        return np.ones((n, n), dtype=bool)

    @classmethod
    def example(cls) -> tuple[Pattern, int]:
        return cls(8), 64

    @classmethod
    def random(cls, draw: Any, sizes: Any) -> tuple[Pattern, Any]:
        block, _, sizes = cls.random_blocks(draw, sizes)
        return cls(block), sizes


@register("deepspeed_fixed")
@dataclass(frozen=True)
class Fixed(LayoutPattern):
    """Local windows of blocks and, as global columns, the last blocks of each.

    For models configured with DeepSpeed's ``FixedSparsityConfig``.

    Parameters
    ----------
    block : int, optional
        Tokens of a block.
    num_local_blocks : int, optional
        Blocks of a local window.
    num_global_blocks : int, optional
        Blocks of each local window that are global.
    attention : {"bidirectional", "unidirectional"}, optional
    horizontal_global_attention : bool, optional
        Whether global blocks also attend to every block; bidirectional only.
    num_different_global_patterns : int, optional
        Head h takes the global blocks of version ``h % num_different_global_patterns``, counted from the window's end.
    head : int or None, optional
        That version; :meth:`at` fixes it.

    Raises
    ------
    TypeError
        If a parameter is not of the type above.
    ValueError
        If a number is less than 1, `num_global_blocks` does not divide `num_local_blocks`, `attention` is neither of
        the two, horizontal attention is asked for with unidirectional, or there are more versions than
        ``num_local_blocks / num_global_blocks``; from :meth:`bind`, if `kv_len` is not a multiple of `block`.
    """

    block: Positive = 16
    num_local_blocks: Positive = 4
    num_global_blocks: Positive = 1
    attention: Direction = "bidirectional"
    horizontal_global_attention: bool = False
    num_different_global_patterns: Positive = 1
    head: Word | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        local, width, versions = self.num_local_blocks, self.num_global_blocks, self.num_different_global_patterns
        if local % width:
            raise ValueError(f"num_global_blocks: expected a divisor of {local} (num_local_blocks), got {width}")
        if self.horizontal_global_attention and self.attention == "unidirectional":
            raise ValueError("horizontal_global_attention: expected False with unidirectional attention, got True")
        if versions > local // width:
            raise ValueError(f"num_different_global_patterns: expected at most {local // width}, got {versions}")

    def sizes(self) -> tuple[int, int]:
        return 1, 0 if self.num_different_global_patterns > 1 and self.head is None else 1

    def at(self, batch: int, head: int) -> Pattern:
        return self if self.sizes()[1] else replace(self, head=head % self.num_different_global_patterns)

    def layout(self, n: int) -> np.ndarray:
        size, width = self.num_local_blocks, self.num_global_blocks
        r, c = np.ogrid[:n, :n]
        layout = self._earlier(r // reach(size) == c // reach(size))
        first = size - (1 + (self.head or 0) % self.num_different_global_patterns) * width
        complete = n - n % size
        starts = list(range(first, complete, size))
        if n % size:
            starts.append(max(min(complete + first, n - width), 0))
        for start in starts:
            layout[start if self.attention == "unidirectional" else 0 :, start : start + width] = True
            if self.horizontal_global_attention:
                layout[start : start + width] = True
        return layout

    @classmethod
    def example(cls) -> tuple[Pattern, int]:
        return cls(4, attention="unidirectional"), 64

    @classmethod
    def random(cls, draw: Any, sizes: Any) -> tuple[Pattern, Any]:
        block, _, sizes = cls.random_blocks(draw, sizes)
        width, times = draw.size(1, 3), draw.size(1, 4)
        attention = draw.value(cls, "attention", sizes)
        horizontal = attention == "bidirectional" and draw.flag()
        return cls(block, width * times, width, attention, horizontal, draw.integer(1, times)), sizes


@register("deepspeed_variable")
@dataclass(frozen=True)
class Variable(LayoutPattern):
    """Local windows of listed sizes, chosen global blocks and random blocks.

    For models configured with DeepSpeed's ``VariableSparsityConfig``.

    Parameters
    ----------
    block : int, optional
        Tokens of a block.
    num_random_blocks : int, optional
        Random blocks of each row, drawn from all.
    local_window_blocks : tuple of int, optional
        Blocks of the local windows, one after another; the last size repeats to the end.
    global_block_indices : tuple of int, optional
        Global blocks, or the starts of ranges of them; those past the sequence's end do not count.
    global_block_end_indices : tuple of int or None, optional
        Ends of the ranges.
    attention : {"bidirectional", "unidirectional"}, optional
    horizontal_global_attention : bool, optional
        Whether global blocks also attend to every block.
    seed : int, optional
        Key of the generator, as :class:`spattn.patterns.BigBird`'s.
    head : int or None, optional
        The head whose random blocks these are; :meth:`at` fixes it.

    Raises
    ------
    TypeError
        If a parameter is not of the type above.
    ValueError
        If a number is out of range, `local_window_blocks` is empty, a range ends before it starts or has no end, or
        `attention` is neither of the two; from :meth:`bind`, if `kv_len` is not a multiple of `block`.
    """

    block: Positive = 16
    num_random_blocks: Count = 0
    local_window_blocks: tuple[Positive, ...] = (4,)
    global_block_indices: tuple[Count, ...] = (0,)
    global_block_end_indices: tuple[Count, ...] | None = None
    attention: Direction = "bidirectional"
    horizontal_global_attention: bool = False
    seed: Word = 0
    head: Word | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.local_window_blocks:
            raise ValueError("local_window_blocks: expected at least one window, got ()")
        check_ranges(self.global_block_indices, self.global_block_end_indices)

    def sizes(self) -> tuple[int, int]:
        return 1, 0 if self.num_random_blocks and self.head is None else 1

    def at(self, batch: int, head: int) -> Pattern:
        return self if self.sizes()[1] else replace(self, head=head)

    def layout(self, n: int) -> np.ndarray:
        ends = np.array([reach(end) for end in itertools.accumulate(self.local_window_blocks)])
        number = np.arange(n)
        past = len(ends) + (number - ends[-1]) // reach(self.local_window_blocks[-1])
        window = np.where(number < ends[-1], np.searchsorted(ends, number, side="right"), past)
        layout = self._earlier(window[:, None] == window)
        for start, end in global_ranges(self.global_block_indices, self.global_block_end_indices):
            layout[start if self.attention == "unidirectional" else 0 :, start:end] = True
            if self.horizontal_global_attention:
                layout[start:end] = True
        if self.num_random_blocks:
            layout |= random_layout(self.seed, self._own_head(), np.full(n, n), self.num_random_blocks)
        return layout

    @classmethod
    def example(cls) -> tuple[Pattern, int]:
        return cls(4, local_window_blocks=(2, 4), global_block_indices=(0, 7)), 64

    @classmethod
    def random(cls, draw: Any, sizes: Any) -> tuple[Pattern, Any]:
        block, blocks, sizes = cls.random_blocks(draw, sizes)
        windows = tuple(draw.size(1, 5) for _ in range(draw.integer(1, 4)))
        fixed = windows, *random_ranges(draw, blocks)
        rest = ("attention", "horizontal_global_attention", "seed", "head")
        drawn = (draw.value(cls, name, sizes) for name in rest)
        return cls(block, draw.size(0, min(3, blocks)), *fixed, *drawn), sizes


@register("deepspeed_bigbird")
@dataclass(frozen=True)
class BigBird(LayoutPattern):
    """Window, global and random blocks.

    For models configured with DeepSpeed's ``BigBirdSparsityConfig``.

    Parameters
    ----------
    block : int, optional
        Tokens of a block.
    num_random_blocks : int, optional
        Random blocks of each row, drawn from all or, when unidirectional, from its own and the earlier ones.
    num_sliding_window_blocks : int, optional
        Blocks of the window, the query's own included.
    num_global_blocks : int, optional
        The first so many rows and columns are global.
    attention : {"bidirectional", "unidirectional"}, optional
    seed : int, optional
        Key of the generator, as :class:`spattn.patterns.BigBird`'s.
    head : int or None, optional
        The head whose random blocks these are; :meth:`at` fixes it.

    Raises
    ------
    TypeError
        If a parameter is not of the type above.
    ValueError
        If a number is out of range, or `attention` is neither of the two; from :meth:`bind`, if `kv_len` is not a
        multiple of `block`.
    """

    block: Positive = 16
    num_random_blocks: Count = 1
    num_sliding_window_blocks: Positive = 3
    num_global_blocks: Count = 1
    attention: Direction = "bidirectional"
    seed: Word = 0
    head: Word | None = None

    def sizes(self) -> tuple[int, int]:
        return 1, 0 if self.num_random_blocks and self.head is None else 1

    def at(self, batch: int, head: int) -> Pattern:
        return self if self.sizes()[1] else replace(self, head=head)

    def layout(self, n: int) -> np.ndarray:
        layout = window_layout(n, self.num_sliding_window_blocks // 2)
        layout[: self.num_global_blocks] = True
        layout[:, : self.num_global_blocks] = True
        if self.num_random_blocks:
            candidates = np.arange(1, n + 1) if self.attention == "unidirectional" else np.full(n, n)
            layout |= random_layout(self.seed, self._own_head(), candidates, self.num_random_blocks)
        return self._earlier(layout)

    @classmethod
    def example(cls) -> tuple[Pattern, int]:
        return cls(4), 64

    @classmethod
    def random(cls, draw: Any, sizes: Any) -> tuple[Pattern, Any]:
        block, blocks, sizes = cls.random_blocks(draw, sizes)
        numbers = draw.size(0, min(3, blocks)), draw.size(1, 5), draw.size(0, 2)
        return cls(block, *numbers, *(draw.value(cls, name, sizes) for name in ("attention", "seed", "head"))), sizes


@register("deepspeed_bslongformer")
@dataclass(frozen=True)
class BSLongformer(LayoutPattern):
    """Window and chosen global blocks.

    For models configured with DeepSpeed's ``BSLongformerSparsityConfig``.

    Parameters
    ----------
    block : int, optional
        Tokens of a block.
    num_sliding_window_blocks : int, optional
        Blocks of the window, the query's own included.
    global_block_indices : tuple of int, optional
        Global blocks, or the starts of ranges of them.
    global_block_end_indices : tuple of int or None, optional
        Ends of the ranges.
    attention : {"bidirectional", "unidirectional"}, optional

    Raises
    ------
    TypeError
        If a parameter is not of the type above.
    ValueError
        If a number is out of range, a range ends before it starts or has no end, or `attention` is neither of the two;
        from :meth:`bind`, if `kv_len` is not a multiple of `block`.
    """

    block: Positive = 16
    num_sliding_window_blocks: Positive = 3
    global_block_indices: tuple[Count, ...] = (0,)
    global_block_end_indices: tuple[Count, ...] | None = None
    attention: Direction = "bidirectional"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self.global_block_indices, self.global_block_end_indices)

    def layout(self, n: int) -> np.ndarray:
        layout = window_layout(n, self.num_sliding_window_blocks // 2)
        for start, end in global_ranges(self.global_block_indices, self.global_block_end_indices):
            layout[start:end] = True
            layout[:, start:end] = True
        return self._earlier(layout)

    @classmethod
    def example(cls) -> tuple[Pattern, int]:
        return cls(4, global_block_indices=(0, 9)), 64

    @classmethod
    def random(cls, draw: Any, sizes: Any) -> tuple[Pattern, Any]:
        block, blocks, sizes = cls.random_blocks(draw, sizes)
        ranges = random_ranges(draw, blocks)
        return cls(block, draw.size(1, 5), *ranges, draw.value(cls, "attention", sizes)), sizes


@register("deepspeed_local_sliding_window")
@dataclass(frozen=True)
class LocalSlidingWindow(LayoutPattern):
    """A window of blocks.

    For models configured with DeepSpeed's ``LocalSlidingWindowSparsityConfig``.

    Parameters
    ----------
    block : int, optional
        Tokens of a block.
    num_sliding_window_blocks : int, optional
        Blocks of the window, the query's own included; ``num_sliding_window_blocks // 2`` on either side.
    attention : {"bidirectional", "unidirectional"}, optional
        Unidirectional has the earlier side only.

    Raises
    ------
    TypeError
        If a parameter is not of the type above.
    ValueError
        If a number is less than 1, or `attention` is neither of the two; from :meth:`bind`, if `kv_len` is not a
        multiple of `block`.
    """

    block: Positive = 16
    num_sliding_window_blocks: Positive = 3
    attention: Direction = "unidirectional"

    def layout(self, n: int) -> np.ndarray:
        return self._earlier(window_layout(n, self.num_sliding_window_blocks // 2))

    @classmethod
    def example(cls) -> tuple[Pattern, int]:
        return cls(4), 64

    @classmethod
    def random(cls, draw: Any, sizes: Any) -> tuple[Pattern, Any]:
        block, _, sizes = cls.random_blocks(draw, sizes)
        return cls(block, draw.size(1, 7), draw.value(cls, "attention", sizes)), sizes
