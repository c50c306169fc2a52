"""Axial and windowed attention: recipes over PerAxis."""

from __future__ import annotations

import itertools
from typing import Annotated, Any

from ..base.check import integer, per_axis
from ..base.parameters import Count, Positive, Range
from ..base.pattern import Pattern
from ..base.recipe import recipe
from ..hints.grid import GridPattern, lengths
from ..sequence.basic import BlockLocal, Full
from ..sequence.documents import Documents
from .per import PerAxis

__all__ = ["axial", "windowed"]


def _random_axial(draw: Any, sizes: Any) -> tuple[tuple[Any, ...], Any]:
    shape, sizes = GridPattern.random_grid(draw, sizes)
    return (shape, draw.integer(-len(shape), len(shape) - 1)), sizes


@recipe("axial", example=(((6, 6), 0), 36), typical=(((64, 64), 0), 4096), random=_random_axial, fixes_lengths=True)
def axial(grid: Positive | tuple[Positive, ...], axis: Annotated[int, Range()]) -> Pattern:
    """Keys that differ from the query in one coordinate only.

    For images and volumes, with another axis in each layer or head.

    Parameters
    ----------
    grid : tuple of int
        Tokens along each axis, in row-major order.
    axis : int
        The axis along which a query attends; negative counts from the last.

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
    """Keys of the query's own window of a grid, after a cyclic shift of the windows.

    For hierarchical vision models, whose layers alternate between shifted and unshifted windows.

    Parameters
    ----------
    grid : tuple of int
        Tokens along each axis, in row-major order.
    window : int or tuple of int
        Tokens of a window along each axis.
    shift : int or tuple of int, optional
        Cyclic shift of the windows along each axis, less than `window`. Tokens from opposite edges of the grid do not
        attend to each other.

    Returns
    -------
    Pattern
        ``PerAxis(grid, patterns)`` with ``BlockLocal(window, shift)`` along each axis that whole windows fill.

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
    """The windows along an axis; if they do not fill it, one may end inside the tokens that the shift wraps around."""
    cut = (shift - length) % window
    if not 0 < cut < shift:
        return BlockLocal(window, shift)
    whole, rest = divmod(length - shift, window)
    return Documents((cut, shift - cut, *(window,) * whole, *([rest] if rest else [])))
