"""Find the tiles of one piece of a pattern, on a query view and a key view."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from ..._util.imports import whole_imports
from ..._util.ragged import ramp
from ...patterns import Pattern
from ...patterns.base.predicate import allowed as allowed_pairs
from ...patterns.hints.closed_forms import Bands, Lattice
from ..contract.budget import Budget
from ..contract.types import SCATTERED_TILE, TILE, grid_of, padded_before, padding_kinds, positions
from ._lists import RunLists
from .masks import EMPTY, Masks, packed
from .parts import Piece
from .run_lists import add_runs, join_runs
from .search import Found, alike, cut_view, search
from .spans import tiles_of_spans

_BOX_BYTES = 96  # memory for each box of the two views
_NOTED_CELLS = 1 << 20  # fewer cells are evaluated in milliseconds
_FEW = 32  # with one query tile, up to this number of key tiles are evaluated without a search


@functools.lru_cache(maxsize=64)
def make_view(lattice: Lattice, block: int) -> np.void:
    """Return the VIEW record of a lattice with boxes of `block` cells."""
    return cut_view(lattice.offset, lattice.strides, lattice.extents, choose_box(lattice.extents, block))


@functools.lru_cache(maxsize=2048)
def choose_box(extents: tuple[int, ...], block: int) -> tuple[int, ...]:
    """Return the most cubic box of `block` cells that covers the lattice with at most 10 % more boxes than necessary.

    If one box covers the lattice, return the box in which the lattice's last cell has the smallest row-major index. On
    ties, prefer a long last axis.
    """

    def boxes(box: tuple[int, ...]) -> int:
        return math.prod(grid_of(extents, box))

    candidates = factorisations(block, len(extents))
    fewest = min(map(boxes, candidates))
    near = [box for box in candidates if boxes(box) <= 1.1 * fewest]
    return min(near, key=lambda box: (last_cell(extents, box) if fewest == 1 else 0, sum(box), box))


def last_cell(extents: tuple[int, ...], box: tuple[int, ...]) -> int:
    """Return the row-major index of a lattice's last cell in a box that contains the lattice."""
    cell = 0
    for extent, side in zip(extents, box, strict=True):
        cell = cell * side + extent - 1
    return cell


