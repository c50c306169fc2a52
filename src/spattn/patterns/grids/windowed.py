"""Patterns of a grid of tokens: along one axis, and in windows. :mod:`.neighborhood` has the third."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...index_set import Runs
from ..base.check import assign, integer, per_axis
from ..base.pattern import Part, Pattern
from ..base.registry import register
from ..hints.grid import GridPattern, box_runs, by_axis, coordinates, lengths, row_major
from ..hints.lattice import Lattice, Span

__all__ = ["Axial", "Windowed"]


def grid_shape(grid: Any) -> tuple[int, ...]:
    """The tokens along each axis, at least one axis."""
    shape = lengths(grid)
    if not shape:
        raise ValueError("grid: expected at least one axis, got ()")
    return shape


@register("axial")
@dataclass(frozen=True)
class Axial(GridPattern):
    """Keys that share every coordinate but one with the query.

    For images and volumes, with another axis in each layer or head.

    Parameters
    ----------
    grid : tuple of int
        Tokens along each axis; token numbers are row-major.
    axis : int
        The axis along which a query attends; negative counts from the last.

    Raises
    ------
    TypeError
        If a parameter is not an integer.
    ValueError
        If `grid` has no axis, an axis without tokens or more tokens than a sequence can have, or `axis` is none of its
        axes; from :meth:`bind`, if `kv_len` is not the number of tokens of the grid.

    References
    ----------
    Ho, Kalchbrenner, Weissenborn, Salimans. Axial Attention in Multidimensional Transformers. arXiv:1912.12180.
    """

    axis: int

    def __post_init__(self) -> None:
        grid = grid_shape(self.grid)
        axis = integer("axis", self.axis, -len(grid), len(grid) - 1)
        assign(self, grid=grid, axis=axis % len(grid))

    def _steps(self) -> tuple[int, int]:
        """Distance of neighbours along the axis, and of neighbours along the next outer one."""
        grid = by_axis(self.grid)
        step = row_major(grid)[self.axis]
        return step, step * grid[self.axis]

    def allows(self, q: Any, k: Any) -> Any:
        step, outer = self._steps()
        line = q % step == k % step
        return line & (q // outer == k // outer) if self.axis else line

    def runs(self, q: np.ndarray, kv_len: int) -> Runs:
        step, outer = self._steps()
        first = q % step + (q // outer * outer if self.axis else 0)
        return Runs.stepped(first, first + outer, step, kv_len)

    def parts(self, q_len: int, kv_len: int) -> tuple[Part, ...]:
        step, outer = self._steps()
        if q_len != kv_len or step == 1:
            return (Part(self),)
        grid = by_axis(self.grid)
        line = Lattice(0, (step,), (grid[self.axis],))
        first = [block * outer + c for block in range(math.prod(grid[: self.axis])) for c in range(step)]
        return (Part(self, line, line, tuple((f, f) for f in first)),)

    @classmethod
    def example(cls) -> tuple[Pattern, int]:
        return cls((6, 6), 0), 36

    @classmethod
    def typical(cls) -> tuple[Pattern, int]:
        return cls((64, 64), 0), 4096

    @classmethod
    def random(cls, draw: Any, sizes: Any) -> tuple[Pattern, Any]:
        shape, sizes = cls.random_grid(draw, sizes)
        return cls(shape, draw.integer(-len(shape), len(shape) - 1)), sizes


@register("windowed")
@dataclass(frozen=True)
class Windowed(GridPattern):
    """Keys of the query's own window of a grid, after a cyclic shift of the windows.

    For hierarchical vision models, whose layers with and without a shift take turns.

    Parameters
    ----------
    grid : tuple of int
        Tokens along each axis; token numbers are row-major.
    window : int or tuple of int
        Tokens of a window along each axis.
    shift : int or tuple of int, optional
        By how much the windows are shifted along each axis, less than `window`. Tokens that the shift brings together
        from opposite edges of the grid do not attend to each other.

    Raises
    ------
    TypeError
        If a parameter is not an integer.
    ValueError
        If an axis has no tokens or the grid more than a sequence can have, a window is larger than its axis or less
        than 1, a shift is negative or not less than its window, or the number of entries is not the number of axes;
        from :meth:`bind`, if `kv_len` is not the number of tokens of the grid.

    References
    ----------
    Liu et al. Swin Transformer. arXiv:2103.14030, §3.2.
    """

    window: int | tuple[int, ...]
    shift: int | tuple[int, ...] = 0

    def __post_init__(self) -> None:
        grid = grid_shape(self.grid)
        window = per_axis("window", self.window, len(grid), least=1)
        shift = per_axis("shift", self.shift, len(grid), least=0)
        for length, w, s in zip(grid, window, shift, strict=True):
            if w > length:
                raise ValueError(f"window: expected at most {length} (tokens of the axis), got {w}")
            if s >= w:
                raise ValueError(f"shift: expected less than the window of the axis ({w}), got {s}")
        assign(self, grid=grid, window=window, shift=shift)

    def _along(self, axis: int) -> tuple[int, int, int]:
        """Tokens of the axis and of a window, and the shift."""
        return by_axis(self.grid)[axis], by_axis(self.window)[axis], by_axis(self.shift)[axis]

    def _window(self, axis: int, x: Any) -> tuple[Any, Any]:
        """Number of the window of coordinate `x`, and whether the shift moved it to the other edge."""
        length, w, s = self._along(axis)
        shifted = x - s
        return shifted % length // w, shifted < 0

    def allows(self, q: Any, k: Any) -> Any:
        allowed, grid = None, by_axis(self.grid)
        for axis, (x, y) in enumerate(zip(coordinates(q, grid), coordinates(k, grid), strict=True)):
            (window_q, moved_q), (window_k, moved_k) = self._window(axis, x), self._window(axis, y)
            same = (window_q == window_k) & (1 * moved_q == 1 * moved_k)
            allowed = same if allowed is None else allowed & same
        return allowed

    def runs(self, q: np.ndarray, kv_len: int) -> Runs:
        grid = by_axis(self.grid)
        bounds = [self._span(axis, x) for axis, x in enumerate(coordinates(q, grid))]
        start, count = zip(*bounds, strict=True)
        return box_runs(start, count, (1,) * len(grid), by_axis(self.window), grid, kv_len)

    def _span(self, axis: int, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First coordinate and number of coordinates of the window of coordinate `x`."""
        length, w, s = self._along(axis)
        window, moved = self._window(axis, x)
        back = np.where(moved, length - s, -s)  # from shifted coordinates to the grid's
        first = np.maximum(window * w - back, np.where(moved, 0, s))
        stop = np.minimum((window + 1) * w - back, np.where(moved, s, length))
        return first, np.maximum(stop - first, 0)

    def parts(self, q_len: int, kv_len: int) -> tuple[Part, ...]:
        grid, shift = by_axis(self.grid), by_axis(self.shift)
        if q_len != kv_len or len(grid) > 3 or (len(grid) == 1 and shift == (0,)):
            return (Part(self),)
        # Nothing attends across the seam of the shift; beyond it the windows start at the lattice's first token.
        stride = row_major(grid)
        sides = (((0, s), (s, n - s)) if s else ((0, n),) for s, n in zip(shift, grid, strict=True))
        parts = []
        for box in itertools.product(*sides):
            first, extents = zip(*box, strict=True)
            lattice = Lattice(sum(c * step for c, step in zip(first, stride, strict=True)), stride, extents)
            parts.append(Part(self, lattice, lattice, spans=tuple(itertools.starmap(self._inside, enumerate(box)))))
        return tuple(parts)

    def _inside(self, axis: int, side: tuple[int, int]) -> Span:
        """The windows of the coordinates of one side of the seam, counted from its first."""
        start, count = self._span(axis, np.arange(side[0], sum(side)))
        return Span(tuple((start - side[0]).tolist()), tuple((start + count - 1 - side[0]).tolist()))

    @classmethod
    def example(cls) -> tuple[Pattern, int]:
        return cls((8, 8), 4, 2), 64

    @classmethod
    def typical(cls) -> tuple[Pattern, int]:
        return cls((64, 64), 8, 4), 4096

    @classmethod
    def random(cls, draw: Any, sizes: Any) -> tuple[Pattern, Any]:
        shape, sizes = cls.random_grid(draw, sizes)
        window = [draw.integer(1, n) for n in shape]
        shift = [draw.integer(0, w - 1) for w in window]
        return cls(shape, draw.one_or_each(window), draw.one_or_each(shift)), sizes
