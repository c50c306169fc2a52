"""Import masks of DeepSpeed, NATTEN, FlashMask, FlashAttention and xFormers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import deepspeed
from ..base.check import flag, integers
from ..base.content import frozen_array
from ..base.pattern import Pattern
from ..grids.neighborhood import Neighborhood
from ..sequence.basic import Causal
from ..sequence.intervals import ColumnIntervals
from ..sequence.packed import PackedWindows
from ..sequence.queries_at import QueriesAt
from ..sequence.windows import SlidingWindow

__all__ = ["from_deepspeed", "from_flash_attention", "from_flashmask", "from_natten", "from_xformers"]

# DeepSpeed's modes, and the keys that its reader reads in each besides "mode", "block" and _PER_HEAD.
_GLOBAL = ("global_block_indices", "global_block_end_indices")
_DIRECTION = ("attention", "horizontal_global_attention")
_WINDOW = "num_sliding_window_blocks"
_MODES: dict[str, tuple[Callable[..., Pattern], tuple[str, ...]]] = {
    "dense": (deepspeed.dense, ()),
    "fixed": (deepspeed.fixed, ("num_local_blocks", "num_global_blocks", *_DIRECTION, "num_different_global_patterns")),
    "variable": (deepspeed.variable, ("num_random_blocks", "local_window_blocks", *_GLOBAL, *_DIRECTION)),
    "bigbird": (deepspeed.bigbird, ("num_random_blocks", _WINDOW, "num_global_blocks")),
    "bslongformer": (deepspeed.bslongformer, (_WINDOW, *_GLOBAL)),
}
_PER_HEAD = "different_layout_per_head"
_KEYS = {"block", *(key for _, keys in _MODES.values() for key in keys)}  # of any mode


def from_deepspeed(config: dict[str, Any]) -> Pattern:
    """Create the pattern of the ``"sparse_attention"`` section of a DeepSpeed configuration.

    Parameters
    ----------
    config : dict
        The section, or a configuration that contains it, as read from JSON. Defaults are those of DeepSpeed's reader:
        mode ``"fixed"``, and no random blocks in any mode. Like that reader, this function ignores keys of other modes.

    Returns
    -------
    Pattern
        A pattern of :mod:`spattn.patterns.deepspeed`. Random blocks use seed 0; DeepSpeed's differ between runs.

    Raises
    ------
    TypeError
        If `config` is not a dict, or a value is of a wrong type.
    ValueError
        If the mode or a key is unknown, or a value is out of range; if ``"attention"`` is not ``"bidirectional"`` in a
        mode in which DeepSpeed's reader ignores it.

    Notes
    -----
    ``"attention": "unidirectional"`` drops blocks above the diagonal but keeps all pairs of the diagonal blocks; add
    ``& Causal()`` to mask them.

    Examples
    --------
    >>> from_deepspeed({"mode": "dense", "block": 32})
    deepspeed.dense(block=32)
    """
    if not isinstance(config, dict):
        raise TypeError(f"config: expected a dict, got {type(config).__name__}")
    section = dict(config.get("sparse_attention", config))
    mode = section.pop("mode", "fixed")
    if not isinstance(mode, str) or mode not in _MODES:
        raise ValueError(f"config: expected a mode of {', '.join(_MODES)}; got {mode!r}")
    make, known = _MODES[mode]
    per_head = flag(_PER_HEAD, section.pop(_PER_HEAD, False))
    if unknown := set(section) - _KEYS:
        raise ValueError(f"config: expected the keys {', '.join(('mode', _PER_HEAD, *sorted(_KEYS)))}; got {unknown}")
    if "attention" not in known and section.get("attention", "bidirectional") != "bidirectional":
        raise ValueError(
            f"config: DeepSpeed's mode {mode!r} is bidirectional and ignores 'attention', got {section['attention']!r}"
            "; remove the key, and join the pattern with & Causal()"
        )
    section = {key: value for key, value in section.items() if key in ("block", *known)}
    if "num_random_blocks" in known:
        section.setdefault("num_random_blocks", 0)  # the reader's default, not the class's
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
    """Create NATTEN's neighborhood attention from the arguments of ``natten.na1d``, ``na2d`` and ``na3d``.

    Parameters
    ----------
    grid : int or tuple of int
        Tokens along each axis, which NATTEN reads from its tensors.
    kernel_size, stride, dilation : int or tuple of int
        One for all axes, or one per axis.
    is_causal : bool or tuple of bool, optional
        One for all axes, or one per axis.

    Returns
    -------
    Neighborhood

    Examples
    --------
    >>> from_natten((8, 8), 3, is_causal=(True, False))
    Neighborhood(grid=(8, 8), kernel=(3, 3), dilation=(1, 1), stride=(1, 1), causal=(True, False))
    """
    return Neighborhood(grid, kernel_size, dilation, stride, is_causal)


def from_flashmask(startend_row_indices: npt.ArrayLike, causal: bool = True) -> Pattern:
    """Create the pattern of FlashMask's column intervals, the argument of PaddlePaddle's ``flashmask_attention``.

    Parameters
    ----------
    startend_row_indices : (batch, heads, kv_len, bounds) int array
        Bounds of the masked rows of each key. If `causal`, ``[s]`` masks rows >= s, and ``[s, e]`` masks s <= row < e.
        Otherwise, ``[s, e]`` masks rows >= s and rows < e, and ``[s, e, s2, e2]`` masks s <= row < e and
        s2 <= row < e2.
    causal : bool, optional
        Whether keys after the query are masked as well.

    Returns
    -------
    Pattern
        For q_len == kv_len; if q_len < kv_len, the queries are the last ones.

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
    """Create FlashAttention's mask from arguments of ``flash_attn_func`` and ``flash_attn_varlen_func``.

    Parameters
    ----------
    window_size : (int, int), optional
        Number of keys before and after the query's position; negative = unbounded.
    causal : bool, optional
        Whether keys after the query's position are masked, regardless of `window_size`.
    cu_seqlens_q, cu_seqlens_k : (sequences + 1,) int arrays, optional
        Cumulative lengths of packed sequences; `cu_seqlens_k` defaults to `cu_seqlens_q`. In each sequence, the last
        query is aligned to the last key.

    Returns
    -------
    Pattern
        If cu_seqlens are given, valid only for q_len == cu_seqlens_q[-1] and kv_len == cu_seqlens_k[-1].

    Raises
    ------
    ValueError
        If the arrays are not cumulative lengths, or differ in length, or if only `cu_seqlens_k` is given.

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
    left, right = (max(side, -1) for side in sides)
    right = 0 if flag("causal", causal) else right
    if cu_seqlens_q is None:
        if cu_seqlens_k is not None:
            raise ValueError("cu_seqlens_q: required with cu_seqlens_k, got None")
        return Causal() if (left, right) == (-1, 0) else SlidingWindow(left, right)
    made: Pattern = PackedWindows.from_cu_seqlens(cu_seqlens_q, cu_seqlens_k, left, right)
    return made


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
        return PackedWindows(q_end - q_first, first, end - first, kv_len, *window(bias), at_end)

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
