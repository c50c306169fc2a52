"""Neighborhood attention on grids of one to three axes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...index_set import Runs
from ..base.check import assign, flag, per_axis
from ..base.class_registry import register
from ..base.pattern import Part, Pattern
from ..hints.closed_forms import Lattice, Span
from .grid import GridPattern, box_runs, by_axis, coordinates, lengths, row_major

__all__ = ["Neighborhood"]


@register("neighborhood", example=(((8, 8), 5), 64), typical=(((128, 128), 13), 16384))
@dataclass(frozen=True)
class Neighborhood(GridPattern):
    """Neighborhood attention: each query attends to the `kernel` nearest keys along each axis of a token grid.

    For images and volumes where every token needs a full neighborhood, even at the edges.

    Parameters
    ----------
    grid : int or tuple of int
        Tokens along each of one to three axes, in row-major order.
    kernel : int or tuple of int
        Number of keys along each axis; ``kernel * dilation`` must not exceed the axis length.
    dilation : int or tuple of int, optional
        Distance between consecutive keys along each axis.
    stride : int or tuple of int, optional
        Number of consecutive queries along each axis that share one neighborhood, at most `kernel`.
    causal : bool or tuple of bool, optional
        Whether coordinates after the query's are masked, per axis.

    Notes
    -----
    A non-causal query has exactly ``kernel`` keys along each axis: windows shift at the edges, where
    :class:`SlidingWindow` clips them.

    References
    ----------
    Hassani et al. Neighborhood Attention Transformer. arXiv:2204.07143. Hassani, Shi. Dilated NAT. arXiv:2209.15001.
    Hassani et al. Faster Neighborhood Attention. arXiv:2403.04690. Hassani et al. Generalized Neighborhood Attention.
    arXiv:2504.16922.
    """

    kernel: int | tuple[int, ...]
    dilation: int | tuple[int, ...] = 1
    stride: int | tuple[int, ...] = 1
    causal: bool | tuple[bool, ...] = False

    def __post_init__(self) -> None:
        grid = lengths(self.grid)
        if not 1 <= len(grid) <= 3:
            raise ValueError(f"grid: expected one to three axes, got {len(grid)}")
        kernel = per_axis("kernel", self.kernel, len(grid), least=1)
        dilation = per_axis("dilation", self.dilation, len(grid), least=1)
        stride = per_axis("stride", self.stride, len(grid), least=1)
        causal = per_axis("causal", self.causal, len(grid), check=flag)
        for length, w, d, s in zip(grid, kernel, dilation, stride, strict=True):
            if w * d > length:
                raise ValueError(f"kernel: expected kernel * dilation <= {length} (tokens of the axis), got {w} * {d}")
            if s > w:
                raise ValueError(f"stride: expected at most the kernel of the axis ({w}), got {s}")
        assign(self, grid=grid, kernel=kernel, dilation=dilation, stride=stride, causal=causal)

    def _span(self, axis: int, x: Any) -> tuple[Any, Any]:
        """Return the first and last key of query coordinates `x`, as indices in the residue class modulo `dilation`."""
        length, w, d, s = (by_axis(each)[axis] for each in (self.grid, self.kernel, self.dilation, self.stride))
        u = x // d
        in_group = length // d + 1 * (x % d < length % d)
        if by_axis(self.causal)[axis]:
            leader = np.minimum(u // s * s + s - 1, in_group - 1)
            return leader - w + 1, u
        leader = np.minimum(u // s * s + s // 2, in_group - 1)
        after = w // 2 + w % 2 - 1
        centre = np.minimum(np.maximum(leader, w // 2), in_group - 1 - after)
        return centre - w // 2, centre + after

    def allows(self, q: Any, k: Any) -> Any:
        allowed, grid = None, by_axis(self.grid)
        for axis, (x, y) in enumerate(zip(coordinates(q, grid), coordinates(k, grid), strict=True)):
            d = by_axis(self.dilation)[axis]
            first, last = self._span(axis, x)
            near = (first <= y // d) & (y // d <= last)
            near = near & (x % d == y % d) if d > 1 else near
            allowed = near if allowed is None else allowed & near
        return allowed

    def runs(self, q: np.ndarray, kv_len: int) -> Runs:
        start, count, grid, dilation = [], [], by_axis(self.grid), by_axis(self.dilation)
        for axis, x in enumerate(coordinates(q, grid)):
            first, last = self._span(axis, x)
            first = np.maximum(first, 0)
            start.append(first * dilation[axis] + x % dilation[axis])
            count.append(np.maximum(last + 1 - first, 0))
        return box_runs(start, count, dilation, by_axis(self.kernel), grid, kv_len)

    def parts(self, q_len: int, kv_len: int) -> tuple[Part, ...]:
        grid, dilation = by_axis(self.grid), by_axis(self.dilation)
        if q_len != kv_len or (len(grid) == 1 and dilation == (1,)):
            return (Part(self),)
        stride = row_major(grid)
        groups: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for residue in itertools.product(*(range(d) for d in dilation)):
            axes = zip(grid, residue, dilation, strict=True)
            extents = tuple(-((r - length) // d) for length, r, d in axes)
            groups.setdefault(extents, []).append(residue)
        strides = tuple(s * d for s, d in zip(stride, dilation, strict=True))
        return tuple(self._part(extents, strides, residues) for extents, residues in groups.items())

    def _part(self, extents: tuple[int, ...], strides: tuple[int, ...], residues: list[tuple[int, ...]]) -> Part:
        """Return the part of residue classes with equal extents."""
        stride, dilation = row_major(by_axis(self.grid)), by_axis(self.dilation)
        starts = [sum(r * s for r, s in zip(residue, stride, strict=True)) for residue in residues]
        lattice = Lattice(starts[0], strides, extents)
        spans = []
        for axis, (r, d, count) in enumerate(zip(residues[0], dilation, extents, strict=True)):
            first, last = self._span(axis, r + d * np.arange(count))
            spans.append(Span(tuple(np.maximum(first, 0).tolist()), tuple(last.tolist())))
        return Part(self, lattice, lattice, tuple((s - starts[0], s - starts[0]) for s in starts), tuple(spans))

    @classmethod
    def random(cls, draw: Any, sizes: Any) -> tuple[Pattern, Any]:
        shape, sizes = cls.random_grid(draw, sizes)
        dilation = [draw.integer(1, max(1, n // 3)) for n in shape]
        kernel = [draw.integer(1, n // d) for n, d in zip(shape, dilation, strict=True)]
        step = [draw.integer(1, w) for w in kernel]
        ahead = [draw.flag() for _ in shape]
        return cls(shape, *map(draw.one_or_each, (kernel, dilation, step, ahead))), sizes
