"""Coordinates of tokens in a grid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..recorder import constant

__all__ = ["check_sizes", "coordinates", "flat"]


def check_sizes(name: str, sizes: Any, ndim: int | None = None) -> tuple[int, ...]:
    """Positive integers, one per axis; TypeError or ValueError otherwise."""
    if not isinstance(sizes, (tuple, list)) or any(
        isinstance(n, bool) or not isinstance(n, (int, np.integer)) for n in sizes
    ):
        raise TypeError(f"{name}: expected a tuple of integers, got {sizes!r}")
    if any(n < 1 for n in sizes) or not 1 <= len(sizes) <= 3 or (ndim is not None and len(sizes) != ndim):
        raise ValueError(f"{name}: expected {ndim or 'one to three'} positive integers, got {sizes!r}")
    return tuple(map(int, sizes))


def coordinates(position: Any, shape: Sequence[int]) -> list[Any]:
    """Coordinates of a position in a grid in row-major order."""
    found = []
    for n in reversed(shape[1:]):
        found.append(position % constant(n))
        position = position // constant(n)
    return [position, *reversed(found)]


def flat(indices: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Row-major index of coordinates."""
    found = indices[0]
    for index, size in zip(indices[1:], sizes[1:], strict=True):
        found = found * constant(size) + index
    return found
