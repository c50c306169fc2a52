"""The bitmasks of a plan, each different one once."""

from __future__ import annotations

import io
import math
from collections.abc import Callable

import numpy as np

from ._bitmasks import Numbers, first_alike, hashes
from ._budget import Budget

__all__ = ["EMPTY", "Masks", "packed"]

EMPTY = -2

_AT_ONCE = 1 << 17  # words of bitmasks that are looked at together: they fit into a cache
_TILES_AT_ONCE = 128  # that are made of truth values at once


def packed(allowed: np.ndarray) -> np.ndarray:
    """Truth values as the bits of words, 64 of the last axis in each."""
    return np.packbits(allowed, axis=-1, bitorder="little").view("<u8").astype(np.uint64, copy=False)


class Masks:
    """Bitmasks by number, in the order in which they first came.

    Their words lie one after the other in a buffer that becomes the plan's array without a copy. A bitmask is found by
    a key, 64 bits that are computed of its words, and compared with those that have this key.

    Parameters
    ----------
    block_q, block_kv : int
        Queries and keys of a tile.
    budget : Budget
        Raises ValueError where the bitmasks are too many.
    """

    def __init__(self, block_q: int, block_kv: int, budget: Budget):
        self.tile = block_q, block_kv
        self.shape = block_q, block_kv // 64
        self._budget = budget
        self._all_rows = np.ones(block_q, np.uint8)
        self._numbers, self._known = Numbers(), 0
        self._content = io.BytesIO()

    def add(self, masks: np.ndarray) -> np.ndarray:
        """The number of each of `masks`, n · block_q · words numbers of uint64."""
        masks = np.ascontiguousarray(masks.reshape(-1, math.prod(self.shape)))
        at_once = max(1, _AT_ONCE // masks.shape[1])
        found = [self._add_some(masks[start : start + at_once]) for start in range(0, len(masks), at_once)]
        return np.concatenate([np.zeros(0, np.int32), *found])

    def _add_some(self, masks: np.ndarray) -> np.ndarray:
        size = 8 * masks.shape[1]
        numbers, new = self._numbers.number(self._keys(masks, self._all_rows), masks, self._stored())
        self._known += len(new)
        self._budget.need(size * min(self._known, self._budget.max_bytes // size + 1))  # the first that is too many
        self._content.write((masks if len(new) == len(masks) else masks[new]).data)
        return numbers

    def _stored(self) -> np.ndarray:
        """The words of all that are known. The buffer does not grow as long as somebody holds them."""
        return np.frombuffer(self._content.getbuffer(), np.uint64).reshape(-1, math.prod(self.shape))

    def _keys(self, masks: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """A number of 64 bits for each bitmask, of these rows."""
        return hashes(masks, rows)

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

    def add_rows(self, masks: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The number of a bitmask that equals each of `masks` in these rows: of the first one, known or among them."""
        masks, rows = masks.reshape(-1, math.prod(self.shape)), rows.view(np.uint8)
        stored = self._stored()
        known, keys = len(stored), np.concatenate([self._keys(some, rows) for some in (stored, masks)])
        first = first_alike(keys, stored, masks, rows)
        del stored  # the buffer grows only while nobody holds it
        new = np.flatnonzero(first == np.arange(known, known + len(masks)))
        number = np.zeros(len(masks), np.int64)  # of those that are new
        number[new] = self.add(masks[new])
        return np.where(first < known, first, number[np.maximum(first - known, 0)]).astype(np.int32)

    def array(self) -> np.ndarray:
        """All of them, (n, block_q, words) uint64."""
        return np.ndarray((self._known, *self.shape), np.uint64, self._content.getvalue())
