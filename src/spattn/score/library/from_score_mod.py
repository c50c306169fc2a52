"""Score functions of FlexAttention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..composition import ScoreFunction
from ..tracing import call
from ._numbers import rows

__all__ = ["from_score_mod"]


@dataclass(frozen=True, eq=False, repr=False)
class from_score_mod(ScoreFunction):
    """Run a ``score_mod`` of ``torch.nn.attention.flex_attention`` unchanged.

    Parameters
    ----------
    score_mod : callable
        ``(score, b, h, q_idx, kv_idx) -> score``, as FlexAttention calls it: `h` is the query head, and `q_idx` and
        `kv_idx` count from 0 at the first query and the first key. Tensors that it captures get gradients.

    Notes
    -----
    Score functions of spattn count queries so that the last one has the position of the last key. Both agree if q_len
    is kv_len. FlexAttention's ``scale`` precedes its ``score_mod``, as here.

    Examples
    --------
    >>> from spattn.score import from_score_mod
    >>> function = from_score_mod(lambda score, b, h, q_idx, kv_idx: score + (kv_idx - q_idx))
    """

    score_mod: Callable[..., Any]

    def __post_init__(self) -> None:
        if not callable(self.score_mod):
            raise TypeError(f"score_mod: expected a function, got {type(self.score_mod).__name__}")

    def __call__(self, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return call(self.score_mod, score, b, h, rows(score, q), k)
