"""Factorized patterns of the Sparse Transformer (Child et al., arXiv:1904.10509 §4.2)."""

from __future__ import annotations

from typing import Any

from ..base.check import integer
from ..base.parameters import Positive
from ..base.pattern import Pattern
from ..base.recipe import recipe
from ..sequence.basic import BlockLocal, Causal, Columns, Stride
from ..sequence.windows import SlidingWindow

__all__ = ["fixed", "strided"]


@recipe("strided", example=((6,), 36), typical=((128,), 16384))
def strided(stride: Positive) -> Pattern:
    """The last `stride` keys and every `stride`-th key before them.

    For data with a regular period, such as images read row by row, and music.

    Parameters
    ----------
    stride : int
        Length of the local window, and distance between the column keys, in tokens.

    Returns
    -------
    Pattern
        ``Causal() & (SlidingWindow(stride - 1, 0) | Stride(stride))``:
        about ``stride + p / stride`` keys at position p.

    References
    ----------
    Child, Gray, Radford, Sutskever. Generating Long Sequences with Sparse Transformers. arXiv:1904.10509, §4.2.
    """
    return Causal() & (SlidingWindow(stride - 1, 0) | Stride(stride))


def _random_fixed(draw: Any, sizes: Any) -> tuple[tuple[Any, ...], Any]:
    block = draw.size(1, sizes.kv_len + 3)
    return (block, draw.integer(1, block)), sizes


@recipe("fixed", example=((8, 2), 32), typical=((128, 8), 16384), random=_random_fixed)
def fixed(block: Positive, summary: Positive) -> Pattern:
    """The query's own block and the last `summary` keys of every block before it.

    For text and other aperiodic data, where the last tokens of a block summarize it.

    Parameters
    ----------
    block : int
        Tokens of a block (the paper's stride).
    summary : int
        Tokens at the end of each block that later blocks attend to (the paper's c), at most `block`.

    Returns
    -------
    Pattern
        ``Causal() & (BlockLocal(block) | Columns(block, block - summary, block))``.

    References
    ----------
    Child, Gray, Radford, Sutskever. Generating Long Sequences with Sparse Transformers. arXiv:1904.10509, §4.2.
    """
    integer("summary", summary, 1, block)
    return Causal() & (BlockLocal(block) | Columns(block, block - summary, block))
