"""A pattern per axis of a grid, and the recipes axial and windowed."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import numpy as np

from ...index_set import Runs
from ..base.check import MOST_RUNS, Count, Positive, Range, assign, integer, per_axis
from ..base.class_registry import register
from ..base.composition import nesting
from ..base.pattern import Part, Pattern
from ..base.per_head import pattern_tuple
from ..base.predicate import allowed
from ..base.recipe import recipe
from ..hints.closed_forms import Lattice, Span, lattice_product
from ..sequence.basic import BlockLocal, Full
from ..sequence.documents import Documents
from ..sequence.windows import SlidingWindow
from .grid import GridPattern, box_runs, by_axis, coordinates, lengths, row_major, table_runs

__all__ = ["PerAxis", "axial", "windowed"]

_MOST_CELLS = 1 << 24  # maximum cells of the table of one axis


class _Side(NamedTuple):
    """A part along one axis, and its key span if the keys of every query form an interval."""

    part: Part
    span: Span | None

    @property
    def is_point(self) -> bool:
        """Return True if the part is one coordinate, repeated along the axis by shifts."""
        return len(self.part.shifts) > 1 and self.part.query is not None and self.part.query.extents == (1,)


def _without_points(lattice: Lattice) -> Lattice:
    """Drop axes of extent 1, but keep at least one axis."""
    axes = [axis for axis in zip(lattice.strides, lattice.extents, strict=True) if axis[1] > 1]
    strides, extents = zip(*(axes or [(1, 1)]), strict=True)
    return lattice._replace(strides=strides, extents=extents)


def _span(pattern: Pattern, tokens: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the first key and the number of keys of each coordinate, or None if its keys are not one interval."""
    runs = pattern.runs(np.arange(tokens), tokens)
    if runs is None or runs.start.shape[1] != 1 or (runs.step != 1).any():
        return None
    return runs.start[:, 0], runs.count[:, 0]


def _sides(pattern: Pattern, tokens: int) -> list[_Side]:
    """Return the parts along an axis. A shorter first block becomes a separate part, so that the other blocks start at
    the origin of their lattice. Blocks of one token form one part with shifts."""
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
    """Return True if the spans partition the axis into blocks."""
    return bool((first[first] == first).all() and (count[first] == count).all())


@register(
    "per_axis",
    example=lambda: (((6, 6), (SlidingWindow(1), SlidingWindow(2))), 36),
    typical=lambda: (((64, 64), (SlidingWindow(6), SlidingWindow(6))), 4096),
)
@dataclass(frozen=True)
class PerAxis(GridPattern):
    """One pattern per axis of a token grid: a key is allowed if every axis allows its coordinate.

    For boxes of keys: image windows that are clipped at the edges, or frames that attend only to earlier frames.

    Parameters
    ----------
    grid : int or tuple of int
        Tokens along each axis, in row-major order.
    patterns : tuple of Pattern
        One pattern per axis, over the coordinates along that axis. It must not differ between heads or batch entries.

    Notes
    -----
    The views of a plan combine the views of all axes, for example residue classes along an axis with a dilated pattern.

    Examples
    --------
    >>> from spattn.patterns import Causal, SlidingWindow
    >>> PerAxis((2, 3), (Causal(), SlidingWindow(1))).index_set(6, 6).row(3)
    array([0, 1, 3, 4])
    """

    patterns: tuple[Pattern, ...]

    def __post_init__(self) -> None:
        grid, patterns = lengths(self.grid), pattern_tuple(self.patterns)
        for pattern in patterns:
            if pattern.sizes() != (1, 1):
                raise ValueError(f"patterns: expected patterns of one batch entry and head, got {pattern!r}")
        if len(patterns) != len(grid):
            raise ValueError(f"patterns: expected {len(grid)} (one per axis), got {len(patterns)}")
        assign(self, grid=grid, patterns=patterns, **nesting(patterns))

    def _axes(self) -> Iterable[tuple[int, int, Pattern]]:
        """Return (number of tokens, stride in tokens, pattern) of each axis."""
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
        """Return the runs if every axis allows one interval of coordinates; None if they exceed MOST_RUNS."""
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
            return (Part(self),)  # the views would be many short lines of consecutive tokens
        parts = tuple(self._part(along) for along in itertools.product(*each))
        axes = (len(lattice.extents) for part in parts for lattice in (part.query, part.key) if lattice is not None)
        return parts if max(axes, default=0) <= 3 else (Part(self),)

    def _part(self, along: tuple[_Side, ...]) -> Part:
        """Combine one part per axis into a part of the grid."""
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


