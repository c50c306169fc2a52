"""Temperatures of the softmax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ..composition import ScoreFunction
from ..functions import take
from ..recorder import is_array
from ._numbers import check_size, number, rows

__all__ = ["temperature"]


@dataclass(frozen=True, eq=False, repr=False)
class temperature(ScoreFunction):
    """Divide scores by a temperature: ``score / value``.

    Parameters
    ----------
    value : float, or (), (heads_q,), (batch,) or (q_len,) array of floats
        Arrays get a gradient.
    per : "head" | "query" | "batch"
        Meaning of an array with one axis: one temperature per query head, query (row of ``q``) or batch entry.

    Examples
    --------
    >>> import numpy as np
    >>> from spattn.score import temperature
    >>> function = temperature(np.array([1.0, 2.0], np.float32))
    >>> float(function(3.0, 0, 1, 0, 0))
    1.5
    """

    value: Any
    per: Literal["head", "query", "batch"] = "head"

    def __post_init__(self) -> None:
        number("value", self.value)
        if self.per not in ("head", "query", "batch"):
            raise ValueError(f"per: expected 'head', 'query' or 'batch', got {self.per!r}")

    def __call__(self, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        if not is_array(self.value) or self.value.ndim == 0:
            return score / self.value
        check_size("temperature", self.value, 0, score, {"head": "heads", "batch": "batch", "query": "q_len"}[self.per])
        index = h if self.per == "head" else b if self.per == "batch" else rows(score, q)
        return score / take(self.value, index)
