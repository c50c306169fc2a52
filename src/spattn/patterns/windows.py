"""Windows: the keys near a query, all of them or every so many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..index_set import Runs
from ._check import assign, reach
from ._lattice import Part, residue_parts
from ._parameters import Count, Positive
from ._pattern import Pattern
from ._registry import register
from .basic import always

__all__ = ["DilatedWindow", "SlidingWindow"]


@register("sliding_window")
@dataclass(frozen=True)
class SlidingWindow(Pattern):
    """Keys at most `left` tokens before and at most `right` tokens after the query.

    For long sequences whose tokens depend mostly on near ones, as in the local layers of language models.

    Parameters
    ----------
    left : int or None
        Tokens before the query; None = unbounded.
    right : int or None, optional
        Tokens after the query; None = unbounded. As many as `left` when left out.

    Raises
    ------
    TypeError
        If `left` or `right` is neither an integer nor None.
    ValueError
        If one of them is negative.

    Notes
    -----
    A window of `left` tokens back has ``left + 1`` keys, the query's own included: Mistral's ``sliding_window=W`` is
    ``SlidingWindow(W - 1, 0)``, FlashAttention's ``window_size=(l, r)`` is ``SlidingWindow(l, r)``. At the ends of the
    sequence the window is cut off; :class:`Neighborhood` shifts it instead.

    References
    ----------
    Beltagy, Peters, Cohan. Longformer. arXiv:2004.05150, §3.1.

    Examples
    --------
    >>> SlidingWindow(2, 0).index_set(4, 4).to_dense().astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [1, 1, 1, 0],
           [0, 1, 1, 1]])
    """

    left: Count | None
    right: Count | None | Literal["left"] = "left"
    translation_invariant = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.right == "left":
            assign(self, right=self.left)

    @property
    def _right(self) -> int | None:
        return self.left if self.right == "left" else self.right

    def allows(self, q: Any, k: Any) -> Any:
        if self.left is None and self._right is None:
            return always(q) & always(k)
        after = always(q) if self.left is None else q - reach(self.left) <= k
        right = self._right
        before = always(k) if right is None else k <= q + reach(right)
        return after & before

    def runs(self, q: np.ndarray, kv_len: int) -> Runs:
        start = np.zeros_like(q) if self.left is None else q - reach(self.left)
        right = self._right
        return Runs.span(start, kv_len if right is None else q + reach(right) + 1, kv_len)

    @classmethod
    def typical(cls) -> tuple[Pattern, int]:
        return cls(256), 16384


@register("dilated_window")
@dataclass(frozen=True)
class DilatedWindow(Pattern):
    """Every `dilation`-th key around the query: ``j = p + dilation * t, -left <= t <= right``.

    For a wider view at the cost of a plain window, where some of the near context can be left out.

    Parameters
    ----------
    left : int
        Keys before the query.
    right : int, optional
        Keys after the query; as many as `left` when left out.
    dilation : int, optional
        Distance of neighbouring keys in tokens.

    Raises
    ------
    TypeError
        If a parameter is not an integer.
    ValueError
        If `left` or `right` is negative, or `dilation` less than 1.

    References
    ----------
    Beltagy, Peters, Cohan. Longformer. arXiv:2004.05150, §3.1.
    """

    left: Count
    right: Count | Literal["left"] = "left"
    dilation: Positive = 1
    translation_invariant = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.right == "left":
            assign(self, right=self.left)

    def spans(self) -> tuple[int, int, int]:
        """Tokens from the query back to its first key, on to its last, and from one key to the next."""
        step = reach(self.dilation)
        right = self.left if self.right == "left" else self.right
        back, ahead = (reach(n * self.dilation) // step * step for n in (self.left, right))
        return back, ahead, step

    def allows(self, q: Any, k: Any) -> Any:
        back, ahead, d = self.spans()
        return (q % d == k % d) & (q - back <= k) & (k <= q + ahead)

    def runs(self, q: np.ndarray, kv_len: int) -> Runs:
        back, ahead, d = self.spans()
        return Runs.stepped(q - back, q + ahead + 1, d, kv_len)

    def parts(self, q_len: int, kv_len: int) -> tuple[Part, ...]:
        return (Part(self),) if self.dilation == 1 else residue_parts(self, reach(self.dilation), 0, q_len, kv_len)

    @classmethod
    def example(cls) -> tuple[Pattern, int]:
        return cls(3, dilation=3), 32

    @classmethod
    def typical(cls) -> tuple[Pattern, int]:
        return cls(256, dilation=4), 16384
