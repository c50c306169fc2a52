"""Import CSR patterns from coordinates and from sparse matrices of SciPy and PyTorch."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from ..._util.index_checks import check_lengths, integer_array
from ..._util.ragged import offsets
from ...arrays import namespace_of, to_host
from ..base.content import on_host
from ..listed.pairs import CSR

__all__ = ["from_pairs", "from_scipy", "from_torch_sparse"]


def from_pairs(row: npt.ArrayLike, key: npt.ArrayLike, q_len: int, kv_len: int) -> CSR:
    """Create the pattern in which query row ``row[n]`` attends to key ``key[n]`` for every n.

    Parameters
    ----------
    row, key : (pairs,) int arrays
        In any order, with repeats allowed.
    q_len, kv_len : int
        Lengths in tokens.

    Returns
    -------
    CSR

    Examples
    --------
    >>> from_pairs([2, 0, 0], [1, 3, 0], 3, 4)
    CSR(indptr=<int64 (4,)>, indices=<int32 (3,)>, kv_len=4)
    """
    q_len, kv_len = check_lengths(q_len, kv_len)
    row, key = integer_array("row", on_host(row)), integer_array("key", on_host(key))
    if row.ndim != 1 or key.shape != row.shape:
        raise ValueError(f"row, key: expected one axis and one length, got shapes {row.shape} and {key.shape}")
    for name, numbers, length in (("row", row, q_len), ("key", key, kv_len)):
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < length:
            raise ValueError(f"{name}: expected numbers in [0, {length}), got {numbers.min()} to {numbers.max()}")
    pair = np.sort(row * kv_len + key)
    pair = pair[np.diff(pair, prepend=-1) > 0]
    rows = pair // max(kv_len, 1)
    return CSR(offsets(np.bincount(rows, minlength=q_len)), pair - rows * kv_len, kv_len)


def from_scipy(matrix: Any) -> CSR:
    """Create the pattern of the non-zero entries of a SciPy sparse matrix.

    Parameters
    ----------
    matrix : (q_len, kv_len) sparse array or matrix of scipy.sparse
        A matrix in any format. Explicit zeros, and duplicates that sum to zero, do not count as entries.

    Returns
    -------
    CSR

    Examples
    --------
    >>> import scipy.sparse
    >>> from_scipy(scipy.sparse.eye_array(3, 5, k=1)).index_set(3, 5).to_dense().astype(int)
    array([[0, 1, 0, 0, 0],
           [0, 0, 1, 0, 0],
           [0, 0, 0, 1, 0]])
    """
    sparse = sys.modules.get("scipy.sparse")  # already imported if `matrix` is sparse
    if sparse is None or not sparse.issparse(matrix):
        raise TypeError(f"matrix: expected a sparse array of SciPy, got {type(matrix).__name__}")
    _check_axes("matrix", matrix)
    pairs = matrix.tocoo(copy=True)
    pairs.sum_duplicates()
    return from_pairs(*pairs.nonzero(), *matrix.shape)


def from_torch_sparse(tensor: Any) -> CSR:
    """Create the pattern of the non-zero entries of a PyTorch sparse tensor.

    Parameters
    ----------
    tensor : (q_len, kv_len) torch.Tensor
        A tensor of layout COO, CSR, CSC, BSR or BSC, on any device. Explicit zeros, and duplicates that sum to zero, do
        not count as entries.

    Returns
    -------
    CSR

    Examples
    --------
    >>> import torch
    >>> from_torch_sparse(torch.eye(3).to_sparse()).index_set(3, 3).to_dense().astype(int)
    array([[1, 0, 0],
           [0, 1, 0],
           [0, 0, 1]])
    """
    library = namespace_of(tensor)
    if library is None or library.name != "torch" or str(tensor.layout) == "torch.strided":
        raise TypeError(f"tensor: expected a sparse tensor of PyTorch, got {getattr(tensor, 'layout', type(tensor))}")
    _check_axes("tensor", tensor)
    pairs = tensor.detach().cpu().to_sparse_coo().coalesce()
    if pairs.sparse_dim() != 2:
        raise ValueError(f"tensor: expected two sparse axes, got {pairs.sparse_dim()}")
    row, key = to_host(pairs.indices()[:, pairs.values() != 0])
    return from_pairs(row, key, *tensor.shape)


def _check_axes(name: str, matrix: Any) -> None:
    if matrix.ndim != 2:
        raise ValueError(f"{name}: expected two axes, got shape {tuple(matrix.shape)}")
