"""From one pattern piece and two views to a list of tiles with deduplicated bitmasks."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from .._imports import whole_imports
from .._ragged import ramp
from ..patterns import Lattice, Pattern
from ..patterns._bands import bands_of
from ..patterns._predicate import allowed as allowed_pairs
from ._budget import Budget
from ._masks import Masks
from ._search import Found, alike, cut_view, search
from ._types import grid_of, padded_before, positions, real_extents

_BOX_BYTES = 96  # of a box of either view
_TILES_AT_ONCE = 128  # tiles evaluated cell by cell at once
_FEW = 32  # tiles of keys beside one of queries, as a box of queries has them


class Tiles(NamedTuple):
    """Tiles of one (query view, key view) pair as runs of `length` consecutive key tiles of one bitmask, by
    query tile, then key tile."""

    query_tile: np.ndarray
    key_tile: np.ndarray
    length: np.ndarray
    mask: np.ndarray
    nnz: int


def make_view(lattice: Lattice, block: int) -> np.void:
    """The VIEW record of a lattice cut into boxes of `block` cells."""
    return cut_view(lattice.offset, lattice.strides, lattice.extents, choose_box(lattice.extents, block))


def choose_box(extents: tuple[int, ...], block: int) -> tuple[int, ...]:
    """The most cubic box of `block` cells among those that need (almost) the fewest; a tie favours the last axis."""

    def boxes(box: tuple[int, ...]) -> int:
        return math.prod(grid_of(extents, box))

    candidates = _factorisations(block, len(extents))
    fewest = min(map(boxes, candidates))
    near = [box for box in candidates if boxes(box) <= 1.1 * fewest]
    return min(near, key=lambda box: (sum(box), box))


def _factorisations(number: int, factors: int) -> list[tuple[int, ...]]:
    if factors == 1:
        return [(number,)]
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return [(d, *rest) for d in divisors for rest in _factorisations(number // d, factors - 1)]


def find_tiles(pattern: Pattern, query: np.void, key: np.void, shift: int, masks: Masks, budget: Budget) -> Tiles:
    """All tiles of `pattern` on a pair of views that hold an allowed pair.

    Parameters
    ----------
    shift : int
        kv_len − q_len: what turns a row of the query view into a position.
    budget : Budget
        Raises ValueError where they are too many.
    """
    budget.need(_BOX_BYTES * (int(query["tiles"]) + int(key["tiles"])))
    if _plain(query) and _plain(key):
        if pattern._lists_pairs:
            with whole_imports:  # which few patterns need
                from ._listed import tiles_of_pairs

            return tiles_of_pairs(pattern, query, key, shift, masks, budget)
        start = int(query["offset"]) + shift
        bands = bands_of(pattern, start, start + int(query["extent"][-1]))
        if bands is not None:
            with whole_imports:  # which not every pattern needs
                from ._banded import tiles_of_bands

            return tiles_of_bands(bands, query, key, shift, masks, budget)
    # A few tiles are sooner evaluated than searched for.
    few = int(query["tiles"]) == 1 and int(key["tiles"]) <= _FEW
    every = np.arange(int(key["tiles"])) if few else np.zeros(0, np.int64)
    pairs = np.stack([np.zeros_like(every), every])
    found = Found(np.zeros((3, 0), np.int64), pairs, pairs, every)
    found = found if few else _without_padding(search(pattern, query, key, shift, budget), key)
    budget.need_runs(found.runs.shape[1])
    first, kinds = (every, every) if few else _kinds(pattern, query, key, shift, found.samples)
    numbers = _evaluate(pattern, query, key, shift, found.samples[:, first], masks)[kinds[found.sample]]
    kept = numbers > _EMPTY
    (q_run, k_run, length), (q_open, k_open) = found.runs, found.open[:, kept]
    count = np.concatenate([length, np.ones(len(q_open), np.int64)])
    mask = np.concatenate([np.full(len(q_run), -1), numbers[kept]])
    query_tile, key_tile = np.concatenate([q_run, q_open]), np.concatenate([k_run, k_open])
    order = np.argsort(query_tile * int(key["tiles"]) + key_tile, kind="stable")  # each half is mostly in order
    joined = join_runs(query_tile[order], key_tile[order], count[order], mask[order])
    return Tiles(*joined, _count(query, *joined, masks))


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


_EMPTY = -2


def _plain(view: np.void) -> bool:
    """Whether a view is one of consecutive positions."""
    return bool(view["stride"][-1] == 1 and view["extent"][:-1].max() == 1)


def _without_padding(found: Found, key: np.void) -> Found:
    """The same with the tiles of runs that hold padding keys as open pairs."""
    before = padded_before(key)
    padded = np.nonzero(np.diff(before))[0]
    query, first, length = found.runs
    low, high = before[first], before[first + length]
    if not (high > low).any():
        return found
    own, row = high - low, query * int(key["tiles"])  # row: where the numbers of all tile pairs of a query tile start
    tiles = padded[np.repeat(low, own) + ramp(own)]
    more = np.stack([np.repeat(query, own), tiles])
    open_, samples = (np.concatenate([pairs, more], axis=1) for pairs in (found.open, found.samples))
    sample = np.append(found.sample, found.samples.shape[1] + np.arange(len(tiles)))
    tiles += np.repeat(row, own)
    # What is left of runs lies between padded tiles: sorted, every start meets its own end.
    starts, stops = np.sort(np.stack([np.append(row + first, tiles + 1), np.append(tiles, row + first + length)]))
    kept = stops > starts
    return Found(
        np.stack([*np.divmod(starts[kept], int(key["tiles"])), (stops - starts)[kept]]), open_, samples, sample
    )


def _kinds(
    pattern: Pattern, query: np.void, key: np.void, shift: int, pairs: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Groups tile pairs whose bitmasks are equal: (one pair of each group, group of each pair)."""
    if not pairs.size:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    first, kinds, unfollowed = alike(pattern, query, key, shift, pairs)
    if unfollowed:
        with whole_imports:  # which few patterns need
            from ._undecided import announce

        cells = math.prod([*query["box"].tolist(), *key["box"].tolist()])
        announce(pattern, unfollowed[0], len(first), len(first) * cells)
    return first, kinds


