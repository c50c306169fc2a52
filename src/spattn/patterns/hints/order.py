"""Patterns under a token permutation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..._util.cached import cached_property
from ..base.pattern import Pattern
from ..base.predicate import allowed, apply

__all__ = ["InOrder", "inverse"]


def inverse(order: np.ndarray) -> np.ndarray:
    """Invert a permutation."""
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    return places


@dataclass(frozen=True, eq=False)
class InOrder(Pattern):
    """A bound pattern under a permutation of queries and keys; `first` is the position of the first query."""

    inner: Pattern
    q_order: np.ndarray
    kv_order: np.ndarray
    first: int

    def __post_init__(self) -> None:  # no checks: only the planner creates these
        pass

    @cached_property
    def _positions(self) -> np.ndarray:
        return self.q_order + self.first

    @cached_property
    def _places(self) -> np.ndarray:
        return inverse(self.kv_order)

    @property
    def _lists_pairs(self) -> bool:  # type: ignore[override]  # per instance
        return self.inner._lists_pairs

    def allows(self, q: Any, k: Any) -> Any:
        of_query = apply(lambda p: self._positions[p - self.first], q)
        return allowed(self.inner, of_query, apply(lambda p: self.kv_order[p], k))

    def _pairs(self, q: np.ndarray, kv_len: int) -> tuple[np.ndarray, np.ndarray]:
        row, key = self.inner._pairs(self._positions[q - self.first], kv_len)
        place = self._places[key]
        order = np.lexsort((place, row))
        return row[order], place[order]
