"""Masks and block layouts, given as arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..._util.cached import cached_property
from ..._util.index_checks import q_offset
from ..._util.ragged import offsets, ramp
from ...index_set import Runs
from ..base.check import assign, integer, per_axis, reach
from ..base.class_registry import CONVERSIONS, register
from ..base.content import ArrayPattern, Bound, dynamic, on_device
from ..base.pattern import Ordered, Part, Pattern, defers, whole_part
from ..base.predicate import row_or_last
from ..hints.closed_forms import NO_RANGES, Bands
from ..hints.table import BlockTable

if TYPE_CHECKING:
    from ..base.rows import AskedRows

__all__ = ["BlockLayout", "KeyBlocks", "Mask"]


@register(
    "mask",
    example=lambda: ((np.add.outer(np.arange(32) ** 2, np.arange(32) ** 2) % 7 < 3,), 32),
    typical=lambda: ((np.add.outer(np.arange(512), np.arange(512)) % 192 < 64,), 512),
)
@dataclass(frozen=True, eq=False, repr=False)
class Mask(ArrayPattern):
    """Dense boolean mask.

    For arbitrary masks, at lengths where one byte per pair fits into memory.

    Parameters
    ----------
    mask : bool array (q_len, kv_len), (heads, q_len, kv_len) or (batch, heads, q_len, kv_len)
        True where query row i may attend to key j; copied.
    """

    mask: np.ndarray

    _has_order = True

    def __post_init__(self) -> None:
        self._freeze(bool, "mask")

    def bind(self, q_len: int, kv_len: int) -> Pattern:
        if self.mask.shape[-2:] != (q_len, kv_len):
            raise ValueError(f"mask: expected shape (..., {q_len}, {kv_len}), got {self.mask.shape}")
        if self.sizes() != (1, 1):
            return self._bound()
        structure, pairs = CONVERSIONS["contents"](self._only(self.mask))
        if structure is not None:
            regular: Pattern = structure.bind(q_len, kv_len)
            return regular
        return self._bound() if pairs is None else _ListedMask(self._bound(), q_offset(q_len, kv_len), pairs)

    @cached_property
    def _table(self) -> BlockTable:
        return BlockTable(self._only(self.mask))

    def allows(self, q: Any, k: Any) -> Any:
        q_len, kv_len = self.mask.shape[-2:]
        return self._table.contains(q - q_offset(q_len, kv_len), k)

    def _rows(self, asked: AskedRows) -> np.ndarray:
        self.bind(asked.q_len, asked.kv_len)  # check the lengths
        return asked.packed(self._rows_of(self.mask, asked.q - q_offset(asked.q_len, asked.kv_len), False))

    @classmethod
    def random(cls, draw: Any, sizes: Any) -> tuple[Pattern, Any]:
        return cls(draw.flags((*cls._leading(draw, sizes, sizes.heads_q), sizes.q_len, sizes.kv_len))), sizes


@dataclass(frozen=True)
class _ListedMask(Bound):
    """A bound mask whose pairs are listed."""

    pairs: Any
    _lists_pairs = True
    _has_order = True

    def allows(self, q: Any, k: Any) -> Any:
        return self.given.allows(q, k)

    def parts(self, q_len: int, kv_len: int) -> tuple[Part, ...]:
        return whole_part(self, q_len, kv_len)

    def _pairs(self, q: np.ndarray, kv_len: int) -> tuple[np.ndarray, np.ndarray]:
        found: tuple[np.ndarray, np.ndarray] = self.pairs._pairs(q, kv_len)
        return found

    def _in_order(self, also: Pattern | None = None) -> Ordered | None:
        found: Ordered | None = self.pairs._in_order(also)
        return found


def check_blocks(name: str, what: str, got: int, length: int, block: int) -> None:
    """Check that `got` blocks cover `length` tokens exactly."""
    if got != -(-length // block):
        raise ValueError(f"{name}: expected {-(-length // block)} {what} ({length} tokens of {block}), got {got}")


def block_runs(table: np.ndarray, a: np.ndarray, block: int, kv_len: int) -> Runs:
    """Return the keys of the block rows `a` of a boolean table; adjacent blocks form one run."""
    rows, columns = table.shape
    edge = np.diff(np.pad(table, ((0, 1), (1, 1))).astype(np.int8), axis=1)  # last row: empty, for `a` out of range
    (row, first), (_, last) = np.nonzero(edge == 1), np.nonzero(edge == -1)
    per_row = np.bincount(row, minlength=rows + 1)
    slot = ramp(per_row)
    start, stop = np.zeros((2, rows + 1, per_row.max(initial=0)), dtype=np.int64)
    start[row, slot], stop[row, slot] = first * block, np.minimum(last * block, kv_len)
    pick = row_or_last(a, rows)
    start, stop = start[pick], stop[pick]
    return Runs(start, np.ones_like(start), np.maximum(stop - start, 0))


def _rows_within(first: int, stop: int, block: int, rows: int) -> range:
    """Return the block rows that contain queries at ``[first, stop)``."""
    last = min(-(-stop // block), rows)
    return range(min(max(first // block, 0), last), last)


def _listed_blocks(rows: range, count: np.ndarray, blocks: np.ndarray, block_q: int, block_kv: int) -> Bands:
    """Return one band per block row; row i takes the next ``count[i]`` entries of `blocks` as its key blocks."""
    first = blocks.astype(np.int64) * block_kv
    return Bands(np.arange(rows.start, rows.stop + 1) * block_q, offsets(count), first, first + block_kv, NO_RANGES)


def _layout(blocks: int) -> np.ndarray:
    return np.add.outer(np.arange(blocks), 2 * np.arange(blocks)) % 5 < 2


@register("block_layout", example=lambda: ((_layout(8), 4), 32), typical=lambda: ((_layout(64), 64), 4096))
@dataclass(frozen=True, eq=False, repr=False)
class BlockLayout(ArrayPattern):
    """Block-sparse layout: query p may attend to key j if ``layout[p // block_q, j // block_kv]``.

    For layouts that are computed or learned block by block.

    Parameters
    ----------
    layout : bool array (rows, columns), (heads, rows, columns) or (batch, heads, rows, columns)
        Must have ``ceil(kv_len / block_q)`` rows and ``ceil(kv_len / block_kv)`` columns; copied.
    block : int or (int, int)
        Tokens per block of a square layout, or tokens per query block and per key block: ``block_q, block_kv``.

    Notes
    -----
    If q_len > kv_len, queries before position 0 are in no block and attend to no key.
    """

    layout: np.ndarray
    block: int | tuple[int, int]

    def __post_init__(self) -> None:
        tokens = per_axis("block", self.block, 2, least=1)
        several = isinstance(self.block, (tuple, list, np.ndarray))
        self._freeze(bool, "layout")
        assign(self, block=tokens if several else tokens[0])
        rows, columns = self.layout.shape[-2:]
        if rows != columns and not several:
            raise ValueError(f"layout: expected as many rows as columns, got shape {self.layout.shape}")

    def _tokens(self) -> tuple[int, int]:
        """Return the tokens per query block and per key block."""
        return self.block if isinstance(self.block, tuple) else (self.block, self.block)

    def bind(self, q_len: int, kv_len: int) -> Pattern:
        for got, block in zip(self.layout.shape[-2:], self._tokens(), strict=True):
            check_blocks("layout", "blocks", got, kv_len, block)
        return self._bound()

    @cached_property
    def _table(self) -> BlockTable:
        return BlockTable(self._only(self.layout))

    def allows(self, q: Any, k: Any) -> Any:
        block_q, block_kv = map(reach, self._tokens())
        return self._table.contains(q // block_q, k // block_kv)

    def runs(self, q: np.ndarray, kv_len: int) -> Runs:
        block_q, block_kv = map(reach, self._tokens())
        return block_runs(self._only(self.layout), q // block_q, block_kv, kv_len)

    def _rows(self, asked: AskedRows) -> np.ndarray:
        self.bind(asked.q_len, asked.kv_len)  # check the lengths
        block_q, block_kv = map(reach, self._tokens())
        blocks = self._rows_of(self.layout, asked.q // block_q, False)
        return asked.packed(np.repeat(blocks, min(block_kv, asked.kv_len), axis=-1)[..., : asked.kv_len])

    def _bands(self, first: int, stop: int) -> tuple[Bands, ...]:
        block_q, block_kv = map(reach, self._tokens())
        layout = self._only(self.layout)
        rows = _rows_within(first, stop, block_q, len(layout))
        row, column = np.nonzero(layout[rows.start : rows.stop])
        return (_listed_blocks(rows, np.bincount(row, minlength=len(rows)), column, block_q, block_kv),)

    @classmethod
    def random(cls, draw: Any, sizes: Any) -> tuple[Pattern, Any]:
        block = draw.size(1, sizes.kv_len + 3)
        block = block if draw.flag() else (block, draw.size(1, sizes.kv_len + 3))
        tokens = block if isinstance(block, tuple) else (block, block)
        shape = *cls._leading(draw, sizes, sizes.heads_q), *(-(-sizes.kv_len // n) for n in tokens)
        return cls(draw.flags(shape), block), sizes


@register(
    "key_blocks",
    example=lambda: ((np.array([[0, -1], [1, 0], [2, 0], [1, 3]]), 8, 8), 32),
    typical=lambda: ((np.maximum(np.arange(64)[:, None] - 5 * np.arange(4), -1), 64, 64), 4096),
)
@dataclass(frozen=True, eq=False, repr=False)
class KeyBlocks(ArrayPattern):
    """List of key blocks per query block, the result of a top-k selection.

    For models that select the most relevant key blocks for each query block.

    Parameters
    ----------
    blocks : int array (batch, heads_kv, query blocks, n)
        Key block indices, -1 = none, in any order; copied. The leading axes are optional. A query at position p uses
        row ``p // block_q``; there must be ``ceil(kv_len / block_q)`` rows. A GPU array is not copied: it gives a
        :class:`~spattn.patterns.dynamic.DynamicKeyBlocks`, which each call reads on the device.
    block_q, block_kv : int
        Tokens per query block and per key block.

    References
    ----------
    Yuan et al. Native Sparse Attention. arXiv:2502.11089.
    """

    blocks: np.ndarray
    block_q: int
    block_kv: int

    def __new__(cls, blocks: Any = None, block_q: Any = None, block_kv: Any = None) -> Any:
        if not defers(blocks) and on_device(blocks):
            return dynamic("DynamicKeyBlocks", blocks, block_q, block_kv)
        return super().__new__(cls, blocks, block_q, block_kv)

    def __post_init__(self) -> None:
        self._freeze(np.int32, "blocks")
        assign(self, block_q=integer("block_q", self.block_q, 1), block_kv=integer("block_kv", self.block_kv, 1))
        if self.blocks.min(initial=0) < -1:
            raise ValueError(f"blocks: expected numbers of key blocks or -1, got {self.blocks.min()}")

    def bind(self, q_len: int, kv_len: int) -> Pattern:
        self._check_lengths(kv_len)
        return self._bound()

    def _check_lengths(self, kv_len: int) -> None:
        check_blocks("blocks", "query blocks", self.blocks.shape[-2], kv_len, self.block_q)
        key_blocks = -(-kv_len // self.block_kv)
        if self.blocks.max(initial=-1) >= key_blocks:
            raise ValueError(f"blocks: expected numbers below {key_blocks} (key blocks), got {self.blocks.max()}")

    @cached_property
    def _table(self) -> BlockTable:
        blocks = self._only(self.blocks)
        cells = np.zeros((len(blocks), blocks.max(initial=-1) + 1), dtype=bool)
        row, slot = np.nonzero(blocks >= 0)
        cells[row, blocks[row, slot]] = True
        return BlockTable(cells)

    def allows(self, q: Any, k: Any) -> Any:
        return self._table.contains(q // reach(self.block_q), k // reach(self.block_kv))

    def runs(self, q: np.ndarray, kv_len: int) -> Runs:
        blocks = np.sort(self._only(self.blocks).astype(np.int64), axis=1)
        blocks[:, 1:][blocks[:, 1:] == blocks[:, :-1]] = -1
        blocks = np.vstack([blocks, np.full_like(blocks[:1], -1, shape=(1, blocks.shape[1]))])
        a, block = q // reach(self.block_q), reach(self.block_kv)
        listed = blocks[row_or_last(a, len(blocks) - 1)]
        start = np.maximum(listed, 0) * block
        stop = np.where(listed < 0, 0, np.minimum(start + block, kv_len))
        return Runs(start, np.ones_like(start), np.maximum(stop - start, 0))

    def _rows(self, asked: AskedRows) -> np.ndarray:
        self._check_lengths(asked.kv_len)
        block = reach(self.block_kv)
        listed = self._rows_of(self.blocks, asked.q // reach(self.block_q), -1).astype(np.int64)
        flat = listed.reshape(math.prod(listed.shape[:-1]), listed.shape[-1])
        start = np.maximum(flat, 0) * block
        count = np.where(flat < 0, 0, np.minimum(block, asked.kv_len - start))
        return asked.filled(Runs(start, np.ones_like(start), count)).reshape(*listed.shape[:-1], -1)

    def _bands(self, first: int, stop: int) -> tuple[Bands, ...]:
        blocks = self._only(self.blocks)
        rows = _rows_within(first, stop, reach(self.block_q), len(blocks))
        own = np.sort(blocks[rows.start : rows.stop], axis=1)  # -1 becomes a run at negative positions
        count = np.full(len(own), own.shape[1])
        return (_listed_blocks(rows, count, own.ravel(), reach(self.block_q), reach(self.block_kv)),)

    @classmethod
    def random(cls, draw: Any, sizes: Any) -> tuple[Pattern, Any]:
        block_q, block_kv = (draw.size(1, sizes.kv_len + 3) for _ in range(2))
        rows, blocks = -(-sizes.kv_len // block_q), -(-sizes.kv_len // block_kv)
        shape = (*cls._leading(draw, sizes, sizes.heads_kv), rows, draw.integer(0, 5))
        return cls(draw.integers(shape, -1, blocks - 1), block_q, block_kv), sizes