def _evaluate(
    pattern: Pattern, query: np.void, key: np.void, shift: int, pairs: np.ndarray, masks: Masks
) -> np.ndarray:
    """Number of the bitmask of each tile pair; -1 when full, `_EMPTY` when nothing is allowed."""
    block_q, words = masks.shape
    numbers = np.zeros(pairs.shape[1], dtype=np.int32)
    # Tiles without padding rows first: a padded tile reuses their masks where its real rows agree.
    real_rows = real_extents(np.broadcast_to(query, pairs.shape[1:]), pairs[0]).prod(axis=1)
    order = np.argsort(real_rows < block_q, kind="stable")
    for part in np.array_split(order, max(1, math.ceil(len(order) / _TILES_AT_ONCE))):
        (q, q_valid), (k, k_valid) = (
            positions(view, tiles) for view, tiles in zip((query, key), pairs[:, part], strict=True)
        )
        allowed = allowed_pairs(pattern, (q + shift)[:, :, None], k[:, None, :])
        allowed = np.broadcast_to(allowed, (len(part), block_q, words * 64)) & k_valid[:, None, :]
        packed = np.packbits(allowed, axis=2, bitorder="little").view("<u8").astype(np.uint64)
        some = (packed.any(axis=2) & q_valid).any(axis=1)
        whole = packed == ~np.uint64(0)
        whole = whole.all(axis=(1, 2)) | (whole.all(axis=2) | ~q_valid).all(axis=1)
        numbers[part] = np.where(whole, -1, _EMPTY)
        partial, real = some & ~whole, q_valid.all(axis=1)
        numbers[part[partial & real]] = masks.add(packed[partial & real])
        for n in np.nonzero(partial & ~real)[0]:
            found = masks.find(packed[n], q_valid[n])
            numbers[part[n]] = masks.add(packed[n])[0] if found is None else found
    return numbers


def _count(
    query: np.void, query_tile: np.ndarray, key_tile: np.ndarray, count: np.ndarray, mask: np.ndarray, masks: Masks
) -> int:
    """Allowed pairs of these runs; padding rows do not count."""
    block_q, words = masks.shape
    rows_bits = np.bitwise_count(masks.array()).sum(axis=2, dtype=np.int64)  # (masks, block_q)
    rows = real_extents(np.broadcast_to(query, query_tile.shape), query_tile).prod(axis=1)
    full, plain = mask < 0, (mask >= 0) & (rows == block_q)
    nnz = int((rows * count)[full].sum()) * 64 * words + int((rows_bits.sum(axis=1)[mask[plain]] * count[plain]).sum())
    for n in np.nonzero(~full & ~plain)[0]:
        real = positions(query, query_tile[n : n + 1])[1][0]
        nnz += int(rows_bits[mask[n]][real].sum()) * int(count[n])
    return nnz
