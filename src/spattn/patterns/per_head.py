"""A pattern of its own for each query head, or for each batch entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..index_set import Runs
from ._check import assign, integer
from ._composition import nesting
from ._lattice import Ends, Part
from ._pattern import Pattern
from ._registry import register
from .basic import Causal
from .windows import SlidingWindow

__all__ = ["PerBatch", "PerHead"]

_AXES = ("batch entry", "head")
_SEVERAL = ("batch entries", "heads")


@dataclass(frozen=True)
class Chosen(Pattern):
    """Shared by the two: patterns of which :meth:`at` chooses one along an axis, 0 of batch entries and 1 of heads."""

    patterns: tuple[Pattern, ...]

    axis: ClassVar[int]

    def __post_init__(self) -> None:
        if isinstance(self.patterns, Pattern) or not hasattr(self.patterns, "__iter__"):
            raise TypeError(f"patterns: expected a sequence of patterns, got {self.patterns!r}")
        patterns, one = tuple(self.patterns), _AXES[self.axis]
        for pattern in patterns:
            if not isinstance(pattern, Pattern):
                raise TypeError(f"patterns: expected patterns, got {pattern!r}")
            own = pattern.sizes()[self.axis]
            if own not in (0, 1, len(patterns)):
                raise ValueError(f"patterns: expected patterns of one {one} or {len(patterns)}, got one of {own}")
        if not patterns:
            raise ValueError("patterns: expected at least one pattern, got none")
        assign(self, patterns=patterns, **nesting(patterns))

    def bind(self, q_len: int, kv_len: int) -> Pattern:
        return type(self)(tuple(p.bind(q_len, kv_len) for p in self.patterns))

    def sizes(self) -> tuple[int, int]:
        other = 1 - self.axis
        found = {p.sizes()[other] for p in self.patterns} - {1}
        if len(found - {0}) > 1:
            raise ValueError(f"patterns: expected patterns for one number of {_SEVERAL[other]}, got {sorted(found)}")
        sizes = max(found, default=1), len(self.patterns)
        return sizes if self.axis else sizes[::-1]

    def grids(self) -> frozenset[tuple[int, ...]]:
        return frozenset().union(*(p.grids() for p in self.patterns))

    def at(self, batch: int, head: int) -> Pattern:
        name, number = (("batch", batch), ("head", head))[self.axis]
        several = len(self.patterns) > 1
        chosen = integer(name, number, 0, len(self.patterns) - 1) if several else 0
        return self.patterns[chosen].at(batch, head)

    def _only(self) -> Pattern:
        if len(self.patterns) > 1:
            name, one, got = type(self).__name__, _AXES[self.axis], len(self.patterns)
            raise ValueError(f"{name}: expected the pattern of one {one}, got {got}; use .at(batch, head)")
        return self.patterns[0]

    def runs(self, q: np.ndarray, kv_len: int) -> Runs | None:
        return self._only().runs(q, kv_len)

    def parts(self, q_len: int, kv_len: int) -> tuple[Part, ...]:
        return self._only().parts(q_len, kv_len)

    def ends(self, q_len: int) -> Ends | None:
        return self._only().ends(q_len)


@register("per_head")
@dataclass(frozen=True)
class PerHead(Chosen):
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

    axis = 1

    def allows(self, q: Any, k: Any) -> Any:
        return self._only().allows(q, k)

    @classmethod
    def example(cls) -> tuple[Pattern, int]:
        return cls((Causal(), SlidingWindow(4, 0))), 32

    @classmethod
    def typical(cls) -> tuple[Pattern, int]:
        return cls((Causal(), SlidingWindow(511, 0))), 4096

    @classmethod
    def random(cls, draw: Any, sizes: Any) -> tuple[Pattern, Any]:
        heads = draw.choice([n for n in range(1, sizes.heads_q + 1) if sizes.heads_q % n == 0])
        own = sizes._replace(heads_q=1, heads_kv=1)
        return cls(tuple(draw.pattern(own) for _ in range(heads))), sizes


@register("per_batch")
@dataclass(frozen=True)
class PerBatch(Chosen):
    """Batch entry b attends as the b-th pattern says.

    For batches whose entries have global tokens, windows or caches of their own.

    Parameters
    ----------
    patterns : tuple of Pattern
        One for each batch entry.

    Raises
    ------
    TypeError
        If `patterns` is not a sequence of patterns.
    ValueError
        If it is empty, a pattern is made for another number of batch entries, or patterns nest more than 64 deep; from
        :meth:`sizes`, if patterns are made for different numbers of heads; from :meth:`allows`, if :meth:`at` has not
        chosen among several batch entries.

    Examples
    --------
    >>> from spattn.patterns import GlobalTokens, SlidingWindow
    >>> pattern = SlidingWindow(1) | PerBatch((GlobalTokens((0,)), GlobalTokens((3,))))
    >>> pattern.index_set(4, 4, batch=0).row(2), pattern.index_set(4, 4, batch=1).row(0)
    (array([0, 1, 2, 3]), array([0, 1, 3]))
    """

    axis = 0

    def allows(self, q: Any, k: Any) -> Any:
        return self._only().allows(q, k)

    @classmethod
    def example(cls) -> tuple[Pattern, int]:
        return cls((SlidingWindow(4, 0),)), 32  # for one entry, as other examples are

    @classmethod
    def typical(cls) -> tuple[Pattern, int]:
        return cls((SlidingWindow(511, 0),)), 4096

    @classmethod
    def random(cls, draw: Any, sizes: Any) -> tuple[Pattern, Any]:
        own = sizes._replace(batch=1, heads_q=1, heads_kv=1)
        return cls(tuple(draw.pattern(own) for _ in range(sizes.batch))), sizes
