"""Greedy search: repeatedly accept the candidate that covers most pairs, then join them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import numpy as np

from ..base.composition import Or
from ..base.pattern import Pattern
from ..listed.pairs import CSR
from ..listed.sparse import from_pairs
from ..sequence.basic import Full
from ._blocks import documents, layouts, scattered_layouts
from ._boxes import boxes
from ._candidate import Candidate
from ._counts import Counts, Evidence, room
from ._lines import columns, diagonals_without_order, global_tokens, longest_runs, rows, strides, windows
from ._pairs import Pairs

__all__ = ["discovered"]

Proposer: TypeAlias = Callable[[Evidence], Iterator[Candidate]]

_LINES: tuple[Proposer, ...] = (windows, strides, global_tokens, columns, rows)
_REGULAR: tuple[tuple[Proposer, ...], ...] = (_LINES, (documents, layouts, boxes))
_IRREGULAR: tuple[tuple[Proposer, ...], ...] = ((diagonals_without_order, scattered_layouts), (longest_runs,))
_NOISY = 0.95  # least share of a pattern's pairs in a noisy mask
_PASSES = ((1.0, _REGULAR), (_NOISY, _REGULAR), (_NOISY, _IRREGULAR))
_MOST_TAKEN = 24
_COST_OF_MISSING = 4  # covered pairs that offset one missing pair, which must be listed


def discovered(pairs: Pairs, grid: tuple[int, ...] | None = None) -> Pattern:
    """Join regular patterns, subtract the missing pairs and list the remaining ones."""
    taken = _taken(pairs, grid)
    # Drop earlier candidates that later ones cover entirely.
    needed = [each for each in taken[:-1] if not pairs.uncover(each.pattern)] + taken[-1:]
    found = [_joined([each.candidate for each in needed], pairs)] if needed else []
    row, key = np.concatenate([np.zeros((2, 0), np.int64), *(each.missing for each in needed)], axis=1)
    if len(row):
        found = [found[0] - from_pairs(row, key, pairs.q_len, pairs.kv_len)]
    indptr, keys = pairs.listed_left()
    if len(keys) or not found:
        found.append(CSR(indptr, keys, pairs.kv_len))
    return Or.of(*found)


class _Taken(NamedTuple):
    """An accepted candidate."""

    candidate: Candidate
    pattern: Pattern  # bound to the lengths
    missing: np.ndarray  # (row, key) of its pairs that the mask lacks


def _taken(pairs: Pairs, grid: tuple[int, ...] | None) -> list[_Taken]:
    """Accept candidates until the rest is irregular."""
    total = left = Counts.of(pairs.runs_left(), pairs)
    taken: list[_Taken] = []
    for fill, proposers in _PASSES:
        while len(taken) < _MOST_TAKEN:
            best = _best(proposers, Evidence(pairs, room(pairs), total, left, fill, grid))
            if best is None:
                break
            bound = best._replace(base=best.base.bind(pairs.q_len, pairs.kv_len))
            pattern = bound.pattern()
            taken.append(_Taken(best, pattern, pairs.cover(pattern, bound.runs(pairs.q, pairs.kv_len))))
            left = Counts.of(pairs.runs_left(), pairs)
    return taken


def _best(proposers: tuple[tuple[Proposer, ...], ...], evidence: Evidence) -> Candidate | None:
    """Return the candidate that covers most; later groups only run if earlier ones cannot cover all."""
    best, most = None, (evidence.pairs.q_len + evidence.pairs.kv_len) // 4
    for some in proposers:
        if evidence.left.nnz <= (most if best is None else best.new):
            break
        for each in (candidate for propose in some for candidate in propose(evidence)):
            worth = each.new - _COST_OF_MISSING * each.missing - each.cost
            if worth > most and each.is_there(evidence.fill):
                best, most = each, worth
    return best


def _joined(taken: list[Candidate], pairs: Pairs) -> Pattern:
    """Unite the candidates, with a common band factored out, and those without views first: they share a plan part."""

    def has_views(candidate: Candidate) -> bool:
        parts = candidate.pattern().bind(pairs.q_len, pairs.kv_len).parts(pairs.q_len, pairs.kv_len)
        return any(part.query is not None or part.key is not None for part in parts)

    taken = sorted(taken, key=has_views)
    bands = {(each.low, each.high) for each in taken}
    if len(bands) > 1 or isinstance(taken[0].base, Full):
        return Or.of(*(each.pattern() for each in taken))
    return taken[0]._replace(base=Or.of(*(each.base for each in taken))).pattern()
