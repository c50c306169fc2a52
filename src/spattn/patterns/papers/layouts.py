"""Block layouts that depend on the sequence length and the head, and reproducible random blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np

from ..base.check import reach
from ..base.pattern import Pattern
from ..listed.masks import BlockLayout
from ..sequence.basic import BlockLocal, Causal, Columns

__all__ = [
    "LengthLayout",
    "check_ranges",
    "draw_ranks",
    "global_ranges",
    "lower",
    "random_layout",
    "random_words",
    "window_layout",
]

# Constants of Philox4x64-10: Salmon, Moraes, Dror, Shaw. Parallel random numbers: as easy as 1, 2, 3. SC11.
_MULTIPLIER = (np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157))
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_TILE = 64  # keys of a tile: blocks of so many leave no gaps in it
_FEWEST = 4  # columns that are worth tiles of their own
_LOW, _HALF, _WORD = np.uint64(0xFFFFFFFF), np.uint64(32), (1 << 64) - 1


@dataclass(frozen=True)
class LengthLayout(Pattern):
    """A block layout that bind() computes from the sequence length.

    ``layout(n, head)`` returns an (n, n) bool array for n blocks. Head h has the layout of head ``h % versions``, or
    its own if `versions` is 0. :meth:`at` sets `head`.
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
        layout = self.layout(kv_len // self.block, self.head or 0)
        # Fewer queries than a tile are planned by their rows: a step of generation does not look for columns.
        found = _periodic_columns(layout) if self.block < _TILE <= q_len <= kv_len else None
        if found is None:
            return BlockLayout(layout, self.block)
        return _with_columns(layout, self.block, *found).bind(q_len, kv_len)

    def allows(self, q: Any, k: Any) -> NoReturn:
        missing = ".bind(q_len, kv_len)" if self.sizes()[1] else ".at(batch, head)"
        raise ValueError(f"deepspeed: the layout depends on the lengths; use {missing}")


def _periodic_columns(layout: np.ndarray) -> tuple[int, int, int, bool] | None:
    """Return (period, first, width, one_way) of the columns of a square layout that all rows have, or all from the
    diagonal on (`one_way`), and that repeat; None if there are few, or if they are wider than their gaps."""
    n = len(layout)
    whole: np.ndarray = np.logical_and.reduce(layout, axis=0)
    one_way = not whole.any()
    if one_way:
        whole = np.tril(layout).sum(axis=0) == n - np.arange(n)
    edges = np.flatnonzero(np.diff(whole, prepend=False, append=False))
    starts, widths = edges[0::2], np.diff(edges)[0::2]
    if len(starts) < _FEWEST:
        return None
    period, width = int(starts[1] - starts[0]), int(widths[0])
    first = int(starts[0]) % period
    if 2 * width > period or n < _FEWEST * period or not whole[_on_lattice(n, period, first, width)].all():
        return None
    return period, first, width, one_way


def _on_lattice(n: int, period: int, first: int, width: int) -> np.ndarray:
    return (np.arange(n) - first) % period < width


def _with_columns(layout: np.ndarray, block: int, period: int, first: int, width: int, one_way: bool) -> Pattern:
    """Return a layout as the union of periodic columns, whose keys form tiles of their own, and of its other blocks."""
    columns: Pattern = Columns(period * block, first * block, (first + width) * block)
    window: Pattern = BlockLocal(period * block)
    repeated = np.broadcast_to(_on_lattice(len(layout), period, first, width), layout.shape)
    number = np.arange(len(layout)) // period
    local = number[:, None] == number
    if one_way:  # a block on the diagonal has pairs after the query
        columns, window = columns & Causal(), window & (Causal() | BlockLocal(block))
        repeated, local = np.tril(repeated, -1), np.tril(local)
    if not np.array_equal(layout, local | repeated):
        window = BlockLayout(layout & ~repeated, block)
    return window | columns


def lower(layout: np.ndarray, attention: str) -> np.ndarray:
    """Drop blocks after the query's own if unidirectional."""
    return np.tril(layout) if attention == "unidirectional" else layout


def window_layout(n: int, side: int) -> np.ndarray:
    """Return the layout of blocks that are at most `side` apart."""
    r, c = np.ogrid[:n, :n]
    return abs(r - c) <= reach(side)


def random_layout(seed: int, head: int, candidates: np.ndarray, count: int) -> np.ndarray:
    """Draw a layout with `count` distinct blocks per row i, among its first ``candidates[i]`` blocks."""
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


def random_words(seed: int, head: int, rows: np.ndarray, count: int) -> np.ndarray:
    """Return the first `count` words of ``np.random.Philox(key=seed, counter=[0, 0, head, row])``, vectorized over
    rows: (rows, count) uint64."""
    blocks = -(-count // 4)
    shape = (len(rows), blocks)
    counter = [
        np.broadcast_to(np.arange(1, blocks + 1, dtype=np.uint64), shape),
        np.zeros(shape, np.uint64),
        np.full(shape, head, np.uint64),
        np.broadcast_to(rows.astype(np.uint64)[:, None], shape),
    ]
    key = [seed & _WORD, seed >> 64]
    for _ in range(10):
        (high0, low0), (high1, low1) = (_product(m, c) for m, c in zip(_MULTIPLIER, counter[::2], strict=True))
        counter = [high1 ^ counter[1] ^ np.uint64(key[0]), low1, high0 ^ counter[3] ^ np.uint64(key[1]), low0]
        key = [(k + w) & _WORD for k, w in zip(key, _WEYL, strict=True)]
    return np.stack(counter, axis=-1).reshape(len(rows), 4 * blocks)[:, :count]


def _product(a: np.uint64, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the high and low words of the 128-bit product."""
    a0, a1, b0, b1 = a & _LOW, a >> _HALF, b & _LOW, b >> _HALF
    middle = a1 * b0 + (a0 * b0 >> _HALF)
    other = a0 * b1 + (middle & _LOW)
    return a1 * b1 + (middle >> _HALF) + (other >> _HALF), a * b


def draw_ranks(seed: int, head: int, rows: np.ndarray, candidates: np.ndarray, size: int) -> np.ndarray:
    """Draw `size` distinct integers below ``candidates[i]`` for each row i, or all of them if there are fewer.

    Returns (rows, size) int64, padded with -1. A row depends only on the seed, the head and the row index. Uses Floyd's
    sampling (Bentley, Programming Pearls, CACM 30(9), 1987); draw t is word t modulo the range, which has a bias of
    2^-44 at a million blocks.
    """
    everyone = np.arange(size)
    ranks = np.where(everyone < candidates[:, None], everyone, -1)
    choosy = candidates > size  # other rows take all candidates without drawing
    ranks[choosy] = _sample(random_words(seed, head, rows[choosy], size), candidates[choosy])
    return ranks


def _sample(words: np.ndarray, candidates: np.ndarray) -> np.ndarray:
    """Draw one distinct integer below ``candidates[i]`` per word of row i; requires fewer words than candidates."""
    size = words.shape[1]
    ranks = np.empty(words.shape, dtype=np.int64)
    for t in range(size):
        last = candidates - size + t
        rank = (words[:, t] % (last + 1).astype(np.uint64)).astype(np.int64)
        taken = (ranks[:, :t] == rank[:, None]).any(axis=1)
        ranks[:, t] = np.where(taken, last, rank)
    return ranks
