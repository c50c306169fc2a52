"""The bitmasks of a plan, each different one once."""

from __future__ import annotations

import io
import math

import numpy as np

from ._budget import Budget

__all__ = ["Masks"]

_AT_ONCE = 1 << 17  # words of bitmasks that are looked at together: they fit into a cache
_FACTOR = np.uint64(0xD2E7470EE14C6C93)  # odd: no bit of a word that it multiplies is lost


class Masks:
    """Bitmasks by number, in the order in which they first came.

    Their words lie one after the other in a buffer that becomes the plan's array without a copy. A bitmask is found by
    a key, 64 bits that are computed of its words, and compared with the one that has this key. One that differs all the
    same has its own bytes as its key.

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
        self._number: dict[int | bytes, int] = {}
        self._content = io.BytesIO()
        self._factors = np.multiply.accumulate(np.full(math.prod(self.shape), _FACTOR))  # its powers, as they wrap

    def add(self, masks: np.ndarray) -> np.ndarray:
        """The number of each of `masks`, n · block_q · words numbers of uint64."""
        masks = masks.reshape(-1, math.prod(self.shape))
        at_once = max(1, _AT_ONCE // masks.shape[1])
        found = [self._add_some(masks[start : start + at_once]) for start in range(0, len(masks), at_once)]
        return np.concatenate([np.zeros(0, np.int32), *found])

    def _add_some(self, masks: np.ndarray) -> np.ndarray:
        known, before, size = self._number, len(self._number), 8 * masks.shape[1]
        keys = self._keys(masks).tolist()
        numbers = np.array([known.setdefault(key, len(known)) for key in keys], np.int32)
        self._budget.need(size * min(len(known), self._budget.max_bytes // size + 1))  # the first that is too many
        new = np.diff(np.maximum.accumulate(np.maximum(numbers, before - 1)), prepend=before - 1) > 0
        self._content.write(np.ascontiguousarray(masks if new.all() else masks[new]).data)
        for at in self._differing(numbers, masks, np.nonzero(~new)[0]):
            own = masks[at].tobytes()
            numbers[at] = known.setdefault(own, len(known))
            if numbers[at] * len(own) == self._content.tell():
                self._content.write(own)
        return numbers

    def _differing(self, numbers: np.ndarray, masks: np.ndarray, some: np.ndarray) -> np.ndarray:
        """Which of some bitmasks are not what is stored under their numbers."""
        stored = np.frombuffer(self._content.getbuffer(), np.uint64).reshape(-1, masks.shape[1])
        return some[(stored[numbers[some]] != masks[some]).any(axis=1)]

    def _keys(self, masks: np.ndarray) -> np.ndarray:
        """A number of 64 bits for each bitmask. Bits are mixed up and down first: times a factor high ones are lost."""
        mixed = masks * _FACTOR
        mixed ^= mixed >> np.uint64(32)
        return np.einsum("ij,j->i", mixed, self._factors)

    def find(self, mask: np.ndarray, rows: np.ndarray) -> int | None:
        """A known mask that equals `mask` in these rows."""
        if self._number and not rows.all():
            same = (self.array()[:, rows] == mask[rows]).all(axis=(1, 2))
            return int(same.argmax()) if same.any() else None
        return None

    def array(self) -> np.ndarray:
        """All of them, (n, block_q, words) uint64."""
        return np.ndarray((len(self._number), *self.shape), np.uint64, self._content.getvalue())
