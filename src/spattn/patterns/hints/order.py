"""Patterns in another order of the tokens, in which pairs that are allowed lie together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..._util.cached import cached_property
from ..base.pattern import Pattern
from ..base.predicate import allowed, apply

__all__ = ["InOrder", "inverse"]


def inverse(order: np.ndarray) -> np.ndarray:
    """The place of each row, of the row at each place."""
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    return places


@dataclass(frozen=True, eq=False)
class InOrder(Pattern):
    """A bound pattern, asked for places: `first` is the position of the first query, and of the query at place 0."""

    inner: Pattern
    q_order: np.ndarray
    kv_order: np.ndarray
    first: int

    def __post_init__(self) -> None:
        """Nothing is checked: planning alone makes these."""

    @cached_property
    def _positions(self) -> np.ndarray:
        """Of the query at each place."""
        return self.q_order + self.first

    @cached_property
    def _places(self) -> np.ndarray:
        """Of each key."""
        return inverse(self.kv_order)

    @property
    def _lists_pairs(self) -> bool:  # type: ignore[override]  # of what it asks, not of its class
        return self.inner._lists_pairs

    def allows(self, q: Any, k: Any) -> Any:
        of_query = apply(lambda p: self._positions[p - self.first], q)
        return allowed(self.inner, of_query, apply(lambda p: self.kv_order[p], k))

    def _pairs(self, q: np.ndarray, kv_len: int) -> tuple[np.ndarray, np.ndarray]:
        row, key = self.inner._pairs(self._positions[q - self.first], kv_len)
        place = self._places[key]
        order = np.lexsort((place, row))
        return row[order], place[order]
