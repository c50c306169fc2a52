"""Attention dropout: the pairs that a seed drops, from a counter-based random number generator."""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Dropout", "kept", "philox", "words"]

_WORDS = 1 << 32  # number of values of a word
_AT_ONCE = 1 << 13  # counters whose arrays fit the L1 and L2 caches


class Dropout(NamedTuple):
    """The share of dropped pairs, and the seed that selects them.

    Attributes
    ----------
    threshold : int
        A pair is dropped if its random number, of 32 bits, is below: the share is ``threshold / 2**32``.
    seed : int
        In [0, 2**64): the key of the generator.
    """

    threshold: int
    seed: int

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
        if threshold == _WORDS:
            raise ValueError(f"dropout_p: must not exceed 1 - 2**-32, got {share}")
        if seed is None:
            raise ValueError("seed: required if dropout_p > 0; pass another integer at each training step")
        return cls(threshold, _checked_seed(seed))

    @property
    def factor(self) -> float:
        """Factor of the weights that are kept, ``1 / (1 - p)``."""
        return _WORDS / (_WORDS - self.threshold)


def _checked_seed(seed: Any) -> int:
    try:
        if isinstance(seed, (bool, np.bool_)):
            raise TypeError
        number = operator.index(seed)
    except TypeError:
        raise TypeError(f"seed: expected an integer, got {type(seed).__name__}") from None
    if not 0 <= number < 1 << 64:
        raise ValueError(f"seed: must be in [0, 2**64), got {number}")
    return number


def philox(seed: int, *counter: Any) -> tuple[np.ndarray, ...]:
    """Return the four words of Philox4x32-10 with key `seed`, as ``philox.h`` and ``dropout_words.cu`` do.

    Parameters
    ----------
    seed : int
        In [0, 2**64).
    *counter : int or array of integers
        Four words, which are broadcast and taken modulo 2**32.

    Returns
    -------
    tuple of uint32 arrays

    References
    ----------
    Salmon, Moraes, Dror, Shaw. Parallel random numbers: as easy as 1, 2, 3. SC 2011.
    """
    mask, shift = np.uint64(_WORDS - 1), np.uint64(32)
    a, b, c, d = (x.astype(np.uint64) & mask for x in np.broadcast_arrays(*(np.asarray(x, np.int64) for x in counter)))
    low, high = seed % _WORDS, seed // _WORDS
    for _ in range(10):
        left, right = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b = (right >> shift) ^ b ^ np.uint64(low), right & mask
        c, d = (left >> shift) ^ d ^ np.uint64(high), left & mask
        low, high = (low + 0x9E3779B9) % _WORDS, (high + 0xBB67AE85) % _WORDS
    return tuple(x.astype(np.uint32) for x in (a, b, c, d))


def words(seed: int, batch: int, heads: int, length: int, which: str, first: int = 0) -> np.ndarray:
    """Return the random words of queries or keys, which do not depend on the share of dropped pairs.

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
    if which not in ("query", "key"):
        raise ValueError(f"which: expected 'query' or 'key', got {which!r}")
    of_query = which == "query"
    found = np.empty((1 + of_query, batch, heads, length), np.uint32)
    for b, h, start in np.ndindex(batch, heads, -(-length // _AT_ONCE)):
        some = slice(start * _AT_ONCE, min(length, (start + 1) * _AT_ONCE))
        position = np.arange(first + some.start, first + some.stop)
        found[:, b, h, some] = philox(seed, position, h, b, int(not of_query))[: 1 + of_query]
    if not of_query:
        return found[0]
    found[1] |= 1
    return found


def kept(dropout: Dropout, offset: Any, multiplier: Any, key: Any) -> np.ndarray:
    """Return whether pairs are kept, from their :func:`words`, which are broadcast."""
    return np.asarray(key * multiplier + offset >= np.uint32(dropout.threshold))