def factorisations(number: int, factors: int) -> list[tuple[int, ...]]:
    """Return all ordered factorizations of an integer into `factors` factors."""
    if factors == 1:
        return [(number,)]
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return [(d, *rest) for d in divisors for rest in factorisations(number // d, factors - 1)]


def choose_tile(bound: Sequence[Pattern], q_len: int, kv_len: int) -> tuple[int, int]:
    """Return the default tile for these variants of a pattern."""
    listing = [pattern for pattern in bound if pattern._lists_pairs]
    if listing:
        with whole_imports:  # imported late: few patterns need it
            from .listed import are_scattered

        if any(are_scattered(pattern, q_len, kv_len, TILE) for pattern in listing):
            return SCATTERED_TILE
    return TILE


def find_tiles(
    piece: Piece, query: np.void, key: np.void, shift: int, kv_len: int, masks: Masks, lists: RunLists, budget: Budget
) -> int:
    """Append all non-empty tiles of a piece to `lists`, one list for each query tile; return the number of pairs.

    `shift` is kv_len − q_len: row r of the query view has position r + `shift`. Exceeding `budget` raises ValueError.
    """
    budget.need(_BOX_BYTES * (int(query["tiles"]) + int(key["tiles"])))
    pattern = piece.pattern
    if _plain(piece.query) and _plain(piece.key):
        if pattern._lists_pairs:
            with whole_imports:  # imported late: few patterns need it
                from .listed import tiles_of_pairs

            return tiles_of_pairs(pattern, query, key, shift, masks, lists, budget)
        bands = _bands(pattern, query, shift)
        if bands is not None:
            with whole_imports:  # imported late: not all patterns need it
                from .banded import tiles_of_bands

            return tiles_of_bands(bands, query, key, shift, masks, lists, budget)
    spanned = tiles_of_spans(piece, query, key, kv_len, masks, lists, budget)
    if spanned is not None:
        return spanned
    # Evaluating all of a few tiles is faster than a search; so is evaluating all pairs if it would decide none.
    few = int(query["tiles"]) == 1 and int(key["tiles"]) <= _FEW
    if not few and _plain(piece.query) and _plain(piece.key):
        with whole_imports:  # imported late: few patterns need it
            from .undecided import listed_pairs

        listed = listed_pairs(pattern, query, key, shift)
        if listed is not None:
            with whole_imports:
                from .listed import tiles_of_pairs

            return tiles_of_pairs(listed, query, key, shift, masks, lists, budget)
    every = np.arange(int(key["tiles"])) if few else np.zeros(0, np.int64)
    pairs = np.stack([np.zeros_like(every), every])
    found = Found(np.zeros((3, 0), np.int64), pairs, pairs, every)
    found = found if few else _without_padding(search(pattern, query, key, shift, budget), key)
    budget.need_runs(found.runs.shape[1])
    first, kinds = (every, every) if few else _kinds(pattern, query, key, shift, found.samples)
    numbers = _evaluate(pattern, query, key, shift, found.samples[:, first], masks)[kinds[found.sample]]
    kept = numbers > EMPTY
    (q_run, k_run, length), (q_open, k_open) = found.runs, found.open[:, kept]
    count = np.concatenate([length, np.ones(len(q_open), np.int64)])
    mask = np.concatenate([np.full(len(q_run), -1), numbers[kept]])
    query_tile, key_tile = np.concatenate([q_run, q_open]), np.concatenate([k_run, k_open])
    order = np.argsort(query_tile * int(key["tiles"]) + key_tile, kind="stable")  # both halves are nearly sorted
    joined = join_runs(query_tile[order], key_tile[order], count[order], mask[order])
    add_runs(lists, budget, int(query["tiles"]), *joined)
    return _count(query, *joined, masks)


def _bands(pattern: Pattern, query: np.void, shift: int) -> tuple[Bands, ...] | None:
    """Return the pattern's conjuncts for a view of consecutive queries."""
    start = int(query["offset"]) + shift
    return pattern._bands(start, start + int(query["extent"][-1]))


def _plain(lattice: Lattice) -> bool:
    """Return whether a lattice has consecutive positions."""
    return lattice.strides[-1] == 1 and max(lattice.extents[:-1], default=1) == 1


def _without_padding(found: Found, key: np.void) -> Found:
    """Remove tiles with padding keys from the runs of full tiles, and add them to the undecided pairs."""
    before = padded_before(key)
    padded = np.nonzero(np.diff(before))[0]
    query, first, length = found.runs
    low, high = before[first], before[first + length]
    if not (high > low).any():
        return found
    own, row = high - low, query * int(key["tiles"])  # row: row-major index of the query tile's first tile pair
    tiles = padded[np.repeat(low, own) + ramp(own)]
    more = np.stack([np.repeat(query, own), tiles])
    open_, samples = (np.concatenate([pairs, more], axis=1) for pairs in (found.open, found.samples))
    sample = np.append(found.sample, found.samples.shape[1] + np.arange(len(tiles)))
    tiles += np.repeat(row, own)
    # The remaining runs lie between padded tiles, so that sorted starts and sorted stops match pairwise.
    starts, stops = np.sort(np.stack([np.append(row + first, tiles + 1), np.append(tiles, row + first + length)]))
    kept = stops > starts
    return Found(
        np.stack([*np.divmod(starts[kept], int(key["tiles"])), (stops - starts)[kept]]), open_, samples, sample
    )


def _kinds(
    pattern: Pattern, query: np.void, key: np.void, shift: int, pairs: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Group tile pairs with equal bitmasks; return (representatives, group of each pair)."""
    if not pairs.size:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    first, kinds, unfollowed = alike(pattern, query, key, shift, pairs)
    cells = len(first) * math.prod([*query["box"].tolist(), *key["box"].tolist()])
    if cells >= _NOTED_CELLS:
        with whole_imports:  # imported late: few patterns need it
            from .undecided import announce

        announce(pattern, unfollowed, len(first), cells)
    return first, kinds


def _evaluate(
    pattern: Pattern, query: np.void, key: np.void, shift: int, pairs: np.ndarray, masks: Masks
) -> np.ndarray:
    """Return the bitmask index of each tile pair: -1 for full tiles, `EMPTY` for empty ones."""

    def evaluated(some: np.ndarray) -> np.ndarray:
        (q, _), (k, valid) = (positions(view, tiles) for view, tiles in zip((query, key), pairs[:, some], strict=True))
        found = allowed_pairs(pattern, (q + shift)[:, :, None], k[:, None, :])
        return packed(np.broadcast_to(found, (len(some), *masks.tile)) & valid[:, None, :])

    return masks.number(evaluated, *padding_kinds(query, pairs[0]))


def _count(
    query: np.void, query_tile: np.ndarray, key_tile: np.ndarray, count: np.ndarray, mask: np.ndarray, masks: Masks
) -> int:
    """Return the number of pairs in these runs, without padding rows."""
    bits, (padding, real) = masks.array(), padding_kinds(query, query_tile)
    pairs = np.zeros((len(real), len(bits) + 1), np.int64)  # pairs of each bitmask; last column: a full tile
    for own, rows in zip(pairs, real, strict=True):
        of_rows = np.bitwise_count(bits if rows.all() else bits[:, rows])
        own[:-1] = of_rows.sum(axis=(1, 2), dtype=np.int64)
        own[-1] = np.count_nonzero(rows) * masks.tile[1]
    return int((pairs[padding, mask] * count).sum())
