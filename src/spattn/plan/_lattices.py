"""Where an affine lattice reaches, in Python's integers, which do not overflow."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

__all__ = ["corners", "repeats"]


def corners(offset: int, strides: Sequence[int], extents: Sequence[int]) -> tuple[int, int]:
    """The least and the greatest position of a lattice whose extents are at least 1."""
    reach = [stride * (extent - 1) for stride, extent in zip(strides, extents, strict=True)]
    return offset + sum(r for r in reach if r < 0), offset + sum(r for r in reach if r > 0)


def repeats(strides: Sequence[int], extents: Sequence[int]) -> bool:
    """Whether two points of a lattice are one position.

    None are where every stride exceeds the reach of the smaller ones, as in a grid; otherwise the points are counted,
    which takes O(points) memory, but no more points than there are positions.
    """
    axes = sorted((abs(stride), extent) for stride, extent in zip(strides, extents, strict=True) if extent > 1)
    reach = 0
    for stride, extent in axes:
        if stride <= reach:
            break
        reach += stride * (extent - 1)
    else:
        return False
    low, high = corners(0, strides, extents)
    points = math.prod(extents)
    if points > high - low + 1:
        return True
    positions = np.zeros(1, np.int64)
    for stride, extent in axes:
        positions = (positions[:, None] + stride * np.arange(extent)).ravel()
    return len(np.unique(positions)) < points
