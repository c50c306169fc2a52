"""Token permutations: permuted patterns, and a search for permutations that cluster CSR pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..._util.cached import cached_property
from ..._util.ragged import offsets, ramp
from ..base.pattern import Pattern
from ..base.predicate import allowed, apply

__all__ = ["InOrder", "cluster_pairs", "inverse"]

_SAMPLE, _LEAST_ALIKE = 512, 0.1  # sampled queries; minimum fraction of them that repeat another one's minhashes
_VOTES = 32  # maximum pairs sampled per query
_BLOCK = 64  # side of a block of pairs
_GAIN = 0.5  # a permutation must reduce the non-empty blocks to at most this fraction
_FULL = 0.3  # if non-empty blocks are denser on average, no permutation is tried
_TABLE = 1 << 24  # maximum blocks that are counted in a table
_FACTORS = np.array([0x9E3779B1, 0x85EBCA77], np.uint32)  # odd multipliers of the hash


def inverse(order: np.ndarray) -> np.ndarray:
    """Invert a permutation."""
    index = np.empty_like(order)
    index[order] = np.arange(len(order))
    return index


@dataclass(frozen=True, eq=False)
class InOrder(Pattern):
    """A bound pattern under a permutation of queries and keys; `first` is the position of the first query."""

    inner: Pattern
    q_order: np.ndarray
    kv_order: np.ndarray
    first: int

    def __post_init__(self) -> None:  # no checks: only the planner creates these
        pass

    @cached_property
    def _positions(self) -> np.ndarray:
        return self.q_order + self.first

    @cached_property
    def _kv_index(self) -> np.ndarray:
        return inverse(self.kv_order)

    @property
    def _lists_pairs(self) -> bool:  # type: ignore[override]  # per instance
        return self.inner._lists_pairs

    def allows(self, q: Any, k: Any) -> Any:
        of_query = apply(lambda p: self._positions[p - self.first], q)
        return allowed(self.inner, of_query, apply(lambda p: self.kv_order[p], k))

    def _pairs(self, q: np.ndarray, kv_len: int) -> tuple[np.ndarray, np.ndarray]:
        row, key = self.inner._pairs(self._positions[q - self.first], kv_len)
        entry = self._kv_index[key]
        order = np.lexsort((entry, row))
        return row[order], entry[order]


def cluster_pairs(indptr: np.ndarray, indices: np.ndarray, kv_len: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Find permutations of rows and keys of a CSR pattern that at least halve the number of non-empty 64 × 64 blocks.

    Returns None if a sample of rows, or the count of blocks, shows no such permutation. The label of a query is a pair
    of minhashes. A minhash is equal for two queries with a probability equal to the Jaccard similarity of their keys
    (Broder 1997, On the resemblance and containment of documents). Then each key takes the most frequent label of its
    queries, each query that of its keys, and each key again that of its queries.
    """
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
    # Empty rows and keys have label -1 and come first.
    q_order, kv_order = np.argsort(of_row, kind="stable"), np.argsort(of_key, kind="stable")
    after = _squares(inverse(q_order)[pairs[0]], inverse(kv_order)[pairs[1]], len(count), kv_len)
    return (q_order, kv_order) if after <= _GAIN * before else None


def _minhashes(indptr: np.ndarray, indices: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return two 32-bit minhashes of each non-empty row, packed into an int64."""
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
    """Return (row, key) of all pairs; rows with more than _VOTES pairs are sampled at random."""
    count = np.diff(indptr)
    taken = np.minimum(count, _VOTES)
    row = np.repeat(np.arange(len(count)), taken)
    entry = ramp(taken)
    many = count[row] > _VOTES
    entry[many] = (rng.random(int(many.sum())) * count[row[many]]).astype(np.int64)
    return row, indices[indptr[row] + entry]


def _most(voter: np.ndarray, label: np.ndarray, voters: int) -> np.ndarray:
    """Return each voter's most frequent label, or -1."""
    order = np.lexsort((label, voter))
    voter, label = voter[order], label[order]
    new = np.ones(len(voter), bool)
    new[1:] = (voter[1:] != voter[:-1]) | (label[1:] != label[:-1])
    first = np.flatnonzero(new)
    count = np.diff(first, append=len(voter))
    rising = np.argsort(count, kind="stable")
    found = np.full(voters, -1, np.int64)
    found[voter[first[rising]]] = label[first[rising]]  # the last assignment wins: the most frequent label
    return found


def _squares(row: np.ndarray, key: np.ndarray, q_len: int, kv_len: int) -> int:
    """Count the non-empty blocks."""
    down, across = -(-q_len // _BLOCK), -(-kv_len // _BLOCK)
    number = row // _BLOCK * across + key // _BLOCK
    if down * across > _TABLE:
        return len(np.unique(number))
    holds = np.zeros(down * across, bool)
    holds[number] = True
    return int(np.count_nonzero(holds))
