"""Deduplicated bitmasks of a plan."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ..contract.budget import Budget
from ._bitmasks import Bitmasks

__all__ = ["EMPTY", "Masks", "packed"]

EMPTY = -2

_CELLS_AT_ONCE = 1 << 20  # cells of the tiles in a chunk of boolean arrays


def packed(allowed: np.ndarray) -> np.ndarray:
    """Pack booleans along the last axis into uint64 words."""
    bits = np.ascontiguousarray(np.packbits(allowed, axis=-1, bitorder="little"))  # it keeps the input's memory layout
    return bits.view("<u8").astype(np.uint64, copy=False)


class Masks:
    """A table of distinct bitmasks, indexed in order of insertion; it raises ValueError beyond the memory budget.

    Bitmasks are found by hash and compared word by word. Their storage becomes the plan's array without a copy. After
    native code has added bitmasks to `compiled`, call :meth:`need`.
    """

    def __init__(self, block_q: int, block_kv: int, budget: Budget):
        self.tile = block_q, block_kv
        self.shape = block_q, block_kv // 64
        self._size = 8 * math.prod(self.shape)
        self._budget, self._most = budget, budget.max_bytes // self._size
        self.compiled = Bitmasks(*self.shape, self._most)

    def add(self, masks: np.ndarray) -> np.ndarray:
        """Insert `masks` (n · block_q · words uint64) and return their indices."""
        return self._added(masks, None)

    def add_rows(self, masks: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return, for each of `masks`, the index of the first bitmask that is equal in `rows`; insert it if none is."""
        return self._added(masks, rows.view(np.uint8))

    def _added(self, masks: np.ndarray, rows: np.ndarray | None) -> np.ndarray:
        numbers = self.compiled.add(np.ascontiguousarray(masks.reshape(-1, math.prod(self.shape))), rows)
        self.need()
        return numbers

    def need(self) -> None:
        """Raise ValueError if the table exceeds the budget."""
        self._budget.need(self._size * min(len(self.compiled), self._most + 1))

    def number(self, masks: Callable[[np.ndarray], np.ndarray], padding: np.ndarray, real: np.ndarray) -> np.ndarray:
        """Return the bitmask index of each tile, -1 for full tiles, `EMPTY` for empty ones.

        ``masks(tiles)`` returns the bitmasks of tiles, (n, block_q, words) uint64, with zero bits for padding keys.
        Tile t has padding class ``padding[t]`` (0: none); ``real[n]`` are the real queries of padding class n.
        """
        numbers = np.zeros(len(padding), np.int32)
        # Tiles without padding come first: a padded tile reuses a bitmask that agrees in its real queries.
        order = np.argsort(padding > 0, kind="stable") if len(real) > 1 else np.arange(len(padding))
        at_once = max(1, _CELLS_AT_ONCE // math.prod(self.tile))
        for start in range(0, len(order), at_once):
            some = order[start : start + at_once]
            own, queries = masks(some), real[padding[some]]
            whole = ((own == ~np.uint64(0)).all(axis=2) | ~queries).all(axis=1)
            partial = ~whole & (own.any(axis=2) & queries).any(axis=1)
            numbers[some] = np.where(whole, -1, EMPTY)
            for kind, rows in enumerate(real):
                at = np.nonzero(partial & (padding[some] == kind))[0]
                if len(at):
                    numbers[some[at]] = self.add(own[at]) if rows.all() else self.add_rows(own[at], rows)
        return numbers

    def array(self) -> np.ndarray:
        """Return all bitmasks, (n, block_q, words) uint64."""
        return self.compiled.array()
