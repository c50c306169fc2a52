"""Patterns from the parameters by which other libraries describe their masks, each counted as its library counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..._util.ragged import ramp
from .. import deepspeed
from ..base.check import flag, integers, reach
from ..base.content import frozen_array
from ..base.pattern import Pattern
from ..grids.neighborhood import Neighborhood
from ..sequence.basic import Causal
from ..sequence.documents import check_cu_seqlens
from ..sequence.intervals import ColumnIntervals, RowIntervals
from ..sequence.windows import SlidingWindow

__all__ = ["from_deepspeed", "from_flash_attention", "from_flashmask", "from_natten"]

# Modes of DeepSpeed's configuration, and the keys that its reader knows beside "mode", "block" and _PER_HEAD.
_MODES: dict[str, tuple[Callable[..., Pattern], tuple[str, ...]]] = {
    "dense": (deepspeed.dense, ()),
    "fixed": (
        deepspeed.fixed,
        (
            "num_local_blocks",
            "num_global_blocks",
            "attention",
            "horizontal_global_attention",
            "num_different_global_patterns",
        ),
    ),
    "variable": (
        deepspeed.variable,
        (
            "num_random_blocks",
            "local_window_blocks",
            "global_block_indices",
            "global_block_end_indices",
            "attention",
            "horizontal_global_attention",
        ),
    ),
    "bigbird": (deepspeed.bigbird, ("num_random_blocks", "num_sliding_window_blocks", "num_global_blocks")),
    "bslongformer": (
        deepspeed.bslongformer,
        ("num_sliding_window_blocks", "global_block_indices", "global_block_end_indices"),
    ),
}
_PER_HEAD = "different_layout_per_head"


def from_deepspeed(config: dict[str, Any]) -> Pattern:
    """The pattern that the section ``"sparse_attention"`` of a DeepSpeed configuration describes.

    Parameters
    ----------
    config : dict
        The section, or a configuration that has it, as read from JSON; what is left out has the default of DeepSpeed's
        reader, which is ``"fixed"`` for ``"mode"`` and 0 for the random blocks of every mode.

    Returns
    -------
    Pattern
        One of :mod:`spattn.patterns.deepspeed`. Its random blocks are drawn by seed 0: DeepSpeed's differ from run to
        run.

    Raises
    ------
    TypeError
        If `config` is not a dict, or a value is of a wrong type.
    ValueError
        If the mode is unknown, a key is one that DeepSpeed's reader does not know for this mode and leaves out, or a
        value is out of range.

    Notes
    -----
    ``"attention": "unidirectional"`` leaves out blocks above the diagonal, not the pairs above it in blocks on the
    diagonal: ``& Causal()`` does.

    Examples
    --------
    >>> from_deepspeed({"mode": "bslongformer", "block": 32, "num_sliding_window_blocks": 5})
    bslongformer(block=32, num_sliding_window_blocks=5, global_block_indices=(0,), global_block_end_indices=None, \
attention='bidirectional')
    """
    if not isinstance(config, dict):
        raise TypeError(f"config: expected a dict, got {type(config).__name__}")
    section = dict(config.get("sparse_attention", config))
    mode = section.pop("mode", "fixed")
    if not isinstance(mode, str) or mode not in _MODES:
        raise ValueError(f"config: expected a mode of {', '.join(_MODES)}; got {mode!r}")
    make, known = _MODES[mode]
    per_head = flag(_PER_HEAD, section.pop(_PER_HEAD, False))
    unknown = set(section) - {"block", *known}
    if unknown:
        raise ValueError(f"config: expected keys of mode {mode!r}, {', '.join(('block', *known))}; got {unknown}")
    if "num_random_blocks" in known:
        section.setdefault("num_random_blocks", 0)  # which is not the default of DeepSpeed's class for it
        section["head"] = None if per_head else 0
    if section.get("num_different_global_patterns", 1) != 1 and not per_head:
        raise ValueError(f"config: expected {_PER_HEAD} with num_different_global_patterns, got False")
    made: Pattern = make(**section)
    return made


def from_natten(
    grid: int | tuple[int, ...],
    kernel_size: int | tuple[int, ...],
    *,
    stride: int | tuple[int, ...] = 1,
    dilation: int | tuple[int, ...] = 1,
    is_causal: bool | tuple[bool, ...] = False,
) -> Neighborhood:
    """NATTEN's neighbourhood attention, as ``natten.na1d``, ``na2d`` and ``na3d`` take it.

    Parameters
    ----------
    grid : int or tuple of int
        Tokens along each axis, which NATTEN reads from its tensors.
    kernel_size, stride, dilation : int or tuple of int
        By axis.
    is_causal : bool or tuple of bool, optional
        By axis.

    Returns
    -------
    Neighborhood

    Raises
    ------
    TypeError
        If a parameter is not of the type above.
    ValueError
        As :class:`Neighborhood` does.

    Examples
    --------
    >>> from_natten((8, 8), 3, is_causal=(True, False))
    Neighborhood(grid=(8, 8), kernel=(3, 3), dilation=(1, 1), stride=(1, 1), causal=(True, False))
    """
    return Neighborhood(grid, kernel_size, dilation, stride, is_causal)


def from_flashmask(startend_row_indices: npt.ArrayLike, causal: bool = True) -> Pattern:
    """FlashMask's column-wise intervals, as ``flashmask_attention`` of PaddlePaddle takes them.

    Parameters
    ----------
    startend_row_indices : (batch, heads, kv_len, bounds) int array
        Rows that do not attend to a key. With `causal` and one bound: those from it on; with two: those between.
        Without `causal` and two bounds: those from the first on and those before the second; with four: those between
        the first two and those between the last two.
    causal : bool, optional
        Whether keys behind the query are hidden too.

    Returns
    -------
    Pattern
        For as many queries as keys; fewer are the last ones.

    Raises
    ------
    TypeError
        If `startend_row_indices` is not of integers, or `causal` not a bool.
    ValueError
        If it has not four axes, or another number of bounds.

    References
    ----------
    Wang et al. FlashMask. arXiv:2410.01359.

    Examples
    --------
    >>> pattern = from_flashmask([[[[2], [2], [4], [4]]]])  # two documents of two tokens
    >>> pattern.index_set(4, 4).to_dense().astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [0, 0, 1, 0],
           [0, 0, 1, 1]])
    """
    array = frozen_array("startend_row_indices", startend_row_indices, np.int64, (4,))
    causal, bounds = flag("causal", causal), array.shape[-1]
    if bounds not in ((1, 2) if causal else (2, 4)):
        expected = "1 or 2" if causal else "2 or 4"
        raise ValueError(f"startend_row_indices: expected {expected} bounds, got {bounds}")
    one, *others = np.moveaxis(array, -1, 0)
    first, last = np.zeros_like(one), np.full_like(one, one.shape[-1])
    if causal:
        return ColumnIntervals(one, others[0] if others else last, causal=True)
    return ColumnIntervals(one, *(others if bounds == 4 else (last, first, others[0])))


def from_flash_attention(
    window_size: tuple[int, int] = (-1, -1),
    causal: bool = False,
    *,
    cu_seqlens_q: npt.ArrayLike | None = None,
    cu_seqlens_k: npt.ArrayLike | None = None,
) -> Pattern:
    """FlashAttention's mask: the arguments of ``flash_attn_func`` and ``flash_attn_varlen_func``.

    Parameters
    ----------
    window_size : (int, int), optional
        Keys before and after the query's place; a negative number is no bound.
    causal : bool, optional
        Whether keys after the query's place are hidden, whatever `window_size` says of them.
    cu_seqlens_q, cu_seqlens_k : (sequences + 1,) int arrays, optional
        Where sequences start that are packed one after another; `cu_seqlens_k` is as `cu_seqlens_q` where it is left
        out. In each sequence the last query stands beside the last key, also where their numbers differ.

    Returns
    -------
    Pattern
        With lengths: for as many queries and keys as the arrays end with, and no others.

    Raises
    ------
    TypeError
        If `window_size` is not of two integers, `causal` not a bool, or the arrays are not of integers.
    ValueError
        If there are not two numbers, the arrays are not cumulative lengths of equally many sequences, or there is
        `cu_seqlens_k` alone.

    Examples
    --------
    >>> from_flash_attention((4, -1), causal=True)
    SlidingWindow(left=4, right=0)
    >>> pattern = from_flash_attention(causal=True, cu_seqlens_q=[0, 1, 3], cu_seqlens_k=[0, 3, 5])
    >>> pattern.index_set(3, 5).to_dense().astype(int)
    array([[1, 1, 1, 0, 0],
           [0, 0, 0, 1, 0],
           [0, 0, 0, 1, 1]])
    """
    sides = integers("window_size", window_size)
    if len(sides) != 2:
        raise ValueError(f"window_size: expected two numbers, got {len(sides)}")
    left, right = (None if side < 0 else side for side in sides)
    right = 0 if flag("causal", causal) else right
    if cu_seqlens_q is None:
        if cu_seqlens_k is not None:
            raise ValueError("cu_seqlens_q: expected it beside cu_seqlens_k, got None")
        return Causal() if (left, right) == (None, 0) else SlidingWindow(left, right)
    q = check_cu_seqlens("cu_seqlens_q", cu_seqlens_q)
    k = q if cu_seqlens_k is None else check_cu_seqlens("cu_seqlens_k", cu_seqlens_k)
    if len(q) != len(k):
        raise ValueError(f"cu_seqlens_k: expected {len(q)} numbers, got {len(k)}")
    return windows_in_sequences(np.diff(q), k[:-1], np.diff(k), int(k[-1]), left, right)


def windows_in_sequences(
    queries: np.ndarray,
    start: np.ndarray,
    keys: np.ndarray,
    kv_len: int,
    left: int | None = None,
    right: int | None = None,
    at_end: bool = True,
) -> RowIntervals:
    """Packed sequences of so many `queries`, each with the `keys` keys from `start` on, of `kv_len` in all.

    A query sees `left` keys before its place and `right` after it, without bound where they are None. Its place is
    beside the key of the same number, counted from the end of the sequence, or from its start.
    """
    sequence = np.repeat(np.arange(len(queries)), queries)
    first, end = start[sequence], (start + keys)[sequence]
    place = (start + (keys - queries if at_end else 0))[sequence] + ramp(queries)
    low = first if left is None else np.maximum(first, place - reach(left))
    high = end if right is None else np.minimum(end, place + reach(right) + 1)
    return RowIntervals(low, high, kv_len)
