"""Which cells of tiles are real: not padding."""

from __future__ import annotations

import numpy as np

from .._ragged import ramp
from ._types import AXES

__all__ = ["real_cells", "real_extents"]


def real_extents(views: np.ndarray, tiles: np.ndarray) -> np.ndarray:
    """(n, axes) int64: how many coordinates along each axis tile ``tiles[i]`` of ``views[i]`` has that are not padding;
    these come first."""
    return np.minimum(views["box"], views["extent"] - _first_coordinates(views, tiles))


def real_cells(views: np.ndarray, tiles: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All real cells of tiles, tile after tile: number of the tile (tile ``tiles[i]`` of ``views[i]`` is number i),
    number of the cell in it, position."""
    first = _first_coordinates(views, tiles)
    real = np.minimum(views["box"], views["extent"] - first)
    origin = views["offset"] + (views["stride"] * first).sum(axis=1)
    count = real.prod(axis=1)
    owner, rest = np.repeat(np.arange(len(tiles)), count), ramp(count)
    position, cell, cells = origin[owner], np.zeros(len(owner), np.int64), np.ones(len(tiles), np.int64)
    for axis in reversed(range(AXES)):
        if (real[:, axis] > 1).any():
            rest, coordinate = np.divmod(rest, real[owner, axis])
            position += views["stride"][owner, axis] * coordinate
            cell += cells[owner] * coordinate
        cells = cells * views["box"][:, axis]
    return owner, cell, position


def _first_coordinates(views: np.ndarray, tiles: np.ndarray) -> np.ndarray:
    """(n, axes) int64: the first coordinates of each tile."""
    first, rest = np.zeros((len(tiles), AXES), np.int64), tiles.astype(np.int64)
    for axis in reversed(range(AXES)):
        rest, number = np.divmod(rest, views["grid"][:, axis])
        first[:, axis] = number * views["box"][:, axis].astype(np.int64)
    return first
