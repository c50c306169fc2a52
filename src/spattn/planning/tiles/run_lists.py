"""Append and merge runs of key tiles."""

from __future__ import annotations

import numpy as np

from ..contract.budget import Budget
from ._lists import RunLists

__all__ = ["add_runs", "join_runs"]


def add_runs(
    lists: RunLists,
    budget: Budget,
    query_tiles: int,
    query_tile: np.ndarray,
    key_tile: np.ndarray,
    count: np.ndarray,
    mask: np.ndarray,
) -> None:
    """Append the lists of `query_tiles` query tiles, given runs sorted by query tile and key tile."""
    budget.add_runs(len(mask))
    columns = (column.astype(np.int32, copy=False) for column in (query_tile, key_tile, count, mask))
    lists.add(query_tiles, *map(np.ascontiguousarray, columns))


def join_runs(
    query_tile: np.ndarray, key_tile: np.ndarray, count: np.ndarray, mask: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Merge adjacent runs with equal bitmasks, given runs sorted by query tile and key tile."""
    starts = np.ones(len(mask), bool)
    starts[1:] = (query_tile[1:] != query_tile[:-1]) | (mask[1:] != mask[:-1])
    starts[1:] |= key_tile[1:] - key_tile[:-1] != count[:-1]
    if starts.all():
        return query_tile, key_tile, count, mask
    at = np.nonzero(starts)[0]
    return query_tile[at], key_tile[at], np.add.reduceat(count, at), mask[at]
