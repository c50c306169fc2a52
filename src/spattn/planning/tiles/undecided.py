"""Predicates that are evaluated pair by pair: a limit, and reasons for warnings about slow plans."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from ..._util.making import note, shared
from ...patterns import Pattern
from ...patterns.base.predicate import allowed, listed
from ..contract.types import positions
from .search import alike, decide

__all__ = ["EveryPair", "announce", "listed_pairs"]

_MOST_CELLS = 1 << 30  # a few operations take seconds in native code, ten in NumPy; slow ones a minute
_FEWEST_CELLS = 1 << 22  # fewer cells are searched in milliseconds
_FIRST, _SAMPLE = 16, 512  # tile pairs: of the first sample, in which a rule usually decides one, and of the second
_SPARSE = 16  # pairs are listed if at most one of so many cells is allowed
_MOST_LISTED = 1 << 23  # 64 MB
_ADVICE = (
    "intersect it (&) with a pattern that excludes most pairs, such as a window, or use operations that the planner "
    "evaluates on whole tiles"
)


class EveryPair(NamedTuple):
    """The allowed pairs of a predicate for queries from position `first` on: stands for a pattern that lists them."""

    first: int
    indptr: np.ndarray
    key: np.ndarray

    def _pairs(self, q: np.ndarray, kv_len: int) -> tuple[np.ndarray, np.ndarray]:
        indptr = self.indptr[q[0] - self.first :][: len(q) + 1]
        return np.repeat(np.arange(len(q)), np.diff(indptr)), self.key[indptr[0] : indptr[-1]]


def listed_pairs(pattern: Pattern, query: np.void, key: np.void, shift: int) -> EveryPair | None:
    """Return the pairs of a sparse predicate if the search for tiles would end with all pairs undecided, and no two
    tiles alike; else None. Decides by samples. The plans of one request share the list."""
    tiles = int(query["tiles"]) * int(key["tiles"])
    cells = int(np.prod(query["extent"], dtype=np.int64) * np.prod(key["extent"], dtype=np.int64))
    if not _FEWEST_CELLS <= cells <= _MOST_CELLS or int(key["offset"]) or pattern.translation_invariant:
        return None
    number = np.unique(np.random.default_rng(0).integers(0, tiles, _SAMPLE))
    pairs = np.stack(np.divmod(number, int(key["tiles"])))
    some = pairs[:, :: max(1, len(number) // _FIRST)]
    if len(decide(pattern, query, key, shift, some)[1]) < some.shape[1]:
        return None
    first, kinds, unfollowed = alike(pattern, query, key, shift, pairs)
    if len(first) < len(kinds):
        return None
    (q, _), (k, _) = positions(query, pairs[0]), positions(key, pairs[1])
    found = np.broadcast_to(allowed(pattern, (q + shift)[:, :, None], k[:, None, :]), (*q.shape, k.shape[1]))
    count = np.count_nonzero(found)
    if max(_SPARSE * count, cells // _MOST_LISTED * count) > found.size:
        return None
    announce(pattern, unfollowed, tiles, cells)
    start, rows, kv_len = int(query["offset"]) + shift, int(query["extent"][-1]), int(key["extent"][-1])
    make = functools.partial(listed, pattern, start + np.arange(rows), kv_len)
    return EveryPair(start, *shared((EveryPair, pattern, start, rows, kv_len), make))


def announce(pattern: Pattern, unfollowed: list[str], tiles: int, cells: int) -> None:
    """Note that all `cells` of `tiles` tiles are evaluated because of `unfollowed`; raise ValueError for too many."""
    why = f"allows() cannot be evaluated on whole tiles ({unfollowed[0]})" if unfollowed else "no two tiles are alike"
    if cells > _MOST_CELLS:
        raise ValueError(
            f"pattern: expected at most {_MOST_CELLS} pairs to evaluate one by one, got {cells} in {pattern!r}: "
            f"{why}; {_ADVICE}"
        )
    note(f"{cells} pairs in {tiles} tiles were evaluated one by one, because {why}; {_ADVICE}")
