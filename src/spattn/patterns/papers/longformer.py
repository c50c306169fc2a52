"""Longformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...index_set import Runs
from ..base.check import assign, integer
from ..base.parameters import Count, Positive
from ..base.pattern import Part, Pattern
from ..base.registry import register
from ..hints.lattice import Ends
from ..sequence.tokens import GlobalTokens, token_groups, token_set
from ..sequence.windows import DilatedWindow

__all__ = ["Longformer"]


@register("longformer")
@dataclass(frozen=True)
class Longformer(Pattern):
    """A (dilated) window around each query and global tokens.

    For long documents with a few tokens that must see everything, as in classification and question answering.

    Parameters
    ----------
    window : int
        Keys of the window on both sides together, even, as in the paper and as Hugging Face's ``attention_window``:
        each query has ``window // 2`` keys on either side and its own.
    dilation : int, optional
        Distance of neighbouring keys of the window in tokens.
    global_tokens : int or tuple of int, optional
        The first so many tokens, or these positions, attend to all keys and all queries attend to them.

    Raises
    ------
    TypeError
        If a parameter is not an integer, or a sequence of them for `global_tokens`.
    ValueError
        If `window` is odd or less than 2, `dilation` less than 1, or `global_tokens` or one of them negative.

    References
    ----------
    Beltagy, Peters, Cohan. Longformer: The Long-Document Transformer. arXiv:2004.05150.
    """

    window: int
    dilation: Positive = 1
    global_tokens: Count | tuple[Count, ...] = ()

    def __post_init__(self) -> None:
        window = integer("window", self.window)
        if window < 2 or window % 2:
            raise ValueError(f"window: expected an even number >= 2, got {window}")
        super().__post_init__()
        assign(self, window=window, global_tokens=token_set(self.global_tokens))

    def _composition(self) -> Pattern:
        window = DilatedWindow(self.window // 2, self.window // 2, self.dilation)
        return window | GlobalTokens(self.global_tokens) if self.global_tokens else window

    def allows(self, q: Any, k: Any) -> Any:
        return self._composition().allows(q, k)

    def runs(self, q: np.ndarray, kv_len: int) -> Runs:
        tokens = GlobalTokens(self.global_tokens)
        starts, stops = token_groups(self.global_tokens, kv_len)
        side, _, d = DilatedWindow(self.window // 2, dilation=self.dilation).spans()
        # The window falls into what lies before, between and after the groups of global tokens.
        first, last = np.append(0, stops), np.append(starts, kv_len)
        low, high = (q - side)[:, None], np.where(tokens.among(q), 0, q + side + 1)[:, None]
        start = np.maximum(first + (low - first) % d, low)
        count = np.maximum(-((start - np.minimum(high, last)) // d), 0)
        return tokens.runs(q, kv_len) | Runs(start, np.full_like(start, d), count)

    def parts(self, q_len: int, kv_len: int) -> tuple[Part, ...]:
        return self._composition().parts(q_len, kv_len)

    def ends(self, q_len: int) -> Ends | None:
        return self._composition().ends(q_len)

    @classmethod
    def example(cls) -> tuple[Pattern, int]:
        return cls(8, global_tokens=(0, 1)), 32

    @classmethod
    def typical(cls) -> tuple[Pattern, int]:
        return cls(512, global_tokens=16), 16384

    @classmethod
    def random(cls, draw: Any, sizes: Any) -> tuple[Pattern, Any]:
        side, dilation = draw.size(1, sizes.kv_len // 2), draw.size(1, sizes.kv_len // 4)
        return cls(2 * side, dilation, draw.value(cls, "global_tokens", sizes)), sizes
