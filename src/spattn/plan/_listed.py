"""From listed pairs to tiles: no cell is visited but those that are listed."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from .._ragged import ramp
from ..patterns import Pattern
from ._budget import Budget
from ._masks import Masks
from ._tiles import Tiles, join_runs

__all__ = ["tiles_of_pairs"]

_PAIRS_AT_ONCE = 1 << 18  # about so many are sorted at once
_WORDS_AT_ONCE = 1 << 17  # of bitmasks that are made at once: they fit into a cache


class _Strip(NamedTuple):
    """Tiles of some consecutive query tiles, sorted; the pairs of tile t are ``cell[first[t] : first[t] + pairs[t]]``,
    as row-major numbers in the tile."""

    query_tile: np.ndarray
    key_tile: np.ndarray
    full: np.ndarray
    first: np.ndarray
    pairs: np.ndarray
    cell: np.ndarray


def tiles_of_pairs(pattern: Pattern, query: np.void, key: np.void, shift: int, masks: Masks, budget: Budget) -> Tiles:
    """The tiles that hold the pairs which `pattern` lists, on views of consecutive positions.

    Parameters are those of :func:`spattn.plan._tiling.find_tiles`. Costs O(nnz log nnz) time.
    """
    budget.need(4 * math.prod(masks.tile))
    single = np.full(math.prod(masks.tile), -1, np.int32)  # number of the bitmask of each cell alone, where it is known
    found: list[tuple[np.ndarray, ...]] = [(np.zeros(0, np.int32),) * 4]
    first, at_once, tiles, nnz = 0, 1, 0, 0
    while first < int(query["tiles"]):
        strip = _strip(pattern, query, key, shift, range(first, first + at_once), masks.tile)
        tiles, nnz = tiles + len(strip.first), nnz + len(strip.cell)
        budget.need_runs(tiles)
        length = np.ones(len(strip.first), np.int32)
        found.append(join_runs(strip.query_tile, strip.key_tile, length, _masks_of(strip, single, masks)))
        first += at_once
        at_once = min(max(at_once * _PAIRS_AT_ONCE // max(len(strip.cell), 1), 1), 4 * at_once)
    columns = [list(column) for column in zip(*found, strict=True)]
    del found  # one column after the other is forgotten: there may be many millions of runs
    query_tile, key_tile, length, mask = (np.concatenate(columns.pop(0)) for _ in range(4))
    return Tiles(query_tile, key_tile, length, mask, nnz)


def _strip(pattern: Pattern, query: np.void, key: np.void, shift: int, tiles: range, tile: tuple[int, int]) -> _Strip:
    """The pairs of some query tiles, tile by tile."""
    (block_q, block_kv), (rows, keys) = tile, (int(view["extent"][-1]) for view in (query, key))
    q = np.arange(tiles.start * block_q, min(tiles.stop * block_q, rows)) + (int(query["offset"]) + shift)
    row, place = pattern._pairs(q, int(key["offset"]) + keys)
    place = place - int(key["offset"])
    inside = (place >= 0) & (place < keys)
    if not inside.all():
        row, place = row[inside], place[inside]
    # Tile and cell of a pair are one number: to sort these is cheaper than to find the order of the pairs.
    area, key_tiles = block_q * block_kv, int(key["tiles"])
    query_tile, in_tile = np.divmod(np.arange(len(q)), block_q)
    code = (query_tile * key_tiles * area + in_tile * block_kv)[row]
    code += place
    place //= block_kv  # the key tile of each pair, whose first key is cell 0
    place *= area - block_kv
    code += place
    if (code[1:] < code[:-1]).any():  # of tiles of one query they rise as the pairs do
        code.sort()
    of_tile = code // area
    first = _starts(of_tile)
    code -= of_tile * area
    of_tile = of_tile[first]
    query_tile = of_tile // key_tiles
    key_tile, query_tile = of_tile - query_tile * key_tiles, query_tile + tiles.start
    count = np.diff(first, append=len(code))
    full = count == np.minimum(rows - query_tile * block_q, block_q) * block_kv
    return _Strip(query_tile.astype(np.int32), key_tile.astype(np.int32), full, first, count, code)


def _masks_of(strip: _Strip, single: np.ndarray, masks: Masks) -> np.ndarray:
    """Number of the bitmask of each tile, -1 for full ones.

    Where pairs are scattered most tiles hold a single one, whose bitmask is looked up by its cell.
    """
    mask = np.full(len(strip.first), -1, np.int32)
    alone = np.nonzero(strip.pairs == 1)[0]
    cell = strip.cell[strip.first[alone]]
    unknown = alone[single[cell] < 0]
    new, one = np.unique(strip.cell[strip.first[unknown]], return_index=True)
    single[new] = _add(strip, unknown[one], masks)
    mask[alone] = single[cell]
    several = np.nonzero((strip.pairs > 1) & ~strip.full)[0]
    mask[several] = _add(strip, several, masks)
    return mask


def _add(strip: _Strip, tiles: np.ndarray, masks: Masks) -> np.ndarray:
    """Numbers of the bitmasks of some tiles of a strip."""
    words = math.prod(masks.shape)
    numbers = [np.zeros(0, np.int32)]
    at_once = max(1, _WORDS_AT_ONCE // words)
    for start in range(0, len(tiles), at_once):
        some = tiles[start : start + at_once]
        pairs = strip.pairs[some]
        cell = strip.cell[np.repeat(strip.first[some], pairs) + ramp(pairs)]
        word = np.repeat(words * np.arange(len(some)), pairs) + cell // 64
        first = _starts(word)
        bits = np.zeros(words * len(some), np.uint64)
        bits[word[first]] = np.bitwise_or.reduceat(np.uint64(1) << (cell % 64).astype(np.uint64), first)
        numbers.append(masks.add(bits))
    return np.concatenate(numbers)


def _starts(numbers: np.ndarray) -> np.ndarray:
    """Where each number of a sorted array comes first."""
    starts = np.ones(len(numbers), bool)
    np.not_equal(numbers[1:], numbers[:-1], out=starts[1:])
    return np.nonzero(starts)[0]
