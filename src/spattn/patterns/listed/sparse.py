"""Listed pairs from coordinates, and from the sparse matrices of SciPy and PyTorch."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from ..._util.index_checks import check_lengths, integer_array
from ..._util.ragged import offsets
from ...arrays import namespace_of, to_host
from ..base.content import on_host
from .pairs import CSR

__all__ = ["from_pairs", "from_scipy", "from_torch_sparse"]


def from_pairs(row: npt.ArrayLike, key: npt.ArrayLike, q_len: int, kv_len: int) -> CSR:
    """The pattern that allows query row ``row[n]`` to attend to ``key[n]``, for every n.

    Parameters
    ----------
    row, key : (pairs,) int arrays
        In any order; a pair may be repeated.
    q_len, kv_len : int
        Lengths in tokens.

    Returns
    -------
    CSR

    Raises
    ------
    TypeError
        If `row` or `key` is not of integers, or a masked array.
    ValueError
        If they are not of one length and one axis, a row lies outside ``[0, q_len)`` or a key outside ``[0, kv_len)``,
        or a length is no integer, negative or 2^31 or more.

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
    """The pairs at which a sparse matrix of SciPy is not zero.

    Parameters
    ----------
    matrix : (q_len, kv_len) sparse array or matrix of scipy.sparse
        Of any format. An entry that is stored and zero, or several whose sum is, is no pair.

    Returns
    -------
    CSR

    Raises
    ------
    TypeError
        If `matrix` is no sparse array of SciPy.
    ValueError
        If it has not two axes.

    Examples
    --------
    >>> import scipy.sparse
    >>> from_scipy(scipy.sparse.eye_array(3, 5, k=1)).index_set(3, 5).to_dense().astype(int)
    array([[0, 1, 0, 0, 0],
           [0, 0, 1, 0, 0],
           [0, 0, 0, 1, 0]])
    """
    sparse = sys.modules.get("scipy.sparse")  # there is no such matrix without it
    if sparse is None or not sparse.issparse(matrix):
        raise TypeError(f"matrix: expected a sparse array of SciPy, got {type(matrix).__name__}")
    _check_axes("matrix", matrix)
    pairs = matrix.tocoo(copy=True)
    pairs.sum_duplicates()
    return from_pairs(*pairs.nonzero(), *matrix.shape)


def from_torch_sparse(tensor: Any) -> CSR:
    """The pairs at which a sparse tensor of PyTorch is not zero.

    Parameters
    ----------
    tensor : (q_len, kv_len) torch.Tensor
        Of a sparse layout: COO, CSR, CSC, BSR or BSC; on any device. An entry that is stored and zero, or several whose
        sum is, is no pair.

    Returns
    -------
    CSR

    Raises
    ------
    TypeError
        If `tensor` is no tensor of PyTorch, or a dense one.
    ValueError
        If it has not two sparse axes.

    Examples
    --------
    >>> import torch
    >>> from_torch_sparse(torch.eye(3).to_sparse()).index_set(3, 3).to_dense().astype(int)
    array([[1, 0, 0],
           [0, 1, 0],
           [0, 0, 1]])
    """
    kind = namespace_of(tensor)
    if kind is None or kind.name != "torch" or str(tensor.layout) == "torch.strided":
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
