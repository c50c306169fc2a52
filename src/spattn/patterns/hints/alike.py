"""Orders of queries and of keys in which listed pairs lie together: those that are alike are neighbours.

Queries that have many keys in common are found by *minhashes*: the least of a hash of their keys is the same for two of
them as often as a key of either one is one of both (Broder 1997, On the resemblance and containment of documents). Each
key then goes where most of its queries are, and each query where most of its keys are.
"""

from __future__ import annotations

import numpy as np

from ..._util.ragged import offsets, ramp
from .order import inverse

__all__ = ["alike_together"]

_SAMPLE, _LEAST_ALIKE = 512, 0.1  # queries that are looked at first, and the share of them that must be like another
_VOTES = 32  # keys of a query, or queries of a key, by which it is placed
_BLOCK = 64  # tokens of the squares that are counted
_GAIN = 0.5  # squares that must be left, of those there were
_FULL = 0.3  # of the pairs of squares, from which on another order is not looked for
_TABLE = 1 << 24  # squares that are marked in a table
_FACTORS = np.array([0x9E3779B1, 0x85EBCA77], np.uint32)  # odd


def alike_together(indptr: np.ndarray, indices: np.ndarray, kv_len: int) -> tuple[np.ndarray, np.ndarray] | None:
    """(rows, keys) in an order in which the pairs of compressed sparse rows fill at most half as many squares of
    64 × 64 as they do; None where a look at a few rows, or at all squares, says that there is none."""
    count = np.diff(indptr)
    rows = np.flatnonzero(count)
    rng = np.random.default_rng(0)
    sample = rng.choice(rows, _SAMPLE, replace=False) if len(rows) > _SAMPLE else rows
    known = _minhashes(indptr, indices, np.sort(sample))
    if not len(rows) or np.unique(known).size > (1 - _LEAST_ALIKE) * len(known):
        return None
    pairs = np.repeat(np.arange(len(count)), count), indices
    before = _squares(*pairs, len(count), kv_len)
    if len(indices) > _FULL * before * _BLOCK**2:
        return None
    label = np.full(len(count), -1, np.int64)
    label[rows] = _minhashes(indptr, indices, rows)
    row, key = _votes(indptr, indices, rng)
    of_key = _most(key, label[row], kv_len)
    of_row = _most(row, of_key[key], len(count))
    of_key = _most(key, of_row[row], kv_len)
    # Those without a pair, whose label is -1, come first, and nothing of the rest lies beyond them.
    q_order, kv_order = np.argsort(of_row, kind="stable"), np.argsort(of_key, kind="stable")
    after = _squares(inverse(q_order)[pairs[0]], inverse(kv_order)[pairs[1]], len(count), kv_len)
    return (q_order, kv_order) if after <= _GAIN * before else None


def _minhashes(indptr: np.ndarray, indices: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """For each of some rows that are not empty, the least of two hashes of its keys, as one number."""
    count = indptr[rows + 1] - indptr[rows]
    start = offsets(count)[:-1]
    own = indices[np.repeat(indptr[rows], count) + ramp(count)].astype(np.uint32)
    found = np.zeros(len(rows), np.uint64)
    for factor in _FACTORS:
        mixed = own * factor
        mixed ^= mixed >> np.uint32(15)
        least = np.minimum.reduceat(mixed * factor, start) if len(rows) else mixed
        found = found << np.uint64(32) | least.astype(np.uint64)
    return found.astype(np.int64)


def _votes(indptr: np.ndarray, indices: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Row and key of all pairs, or of so many of each row, any of them, where it has more."""
    count = np.diff(indptr)
    taken = np.minimum(count, _VOTES)
    row = np.repeat(np.arange(len(count)), taken)
    place = ramp(taken)
    many = count[row] > _VOTES
    place[many] = (rng.random(int(many.sum())) * count[row[many]]).astype(np.int64)
    return row, indices[indptr[row] + place]


def _most(voter: np.ndarray, label: np.ndarray, voters: int) -> np.ndarray:
    """For each of so many voters the label that comes most often, -1 where none does."""
    order = np.lexsort((label, voter))
    voter, label = voter[order], label[order]
    new = np.ones(len(voter), bool)
    new[1:] = (voter[1:] != voter[:-1]) | (label[1:] != label[:-1])
    first = np.flatnonzero(new)
    count = np.diff(first, append=len(voter))
    rising = np.argsort(count, kind="stable")
    found = np.full(voters, -1, np.int64)
    found[voter[first[rising]]] = label[first[rising]]  # of several the last one is kept
    return found


def _squares(row: np.ndarray, key: np.ndarray, q_len: int, kv_len: int) -> int:
    """How many squares hold a pair."""
    down, across = -(-q_len // _BLOCK), -(-kv_len // _BLOCK)
    number = row // _BLOCK * across + key // _BLOCK
    if down * across > _TABLE:
        return len(np.unique(number))
    holds = np.zeros(down * across, bool)
    holds[number] = True
    return int(np.count_nonzero(holds))
