"""The bitmasks of a plan, each different one once."""

from __future__ import annotations

import io
import math
from collections.abc import Callable

import numpy as np

from ._budget import Budget

__all__ = ["EMPTY", "Masks", "packed"]

EMPTY = -2

_AT_ONCE = 1 << 17  # words of bitmasks that are looked at together: they fit into a cache
_TILES_AT_ONCE = 128  # that are made of truth values at once
_FACTOR = np.uint64(0xD2E7470EE14C6C93)  # odd: no bit of a word that it multiplies is lost


def packed(allowed: np.ndarray) -> np.ndarray:
    """Truth values as the bits of words, 64 of the last axis in each."""
    return np.packbits(allowed, axis=-1, bitorder="little").view("<u8").astype(np.uint64, copy=False)


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
                    numbers[some[at]] = self.add(own[at]) if rows.all() else self._add_rows(own[at], rows)
        return numbers

    def _add_rows(self, masks: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The number of a bitmask that equals each of `masks` in these rows: the first known one, or else itself."""
        known, masked = self.array(), masks * rows[:, None]
        keys = self._keys_of_rows(known, rows).tolist()
        first = dict(zip(reversed(keys), range(len(keys) - 1, -1, -1), strict=True))
        places: dict[bytes, int] = {}  # of one of those that are equal in these rows
        which = [places.setdefault(one.tobytes(), at) for at, one in enumerate(masked)]
        one_of_each = np.array(list(places.values()))
        found = self._keys_of_rows(masks[one_of_each], rows).tolist()
        number = np.array([first.get(key, -1) for key in found], np.int32)
        like = np.nonzero(number >= 0)[0]
        differ = (known[number[like]] * rows[:, None] != masked[one_of_each[like]]).any(axis=(1, 2))
        number[like[differ]] = -1
        number[number < 0] = self.add(masks[one_of_each[number < 0]])
        return number[np.searchsorted(one_of_each, which)]

    def _keys_of_rows(self, masks: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The keys of bitmasks of which these rows alone are looked at."""
        at_once = max(1, _AT_ONCE // math.prod(self.shape))
        found = [np.zeros(0, np.uint64)]
        for start in range(0, len(masks), at_once):
            some = masks[start : start + at_once] * rows[:, None]
            found.append(self._keys(some.reshape(len(some), -1)))
        return np.concatenate(found)

    def array(self) -> np.ndarray:
        """All of them, (n, block_q, words) uint64."""
        return np.ndarray((len(self._number), *self.shape), np.uint64, self._content.getvalue())
