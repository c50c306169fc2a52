"""Choose the rank that computes each split item: one with its rows, or the one with most rows that it reads.

A split item writes a partial, which the rank of a row combines with others. If the item is computed where the rows are
that it reads, its own rows and the partial are exchanged instead. Combines have the whole plan's order on any rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .._util.frozen import frozen
from .._util.ragged import offsets
from .reductions import Merges

__all__ = ["HOME", "LATE", "LENT", "OWN", "Bytes", "Partials", "Placement", "Runs", "place"]

HOME = -1  # every rank with a row of an item computes it
OWN, LENT, LATE = range(3)  # roles of stages
_MOST_WORK = 17, 16  # no rank's work may grow by more than this ratio of the largest


class Bytes(NamedTuple):
    """Bytes of an item's row, of its partial, and of a row that it reads, in the same units."""

    row: int
    partial: int
    read: int


class Runs(NamedTuple):
    """The tiles that items read: item ``item[i]`` reads ``tiles[start[i]:stop[i]]``; -1 stands for padding."""

    tiles: np.ndarray
    item: np.ndarray
    start: np.ndarray
    stop: np.ndarray

    def covered(self, chosen: np.ndarray) -> np.ndarray:
        """Return how many of the `chosen` items, (items,) bool, read each tile."""
        runs, size = chosen[self.item], len(self.tiles) + 1
        steps = np.bincount(self.start[runs], minlength=size) - np.bincount(self.stop[runs], minlength=size)
        return np.cumsum(steps)[:-1]

    def total(self, of_tile: np.ndarray, items: int) -> np.ndarray:
        """Return the sum, of each item, of a value of the tiles that it reads."""
        before, found = offsets(of_tile), np.zeros(items, np.int64)
        np.add.at(found, self.item, before[self.stop] - before[self.start])
        return found


