"""A separate pattern per query head, per batch entry, or per axis of a grid."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ...index_set import Runs
from ..base.check import MOST_RUNS, assign, integer
from ..base.composition import nesting
from ..base.pattern import Part, Pattern
from ..base.predicate import allowed
from ..base.registry import register
from ..hints.grid import GridPattern, box_runs, by_axis, coordinates, lengths, row_major, table_runs
from ..hints.lattice import Ends, Lattice, Span, lattice_product
from ..sequence.basic import Causal
from ..sequence.windows import SlidingWindow

__all__ = ["PerAxis", "PerBatch", "PerHead"]

_AXES = ("batch entry", "head")
_SEVERAL = ("batch entries", "heads")
_MOST_CELLS = 1 << 24  # of one axis's table


def _checked(patterns: object) -> tuple[Pattern, ...]:
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
    """Base of PerBatch and PerHead: :meth:`at` picks a pattern along `axis`, 0 = batch entries, 1 = heads."""

    patterns: tuple[Pattern, ...]

    axis: ClassVar[int]

    def __post_init__(self) -> None:
        patterns, one = _checked(self.patterns), _AXES[self.axis]
        for pattern in patterns:
            own = pattern.sizes()[self.axis]
            if own not in (0, 1, len(patterns)):
                raise ValueError(f"patterns: expected patterns for one {one} or {len(patterns)}, got one for {own}")
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
        One per query head, or per group of neighbouring heads if their number divides the number of heads. All must
        support the same number of batch entries.
    """

    axis = 1

    def allows(self, q: Any, k: Any) -> Any:
        return self._only().allows(q, k)

    @classmethod
    def random(cls, draw: Any, sizes: Any) -> tuple[Pattern, Any]:
        heads = draw.choice([n for n in range(1, sizes.heads_q + 1) if sizes.heads_q % n == 0])
        own = sizes._replace(heads_q=1, heads_kv=1)
        return cls(tuple(draw.pattern(own) for _ in range(heads))), sizes


@register(
    "per_batch",
    example=lambda: (((SlidingWindow(4, 0),),), 32),  # a single entry, to suit batch 1
    typical=lambda: (((SlidingWindow(511, 0),),), 4096),
)
@dataclass(frozen=True)
class PerBatch(Chosen):
    """A separate pattern for each batch entry.

    For batches whose entries differ in global tokens, windows or cache lengths.

    Parameters
    ----------
    patterns : tuple of Pattern
        One per batch entry. All must support the same number of heads.

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
    def random(cls, draw: Any, sizes: Any) -> tuple[Pattern, Any]:
        own = sizes._replace(batch=1, heads_q=1, heads_kv=1)
        return cls(tuple(draw.pattern(own) for _ in range(sizes.batch))), sizes


class _Side(NamedTuple):
    """A part along one axis, and the span of its queries' keys, if each has one."""

    part: Part
    span: Span | None

    @property
    def is_point(self) -> bool:
        """Whether it is a single coordinate, shifted along the axis."""
        return len(self.part.shifts) > 1 and self.part.query is not None and self.part.query.extents == (1,)


def _without_points(lattice: Lattice) -> Lattice:
    """Drop axes of one point, keeping at least one axis."""
    axes = [axis for axis in zip(lattice.strides, lattice.extents, strict=True) if axis[1] > 1]
    strides, extents = zip(*(axes or [(1, 1)]), strict=True)
    return lattice._replace(strides=strides, extents=extents)


