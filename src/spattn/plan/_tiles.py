"""Tiles of one view of queries and one of keys, as runs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

__all__ = ["Tiles", "join_runs"]


class Tiles(NamedTuple):
    """Tiles of one (query view, key view) pair as runs of `length` consecutive key tiles of one bitmask, by
    query tile, then key tile."""

    query_tile: np.ndarray
    key_tile: np.ndarray
    length: np.ndarray
    mask: np.ndarray
    nnz: int


def join_runs(
    query_tile: np.ndarray, key_tile: np.ndarray, count: np.ndarray, mask: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Runs that are sorted by query tile and key tile, those of one bitmask that follow one another as one."""
    starts = np.ones(len(mask), bool)
    starts[1:] = (query_tile[1:] != query_tile[:-1]) | (mask[1:] != mask[:-1])
    starts[1:] |= key_tile[1:] - key_tile[:-1] != count[:-1]
    if starts.all():
        return query_tile, key_tile, count, mask
    at = np.nonzero(starts)[0]
    return query_tile[at], key_tile[at], np.add.reduceat(count, at), mask[at]
