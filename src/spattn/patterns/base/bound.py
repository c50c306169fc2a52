"""Base class for per-row patterns after bind()."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from .pattern import Pattern

__all__ = ["Bound"]


@dataclass(frozen=True)
class Bound(Pattern):
    """A per-row pattern at known lengths; row 0 stands at position `first`."""

    given: Any
    first: int

    def sizes(self) -> tuple[int, int]:
        sizes: tuple[int, int] = self.given.sizes()
        return sizes

    def at(self, batch: int, head: int) -> Pattern:
        return replace(self, given=self.given.at(batch, head))

    def bind(self, q_len: int, kv_len: int) -> Pattern:
        pattern: Pattern = self.given.bind(q_len, kv_len)
        return pattern

    def _description(self) -> dict[str, Any]:
        description: dict[str, Any] = self.given._description()
        return description
