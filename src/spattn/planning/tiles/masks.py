"""The bitmasks of a plan, each different one once."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ..contract.budget import Budget
from ._bitmasks import Bitmasks

__all__ = ["EMPTY", "Masks", "packed"]

EMPTY = -2

_TILES_AT_ONCE = 128  # that are made of truth values at once


def packed(allowed: np.ndarray) -> np.ndarray:
    """Truth values as the bits of words, 64 of the last axis in each."""
    return np.packbits(allowed, axis=-1, bitorder="little").view("<u8").astype(np.uint64, copy=False)


class Masks:
    """Bitmasks by number, in the order in which they first came.

    Their words lie one after the other in bytes that become the plan's array without a copy. A bitmask is found by a
    hash of its words, and compared with those that have the same.

    Parameters
    ----------
    block_q, block_kv : int
        Queries and keys of a tile.
    budget : Budget
        Raises ValueError where the bitmasks are too many.

    Attributes
    ----------
    compiled : Bitmasks
        For compiled code that adds some itself; :meth:`need` has to follow.
    """

    def __init__(self, block_q: int, block_kv: int, budget: Budget):
        self.tile = block_q, block_kv
        self.shape = block_q, block_kv // 64
        self._size = 8 * math.prod(self.shape)
        self._budget, self._most = budget, budget.max_bytes // self._size
        self.compiled = Bitmasks(*self.shape, self._most)

    def add(self, masks: np.ndarray) -> np.ndarray:
        """The number of each of `masks`, n · block_q · words numbers of uint64."""
        return self._added(masks, None)

    def add_rows(self, masks: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The number of a bitmask that equals each of `masks` in these rows: of the first one, known or among them."""
        return self._added(masks, rows.view(np.uint8))

    def _added(self, masks: np.ndarray, rows: np.ndarray | None) -> np.ndarray:
        numbers = self.compiled.add(np.ascontiguousarray(masks.reshape(-1, math.prod(self.shape))), rows)
        self.need()
        return numbers

    def need(self) -> None:
        """ValueError if there are too many."""
        self._budget.need(self._size * min(len(self.compiled), self._most + 1))

    def number(self, masks: Callable[[np.ndarray], np.ndarray], padding: np.ndarray, real: np.ndarray) -> np.ndarray:
        """The number of the bitmask of each of some tiles, -1 where all is allowed, `EMPTY` where nothing is.

        Parameters
        ----------
        masks : callable
            The bitmasks of some of the tiles, (n, block_q, words) uint64, no bit of padding keys set.
        padding : (tiles,) int array
            Kind of each tile, 0 where no query is padding.
        real : (kinds, block_q) bool array
            Which queries of tiles of each kind are not padding.
        """
        numbers = np.zeros(len(padding), np.int32)
        # Tiles without padding queries first: a padded tile reuses their bitmasks where its real queries agree.
        order = np.argsort(padding > 0, kind="stable") if len(real) > 1 else np.arange(len(padding))
        for start in range(0, len(order), _TILES_AT_ONCE):
            some = order[start : start + _TILES_AT_ONCE]
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
        """All of them, (n, block_q, words) uint64."""
        return self.compiled.array()