class Partials(NamedTuple):
    """The partials of a kernel: each item's slot, the items of each variant, all combines and those that the combine
    kernel does, and the number of slots and of rows of a slot."""

    slot: np.ndarray
    work_indptr: np.ndarray
    merges: Merges
    left: Merges
    slots: int
    rows: int

    @property
    def variant(self) -> np.ndarray:
        """Variant of each item."""
        return np.repeat(np.arange(len(self.work_indptr) - 1), np.diff(self.work_indptr))

    def free(self) -> np.ndarray:
        """Return which items write a partial that the combine kernel alone reads: (items,) bool."""
        read = [self._sources(merges) for merges in (self.merges, self.left)]
        found = self.slot >= 0
        at = (self.variant * self.slots + self.slot)[found]
        found[found] = (read[0][at] == read[1][at]) & (read[1][at] > 0)
        return found

    def _sources(self, merges: Merges) -> np.ndarray:
        """Return how many rows read each slot, (variants · slots,)."""
        variant = np.repeat(self.of_merges(merges), np.diff(merges.indptr))
        size = (len(self.work_indptr) - 1) * self.slots
        return np.bincount(variant * self.slots + merges.sources // self.rows, minlength=size)

    @staticmethod
    def of_merges(merges: Merges) -> np.ndarray:
        """Return the variant of each combine."""
        return np.repeat(np.arange(len(merges.variants) - 1), np.diff(merges.variants))


@dataclass(frozen=True, eq=False)
class Placement:
    """The rank that computes each item.

    Attributes
    ----------
    of_item : (items,) int32 array
        Rank, or `HOME`.
    partials : Partials
    """

    of_item: np.ndarray
    partials: Partials

    def __bool__(self) -> bool:
        """True if an item is computed elsewhere."""
        return bool((self.of_item != HOME).any())

    def writers(self) -> np.ndarray:
        """Return the rank that writes each workspace row, (variants, rows) int32; `HOME` for its reader."""
        return np.repeat(self._of_slots(), self.partials.rows, axis=1)

    def _of_slots(self) -> np.ndarray:
        of = self.partials
        found, some = np.full((len(of.work_indptr) - 1, of.slots), HOME, np.int32), of.slot >= 0
        found[of.variant[some], of.slot[some]] = self.of_item[some]
        return found

    def needed(self, owners: np.ndarray, rank: int) -> np.ndarray:
        """Return the workspace rows that a rank receives, (variants, rows) bool."""
        found = np.zeros((len(self.partials.work_indptr) - 1, self.partials.slots * self.partials.rows), bool)
        if self:
            variant, source, _, writer = self._sources(owners, rank)
            far = (writer != HOME) & (writer != rank)
            found[variant[far], source[far]] = True
        return found

    def late(self, owners: np.ndarray, rank: int) -> np.ndarray:
        """Return the rows of a rank with a source that one rank computes for all, (variants, length) bool."""
        found = np.zeros((len(self.partials.work_indptr) - 1, len(owners)), bool)
        if self:
            variant, _, row, writer = self._sources(owners, rank)
            found[variant[writer != HOME], row[writer != HOME]] = True
        return found

    def _sources(self, owners: np.ndarray, rank: int) -> tuple[np.ndarray, ...]:
        """Return (variant, workspace row, row, rank that writes it or `HOME`) of the sources of a rank's rows."""
        merges = self.partials.merges
        count = np.diff(merges.indptr)
        mine = np.repeat(owners[merges.rows] == rank, count)
        variant = np.repeat(self.partials.of_merges(merges), count)[mine]
        source, row = merges.sources[mine], np.repeat(merges.rows, count)[mine]
        return variant, source, row, self._of_slots()[variant, source // self.partials.rows]

    def prove(self, rank: int, owners: np.ndarray, stages: Iterable[tuple[np.ndarray, np.ndarray, int]]) -> None:
        """Raise RuntimeError unless each partial that a rank combines is written once: by an item of the row's stage
        or, for rows that are combined late, of any stage, or by another rank. Stages are (items, rows, role)."""
        of, stages = self.partials, list(stages)
        times = sum((items.astype(np.int64) for items, _, _ in stages), np.zeros(len(of.slot), np.int64))
        variant, source, row, writer = self._sources(owners, rank)
        far = (writer != HOME) & (writer != rank)
        fine = times.max(initial=0) <= 1 and (times[self.of_item == rank] == 1).all()
        fine &= not times[(self.of_item != HOME) & (self.of_item != rank)].any()
        for items, rows, role in stages:
            here = np.zeros((len(of.work_indptr) - 1, of.slots), bool)
            some = (of.slot >= 0) & (times > 0 if role == LATE else items)
            here[of.variant[some], of.slot[some]] = True
            read = rows[variant, row]
            present = here[variant, source // of.rows]
            fine &= (present != far)[read].all() if role == LATE else (present & (writer == HOME))[read].all()
        if not fine:
            raise RuntimeError(
                "plan: a partial of a rank has no writer or several; this is a bug in spattn, please report it"
            )


def place(
    partials: Partials,
    rows: np.ndarray,
    runs: Runs,
    weight: np.ndarray,
    owners: np.ndarray,
    world_size: int,
    cost: Bytes,
) -> Placement:
    """Place items where ranks then exchange fewer bytes; the same on all ranks.

    Item i writes the rows ``rows[i]``, -1 for padding, and has the work ``weight[i]``. All items stay at `HOME` if a
    rank would have much more work than the busiest has.
    """
    of_item, free = np.full(len(rows), HOME, np.int32), partials.free()
    if world_size == 1 or not free.any():
        return Placement(frozen(of_item), partials)
    mine, held = _of_ranks(rows, owners, world_size), _of_ranks(runs.tiles, owners, world_size)
    target = np.argmax([runs.total(count, len(rows)) for count in held], axis=0)
    home, at_target = mine > 0, mine[target, np.arange(len(rows))]
    free &= at_target < mine.sum(axis=0)
    found = np.zeros_like(free)
    while (found != free).any():  # fewer items share what they save
        found, saved = free, (at_target - mine.sum(axis=0)) * (cost.row + cost.partial)
        for rank in range(world_size):
            # Rows that items at home read in any case are there; items that leave share the others evenly.
            leaving, coming = (free & (target != rank) & home[rank]), free & (target == rank) & ~home[rank]
            away = (held.sum(axis=0) - held[rank]) * (runs.covered(home[rank] & ~leaving) == 0) * cost.read
            shared = runs.total(away // np.maximum(1, runs.covered(leaving)), len(rows))
            saved += np.where(leaving, shared, 0)
            saved -= np.where(coming, runs.total(away, len(rows)), 0)
        free = free & (saved > 0)
    of_item[free] = target[free]
    before = home @ weight
    after = (home & ~free) @ weight + np.bincount(target[free], weight[free], world_size).astype(np.int64)
    if _MOST_WORK[1] * int(after.max()) > _MOST_WORK[0] * int(before.max()):
        of_item[:] = HOME
    return Placement(frozen(of_item), partials)


def _of_ranks(tiles: np.ndarray, owners: np.ndarray, world_size: int) -> np.ndarray:
    """Return how many rows of each tile each rank has, (ranks, tiles) int64."""
    tile, cell = np.nonzero(tiles >= 0)
    found = np.zeros((world_size, len(tiles)), np.int64)
    np.add.at(found, (owners[tiles[tile, cell]], tile), 1)
    return found
