"""Discover regular patterns in masks and sparse matrices.

Every candidate is verified against all pairs before it is accepted; pairs that no candidate covers form a CSR pattern.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..._util.index_checks import plain_array
from ...arrays import namespace_of
from ...index_set import AffineRows
from ..base.composition import Or
from ..base.content import on_host
from ..base.pattern import Pattern
from ..base.per_head import PerBatch, PerHead
from ..grids.grid import lengths
from ..interop.sparse import from_pairs, from_scipy, from_torch_sparse
from ..listed.masks import Mask
from ..listed.pairs import CSR
from ..sequence.basic import Full
from .blocks import boxes, documents, layouts, scattered_layouts
from .evidence import Counts, Evidence, Pairs, capacity
from .lines import Candidate, columns, diagonals_without_order, global_tokens, longest_runs, rows, strides, windows

__all__ = ["discover"]

Proposer: TypeAlias = Callable[[Evidence], Iterator[Candidate]]
_LINES: tuple[Proposer, ...] = (windows, strides, global_tokens, columns, rows)
_REGULAR: tuple[tuple[Proposer, ...], ...] = (_LINES, (documents, layouts, boxes))
_IRREGULAR: tuple[tuple[Proposer, ...], ...] = ((diagonals_without_order, scattered_layouts), (longest_runs,))
_NOISY = 0.95  # minimum fraction of a candidate's pairs that a noisy mask must contain
_PASSES = ((1.0, _REGULAR), (_NOISY, _REGULAR), (_NOISY, _IRREGULAR))
_MOST_TAKEN = 24
_COST_OF_MISSING = 4  # covered pairs that outweigh one missing pair, which must be listed


def discover(mask: Any, grid: Any = None) -> Pattern:
    """Decompose a mask into regular patterns, and list the pairs that these do not cover; the result is always exact.

    The planner tiles a plain mask in token order; if pairs are strided, dilated or local on a grid, most tiles are
    nearly empty. Discovered patterns have denser views.

    Parameters
    ----------
    mask : array of bool, index set, Mask, CSR or sparse matrix
        An array (q_len, kv_len), (heads, q_len, kv_len) or (batch, heads, q_len, kv_len) of any framework, an
        :class:`~spattn.index_set.AffineRows`, or the non-zero entries of a sparse SciPy or PyTorch matrix.
    grid : int or tuple of int, optional
        Tokens along each axis of a row-major grid; enables the search for boxes of keys on the grid.

    Returns
    -------
    Pattern
        A union of registered patterns, minus a :class:`CSR` of pairs that the mask lacks, plus a CSR of the uncovered
        pairs. A result with a CSR is valid only for the lengths of `mask`. Heads and batch entries that differ have
        separate patterns.

    Raises
    ------
    TypeError
        If `mask` has another type or dtype.
    ValueError
        If an array does not have two to four axes, or a leading axis is empty; if `grid` does not have `kv_len` tokens.

    Notes
    -----
    The function searches for windows, dilated windows, strides, other diagonals, periodic columns, global tokens and
    sinks, rows, documents and blocks of equal length, layouts of square blocks, boxes on a grid, and one interval of
    keys per row. The search is greedy: it accepts the candidate that covers the most pairs until the rest is small or
    irregular. Up to 5 % of a pattern's pairs may be missing (noise). Each accepted pattern costs O(nnz) time and
    memory; an array is read once.

    Examples
    --------
    >>> import numpy as np
    >>> i, j = np.ogrid[:64, :64]
    >>> discover((j <= i) & ((i // 16 == j // 16) | (j % 16 >= 14)))
    (Causal() & (BlockLocal(block=16, offset=0) | Columns(period=16, start=14, stop=16)))
    >>> one_more = (abs(i - j) <= 3) | ((i == 60) & (j == 1))
    >>> discover(one_more)
    (SlidingWindow(left=3, right=3) | CSR(indptr=<int64 (65,)>, indices=<int32 (1,)>, kv_len=64))
    """
    if isinstance(mask, Mask):
        mask = mask.mask
    rows = _rows_of(mask)
    if rows is not None:
        return _discovered(Pairs(*rows), grid)
    array = plain_array("mask", on_host(mask))
    if array.dtype != bool:
        raise TypeError(f"mask: expected bool, an index set, a Mask, a CSR or a sparse matrix, got {_kind(mask)}")
    if array.ndim not in (2, 3, 4) or 0 in array.shape[:-2]:
        raise ValueError(f"mask: expected 2-D, 3-D or 4-D, with at least one head and batch entry, got {array.shape}")
    return _of_array(array, grid)


def _kind(value: Any) -> str:
    return f"an array of {value.dtype}" if hasattr(value, "dtype") else type(value).__name__


def _rows_of(mask: Any) -> tuple[np.ndarray, np.ndarray, int] | None:
    """Return (indptr, indices, kv_len) of a sparse input, or None for an array."""
    sparse = sys.modules.get("scipy.sparse")  # already imported if `mask` is sparse
    if sparse is not None and sparse.issparse(mask):
        mask = from_scipy(mask)
    elif (
        (library := namespace_of(mask)) is not None and library.name == "torch" and str(mask.layout) != "torch.strided"
    ):
        mask = from_torch_sparse(mask)
    if isinstance(mask, CSR):
        return mask.indptr, mask.indices, mask.kv_len
    if isinstance(mask, AffineRows):
        indptr, keys = mask.to_csr()
        return indptr, keys.astype(np.int32), mask.kv_len
    return None


def _of_array(mask: np.ndarray, grid: Any) -> Pattern:
    """Discover the pattern of each batch entry and head, and merge identical results."""
    if mask.ndim == 2:
        return _discovered(Pairs.of_mask(mask), grid)
    found = tuple(_of_array(each, grid) for each in mask)
    if len(set(found)) == 1:
        return found[0]
    return PerHead(found) if mask.ndim == 3 else PerBatch(found)


def _discovered(pairs: Pairs, grid: Any) -> Pattern:
    shape = None if grid is None else lengths(grid)
    if shape is not None and math.prod(shape) != pairs.kv_len:
        by = " × ".join(map(str, shape))
        raise ValueError(f"grid: expected a grid of {pairs.kv_len} tokens (kv_len), got {by}")
    return discovered(pairs, shape)


def discovered(pairs: Pairs, grid: tuple[int, ...] | None = None) -> Pattern:
    """Return the union of the accepted candidates, minus the missing pairs, plus the uncovered pairs."""
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
    missing: np.ndarray  # (row, key) of the candidate's pairs that the mask lacks


def _taken(pairs: Pairs, grid: tuple[int, ...] | None) -> list[_Taken]:
    """Accept candidates until none covers enough of the remaining pairs."""
    total = left = Counts.of(pairs.runs_left(), pairs)
    taken: list[_Taken] = []
    for fill, proposers in _PASSES:
        while len(taken) < _MOST_TAKEN:
            best = _best(proposers, Evidence(pairs, capacity(pairs), total, left, fill, grid))
            if best is None:
                break
            bound = best._replace(base=best.base.bind(pairs.q_len, pairs.kv_len))
            pattern = bound.pattern()
            taken.append(_Taken(best, pattern, pairs.cover(pattern, bound.runs(pairs.q, pairs.kv_len))))
            left = Counts.of(pairs.runs_left(), pairs)
    return taken


def _best(proposers: tuple[tuple[Proposer, ...], ...], evidence: Evidence) -> Candidate | None:
    """Return the candidate with the highest gain; skip later groups of proposers if it covers all uncovered pairs."""
    best, most = None, (evidence.pairs.q_len + evidence.pairs.kv_len) // 4
    for some in proposers:
        if evidence.left.nnz <= (most if best is None else best.new):
            break
        for each in (candidate for propose in some for candidate in propose(evidence)):
            gain = each.new - _COST_OF_MISSING * each.missing - each.cost
            if gain > most and each.is_present(evidence.fill):
                best, most = each, gain
    return best


def _joined(taken: list[Candidate], pairs: Pairs) -> Pattern:
    """Unite the candidates, and factor out a band that all share.

    Candidates without views come first, because they form one part of the union.
    """

    def has_views(candidate: Candidate) -> bool:
        parts = candidate.pattern().bind(pairs.q_len, pairs.kv_len).parts(pairs.q_len, pairs.kv_len)
        return any(part.query is not None or part.key is not None for part in parts)

    taken = sorted(taken, key=has_views)
    bands = {(each.low, each.high) for each in taken}
    if len(bands) > 1 or isinstance(taken[0].base, Full):
        return Or.of(*(each.pattern() for each in taken))
    return taken[0]._replace(base=Or.of(*(each.base for each in taken))).pattern()
