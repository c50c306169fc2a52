"""Discover regular patterns in masks and listed pairs.

Every candidate is verified against all pairs before it is accepted; pairs that no candidate covers are listed.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from ..._util.index_checks import plain_array
from ...arrays import namespace_of
from ...index_set import AffineRows
from ..base.content import on_host
from ..base.pattern import Pattern
from ..grids.per import PerBatch, PerHead
from ..hints.grid import lengths
from ..listed.masks import Mask
from ..listed.pairs import CSR
from ..listed.sparse import from_scipy, from_torch_sparse
from ._pairs import Pairs
from ._search import discovered

__all__ = ["discover"]


def discover(mask: Any, grid: Any = None) -> Pattern:
    """Express exactly these pairs by regular patterns, as far as possible.

    The planner tiles a mask by consecutive tokens; if pairs are strided, dilated or local on a grid, most tiles are
    nearly empty. The discovered patterns bring denser views.

    Parameters
    ----------
    mask : array of bool, index set, Mask, CSR or sparse matrix
        An array (q_len, kv_len), (heads, q_len, kv_len) or (batch, heads, q_len, kv_len) of any framework, an
        :class:`~spattn.index_set.AffineRows`, or the non-zero entries of a sparse SciPy or PyTorch matrix.
    grid : int or tuple of int, optional
        Tokens along each axis of a row-major grid; enables the search for boxes of keys.

    Returns
    -------
    Pattern
        A union of registered patterns, minus listed pairs that the mask lacks, plus the remaining pairs as a list.
        Lists fix the lengths to those of `mask`; a pattern without lists may fit others. Differing heads and batch
        entries have separate patterns.

    Raises
    ------
    TypeError
        If `mask` is none of these, or an array of another dtype.
    ValueError
        If an array does not have two to four axes, or a leading axis is empty; if the tokens of `grid` differ from
        `kv_len`.

    Notes
    -----
    Searches for windows, dilated windows, strides, other diagonals, periodic columns, global tokens and sinks, rows,
    documents and blocks of equal length, layouts of square blocks, boxes on a grid, and one interval of keys per row.
    Greedily takes the candidate that covers most pairs until the rest is short or irregular; tolerates noise that
    removes up to a twentieth of a pattern's pairs. Costs O(nnz) time and memory per accepted pattern, and one pass over
    an array.

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
    """Return the CSR arrays of listed pairs, or None for an array."""
    sparse = sys.modules.get("scipy.sparse")  # imported, if `mask` is a sparse array
    if sparse is not None and sparse.issparse(mask):
        mask = from_scipy(mask)
    elif (kind := namespace_of(mask)) is not None and kind.name == "torch" and str(mask.layout) != "torch.strided":
        mask = from_torch_sparse(mask)
    if isinstance(mask, CSR):
        return mask.indptr, mask.indices, mask.kv_len
    if isinstance(mask, AffineRows):
        indptr, keys = mask.to_csr()
        return indptr, keys.astype(np.int32), mask.kv_len
    return None


def _of_array(mask: np.ndarray, grid: Any) -> Pattern:
    """Discover each batch entry and head; identical results are merged."""
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
