"""A separate pattern per query head or batch entry."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..._util.cached import cached_property
from ...index_set import Runs
from ..hints.closed_forms import Ends
from ..sequence.basic import Causal
from ..sequence.queries_at import QueriesAt
from ..sequence.windows import SlidingWindow
from .check import assign, integer
from .class_registry import register
from .composition import at_joint, joint_heads, joint_size, nesting
from .pattern import Part, Pattern

if TYPE_CHECKING:
    from .rows import AskedRows

__all__ = ["PerBatch", "PerHead", "pattern_tuple"]

_AXES = ("batch entry", "head")
_HASHED = 8  # patterns of a hash


def pattern_tuple(patterns: object) -> tuple[Pattern, ...]:
    """Check a sequence of patterns and return it as a tuple."""
    if isinstance(patterns, Pattern) or not isinstance(patterns, Iterable):
        raise TypeError(f"patterns: expected a sequence of patterns, got {patterns!r}")
    found = tuple(patterns)
    for pattern in found:
        if not isinstance(pattern, Pattern):
            raise TypeError(f"patterns: expected patterns, got {pattern!r}")
    return found


@dataclass(frozen=True)
class Chosen(Pattern):
    """Base class of PerBatch (`axis` 0) and PerHead (`axis` 1): :meth:`at` selects a pattern along `axis`."""

    patterns: tuple[Pattern, ...]

    axis: ClassVar[int]
    _different: ClassVar[set[tuple[int, int]]]  # sizes of the patterns, set per instance; not a dataclass field

    def __post_init__(self) -> None:
        patterns, one = pattern_tuple(self.patterns), _AXES[self.axis]
        if not patterns:
            raise ValueError("patterns: expected at least one pattern, got none")
        sizes = {pattern.sizes() for pattern in patterns}
        for own in (size[self.axis] for size in sizes):
            if own not in (0, 1, len(patterns)):
                raise ValueError(f"patterns: expected patterns for one {one} or {len(patterns)}, got one for {own}")
        assign(self, patterns=patterns, _different=sizes, **nesting(patterns))

    def bind(self, q_len: int, kv_len: int) -> Pattern:
        return type(self)(tuple(p.bind(q_len, kv_len) for p in self.patterns))

    @cached_property
    def _sizes(self) -> tuple[int, int]:  # cached: every step of generation needs them
        other = 1 - self.axis
        found = joint_size({size[other] for size in self._different}, other)
        several = len(self.patterns) > 1
        sizes = found, len(self.patterns) if several else self.patterns[0].sizes()[self.axis]
        return sizes if self.axis else sizes[::-1]

    def sizes(self) -> tuple[int, int]:
        return self._sizes

    def grids(self) -> frozenset[tuple[int, ...]]:
        return frozenset().union(*(p.grids() for p in self.patterns))

    def at(self, batch: int, head: int) -> Pattern:
        name, number = (("batch", batch), ("head", head))[self.axis]
        several = len(self.patterns) > 1
        chosen = integer(name, number, 0, len(self.patterns) - 1) if several else 0
        return at_joint(self.patterns[chosen], batch, head, self._sizes[1])

    def _only(self) -> Pattern:
        if len(self.patterns) > 1:
            name, one, got = type(self).__name__, _AXES[self.axis], len(self.patterns)
            raise ValueError(f"{name}: expected the pattern of one {one}, got {got}; use .at(batch, head)")
        return self.patterns[0]

    def _rows(self, asked: AskedRows) -> np.ndarray:
        together = None if self.axis else QueriesAt.together(self.patterns, asked.q_len)
        if together is not None:
            return asked.of(together)
        of_heads = asked.of_heads(self.patterns) if self.axis else None
        if of_heads is not None:
            return of_heads
        each = []
        for number, p in enumerate(self.patterns):
            if p.sizes() != (1, 1):
                return super()._rows(asked)
            each.append((asked.entry(None, number) if self.axis else asked.entry(number, None)).of(p))
        return np.concatenate(each, axis=self.axis)

    @cached_property
    def _hash(self) -> int:  # cached: every call hashes the pattern; a few of many patterns tell most steps apart
        few = self.patterns[:: -(-len(self.patterns) // _HASHED)]
        return hash((type(self).__qualname__, len(self.patterns), few))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.patterns,)  # without the hash, which differs between processes

    @property
    def _has_order(self) -> bool:  # type: ignore[override]  # per instance
        return any(p._has_order for p in self.patterns)

    def runs(self, q: np.ndarray, kv_len: int) -> Runs | None:
        return self._only().runs(q, kv_len)

    def parts(self, q_len: int, kv_len: int) -> tuple[Part, ...]:
        return self._only().parts(q_len, kv_len)

    def ends(self, q_len: int) -> Ends | None:
        return self._only().ends(q_len)


@register(
    "per_head",
    example=lambda: (((Causal(), SlidingWindow(4, 0)),), 32),
    typical=lambda: (((Causal(), SlidingWindow(511, 0)),), 4096),
)
@dataclass(frozen=True)
class PerHead(Chosen):
    """A separate pattern for each query head.

    For models that mix local and global heads.

    Parameters
    ----------
    patterns : tuple of Pattern
        One per query head; or fewer, each for a group of consecutive heads, if their number divides the number of
        heads. One that depends on the head, such as :class:`BigBird`, is that of each head of its group. In a
        composition, the numbers of its operands must divide the largest. All must support the same number of batch
        entries.
    """

    axis = 1
    __hash__ = Chosen.__hash__

    def _for_heads(self, heads: int) -> Pattern:
        """See :meth:`.Pattern._for_heads`; a pattern of a group of heads may differ between them."""
        several = len(self.patterns)
        if several in (1, heads) or all(p.sizes()[1] for p in self.patterns):
            return self
        return PerHead(tuple(self.patterns[head * several // heads] for head in range(heads)))

    def allows(self, q: Any, k: Any) -> Any:
        return self._only().allows(q, k)

    @classmethod
    def random(cls, draw: Any, sizes: Any) -> tuple[Pattern, Any]:
        heads = draw.choice([n for n in range(1, sizes.heads_q + 1) if sizes.heads_q % n == 0])
        own = sizes._replace(heads_q=1, heads_kv=1)
        return cls(tuple(draw.pattern(own) for _ in range(heads))), sizes


@register(
    "per_batch",
    example=lambda: (((SlidingWindow(4, 0),),), 32),  # one entry, for batch size 1
    typical=lambda: (((SlidingWindow(511, 0),),), 4096),
)
@dataclass(frozen=True)
class PerBatch(Chosen):
    """A separate pattern for each batch entry.

    For batches whose entries differ in global tokens, windows or cache lengths.

    Parameters
    ----------
    patterns : tuple of Pattern
        One per batch entry. Their numbers of heads must divide the largest.

    Examples
    --------
    >>> from spattn.patterns import GlobalTokens, SlidingWindow
    >>> pattern = SlidingWindow(1) | PerBatch((GlobalTokens((0,)), GlobalTokens((3,))))
    >>> pattern.index_set(4, 4, batch=0).row(2), pattern.index_set(4, 4, batch=1).row(0)
    (array([0, 1, 2, 3]), array([0, 1, 3]))
    """

    axis = 0
    __hash__ = Chosen.__hash__

    def _for_heads(self, heads: int) -> Pattern:
        """See :meth:`.Pattern._for_heads`."""
        own = joint_heads(self.patterns, heads)
        unchanged = all(new is old for new, old in zip(own, self.patterns, strict=True))
        return self if unchanged else PerBatch(tuple(own))

    def allows(self, q: Any, k: Any) -> Any:
        return self._only().allows(q, k)

    @classmethod
    def random(cls, draw: Any, sizes: Any) -> tuple[Pattern, Any]:
        own = sizes._replace(batch=1, heads_q=1, heads_kv=1)
        return cls(tuple(draw.pattern(own) for _ in range(sizes.batch))), sizes
