"""Longformer (Beltagy, Peters, Cohan, arXiv:2004.05150)."""

from __future__ import annotations

from typing import Any

from ..base.check import integer
from ..base.parameters import Count, Positive
from ..base.pattern import Pattern
from ..base.recipe import recipe
from ..sequence.tokens import GlobalTokens
from ..sequence.windows import DilatedWindow

__all__ = ["longformer"]


def _random(draw: Any, sizes: Any) -> tuple[tuple[Any, ...], Any]:
    side, dilation = draw.size(1, sizes.kv_len // 2), draw.size(1, sizes.kv_len // 4)
    return (2 * side, dilation, draw.choice([draw.integer(0, 4), draw.positions(sizes.kv_len)])), sizes


@recipe("longformer", example=((8, 1, (0, 1)), 32), typical=((512, 1, 16), 16384), random=_random)
def longformer(window: int, dilation: Positive = 1, global_tokens: Count | tuple[Count, ...] = ()) -> Pattern:
    """A (dilated) window around each query, and global tokens.

    For long documents with a few tokens that must see everything, as in classification and question answering.

    Parameters
    ----------
    window : int
        Even number of keys on both sides together, as in the paper and in Hugging Face's ``attention_window``: each
        query has ``window // 2`` keys on either side and its own.
    dilation : int, optional
        Distance between neighbouring keys of the window in tokens.
    global_tokens : int or tuple of int, optional
        Number of leading global tokens, or their positions: they attend to all keys, and all queries to them.

    Returns
    -------
    Pattern
        ``DilatedWindow(window // 2, window // 2, dilation) | GlobalTokens(global_tokens)``.

    References
    ----------
    Beltagy, Peters, Cohan. Longformer: The Long-Document Transformer. arXiv:2004.05150.
    """
    side = integer("window", window) // 2
    if window < 2 or window % 2:
        raise ValueError(f"window: expected an even number >= 2, got {window}")
    local = DilatedWindow(side, side, dilation)
    return local | GlobalTokens(global_tokens) if global_tokens else local
