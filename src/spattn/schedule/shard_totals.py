"""How many rows and tiles each of many ranks needs, sends and computes, for all ranks together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .._util.ragged import offsets, ramp
from ..planning import Plan
from .shard import Sharding, Spans, spans_of, tiles_in_runs

__all__ = ["Totals", "totals"]

_RANKS = 512  # ranks whose needs are in memory together


class Totals(NamedTuple):
    """Of each rank: exchanged rows, times heads, messages that it receives, and tiles that it computes, times heads."""

    received: np.ndarray
    sent: np.ndarray
    messages: np.ndarray
    own_tiles: np.ndarray  # of lists with a row of the rank
    tiles: np.ndarray  # backward, also of other lists, from the first to the last tile with a key of the rank


def totals(
    plan: Plan, sharding: Sharding, groups: Sequence[tuple[Sequence[int], int]], heads: np.ndarray, backward: bool
) -> Totals:
    """Return the totals of all ranks.

    `groups` has, for each kind of exchanged heads, the variants that it takes part in, and the number of such heads;
    ``heads[v]`` is the number of query heads of variant v.
    """
    spans, owners, world_size = spans_of(plan), sharding.owners(), sharding.world_size
    targets, variant = (spans.queries, spans.of_list) if backward else (spans.keys, spans.of_tile)
    each = [(np.isin(np.arange(plan.variants), own), number) for own, number in groups]
    atoms = [_Atoms.of(targets, variant, own, owners) for own, _ in each]
    of_lists, of_tiles = (_pairs(rows, owners) for rows in (spans.queries, spans.keys))
    received, sent, messages = (np.zeros(world_size, np.int64) for _ in range(3))
    length = np.bincount(spans.lists, spans.work["end"] - spans.work["begin"], len(spans.queries))
    of_list = length * heads[spans.of_list]
    own_tiles = np.bincount(of_lists[1], of_list[of_lists[0]], world_size).astype(np.int64)
    tiles = own_tiles.copy()
    for first in range(0, world_size, _RANKS):
        count = min(_RANKS, world_size - first)
        lists, keys = (_of_ranks(pairs, first, count) for pairs in (of_lists, of_tiles))
        need = _needed_rows(spans, keys, count) if backward else _needed_keys(spans, lists, count)
        single = (
            _single_rows(plan, spans, keys, owners, first, count)
            if backward
            else (_single_keys(plan, spans, lists, owners, first, count))
        )
        pairs = np.zeros((world_size, count), bool)  # who sends to whom
        for (own, number), atom in zip(each, atoms, strict=True):
            to, by = atom.exchanged(need, single, variant_mask=own, owners=owners, first=first, pairs=pairs)
            received[first : first + count] += number * to
            sent += number * by
        messages[first : first + count] = pairs.sum(axis=0)
        if backward:
            tiles[first : first + count] += _cut_tiles(spans, lists, keys, heads, count)
    return Totals(received, sent, messages, own_tiles, tiles)


class _Atoms(NamedTuple):
    """Rows of equal owner that are in the same tiles."""

    tiles: np.ndarray  # (atoms, most tiles of a row) indices of tiles, -1 for none
    owner: np.ndarray  # (atoms,)
    rows: np.ndarray  # (atoms,) number of rows
    of_row: np.ndarray  # (length,) atom of each row

    @classmethod
    def of(cls, targets: np.ndarray, variant: np.ndarray, variants: np.ndarray, owners: np.ndarray) -> _Atoms:
        """Return the atoms of the tiles `targets` of some variants, a bool array."""
        tile, cell = np.nonzero((targets >= 0) & variants[variant][:, None])
        row = targets[tile, cell]
        order = np.argsort(row, kind="stable")
        number = np.bincount(row, minlength=len(owners))
        table = np.full((len(owners), 1 + int(number.max(initial=0))), -1)
        table[row[order], ramp(number)] = tile[order]
        table[:, -1] = owners
        found, of_row, count = np.unique(table, axis=0, return_inverse=True, return_counts=True)
        return cls(found[:, :-1], found[:, -1], count, of_row.ravel())

    def exchanged(
        self,
        need: np.ndarray,
        single: tuple[np.ndarray, np.ndarray, np.ndarray],
        variant_mask: np.ndarray,
        owners: np.ndarray,
        first: int,
        pairs: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows that each rank of a block receives and that each rank sends; add who sends to whom."""
        count = need.shape[1]
        padded = np.concatenate([need, np.zeros((1, count), bool)])
        needed = padded[self.tiles].any(axis=1) if self.tiles.shape[1] else np.zeros((len(self.owner), count), bool)
        here = np.nonzero((self.owner >= first) & (self.owner < first + count))[0]
        needed[here, self.owner[here] - first] = False
        exact = np.float32 if len(self.of_row) < 1 << 24 else np.float64  # the types of BLAS
        received = (self.rows.astype(exact) @ needed.astype(exact)).astype(np.int64)
        sent = np.bincount(self.owner, self.rows * needed.sum(axis=1), len(pairs)).astype(np.int64)
        order = np.argsort(self.owner, kind="stable")
        starts = np.nonzero(np.diff(self.owner[order], prepend=-1))[0]
        pairs[self.owner[order][starts]] |= np.logical_or.reduceat(needed[order], starts)
        variant, row, rank = single
        chosen = variant_mask[variant] & (owners[row] != rank + first) & ~needed[self.of_row[row], rank]
        row, rank = np.divmod(np.unique(row[chosen].astype(np.int64) * count + rank[chosen]), count)
        pairs[owners[row], rank] = True
        return received + np.bincount(rank, minlength=count), sent + np.bincount(owners[row], minlength=len(pairs))


