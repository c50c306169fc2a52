"""Tiles of patterns that list their pairs, in O(nnz)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..._util.index_checks import q_offset
from ...patterns import Pattern
from ..contract.budget import Budget
from ..contract.types import LARGEST
from ._lists import RunLists
from ._pairs import Gathered, Pairs, bitmasks
from .masks import Masks
from .run_lists import add_runs, join_runs

if TYPE_CHECKING:
    from .undecided import EveryPair

__all__ = ["are_scattered", "gathered_tiles", "tiles_of_pairs"]

_PAIRS_AT_ONCE = 1 << 18  # approximate number of pairs in a chunk
_PLACE_BYTES = 4  # memory of an element of kv_order, and of a key while keys are gathered
_WORDS_AT_ONCE = 1 << 17  # bitmask words in a chunk, which should fit the cache
_SAMPLE = 16  # number of sampled query tiles
_FEW = 8  # mean pairs per non-empty tile below which a pattern counts as scattered


class _Strip(NamedTuple):
    """The non-empty (query tile, key tile) rectangles of consecutive query tiles, in row-major order. Rectangle t
    allows the cells ``cell[first[t]:first[t + 1]]``, numbered in row-major order."""

    query_tile: np.ndarray
    key_tile: np.ndarray
    full: np.ndarray
    first: np.ndarray
    cell: np.ndarray


def are_scattered(pattern: Pattern, q_len: int, kv_len: int, tile: tuple[int, int]) -> bool:
    """Return whether sampled non-empty tiles hold few pairs on average, which makes a plan large and inefficient."""
    block_q, block_kv = tile
    pairs = met = 0
    if q_len >= block_q and kv_len:
        for number in np.unique(np.linspace(0, q_len // block_q - 1, _SAMPLE).astype(np.int64)):
            q = np.arange(number * block_q, (number + 1) * block_q) + q_offset(q_len, kv_len)
            _, key = pattern._pairs(q, kv_len)
            pairs, met = pairs + len(key), met + len(np.unique(key // block_kv))
    return pairs < _FEW * met


def tiles_of_pairs(
    pattern: Pattern | EveryPair,
    query: np.void,
    key: np.void,
    shift: int,
    masks: Masks,
    lists: RunLists,
    budget: Budget,
) -> int:
    """Append the tiles of the pairs that `pattern` lists; return the number of pairs.

    The views must have consecutive positions. Parameters as in :func:`spattn.planning.tiles.tiling.find_tiles`.
    """
    pairs = Pairs(masks.tile, int(key["offset"]), int(key["extent"][-1]))
    kv_len = int(key["offset"] + key["extent"][-1])

    def strip(tiles: range) -> _Strip:
        return _strip(pairs, *_listed(pattern, query, shift, kv_len, tiles, masks), tiles.start, query, masks)

    return _add_strips(strip, query, masks, lists, budget)


def gathered_tiles(
    pattern: Pattern, query: np.void, shift: int, kv_len: int, masks: Masks, lists: RunLists, budget: Budget
) -> tuple[int, np.ndarray]:
    """Append the tiles of listed pairs with gathered keys; return (number of pairs, key at each index).

    Each query tile's keys are sorted and unique; copies of the last key, which bitmasks exclude, pad them
    to whole tiles.
    """
    budget.need(_PLACE_BYTES * kv_len)
    gathered, found, places = Gathered(masks.tile, kv_len), [np.zeros(0, np.int32)], 0

    def strip(tiles: range) -> _Strip:
        nonlocal places
        row, key = _listed(pattern, query, shift, kv_len, tiles, masks)
        keys, place = gathered.gather(row, key, min(LARGEST, budget.max_bytes // _PLACE_BYTES) - places)
        found.append(keys)
        before, places = places // masks.tile[1], places + len(keys)
        budget.need(_PLACE_BYTES * places)
        if places > LARGEST:
            raise ValueError(f"pattern: expected at most {LARGEST} gathered keys, got at least {places}")
        own = _strip(Pairs(masks.tile, 0, len(keys)), row, place, tiles.start, query, masks)
        return own._replace(key_tile=own.key_tile + np.int32(before))

    return _add_strips(strip, query, masks, lists, budget), np.concatenate(found)


def _add_strips(strip: Callable[[range], _Strip], query: np.void, masks: Masks, lists: RunLists, budget: Budget) -> int:
    """Append tiles in strips of about _PAIRS_AT_ONCE pairs; return the number of pairs."""
    budget.need(4 * math.prod(masks.tile))
    single = np.full(math.prod(masks.tile), -1, np.int32)  # bitmask index of a tile with only this cell, -1 if unknown
    first, at_once, nnz, query_tiles = 0, 1, 0, int(query["tiles"])
    while first < query_tiles:
        tiles = range(first, min(first + at_once, query_tiles))
        pairs = _add_strip(strip(tiles), tiles, single, masks, lists, budget)
        nnz, first = nnz + pairs, tiles.stop
        at_once = min(max(at_once * _PAIRS_AT_ONCE // max(pairs, 1), 1), 4 * at_once)
    return nnz


def _add_strip(own: _Strip, tiles: range, single: np.ndarray, masks: Masks, lists: RunLists, budget: Budget) -> int:
    """Append the tiles of a strip; return its number of pairs.

    The caller keeps no reference to the strip, so that its memory is free before the next strip is made.
    """
    budget.need_runs(len(own.full))
    mask, length = _masks_of(own, single, masks), np.ones(len(own.full), np.int32)
    runs = join_runs(own.query_tile - np.int32(tiles.start), own.key_tile, length, mask)
    add_runs(lists, budget, len(tiles), *runs)
    return len(own.cell)


def _listed(
    pattern: Pattern | EveryPair, query: np.void, shift: int, kv_len: int, tiles: range, masks: Masks
) -> tuple[np.ndarray, np.ndarray]:
    """Return the listed pairs of some query tiles, with rows relative to the first of them."""
    block_q, rows = masks.tile[0], int(query["extent"][-1])
    q = np.arange(tiles.start * block_q, min(tiles.stop * block_q, rows)) + (int(query["offset"]) + shift)
    row, key = (np.ascontiguousarray(side, np.int64) for side in pattern._pairs(q, kv_len))
    return row, key


def _strip(pairs: Pairs, row: np.ndarray, key: np.ndarray, number: int, query: np.void, masks: Masks) -> _Strip:
    """Group pairs by tile; their rows are relative to query tile `number`."""
    (block_q, block_kv), rows = masks.tile, int(query["extent"][-1])
    query_tile, key_tile, first, cell = pairs.group(row, key, number)
    full = np.diff(first) == np.minimum(rows - query_tile.astype(np.int64) * block_q, block_q) * block_kv
    return _Strip(query_tile, key_tile, full, first, cell)


def _masks_of(strip: _Strip, single: np.ndarray, masks: Masks) -> np.ndarray:
    """Return the bitmask index of each tile, -1 for full tiles.

    Most tiles of a scattered pattern have a single cell; `single` caches their bitmask indices by cell.
    """
    count, mask = np.diff(strip.first), np.full(len(strip.full), -1, np.int32)
    alone = np.flatnonzero(count == 1)
    cell = strip.cell[strip.first[alone]]
    unknown = alone[single[cell] < 0]
    new, one = np.unique(strip.cell[strip.first[unknown]], return_index=True)
    single[new] = _add(strip, unknown[one], masks)
    mask[alone] = single[cell]
    several = np.flatnonzero((count > 1) & ~strip.full)
    mask[several] = _add(strip, several, masks)
    return mask


def _add(strip: _Strip, tiles: np.ndarray, masks: Masks) -> np.ndarray:
    """Insert the bitmasks of some tiles of a strip and return their indices."""
    words = math.prod(masks.shape)
    numbers = [np.zeros(0, np.int32)]
    at_once = max(1, _WORDS_AT_ONCE // words)
    for start in range(0, len(tiles), at_once):
        numbers.append(masks.add(bitmasks(strip.first, strip.cell, tiles[start : start + at_once], words)))
    return np.concatenate(numbers)
