"""The bitmasks of a plan, each different one once."""

from __future__ import annotations

import io
import math

import numpy as np

from ._bitmasks import Numbers, hashes
from ._budget import Budget

__all__ = ["Masks"]

_AT_ONCE = 1 << 17  # words of bitmasks that are looked at together: they fit into a cache


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
        self._numbers, self._known = Numbers(), 0
        self._content = io.BytesIO()

    def add(self, masks: np.ndarray) -> np.ndarray:
        """The number of each of `masks`, n · block_q · words numbers of uint64."""
        masks = np.ascontiguousarray(masks.reshape(-1, math.prod(self.shape)))
        at_once = max(1, _AT_ONCE // masks.shape[1])
        found = [self._add_some(masks[start : start + at_once]) for start in range(0, len(masks), at_once)]
        return np.concatenate([np.zeros(0, np.int32), *found])

    def add_rows(self, masks: np.ndarray, rows: int) -> np.ndarray:
        """The number of a bitmask that equals each of `masks` in the first `rows` queries: of the first one, known or
        among them."""
        whole, known, words = masks.reshape(-1, math.prod(self.shape)), self._known, rows * self.shape[1]
        every = np.concatenate([self._stored()[:, :words], whole[:, :words]])
        kind, first = Numbers().number(self._keys(every), every, every[:0])
        self.add(whole[first[first >= known] - known])
        number = np.where(first < known, first, known + np.cumsum(first >= known) - 1)
        return number[kind[known:]].astype(np.int32)

    def _add_some(self, masks: np.ndarray) -> np.ndarray:
        size = 8 * masks.shape[1]
        numbers, new = self._numbers.number(self._keys(masks), masks, self._stored())
        self._known += len(new)
        self._budget.need(size * min(self._known, self._budget.max_bytes // size + 1))  # the first that is too many
        self._content.write((masks if len(new) == len(masks) else masks[new]).data)
        return numbers

    def _stored(self) -> np.ndarray:
        """The words of all that are known. The buffer does not grow as long as somebody holds them."""
        return np.frombuffer(self._content.getbuffer(), np.uint64).reshape(-1, math.prod(self.shape))

    def _keys(self, masks: np.ndarray) -> np.ndarray:
        """A number of 64 bits for each bitmask."""
        return hashes(masks)

    def find(self, mask: np.ndarray, rows: np.ndarray) -> int | None:
        """A known mask that equals `mask` in these rows."""
        if self._known and not rows.all():
            same = (self.array()[:, rows] == mask[rows]).all(axis=(1, 2))
            return int(same.argmax()) if same.any() else None
        return None

    def array(self) -> np.ndarray:
        """All of them, (n, block_q, words) uint64."""
        return np.ndarray((self._known, *self.shape), np.uint64, self._content.getvalue())