def _pairs(rows: np.ndarray, owners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (tile, rank) of each rank with a row in a tile, sorted."""
    tile, cell = np.nonzero(rows >= 0)
    world_size = int(owners.max(initial=0)) + 1
    return np.divmod(np.unique(tile * world_size + owners[rows[tile, cell]]), world_size)


def _of_ranks(pairs: tuple[np.ndarray, np.ndarray], first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    here = (pairs[1] >= first) & (pairs[1] < first + count)
    return pairs[0][here], pairs[1][here] - first


def _needed_keys(spans: Spans, lists: tuple[np.ndarray, np.ndarray], count: int) -> np.ndarray:
    """Return whether a rank needs all keys of a tile: (key tiles, ranks) bool."""
    full = np.nonzero(spans.mask < 0)[0]
    of_list = spans.lists[spans.item[full]]
    before = offsets(np.bincount(lists[0], minlength=len(spans.queries)))
    number = before[of_list + 1] - before[of_list]
    run, rank = np.repeat(full, number), lists[1][np.repeat(before[of_list], number) + ramp(number)]
    steps = np.zeros((len(spans.keys) + 1, count), np.int32)
    np.add.at(steps, (spans.start[run], rank), 1)
    np.subtract.at(steps, (spans.stop[run], rank), 1)
    return np.cumsum(steps[:-1], axis=0, out=steps[:-1]) > 0


def _touched(spans: Spans, keys: tuple[np.ndarray, np.ndarray], count: int) -> np.ndarray:
    """Return whether a run has a tile with a key of a rank: (runs, ranks) bool."""
    before = np.zeros((len(spans.keys) + 1, count), np.int32)
    before[keys[0] + 1, keys[1]] = 1
    np.cumsum(before, axis=0, out=before)
    return before[spans.stop] > before[spans.start]


def _needed_rows(spans: Spans, keys: tuple[np.ndarray, np.ndarray], count: int) -> np.ndarray:
    """Return whether a rank needs all rows of a list: (lists, ranks) bool."""
    found = np.zeros((len(spans.queries), count), bool)
    full = spans.mask < 0
    np.logical_or.at(found, spans.lists[spans.item[full]], _touched(spans, keys, count)[full])
    return found


def _single_keys(
    plan: Plan, spans: Spans, lists: tuple[np.ndarray, np.ndarray], owners: np.ndarray, first: int, count: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (variant, key, rank) of the keys that rows of a rank attend to by a bitmask."""
    found = []
    near = np.bincount(lists[0], minlength=len(spans.queries)) > 0
    for run, tile in tiles_in_runs(spans, (spans.mask >= 0) & near[spans.lists[spans.item]]):
        pair, rank, cells = _by_rank(spans.queries[spans.lists[spans.item[run]]], owners, first, count)
        words = plan.masks[spans.mask[run]].reshape(-1, plan.masks.shape[2])
        starts = np.nonzero(np.diff(pair * count + rank, prepend=-1))[0]
        if len(starts):
            words = np.bitwise_or.reduceat(words[cells], starts)
            bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, bitorder="little").view(bool)
            keys = np.where(bits, spans.keys[tile[pair[starts]]], -1)
            found.append(_listed(spans.of_tile[tile[pair[starts]]], keys, rank[starts]))
    return _joined(found)


