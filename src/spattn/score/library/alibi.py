"""Attention with linear biases."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..composition import ScoreFunction
from ..functions import take
from ._numbers import check_table, constants, sizes_of

__all__ = ["alibi", "alibi_slopes"]


def alibi_slopes(num_heads: int, rule: Literal["paper", "geometric"] = "paper") -> np.ndarray:
    """Return the slopes of ALiBi, one per query head.

    Parameters
    ----------
    num_heads : int
    rule : "paper" | "geometric"
        ``"paper"``: with n the largest power of two up to `num_heads`, ``2**(-8 * i / n)`` for i = 1 to n, then every
        other slope of 2 n heads, ``2**(-4 * i / n)`` for i = 1, 3, 5, …, as in the paper, BLOOM, MPT and cuDNN.
        ``"geometric"``: ``2**(-8 * i / num_heads)`` for i = 1 to `num_heads`, as in attention-gym.
        Both agree for powers of two.

    Returns
    -------
    (num_heads,) array of float32

    Raises
    ------
    TypeError
        If `num_heads` is not an integer.
    ValueError
        If `num_heads` is not positive, or for another rule.

    References
    ----------
    .. [1] O. Press, N. A. Smith, M. Lewis, "Train short, test long: Attention with linear biases enables input length
       extrapolation", ICLR 2022.

    Examples
    --------
    >>> from spattn.score import alibi_slopes
    >>> alibi_slopes(4)
    array([0.25      , 0.0625    , 0.015625  , 0.00390625], dtype=float32)
    >>> alibi_slopes(3)
    array([0.0625    , 0.00390625, 0.25      ], dtype=float32)
    """
    if isinstance(num_heads, bool) or not isinstance(num_heads, (int, np.integer)):
        raise TypeError(f"num_heads: expected an integer, got {type(num_heads).__name__}")
    if num_heads < 1:
        raise ValueError(f"num_heads: expected a positive integer, got {num_heads}")
    if rule == "geometric":
        return np.exp2(-8 * np.arange(1, num_heads + 1) / num_heads).astype(np.float32)
    if rule != "paper":
        raise ValueError(f"rule: expected 'paper' or 'geometric', got {rule!r}")
    n = 1 << (int(num_heads).bit_length() - 1)
    first = -8 * np.arange(1, n + 1) / n
    rest = -4 * np.arange(1, 2 * (num_heads - n), 2) / n
    return np.exp2(np.concatenate([first, rest])).astype(np.float32)


@functools.lru_cache(64)
def _slopes(num_heads: int) -> np.ndarray:
    """The paper's slopes, read-only, so that :mod:`spattn.score.kept_traces` keeps them with the trace."""
    found = alibi_slopes(num_heads)
    found.flags.writeable = False
    return found


@dataclass(frozen=True, eq=False, repr=False)
class alibi(ScoreFunction):
    """Add a bias that is linear in the distance: ``score + slope[h] * (k - q)``.

    Parameters
    ----------
    slopes : (heads_q,) array of floats, optional
        One per query head; it gets a gradient. None stands for :func:`alibi_slopes` of the call's number of heads.
    symmetric : bool, optional
        Add ``-slope[h] * abs(k - q)`` instead, as FlashAttention-2 does; for causal patterns, both are the same.

    Notes
    -----
    The last query has the position of the last key, also if q_len differs from kv_len, as in FlashAttention-2. Biases
    of libraries that count queries from 0 (FlashInfer) differ by a constant per row and head, which only changes
    ``lse``.

    References
    ----------
    .. [1] O. Press, N. A. Smith, M. Lewis, "Train short, test long: Attention with linear biases enables input length
       extrapolation", ICLR 2022.

    Examples
    --------
    >>> from spattn.score import alibi, alibi_slopes
    >>> function = alibi(alibi_slopes(4))
    >>> float(function(1.0, b=0, h=0, q=6, k=4))
    0.5
    """

    slopes: Any = None
    symmetric: bool = False

    def __post_init__(self) -> None:
        if self.slopes is not None:
            check_table("slopes", self.slopes, 1)

    def __call__(self, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        slopes = self.slopes
        sizes = sizes_of(score)
        if slopes is None:
            if sizes is None:
                raise TypeError("score: alibi() needs the number of heads: use alibi(alibi_slopes(num_heads))")
            slopes = constants(score, __name__, "_slopes", sizes.heads)
        elif sizes is not None and slopes.shape[0] != sizes.heads:
            raise ValueError(f"alibi: expected {sizes.heads} slopes, got {slopes.shape[0]}")
        slope = take(slopes, h)
        return score - slope * abs(q - k) if self.symmetric else score + slope * (k - q)
