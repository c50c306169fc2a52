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

import numpy as np

from ._check import flag, integer, integers, reach
from ._deepspeed import LayoutPattern, check_ranges, global_ranges, random_layout, window_layout
from ._registry import register

__all__ = ["BSLongformer", "BigBird", "Dense", "Fixed", "LocalSlidingWindow", "Variable"]


@register("deepspeed_dense")
@dataclass(frozen=True)
class Dense(LayoutPattern):
    """All blocks.

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

    block: int = 16

    def __post_init__(self):
        self._checked()

    def layout(self, n):
        return np.ones((n, n), dtype=bool)

    @classmethod
    def example(cls):
        return cls(8), 64


@register("deepspeed_fixed")
@dataclass(frozen=True)
class Fixed(LayoutPattern):
    """Local windows of blocks and, as global columns, the last blocks of each.

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

    block: int = 16
    num_local_blocks: int = 4
    num_global_blocks: int = 1
    attention: str = "bidirectional"
    horizontal_global_attention: bool = False
    num_different_global_patterns: int = 1
    head: int | None = None

    def __post_init__(self):
        local = integer("num_local_blocks", self.num_local_blocks, 1)
        width = integer("num_global_blocks", self.num_global_blocks, 1)
        horizontal = flag("horizontal_global_attention", self.horizontal_global_attention)
        versions = integer("num_different_global_patterns", self.num_different_global_patterns, 1)
        if local % width:
            raise ValueError(f"num_global_blocks: expected a divisor of {local} (num_local_blocks), got {width}")
        self._checked(
            num_local_blocks=local, num_global_blocks=width, horizontal_global_attention=horizontal,
            num_different_global_patterns=versions,
        )
        if horizontal and self.attention == "unidirectional":
            raise ValueError("horizontal_global_attention: expected False with unidirectional attention, got True")
        if versions > local // width:
            raise ValueError(f"num_different_global_patterns: expected at most {local // width}, got {versions}")

    def sizes(self):
        return 1, 0 if self.num_different_global_patterns > 1 and self.head is None else 1

    def at(self, batch, head):
        return self if self.sizes()[1] else replace(self, head=head % self.num_different_global_patterns)

    def layout(self, n):
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
    def example(cls):
        return cls(4, attention="unidirectional"), 64


@register("deepspeed_variable")
@dataclass(frozen=True)
class Variable(LayoutPattern):
    """Local windows of listed sizes, chosen global blocks and random blocks.

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

    block: int = 16
    num_random_blocks: int = 0
    local_window_blocks: tuple[int, ...] = (4,)
    global_block_indices: tuple[int, ...] = (0,)
    global_block_end_indices: tuple[int, ...] | None = None
    attention: str = "bidirectional"
    horizontal_global_attention: bool = False
    seed: int = 0
    head: int | None = None

    def __post_init__(self):
        windows = integers("local_window_blocks", self.local_window_blocks, 1)
        if not windows:
            raise ValueError("local_window_blocks: expected at least one window, got ()")
        horizontal = flag("horizontal_global_attention", self.horizontal_global_attention)
        self._checked(
            num_random_blocks=integer("num_random_blocks", self.num_random_blocks, 0), local_window_blocks=windows,
            horizontal_global_attention=horizontal,
            **check_ranges(self.global_block_indices, self.global_block_end_indices),
        )

    def sizes(self):
        return 1, 0 if self.num_random_blocks and self.head is None else 1

    def at(self, batch, head):
        return self if self.sizes()[1] else replace(self, head=head)

    def layout(self, n):
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
            layout |= random_layout(self.seed, self.head, np.full(n, n), self.num_random_blocks)
        return layout

    @classmethod
    def example(cls):
        return cls(4, local_window_blocks=(2, 4), global_block_indices=(0, 7)), 64


@register("deepspeed_bigbird")
@dataclass(frozen=True)
class BigBird(LayoutPattern):
    """Window, global and random blocks.

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

    block: int = 16
    num_random_blocks: int = 1
    num_sliding_window_blocks: int = 3
    num_global_blocks: int = 1
    attention: str = "bidirectional"
    seed: int = 0
    head: int | None = None

    def __post_init__(self):
        self._checked(
            num_random_blocks=integer("num_random_blocks", self.num_random_blocks, 0),
            num_sliding_window_blocks=integer("num_sliding_window_blocks", self.num_sliding_window_blocks, 1),
            num_global_blocks=integer("num_global_blocks", self.num_global_blocks, 0),
        )

    def sizes(self):
        return 1, 0 if self.num_random_blocks and self.head is None else 1

    def at(self, batch, head):
        return self if self.sizes()[1] else replace(self, head=head)

    def layout(self, n):
        layout = window_layout(n, self.num_sliding_window_blocks // 2)
        layout[: self.num_global_blocks] = True
        layout[:, : self.num_global_blocks] = True
        if self.num_random_blocks:
            candidates = np.arange(1, n + 1) if self.attention == "unidirectional" else np.full(n, n)
            layout |= random_layout(self.seed, self.head, candidates, self.num_random_blocks)
        return self._earlier(layout)

    @classmethod
    def example(cls):
        return cls(4), 64


@register("deepspeed_bslongformer")
@dataclass(frozen=True)
class BSLongformer(LayoutPattern):
    """Window and chosen global blocks.

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

    block: int = 16
    num_sliding_window_blocks: int = 3
    global_block_indices: tuple[int, ...] = (0,)
    global_block_end_indices: tuple[int, ...] | None = None
    attention: str = "bidirectional"

    def __post_init__(self):
        self._checked(
            num_sliding_window_blocks=integer("num_sliding_window_blocks", self.num_sliding_window_blocks, 1),
            **check_ranges(self.global_block_indices, self.global_block_end_indices),
        )

    def layout(self, n):
        layout = window_layout(n, self.num_sliding_window_blocks // 2)
        for start, end in global_ranges(self.global_block_indices, self.global_block_end_indices):
            layout[start:end] = True
            layout[:, start:end] = True
        return self._earlier(layout)

    @classmethod
    def example(cls):
        return cls(4, global_block_indices=(0, 9)), 64


@register("deepspeed_local_sliding_window")
@dataclass(frozen=True)
class LocalSlidingWindow(LayoutPattern):
    """A window of blocks.

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

    block: int = 16
    num_sliding_window_blocks: int = 3
    attention: str = "unidirectional"

    def __post_init__(self):
        self._checked(
            num_sliding_window_blocks=integer("num_sliding_window_blocks", self.num_sliding_window_blocks, 1)
        )

    def layout(self, n):
        return self._earlier(window_layout(n, self.num_sliding_window_blocks // 2))

    @classmethod
    def example(cls):
        return cls(4), 64
