"""Import xFormers' masks, recognized by class name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..base.pattern import Pattern
from ..sequence.basic import Causal
from ..sequence.queries_at import QueriesAt
from ..sequence.windows import SlidingWindow
from .other_libraries import windows_in_sequences

__all__ = ["from_xformers"]


def from_xformers(attn_bias: Any) -> Pattern:
    """Create the pattern of a mask of ``xformers.ops.fmha.attn_bias``.

    Parameters
    ----------
    attn_bias : object
        An instance of ``LowerTriangularMask`` (aligned to the top left corner), ``LowerTriangularFromBottomRightMask``,
        ``LocalAttentionFromBottomRightMask``, ``BlockDiagonalMask`` or a mask derived from these, including those with
        padded or gappy keys.

    Returns
    -------
    Pattern
        If `attn_bias` is block-diagonal, the pattern is valid only for its packed lengths.

    Raises
    ------
    TypeError
        If `attn_bias` is of another class, such as an additive bias or a paged mask.

    Examples
    --------
    >>> class LowerTriangularMask:  # stands in for xFormers' class
    ...     __module__ = "xformers.ops.fmha.attn_bias"
    >>> from_xformers(LowerTriangularMask()).index_set(2, 3).to_dense().astype(int)
    array([[1, 0, 0],
           [1, 1, 0]])
    """
    cls = type(attn_bias)
    make = _MASKS.get(cls.__name__) if cls.__module__.partition(".")[0] == "xformers" else None
    if make is None:
        raise TypeError(f"attn_bias: expected a mask of xformers.ops.fmha.attn_bias, got {cls.__name__}")
    return make(attn_bias)


def _window(bias: Any) -> tuple[int, int]:
    """Return the keys before and after the query's position; a window of W keys includes the query's own."""
    if hasattr(bias, "window_left"):
        return bias.window_left, bias.window_right
    return bias._window_size - 1, 0


def _in_blocks(window: Callable[[Any], tuple[int, int]], at_end: bool) -> Callable[[Any], Pattern]:
    """Return a converter of block-diagonal masks whose windows are aligned to the end or the start of each block."""

    def make(bias: Any) -> Pattern:
        (q_first, q_end), (first, end) = (
            np.array([*info.intervals()], np.int64).reshape(-1, 2).T for info in (bias.q_seqinfo, bias.k_seqinfo)
        )
        kv_len = int(bias.k_seqinfo.seqstart_py[-1])
        return windows_in_sequences(q_end - q_first, first, end - first, kv_len, *window(bias), at_end=at_end)

    return make


def _everything(bias: Any) -> tuple[int, int]:
    return -1, -1


def _earlier(bias: Any) -> tuple[int, int]:
    return -1, 0


_MASKS: dict[str, Callable[[Any], Pattern]] = {
    "LowerTriangularMask": lambda bias: QueriesAt(Causal(), 0),
    "LowerTriangularFromBottomRightMask": lambda bias: Causal(),
    "LowerTriangularFromBottomRightLocalAttentionMask": lambda bias: SlidingWindow(*_window(bias)),
    "LocalAttentionFromBottomRightMask": lambda bias: SlidingWindow(*_window(bias)),
    "BlockDiagonalMask": _in_blocks(_everything, at_end=True),
    "BlockDiagonalCausalMask": _in_blocks(_earlier, at_end=False),
    "BlockDiagonalCausalFromBottomRightMask": _in_blocks(_earlier, at_end=True),
    "BlockDiagonalCausalLocalAttentionMask": _in_blocks(_window, at_end=False),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": _in_blocks(_window, at_end=True),
    "BlockDiagonalPaddedKeysMask": _in_blocks(_everything, at_end=True),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": _in_blocks(_earlier, at_end=True),
    "BlockDiagonalLocalAttentionPaddedKeysMask": _in_blocks(_window, at_end=True),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": _in_blocks(_window, at_end=True),
    "BlockDiagonalGappyKeysMask": _in_blocks(_everything, at_end=True),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": _in_blocks(_earlier, at_end=True),
}
