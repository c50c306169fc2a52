"""From bits or pairs to structure: which regular patterns a mask is made of.

Nothing is assumed: whatever a candidate's parameters were read from, it is compared with every pair before it is taken,
and what no candidate covers is listed.
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
from ..grids.windowed import grid_shape
from ..listed.masks import Mask
from ..listed.pairs import CSR
from ..listed.sparse import from_scipy, from_torch_sparse
from ._pairs import Pairs
from ._search import discovered

__all__ = ["discover"]


def discover(mask: Any, grid: Any = None) -> Pattern:
    """The pattern of exactly these pairs, made of regular patterns as far as there are any.

    A mask is planned in tiles of consecutive tokens, most of which are nearly empty where its pairs are strided,
    dilated, or near each other on a grid. What this function finds in it has views of its own.

    Parameters
    ----------
    mask : array of bool, index set, Mask, CSR or sparse matrix
        An array (q_len, kv_len), (heads, q_len, kv_len) or (batch, heads, q_len, kv_len) of any framework, an
        :class:`~spattn.index_set.AffineRows`, or a matrix of SciPy or PyTorch, whose pairs are the entries that are not
        zero.
    grid : int or tuple of int, optional
        Tokens along each axis, where the tokens form a grid in row-major order: boxes of keys are looked for too.

    Returns
    -------
    Pattern
        A union of registered patterns, less a list of the pairs that they have and the mask has not, and a list of the
        pairs that are left. Lists fit the lengths of `mask` alone; a pattern without them may fit others. Different
        heads and batch entries have their own.

    Raises
    ------
    TypeError
        If `mask` is none of these, an array of another dtype, or a masked array, or `grid` not of integers.
    ValueError
        If an array has not two to four axes or a leading one without entries, or `grid` has no axis, an axis without
        tokens, or another number of tokens than there are keys.

    Notes
    -----
    Looks for windows, dilated windows, strides, any other diagonals, columns in every period, global tokens and sinks,
    rows, documents and blocks of equal length, layouts of square blocks, boxes on a grid, and one interval of keys a
    row. The one that covers most is taken, until the rest is short or irregular; where noise has taken up to a
    twentieth of a pattern's pairs away, it is found all the same. Costs O(nnz) time and memory for each pattern that is
    taken, and a visit of each element of an array.

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
    """Compressed sparse rows of what lists its pairs, None where an array is expected."""
    sparse = sys.modules.get("scipy.sparse")  # there is no such matrix without it
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
    """That of each batch entry and head, once where they are all alike."""
    if mask.ndim == 2:
        return _discovered(Pairs.of_mask(mask), grid)
    found = tuple(_of_array(each, grid) for each in mask)
    if len(set(found)) == 1:
        return found[0]
    return PerHead(found) if mask.ndim == 3 else PerBatch(found)


def _discovered(pairs: Pairs, grid: Any) -> Pattern:
    shape = None if grid is None else grid_shape(grid)
    if shape is not None and math.prod(shape) != pairs.kv_len:
        by = " × ".join(map(str, shape))
        raise ValueError(f"grid: expected a grid of {pairs.kv_len} tokens (kv_len), got {by}")
    return discovered(pairs, shape)