def _span(pattern: Pattern, tokens: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the first key and the number of keys of each coordinate, or None if keys are not one span."""
    runs = pattern.runs(np.arange(tokens), tokens)
    if runs is None or runs.start.shape[1] != 1 or (runs.step != 1).any():
        return None
    return runs.start[:, 0], runs.count[:, 0]


def _sides(pattern: Pattern, tokens: int) -> list[_Side]:
    """Return the parts along an axis. A shorter first block gets a part of its own, so that the other blocks align with
    their lattice's first token; blocks of one token form one part with shifts."""
    parts = pattern.parts(tokens, tokens)
    if any(part.query is not None or part.key is not None for part in parts) or len(parts) != 1:
        return [_Side(part, None) for part in parts]
    found = _span(pattern, tokens)
    if found is None or not found[1].all():
        return [_Side(parts[0], None)]
    first, count = found
    if tokens > 1 and (count == 1).all() and (first == np.arange(tokens)).all():
        one = Lattice(0, (1,), (1,))
        return [_Side(Part(pattern, one, one, tuple((c, c) for c in range(tokens))), None)]
    blocks = np.flatnonzero(first == np.arange(tokens))
    cut = int(blocks[1]) if _in_blocks(first, count) and len(blocks) > 1 and count[0] < count[blocks[1]] else 0
    sides = ((0, cut), (cut, tokens)) if cut else ((0, tokens),)
    found_sides = []
    for begin, end in sides:
        lattice = None if end - begin == tokens else Lattice(begin, (1,), (end - begin,))
        own, last = first[begin:end] - begin, first[begin:end] + count[begin:end] - 1 - begin
        span = Span(tuple(own.tolist()), tuple(last.tolist()))
        found_sides.append(_Side(Part(pattern, lattice, lattice), span))
    return found_sides


def _in_blocks(first: np.ndarray, count: np.ndarray) -> bool:
    """Whether the spans partition an axis into blocks."""
    return bool((first[first] == first).all() and (count[first] == count).all())


@register(
    "per_axis",
    example=lambda: (((6, 6), (SlidingWindow(1), SlidingWindow(2))), 36),
    typical=lambda: (((64, 64), (SlidingWindow(6), SlidingWindow(6))), 4096),
)
@dataclass(frozen=True)
class PerAxis(GridPattern):
    """A pattern per axis of a token grid; a key is allowed if every axis allows its coordinate.

    For boxes of keys: image windows that are clipped at the edges, or frames that see only earlier ones.

    Parameters
    ----------
    grid : int or tuple of int
        Tokens along each axis, in row-major order.
    patterns : tuple of Pattern
        One per axis, over the coordinates along it; the same for all heads and batch entries.

    Notes
    -----
    A plan views each axis as the axis's own pattern does: by residue classes if that pattern is dilated.

    Examples
    --------
    >>> PerAxis((2, 3), (Causal(), SlidingWindow(1))).index_set(6, 6).row(3)
    array([0, 1, 3, 4])
    """

    patterns: tuple[Pattern, ...]

    def __post_init__(self) -> None:
        grid, patterns = lengths(self.grid), _checked(self.patterns)
        for pattern in patterns:
            if pattern.sizes() != (1, 1):
                raise ValueError(f"patterns: expected patterns of one batch entry and head, got {pattern!r}")
        if len(patterns) != len(grid):
            raise ValueError(f"patterns: expected {len(grid)} (one per axis), got {len(patterns)}")
        assign(self, grid=grid, patterns=patterns, **nesting(patterns))

    def _axes(self) -> Iterable[tuple[int, int, Pattern]]:
        """Return the tokens, the stride in tokens and the pattern of each axis."""
        return zip(by_axis(self.grid), row_major(by_axis(self.grid)), self.patterns, strict=True)

    def bind(self, q_len: int, kv_len: int) -> Pattern:
        super().bind(q_len, kv_len)
        return replace(self, patterns=tuple(p.bind(n, n) for n, _, p in self._axes()))

    def allows(self, q: Any, k: Any) -> Any:
        sides = (coordinates(side, by_axis(self.grid)) for side in (q, k))
        each = [allowed(p, x, y) for p, x, y in zip(self.patterns, *sides, strict=True)]
        return functools.reduce(operator.and_, each)

    def runs(self, q: np.ndarray, kv_len: int) -> Runs | None:
        grid = by_axis(self.grid)
        if q.min(initial=0) < 0:
            return None
        spans = [_span(p, n) for n, _, p in self._axes()]
        if all(span is not None for span in spans):
            return self._boxes([span for span in spans if span is not None], q, kv_len)
        if max(grid) ** 2 > _MOST_CELLS:
            return None
        return table_runs([p.index_set(n, n).to_dense() for n, _, p in self._axes()], grid, q)

    def _boxes(self, spans: list[tuple[np.ndarray, np.ndarray]], q: np.ndarray, kv_len: int) -> Runs | None:
        """Return the runs if each axis allows a single span of coordinates."""
        grid = by_axis(self.grid)
        most = tuple(int(count.max(initial=0)) for _, count in spans)
        if len(q) * math.prod(most[:-1]) > MOST_RUNS:
            return None
        start, count = zip(
            *((first[x], own[x]) for (first, own), x in zip(spans, coordinates(q, grid), strict=True)), strict=True
        )
        return box_runs(start, count, (1,) * len(grid), most, grid, kv_len)

    def parts(self, q_len: int, kv_len: int) -> tuple[Part, ...]:
        if q_len != kv_len:
            return (Part(self),)
        each = [_sides(p, n) for n, _, p in self._axes()]
        if all(side.part.query is None for side in each[-1]) and all(
            sides and sides[0].is_point for sides in each[:-1]
        ):
            return (Part(self),)  # lines of consecutive tokens: their views would be many and short
        parts = tuple(self._part(along) for along in itertools.product(*each))
        axes = (len(lattice.extents) for part in parts for lattice in (part.query, part.key) if lattice is not None)
        return parts if max(axes, default=0) <= 3 else (Part(self),)

    def _part(self, along: tuple[_Side, ...]) -> Part:
        """Build the part of one side per axis."""
        grid, steps = by_axis(self.grid), row_major(by_axis(self.grid))

        def product(lattices: Iterable[Lattice | None]) -> Lattice:
            return lattice_product([c or Lattice(0, (1,), (n,)) for c, n in zip(lattices, grid, strict=True)], steps)

        def moved(moves: Iterable[tuple[int, int]], side: int) -> int:
            return sum(move[side] * step for move, step in zip(moves, steps, strict=True))

        query, key = product(side.part.query for side in along), product(side.part.key for side in along)
        if any(side.is_point for side in along):
            query, key = _without_points(query), _without_points(key)
        each = itertools.product(*(side.part.shifts for side in along))
        shifts = tuple((moved(moves, 0), moved(moves, 1)) for moves in each)
        spans = [side.span for side in along if side.span is not None and not any(one.is_point for one in along)]
        pattern = replace(self, patterns=tuple(side.part.pattern for side in along))
        return Part(pattern, query, key, shifts, tuple(spans) if len(spans) == len(query.extents) else None)

    @classmethod
    def random(cls, draw: Any, sizes: Any) -> tuple[Pattern, Any]:
        shape, sizes = cls.random_grid(draw, sizes)
        axes = (sizes._replace(batch=1, heads_q=1, heads_kv=1, q_len=n, kv_len=n) for n in shape)
        return cls(shape, tuple(draw.pattern(axis).at(0, 0) for axis in axes)), sizes
