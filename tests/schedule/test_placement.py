"""The rank that computes each split item: bytes, work, and proofs."""

import numpy as np
import pytest

from spattn.schedule.placement import HOME, LATE, LENT, OWN, Bytes, Partials, Placement, Runs, place
from spattn.schedule.reductions import Merges, select_merges

CELLS, LENGTH = 4, 48


def problem(seed):
    """Lists of tiles of consecutive rows, cut into items; a list of one item writes its rows."""
    generator = np.random.default_rng(seed)
    tiles = np.arange(LENGTH).reshape(-1, CELLS)
    world_size = int(generator.integers(1, 5))
    owners = np.sort(generator.integers(0, world_size, LENGTH))
    items, runs, sources, slot = [], [], [[] for _ in range(LENGTH)], 0
    for tile in generator.permutation(len(tiles)):
        pieces = int(generator.integers(1, 6))
        cuts = np.sort(generator.choice(len(tiles) + 1, pieces + 1, replace=False))
        for begin, end in zip(cuts[:-1], cuts[1:], strict=True):
            runs.append((len(items), begin, end))
            items.append((tile, slot if pieces > 1 else -1, end - begin))
            for cell, row in enumerate(tiles[tile]):
                if pieces > 1:
                    sources[row].append(slot * CELLS + cell)
            slot += pieces > 1
    rows, slots, weight = tiles[[tile for tile, _, _ in items]], *np.array(items)[:, 1:].T
    merged = [row for row in range(LENGTH) if sources[row]]
    indptr = np.cumsum([0, *(len(sources[row]) for row in merged)])
    all_sources = np.array([x for row in merged for x in sources[row]], np.int64)
    merges = Merges(np.array(merged, np.int64), indptr, all_sources, np.array([0, len(merged)]))
    partials = Partials(slots, np.array([0, len(items)]), merges, merges, slot, CELLS)
    item, start, stop = np.array(runs).T
    return partials, rows, Runs(tiles, item, start, stop), weight, owners, world_size


def bytes_moved(of_item, rows, runs, owners, world_size, cost):
    """The bytes that all ranks receive, row by row."""
    total = 0
    for rank in range(world_size):
        mine = np.where(of_item == HOME, (owners[rows] == rank).any(axis=1), of_item == rank)
        read = np.zeros(LENGTH, bool)
        for item, start, stop in zip(*runs[1:], strict=True):
            if mine[item]:
                read[runs.tiles[start:stop]] = True
        total += cost.read * (read & (owners != rank)).sum()
        total += (cost.row + cost.partial) * (owners[rows[of_item == rank]] != rank).sum()
    return total


@pytest.mark.parametrize("seed", range(40))
def test_fewer_bytes(seed):
    partials, rows, runs, weight, owners, world_size = problem(seed)
    cost = Bytes(*np.random.default_rng(seed).integers(0, 6, 2).tolist(), 7)
    found = place(partials, rows, runs, weight, owners, world_size, cost).of_item
    assert (found[partials.slot < 0] == HOME).all() and (found < world_size).all()
    moved = [bytes_moved(x, rows, runs, owners, world_size, cost) for x in (found, np.full_like(found, HOME))]
    assert moved[0] < moved[1] or (found == HOME).all()
    work = np.zeros((2, world_size), np.int64)
    for rank in range(world_size):
        home = (owners[rows] == rank).any(axis=1)
        work[:, rank] = weight[home].sum(), weight[np.where(found == HOME, home, found == rank)].sum()
    assert 16 * work[1].max() <= 17 * work[0].max()


def test_some_items_move():
    assert sum((place(*problem(seed), Bytes(1, 1, 7)).of_item != HOME).any() for seed in range(40)) >= 10


def test_items_that_kernels_combine_stay():
    for seed in range(10):
        partials, *rest = problem(seed)
        kept = np.arange(len(partials.merges.rows)) % 3 > 0
        partials = partials._replace(left=select_merges(partials.merges, kept))
        read = partials.merges.sources[np.repeat(~kept, np.diff(partials.merges.indptr))] // CELLS
        free = partials.free()
        assert not np.isin(partials.slot[free], read).any() and (partials.slot[free] >= 0).all()
        assert (place(partials, *rest, Bytes(0, 0, 7)).of_item[~free] == HOME).all()


@pytest.mark.parametrize("change", ["none", "twice", "never", "at another", "late", "received"])
def test_partials_with_no_writer_or_several_are_refused(change):
    """Two ranks have rows 0 to 3 and 4 to 7. An item reads a tile of each; rank 1 computes the second of rank 0."""
    merges = Merges(
        np.arange(8), np.arange(0, 18, 2), np.array([0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]), [0, 8]
    )
    partials = Partials(np.arange(4), np.array([0, 4]), merges, merges, 4, CELLS)
    owners, rows = np.repeat([0, 1], 4), np.zeros((1, 8), bool)
    of = Placement(np.array([HOME, 1, HOME, HOME]), partials)
    assert of.needed(owners, 0).nonzero()[1].tolist() == [4, 5, 6, 7] and not of.needed(owners, 1).any()
    assert of.late(owners, 0).nonzero()[1].tolist() == [0, 1, 2, 3] and not of.late(owners, 1).any()
    own, lent, none = np.array([0, 0, 1, 1], bool), np.array([0, 1, 0, 0], bool), np.zeros(4, bool)
    mine = rows | (owners == 1)
    stages = [(own, mine, OWN), (lent, rows, LENT)]
    of_zero = [(np.array([1, 0, 0, 0], bool), rows, OWN), (none, rows | (owners == 0), LATE)]
    if change == "none":
        of.prove(1, owners, stages)
        of.prove(0, owners, of_zero)
        return
    rank = 1
    if change == "twice":
        stages.append((lent, rows, LENT))
    elif change == "never":
        stages.pop()
    elif change == "at another":
        rank, stages = 0, [(np.array([1, 1, 0, 0], bool), rows, OWN), of_zero[1]]
    elif change == "late":
        rank, stages = 0, [(of_zero[0][0], rows | (owners == 0), OWN)]
    else:
        rank, stages = 0, [(none, rows, OWN), of_zero[1]]
    with pytest.raises(RuntimeError, match="no writer or several"):
        of.prove(rank, owners, stages)
