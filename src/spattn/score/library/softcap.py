"""Soft-capped scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..composition import ScoreFunction
from ..functions import tanh
from ._numbers import check_size, number, per_head

__all__ = ["softcap"]


@dataclass(frozen=True, eq=False, repr=False)
class softcap(ScoreFunction):
    """Keep scores between ``-cap`` and ``cap``: ``cap * tanh(score / cap)``.

    Parameters
    ----------
    cap : float, or () or (heads_q,) array of floats
        Positive; for all heads or one per query head. Arrays get a gradient.

    Notes
    -----
    The derivative is ``1 - tanh(score / cap) ** 2``. Gemma 2 [1]_ uses 50 for attention. Libraries differ in the order
    of a cap and a bias: ``softcap(c) | bias(x)`` caps first, as FlashAttention-2 does; ``bias(x) | softcap(c)`` caps
    the sum, as FlashInfer and tokamax do.

    References
    ----------
    .. [1] Gemma Team, "Gemma 2: Improving open language models at a practical size", 2024.

    Examples
    --------
    >>> from spattn.score import softcap
    >>> function = softcap(50.0)
    >>> round(float(function(1000.0, 0, 0, 0, 0)), 6)
    50.0
    """

    cap: Any

    def __post_init__(self) -> None:
        number("cap", self.cap)
        if isinstance(self.cap, (int, float)) and not self.cap > 0:
            raise ValueError(f"cap: expected a positive number, got {self.cap}")

    def __call__(self, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        check_size("softcap", self.cap, 0, score)
        cap = per_head(self.cap, h)
        return cap * tanh(score / cap)
