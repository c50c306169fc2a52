"""What DeepSpeed's configurations share: a layout of blocks, made for a sequence length."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from ..._util.imports import whole_imports
from ..base.check import reach
from ..base.parameters import Positive, Word
from ..base.pattern import Pattern
from ..listed.masks import BlockLayout

__all__ = ["LayoutPattern", "check_ranges", "global_ranges", "random_layout", "random_ranges", "window_layout"]


class LayoutPattern(Pattern):
    """Shared by the configurations: a boolean layout over blocks once the sequence length is known."""

    block: Positive
    attention: str
    head: Word | None = None
    fixes_lengths = True

    @staticmethod
    def random_blocks(draw: Any, sizes: Any) -> tuple[int, int, Any]:
        """Tokens of a block, how many blocks, and sizes of so many whole blocks."""
        block = draw.integer(1, min(24, sizes.kv_len))
        blocks = draw.integer(1, sizes.kv_len // block)
        return block, blocks, draw.fitted(sizes, block * blocks)

    @classmethod
    def typical(cls) -> tuple[Pattern, int]:
        return cls(), 4096

    def layout(self, n: int) -> np.ndarray:
        """The layout of `n` blocks, an (n, n) bool array."""
        raise NotImplementedError

    def bind(self, q_len: int, kv_len: int) -> Pattern:
        if kv_len % self.block:
            raise ValueError(f"kv_len: expected a multiple of {self.block} (tokens of a block), got {kv_len}")
        return self if self.sizes()[1] == 0 else BlockLayout(self.layout(kv_len // self.block), self.block)

    def allows(self, q: Any, k: Any) -> NoReturn:
        missing = ".bind(q_len, kv_len)" if self.sizes()[1] else ".at(batch, head)"
        raise ValueError(f"deepspeed.{type(self).__name__}: its layout depends on the lengths; use {missing}")

    def _own_head(self) -> int:
        if self.head is None:
            raise ValueError(f"deepspeed.{type(self).__name__}: its layout depends on the head; use .at(batch, head)")
        return self.head

    def _earlier(self, layout: np.ndarray) -> np.ndarray:
        """The layout, cut to the query's own and earlier blocks when unidirectional."""
        return np.tril(layout) if self.attention == "unidirectional" else layout


def window_layout(n: int, side: int) -> np.ndarray:
    """Blocks at most `side` apart."""
    r, c = np.ogrid[:n, :n]
    return abs(r - c) <= reach(side)


def random_layout(seed: int, head: int, candidates: np.ndarray, count: int) -> np.ndarray:
    """`count` different blocks below each row's number of candidates."""
    with whole_imports:
        from ..base.random import draw_ranks  # only where blocks are random

    n = len(candidates)
    layout = np.zeros((n, n), dtype=bool)
    ranks = draw_ranks(seed, head, np.arange(n), candidates, min(count, n))
    row, slot = np.nonzero(ranks >= 0)
    layout[row, ranks[row, slot]] = True
    return layout


def global_ranges(first: tuple[int, ...], end: tuple[int, ...] | None) -> list[tuple[int, int]]:
    """Ranges [start, end) of global blocks."""
    return list(zip(first, end or (g + 1 for g in first), strict=True))


def check_ranges(first: tuple[int, ...], end: tuple[int, ...] | None) -> None:
    """ValueError unless each range of global blocks that has an end ends after its start."""
    if end is None:
        return
    if len(end) != len(first):
        raise ValueError(f"global_block_end_indices: expected {len(first)} (one per global block), got {len(end)}")
    for a, b in zip(first, end, strict=True):
        if a >= b:
            raise ValueError(f"global_block_end_indices: expected an end beyond {a}, got {b}")


def random_ranges(draw: Any, blocks: int) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Global block indices and, half the time, the ends of disjoint ranges that start there."""
    if draw.flag():
        return tuple(sorted(set(draw.positions(blocks + 1, 3)))), None
    cuts = sorted(set(draw.positions(blocks + 2, 4)))
    return tuple(cuts[0 : len(cuts) // 2 * 2 : 2]), tuple(cuts[1 : len(cuts) // 2 * 2 : 2])
