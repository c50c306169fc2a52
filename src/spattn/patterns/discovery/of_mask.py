"""What a boolean array is planned as: a regular pattern, listed pairs, or the array itself."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from ..._util.making import shared
from ...index_set import AffineRows, Runs
from ..base.pattern import Pattern
from ..base.predicate import allowed, pair_count
from ..listed.pairs import CSR
from . import discovered
from .evidence import Pairs

__all__ = ["contents"]

_LEAST_CELLS = 1 << 20  # a smaller mask is planned before the search ends
_LISTED = 1 / 16  # masks with fewer pairs are planned pair by pair
_SEARCHED = 1 / 4  # the tiles of denser masks are full, whatever their structure
_MOST_PAIRS = 1 << 25  # the search takes about 10 ns and 6 bytes per pair
_CANDIDATES_AT_ONCE = 1 << 18  # pairs in a chunk
_SAMPLE = 64  # rows that are compared with their successors
_ALIKE = 1 / 2  # a row repeats another if fewer of its keys differ


def contents(mask: np.ndarray) -> tuple[Pattern | None, Pattern | None]:
    """Return (regular pattern, bound CSR pattern) of a mask (q_len, kv_len); None for those that it is not planned as.

    The regular pattern has no listed pairs, and exactly the pairs of the mask.
    """
    where = mask.__array_interface__["data"][0], mask.shape  # heads are parts of one C-contiguous array
    found, _ = shared((contents, *where), lambda: (_contents(mask), mask))  # `mask` keeps its memory from others
    return found


def _contents(mask: np.ndarray) -> tuple[Pattern | None, Pattern | None]:
    if mask.size < _LEAST_CELLS:
        return None, None
    count = np.count_nonzero(mask)
    is_listed = count <= _LISTED * mask.size
    is_searched = 0 < count <= min(_SEARCHED * mask.size, _MOST_PAIRS) and _is_regular(mask)
    if not (is_listed or is_searched):
        return None, None
    pairs = Pairs.of_mask(mask)
    if is_searched:
        found = discovered(pairs)
        if not _lists(found) and _has_pairs(found, pairs, mask):
            return found, None
    if not is_listed:
        return None, None
    return None, CSR(pairs.indptr, pairs.keys, pairs.kv_len).bind(pairs.q_len, pairs.kv_len)


def _is_regular(mask: np.ndarray) -> bool:
    """Return whether most sampled rows repeat the row before, perhaps shifted by one key."""
    rows = np.unique(np.linspace(0, max(len(mask) - 2, 0), _SAMPLE).astype(np.int64))
    if len(mask) < 2:
        return False
    one, other = mask[rows], mask[rows + 1]
    differ = np.minimum(np.count_nonzero(one != other, axis=1), np.count_nonzero(one[:, :-1] != other[:, 1:], axis=1))
    return bool(np.mean(differ <= _ALIKE * np.count_nonzero(one, axis=1)) > _ALIKE)


def _lists(pattern: object) -> bool:
    """Return whether a pattern contains listed pairs."""
    if isinstance(pattern, tuple):
        return any(map(_lists, pattern))
    if not isinstance(pattern, Pattern):
        return False
    return (
        pattern._lists_pairs
        or any(_lists(getattr(pattern, field.name)) for field in dataclasses.fields(pattern))
        or isinstance(pattern, CSR)
    )


def _has_pairs(pattern: Pattern, pairs: Pairs, mask: np.ndarray) -> bool:
    """Return whether a pattern is known to have exactly the pairs of a mask."""
    bound = pattern.bind(pairs.q_len, pairs.kv_len)
    candidates = bound._candidates(pairs.q, pairs.kv_len)
    if candidates is None or not all(here.all() for _, here in pairs.evaluated(bound)):
        return False
    at_once = max(1, _CANDIDATES_AT_ONCE * pairs.q_len // max(pair_count(candidates), 1))
    for runs, first in itertools.product(candidates, range(0, pairs.q_len, at_once)):
        own = Runs(*(each[first : first + at_once] for each in (runs.start, runs.step, runs.count)))
        indptr, key = AffineRows.from_runs(own, pairs.kv_len).to_csr()
        row = np.repeat(np.arange(first, first + len(indptr) - 1), np.diff(indptr))
        absent = ~mask[row, key]
        if np.any(allowed(bound, pairs.q[row[absent]], key[absent])):
            return False
    return True