def _random_axial(draw: Any, sizes: Any) -> tuple[tuple[Any, ...], Any]:
    shape, sizes = GridPattern.random_grid(draw, sizes)
    return (shape, draw.integer(-len(shape), len(shape) - 1)), sizes


@recipe("axial", example=(((6, 6), 0), 36), typical=(((64, 64), 0), 4096), random=_random_axial, fixes_lengths=True)
def axial(grid: Positive | tuple[Positive, ...], axis: Annotated[int, Range()]) -> Pattern:
    """Allow the keys that share all coordinates with the query except the one along `axis`.

    For images and volumes; use a different axis in each layer or head.

    Parameters
    ----------
    grid : tuple of int
        Tokens along each axis, in row-major order.
    axis : int
        The axis along which a query attends; negative values count from the last axis.

    Returns
    -------
    Pattern
        ``PerAxis(grid, patterns)`` with ``Full()`` along `axis` and ``BlockLocal(1)`` along all others.

    References
    ----------
    Ho, Kalchbrenner, Weissenborn, Salimans. Axial Attention in Multidimensional Transformers. arXiv:1912.12180.
    """
    shape = lengths(grid)
    along = integer("axis", axis, -len(shape), len(shape) - 1) % len(shape)
    return PerAxis(shape, tuple(Full() if number == along else BlockLocal(1) for number in range(len(shape))))


def _random_windowed(draw: Any, sizes: Any) -> tuple[tuple[Any, ...], Any]:
    shape, sizes = GridPattern.random_grid(draw, sizes)
    window = [draw.integer(1, n) for n in shape]
    shift = [draw.integer(0, w - 1) for w in window]
    return (shape, draw.one_or_each(window), draw.one_or_each(shift)), sizes


@recipe(
    "windowed",
    example=(((8, 8), 4, 2), 64),
    typical=(((64, 64), 8, 4), 4096),
    random=_random_windowed,
    fixes_lengths=True,
)
def windowed(
    grid: Positive | tuple[Positive, ...],
    window: Positive | tuple[Positive, ...],
    shift: Count | tuple[Count, ...] = 0,
) -> Pattern:
    """Allow the keys in the query's own window of a grid, after a cyclic shift of the windows.

    For hierarchical vision models, whose layers alternate between shifted and unshifted windows.

    Parameters
    ----------
    grid : tuple of int
        Tokens along each axis, in row-major order.
    window : int or tuple of int
        Tokens per window along each axis.
    shift : int or tuple of int, optional
        Cyclic shift of the windows along each axis, less than `window`. Tokens at opposite edges of the grid do not
        attend to each other.

    Returns
    -------
    Pattern
        ``PerAxis(grid, patterns)`` with ``BlockLocal(window, shift)`` along each axis whose length is a multiple of the
        window; other axes may have :class:`Documents`.

    References
    ----------
    Liu et al. Swin Transformer. arXiv:2103.14030, §3.2.
    """
    shape = lengths(grid)
    windows = per_axis("window", window, len(shape), least=1)
    shifts = per_axis("shift", shift, len(shape), least=0)
    for length, w, s in zip(shape, windows, shifts, strict=True):
        if w > length:
            raise ValueError(f"window: expected at most {length} (tokens of the axis), got {w}")
        if s >= w:
            raise ValueError(f"shift: expected less than the window of the axis ({w}), got {s}")
    return PerAxis(shape, tuple(itertools.starmap(_windows, zip(shape, windows, shifts, strict=True))))


def _windows(length: int, window: int, shift: int) -> Pattern:
    """Return the windows along an axis; unless `window` divides `length`, one may end among the wrapped tokens."""
    cut = (shift - length) % window
    if not 0 < cut < shift:
        return BlockLocal(window, shift)
    whole, rest = divmod(length - shift, window)
    return Documents((cut, shift - cut, *(window,) * whole, *([rest] if rest else [])))
