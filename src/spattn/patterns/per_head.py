"""A pattern of its own for each query head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..index_set import Runs
from ._check import assign, integer
from ._composition import nesting
from ._lattice import Part
from ._pattern import Pattern
from ._registry import register

__all__ = ["PerHead"]


@register("per_head")
@dataclass(frozen=True)
class PerHead(Pattern):
    """Head h attends as the h-th pattern says.

    For models with local heads beside global ones.

    Parameters
    ----------
    patterns : tuple of Pattern
        One for each query head; fewer, when their number divides the number of heads, serve groups of
        neighbouring heads.

    Raises
    ------
    TypeError
        If `patterns` is not a sequence of patterns.
    ValueError
        If it is empty, a pattern is made for another number of heads, or patterns nest more than 64 deep; from
        :meth:`sizes`, if patterns are made for different numbers of batch entries; from :meth:`allows`, if :meth:`at`
        has not chosen among several heads.
    """

    patterns: tuple[Pattern, ...]

    def __post_init__(self) -> None:
        if isinstance(self.patterns, Pattern) or not hasattr(self.patterns, "__iter__"):
            raise TypeError(f"patterns: expected a sequence of patterns, got {self.patterns!r}")
        patterns = tuple(self.patterns)
        for pattern in patterns:
            if not isinstance(pattern, Pattern):
                raise TypeError(f"patterns: expected patterns, got {pattern!r}")
            if pattern.sizes()[1] not in (0, 1, len(patterns)):
                heads = pattern.sizes()[1]
                raise ValueError(f"patterns: expected patterns of one head or {len(patterns)}, got one of {heads}")
        if not patterns:
            raise ValueError("patterns: expected at least one pattern, got none")
        assign(self, patterns=patterns, **nesting(patterns))

    def bind(self, q_len: int, kv_len: int) -> Pattern:
        return PerHead(tuple(p.bind(q_len, kv_len) for p in self.patterns))

    def sizes(self) -> tuple[int, int]:
        batch = {p.sizes()[0] for p in self.patterns} - {1}
        if len(batch - {0}) > 1:
            raise ValueError(f"patterns: expected patterns for one number of batch entries, got {sorted(batch)}")
        return max(batch, default=1), len(self.patterns)

    def at(self, batch: int, head: int) -> Pattern:
        number = integer("head", head, 0, len(self.patterns) - 1) if len(self.patterns) > 1 else 0
        return self.patterns[number].at(batch, number if len(self.patterns) > 1 else head)

    def _only(self) -> Pattern:
        if len(self.patterns) > 1:
            heads = len(self.patterns)
            raise ValueError(f"PerHead: expected the pattern of one head, got {heads}; use .at(batch, head)")
        return self.patterns[0]

    def allows(self, q: Any, k: Any) -> Any:
        return self._only().allows(q, k)

    def runs(self, q: np.ndarray, kv_len: int) -> Runs | None:
        return self._only().runs(q, kv_len)

    def parts(self, q_len: int, kv_len: int) -> tuple[Part, ...]:
        return self._only().parts(q_len, kv_len)

    @classmethod
    def example(cls) -> tuple[Pattern, int]:
        from .basic import Causal
        from .windows import SlidingWindow

        return cls((Causal(), SlidingWindow(4, 0))), 32

    @classmethod
    def typical(cls) -> tuple[Pattern, int]:
        from .basic import Causal
        from .windows import SlidingWindow

        return cls((Causal(), SlidingWindow(511, 0))), 4096

    @classmethod
    def random(cls, draw: Any, sizes: Any) -> tuple[Pattern, Any]:
        heads = draw.choice([n for n in range(1, sizes.heads_q + 1) if sizes.heads_q % n == 0])
        own = sizes._replace(heads_q=1, heads_kv=1)
        return cls(tuple(draw.pattern(own) for _ in range(heads))), sizes
