"""Attention dropout: the pairs that a seed drops, from a counter-based random number generator."""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple

import numpy as np

from ._philox import philox

__all__ = ["DeviceSeed", "Dropout", "DropoutWords", "checked_seed", "words"]

_NUMBERS = 1 << 32  # values of a random number
_STREAMS = {"query": 0, "key": 1}  # the last word of the generator's counter


class DeviceSeed(NamedTuple):
    """A seed in device memory, which kernels read when they run, modulo 2**64.

    Attributes
    ----------
    address : int
        Of 64 bits.
    owner : object
        Keeps the memory allocated.
    """

    address: int
    owner: Any


class Dropout(NamedTuple):
    """The share of dropped pairs, and the seed that selects them.

    Attributes
    ----------
    threshold : int
        A pair is dropped if its random number, of 32 bits, is below: the share is ``threshold / 2**32``.
    seed : int or DeviceSeed
        In [0, 2**64): the key of the generator.
    """

    threshold: int
    seed: Any

    @classmethod
    def of(cls, dropout_p: Any, seed: Any) -> Dropout | None:
        """Validate the arguments of :func:`spattn.attention`; return None if they drop nothing."""
        if isinstance(dropout_p, (bool, np.bool_)) or not isinstance(dropout_p, (int, float, np.integer, np.floating)):
            raise TypeError(f"dropout_p: expected a float, got {type(dropout_p).__name__}")
        share = float(dropout_p)
        if not 0 <= share < 1:
            raise ValueError(f"dropout_p: must be at least 0 and less than 1, got {share}")
        threshold = round(math.ldexp(share, 32))
        if not threshold:
            return None
        if threshold == _NUMBERS:
            raise ValueError(f"dropout_p: must not exceed 1 - 2**-32, got {share}")
        if seed is None:
            raise ValueError("seed: required if dropout_p > 0; pass another integer at each training step")
        return cls(threshold, seed if isinstance(seed, DeviceSeed) else checked_seed(seed))

    @property
    def factor(self) -> float:
        """Factor of the weights that are kept, ``1 / (1 - p)``."""
        return _NUMBERS / (_NUMBERS - self.threshold)

    def words(self, batch: int, heads: int, q_len: int, kv_len: int) -> DropoutWords:
        """Return the random numbers of a call."""
        query = words(self.seed, batch, heads, q_len, "query", kv_len - q_len)
        return DropoutWords(self.threshold, self.factor, query, words(self.seed, batch, heads, kv_len, "key"))


def checked_seed(seed: Any) -> int:
    """Validate a seed and return it as an integer."""
    # PyTorch's __index__ refuses uint64 above the range of int64.
    value = seed.item() if getattr(seed, "shape", None) == () and hasattr(seed, "item") else seed
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"seed: expected an integer, got {type(seed).__name__}") from None
    if not 0 <= number < 1 << 64:
        raise ValueError(f"seed: must be in [0, 2**64), got {number}")
    return number


class DropoutWords(NamedTuple):
    """The random numbers of the queries and keys of a call.

    Attributes
    ----------
    threshold : int
        Of the :class:`Dropout`.
    factor : float
        Of the :class:`Dropout`.
    query : (2, batch, heads_q, q_len) uint32 array
        Offsets and odd multipliers.
    key : (batch, heads_q, kv_len) uint32 array
    """

    threshold: int
    factor: float
    query: np.ndarray
    key: np.ndarray

    def kept(self, b: Any, h: Any, q: Any, k: Any) -> np.ndarray:
        """Return whether pairs are kept, given broadcastable batch entries, query heads, rows of q, and keys."""
        offset, multiplier = self.query[:, b, h, q]
        return np.asarray(self.key[b, h, k] * multiplier + offset >= np.uint32(self.threshold))


def words(seed: int, batch: int, heads: int, length: int, which: str, first: int = 0) -> np.ndarray:
    """Return the random numbers of queries or keys, which do not depend on the share of dropped pairs.

    Parameters
    ----------
    seed : int
    batch, heads : int
        Batch size and query heads.
    length : int
        Number of queries or keys.
    which : {"query", "key"}
    first : int, optional
        Position of the first one; that of the first query is ``kv_len - q_len``.

    Returns
    -------
    (2, batch, heads, length) or (batch, heads, length) uint32 array
        Offsets and odd multipliers of queries; words of keys.
    """
    if which not in _STREAMS:
        raise ValueError(f"which: expected 'query' or 'key', got {which!r}")
    of_query = which == "query"
    found = np.empty((1 + of_query, batch, heads, length), np.uint32)
    philox(seed, first, _STREAMS[which], found)
    if not of_query:
        return found[0]
    found[1] |= 1
    return found
