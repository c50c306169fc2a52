"""Takes one candidate after the other, the one that covers most, and joins what it has taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np

from ..._ragged import offsets
from .._composition import Or
from .._pattern import Pattern
from ..basic import Full
from ..pairs import CSR
from ._blocks import documents, layouts
from ._candidate import Candidate, band
from ._counts import Counts, Evidence, room
from ._diagonals import diagonals_without_order, strides, windows
from ._irregular import longest_runs
from ._lines import columns, global_tokens, rows
from ._pairs import Pairs

__all__ = ["discovered"]

Proposer: TypeAlias = Callable[[Evidence], Iterator[Candidate]]

_LINES: tuple[Proposer, ...] = (windows, strides, global_tokens, columns, rows)
_REGULAR: tuple[tuple[Proposer, ...], ...] = (_LINES, (documents, layouts))
_IRREGULAR: tuple[tuple[Proposer, ...], ...] = ((diagonals_without_order,), (longest_runs,))
_NOISY = 0.95  # of a pattern's pairs have to be there where a mask has noise
_PASSES = ((1.0, _REGULAR), (_NOISY, _REGULAR), (_NOISY, _IRREGULAR))
_MOST_TAKEN = 24
_COST_OF_MISSING = 4  # pairs that a pattern has to cover for each that is not there, which is listed


def discovered(pairs: Pairs) -> Pattern:
    """The pattern of these pairs: regular ones joined, less what is missing, and what is left as a list."""
    taken, missing = _taken(pairs)
    found = [_joined(taken, pairs)] if taken else []
    if missing.size:
        row, key = missing
        found = [found[0] - CSR(offsets(np.bincount(row, minlength=pairs.q_len)), key, pairs.kv_len)]
    indptr, keys = pairs.listed_left()
    if len(keys) or not found:
        found.append(CSR(indptr, keys, pairs.kv_len))
    return Or.of(*found)


def _taken(pairs: Pairs) -> tuple[list[Candidate], np.ndarray]:
    """Candidates that together cover what is regular, and (row, key) of their pairs that are not there."""
    total = left = Counts.of(pairs.runs_left(), pairs)
    taken: list[Candidate] = []
    missing = [np.zeros((2, 0), np.int64)]
    for fill, proposers in _PASSES:
        while len(taken) < _MOST_TAKEN:
            best = _best(proposers, Evidence(pairs, room(pairs), total, left, fill))
            if best is None:
                break
            bound = best._replace(base=best.base.bind(pairs.q_len, pairs.kv_len))
            missing.append(pairs.cover(bound.pattern(), bound.runs(pairs.q, pairs.kv_len)))
            taken.append(best)
            left = Counts.of(pairs.runs_left(), pairs)
    row, key = np.concatenate(missing, axis=1)
    code = np.unique(row * pairs.kv_len + key)
    return taken, np.stack(np.divmod(code, max(pairs.kv_len, 1)))


def _best(proposers: tuple[tuple[Proposer, ...], ...], evidence: Evidence) -> Candidate | None:
    """The candidate that covers most; the later proposers are asked where the first ones leave more than they cover."""
    best, most = None, (evidence.pairs.q_len + evidence.pairs.kv_len) // 4
    for some in proposers:
        if evidence.left.nnz <= (most if best is None else 2 * most):
            break
        for each in (candidate for propose in some for candidate in propose(evidence)):
            worth = each.new - _COST_OF_MISSING * each.missing - each.written
            if worth > most and each.missing <= (1 - evidence.fill) * (each.new + each.missing):
                best, most = each, worth
    return best


def _joined(taken: list[Candidate], pairs: Pairs) -> Pattern:
    """The union of the candidates, with the band that all of them share written once, and those without views of their
    own first: these are planned together."""

    def has_views(candidate: Candidate) -> bool:
        parts = candidate.pattern().bind(pairs.q_len, pairs.kv_len).parts(pairs.q_len, pairs.kv_len)
        return any(part.query is not None or part.key is not None for part in parts)

    taken = sorted(taken, key=has_views)
    bands = {(each.low, each.high) for each in taken}
    if len(bands) > 1 or isinstance(taken[0].base, Full):
        return Or.of(*(each.pattern() for each in taken))
    return taken[0]._replace(base=Or.of(*(each.base for each in taken))).pattern()