def _single_rows(
    plan: Plan, spans: Spans, keys: tuple[np.ndarray, np.ndarray], owners: np.ndarray, first: int, count: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (variant, row, rank) of the rows that attend to keys of a rank by a bitmask."""
    found = []
    near = offsets(np.bincount(keys[0], minlength=len(spans.keys)))
    for run, tile in tiles_in_runs(spans, (spans.mask >= 0) & (near[spans.stop] > near[spans.start])):
        pair, rank, cells = _by_rank(spans.keys[tile], owners, first, count)
        block = spans.keys.shape[1]
        starts = np.nonzero(np.diff(pair * count + rank, prepend=-1))[0]
        if len(starts):
            number = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(pair)))
            bits = np.zeros((len(starts), block), bool)
            bits[number, cells % block] = True
            words = np.packbits(bits, axis=1, bitorder="little").view(np.uint64)
            of_pair = pair[starts]
            lists = spans.lists[spans.item[run[of_pair]]]
            seen = (plan.masks[spans.mask[run[of_pair]]] & words[:, None]).any(axis=2)
            found.append(_listed(spans.of_list[lists], np.where(seen, spans.queries[lists], -1), rank[starts]))
    return _joined(found)


def _by_rank(rows: np.ndarray, owners: np.ndarray, first: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (tile, rank, index of the cell among all cells) of the rows of some ranks, sorted by tile and rank."""
    rank = np.where(rows >= 0, owners[rows], -1).ravel() - first
    cells = np.nonzero((rank >= 0) & (rank < count))[0]
    pair = cells // rows.shape[1]
    order = np.argsort(pair * count + rank[cells], kind="stable")
    return pair[order], rank[cells][order], cells[order]


def _listed(variant: np.ndarray, rows: np.ndarray, rank: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    pair, cell = np.nonzero(rows >= 0)
    return variant[pair], rows[pair, cell], rank[pair]


def _joined(found: Sequence[tuple[np.ndarray, ...]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    if not found:
        return (np.zeros(0, np.int64),) * 3
    variant, row, rank = (np.concatenate(column) for column in zip(*found, strict=True))
    return variant, row, rank


def _cut_tiles(
    spans: Spans,
    lists: tuple[np.ndarray, np.ndarray],
    keys: tuple[np.ndarray, np.ndarray],
    heads: np.ndarray,
    count: int,
) -> np.ndarray:
    """Return the tiles of lists without a row of a rank, from the first to the last with a key of the rank."""
    touched = _touched(spans, keys, count)
    own = np.zeros((len(spans.queries), count), bool)
    own[lists] = True
    run, rank = np.nonzero(touched & ~own[spans.lists[spans.item]])
    size = len(spans.keys)
    codes = np.sort(keys[1].astype(np.int64) * size + keys[0])
    low = codes[np.searchsorted(codes, rank * size + spans.start[run])] - rank * size
    high = codes[np.searchsorted(codes, rank * size + spans.stop[run]) - 1] - rank * size
    shift, item = spans.number[run] - spans.start[run], spans.item[run]
    begin = np.full((len(spans.work), count), np.iinfo(np.int32).max, np.int32)
    end = np.zeros((len(spans.work), count), np.int32)
    # Runs of an item ascend, and of equal indices the last assignment counts.
    last_first = np.arange(len(item) - 1, -1, -1)
    begin[item[last_first], rank[last_first]] = (low + shift)[last_first]
    end[item, rank] = high + shift + 1
    return heads[spans.of_list[spans.lists]] @ np.where(begin < end, end - begin, 0)
