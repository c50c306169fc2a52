"""Block layouts that depend on the sequence length and the head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np

from ..._util.imports import whole_imports
from ..base.check import reach
from ..base.pattern import Pattern
from ..listed.masks import BlockLayout

__all__ = ["LengthLayout", "check_ranges", "global_ranges", "lower", "random_layout", "window_layout"]


@dataclass(frozen=True)
class LengthLayout(Pattern):
    """A block layout computed by bind().

    `layout` maps (number of blocks, head) to an (n, n) bool array. Head h has layout ``h % versions``; 0 = every head
    has its own. :meth:`at` fixes `head`.
    """

    block: int
    layout: Callable[[int, int], np.ndarray]
    versions: int = 1
    head: int | None = None
    fixes_lengths = True

    def sizes(self) -> tuple[int, int]:
        return 1, 0 if self.versions != 1 and self.head is None else 1

    def at(self, batch: int, head: int) -> Pattern:
        return self if self.sizes()[1] else replace(self, head=head % self.versions if self.versions else head)

    def bind(self, q_len: int, kv_len: int) -> Pattern:
        if kv_len % self.block:
            raise ValueError(f"kv_len: expected a multiple of {self.block} (tokens of a block), got {kv_len}")
        if not self.sizes()[1]:
            return self
        return BlockLayout(self.layout(kv_len // self.block, self.head or 0), self.block)

    def allows(self, q: Any, k: Any) -> NoReturn:
        missing = ".bind(q_len, kv_len)" if self.sizes()[1] else ".at(batch, head)"
        raise ValueError(f"deepspeed: the layout depends on the lengths; use {missing}")


def lower(layout: np.ndarray, attention: str) -> np.ndarray:
    """Drop blocks after the query's own if unidirectional."""
    return np.tril(layout) if attention == "unidirectional" else layout


def window_layout(n: int, side: int) -> np.ndarray:
    """Blocks at most `side` apart."""
    r, c = np.ogrid[:n, :n]
    return abs(r - c) <= reach(side)


def random_layout(seed: int, head: int, candidates: np.ndarray, count: int) -> np.ndarray:
    """Draw `count` distinct blocks for each row, below its number of candidates."""
    with whole_imports:
        from ..base.random import draw_ranks  # only for random blocks

    n = len(candidates)
    layout = np.zeros((n, n), dtype=bool)
    ranks = draw_ranks(seed, head, np.arange(n), candidates, min(count, n))
    row, column = np.nonzero(ranks >= 0)
    layout[row, ranks[row, column]] = True
    return layout


def global_ranges(first: tuple[int, ...], end: tuple[int, ...] | None) -> list[tuple[int, int]]:
    """Return the half-open ranges of global blocks."""
    return list(zip(first, end or (g + 1 for g in first), strict=True))


def check_ranges(first: tuple[int, ...], end: tuple[int, ...] | None) -> None:
    """Check that each range of global blocks ends after its start."""
    if end is None:
        return
    if len(end) != len(first):
        raise ValueError(f"global_block_end_indices: expected {len(first)} (one per global block), got {len(end)}")
    for a, b in zip(first, end, strict=True):
        if a >= b:
            raise ValueError(f"global_block_end_indices: expected an end beyond {a}, got {b}")
