"""Import masks of PyTorch's FlexAttention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..._util.imports import whole_imports
from ...errors import BackendUnavailableError
from ..base.check import check_mask_mod, integer
from ..base.content import on_host
from ..base.pattern import Pattern
from ..listed.masks import BlockLayout
from ..sequence.queries_at import QueriesAt
from .mask_mod import BATCH, HEAD, MaskMod

__all__ = ["from_block_mask", "from_mask_mod"]


def from_mask_mod(mask_mod: Callable[..., Any], *, batch: int | None = None, heads: int | None = None) -> Pattern:
    """Create a pattern from a FlexAttention ``mask_mod(b, h, q_idx, kv_idx)``.

    Traces the function once and copies the tensors it refers to, so later changes have no effect. Tracing the same
    operations on equal tensors again gives an equal pattern, which shares its plan.

    Parameters
    ----------
    mask_mod : callable
        Maps scalar integer tensors (batch entry, query head, query row, key) to a scalar bool tensor. May index other
        tensors, ``document[q_idx] == document[kv_idx]``.
    batch, heads : int, optional
        Numbers of batch entries and query heads; any by default.

    Returns
    -------
    Pattern
        Over query rows, as in FlexAttention: the first query has q_idx 0, even if q_len < kv_len.

    Raises
    ------
    BackendUnavailableError
        If PyTorch is not installed.
    TypeError
        If `mask_mod` does not return a scalar bool tensor, uses the value of an index (``if``, ``int()``), mutates a
        tensor, draws random numbers with PyTorch, refers to a tensor that is sparse, nested, quantized or without data,
        or uses an operation that :func:`torch.vmap` does not support.
    ValueError
        During planning, if an index into a tensor is out of range, or if more than 2³⁰ pairs would be evaluated one by
        one.

    Notes
    -----
    PyTorch evaluates terms of the query alone or of the key alone, once per position. The planner evaluates terms of
    both on whole tiles, if they consist of arithmetic, comparisons, bitwise and boolean operators, monotone functions,
    look-ups in tensors, and ``any``, ``all`` and ``sum`` of small vectors. Equal remainders by a constant become views
    of every n-th token, and equal labels in any order become :class:`~spattn.patterns.Clusters`. Other terms, and tiles
    that no rule decides, are evaluated pair by pair, on one tile of each equivalence class that the rest of the mask
    leaves undecided. Floats that a ``sum`` adds are added in order.

    References
    ----------
    Dong et al. Flex Attention: A Programming Model for Generating Optimized Attention Kernels. arXiv:2412.05496.

    Examples
    --------
    >>> import torch
    >>> from spattn.patterns.interop import from_mask_mod
    >>> document = torch.tensor([0, 0, 1, 1])
    >>> def mask_mod(b, h, q_idx, kv_idx):
    ...     return (document[q_idx] == document[kv_idx]) & (q_idx >= kv_idx)
    >>> from_mask_mod(mask_mod).index_set(4, 4).to_dense().astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [0, 0, 1, 0],
           [0, 0, 1, 1]])
    """
    return _traced(mask_mod, batch, heads)


def _traced(mask_mod: Callable[..., Any], batch: int | None = None, heads: int | None = None) -> MaskMod:
    if not callable(mask_mod):
        raise TypeError(f"mask_mod: expected a function of b, h, q_idx and kv_idx, got {mask_mod!r}")
    check_mask_mod("mask_mod", mask_mod)
    given = [n if n is None else integer(name, n, 1) for name, n in (("batch", batch), ("heads", heads))]
    try:
        with whole_imports:
            from ...trace.recorder import trace
    except ModuleNotFoundError as error:
        raise BackendUnavailableError("mask_mod: requires PyTorch; pip install torch") from error
    found = trace(mask_mod, 4)
    own = (0 if argument in found.used else 1 for argument in (BATCH, HEAD))
    return MaskMod(found, *(n or size for n, size in zip(given, own, strict=True)))


def from_block_mask(block_mask: Any) -> Pattern:
    """Create a pattern from a FlexAttention BlockMask.

    As in FlexAttention's kernels, all pairs of full blocks are allowed, and those pairs of partial blocks that the
    mask_mod allows.

    Parameters
    ----------
    block_mask : torch.nn.attention.flex_attention.BlockMask
        From ``create_block_mask`` or ``BlockMask.from_kv_blocks``; copied with its mask_mod's tensors.

    Returns
    -------
    Pattern
        Valid only for the number of key blocks of `block_mask`, and for at most its number of queries.

    Raises
    ------
    TypeError
        If `block_mask` is not a BlockMask, or as for :func:`from_mask_mod`.

    Examples
    --------
    >>> from torch.nn.attention.flex_attention import create_block_mask
    >>> from spattn.patterns import Causal
    >>> from spattn.patterns.interop import from_block_mask
    >>> block_mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 300, 300, device="cpu")
    >>> from_block_mask(block_mask).index_set(300, 300) == Causal().index_set(300, 300)
    True
    """
    fields = ("seq_lengths", "BLOCK_SIZE", "mask_mod", "kv_num_blocks", "kv_indices", "full_kv_num_blocks")
    if not all(hasattr(block_mask, name) for name in fields):
        raise TypeError(f"block_mask: expected a BlockMask, got {type(block_mask).__name__}")
    block, tokens = tuple(block_mask.BLOCK_SIZE), max(block_mask.seq_lengths)
    shape = tuple(-(-tokens // size) for size in block)
    listed_blocks = BlockLayout(_layout(block_mask.kv_num_blocks, block_mask.kv_indices, shape), block)
    allowed = listed_blocks & _traced(block_mask.mask_mod)
    if block_mask.full_kv_num_blocks is not None:
        full = _layout(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, shape)
        allowed = allowed | BlockLayout(full, block)
    return QueriesAt(allowed, 0)


def _layout(counts: Any, listed: Any, shape: tuple[int, int]) -> np.ndarray:
    """Scatter block lists, with `counts` valid entries per row, into a layout of this shape."""
    counts, listed = on_host(counts), on_host(listed)
    rows, columns = listed.shape[-2:]
    layout = np.zeros((*listed.shape[:-2], rows, columns + 1), dtype=bool)
    np.put_along_axis(layout, np.where(np.arange(columns) < counts[..., None], listed, columns), True, axis=-1)
    widths = [(0, 0)] * (listed.ndim - 2) + [(0, n - have) for n, have in zip(shape, (rows, columns), strict=True)]
    return np.pad(layout[..., :columns], widths)
