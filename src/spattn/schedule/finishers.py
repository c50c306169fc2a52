"""Finishers: work items that write the results of rows that they share, which saves a merge a trip through memory.

Rows of the forward are merged by the later of two sources. Rows of gradients are sums, whose first source can add any
number of others, in their order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .._util.checks import show
from .._util.ragged import offsets, ramp
from ..planning.contract.types import Plan

__all__ = ["Finishers", "Merges", "SumFinishers", "find_finishers", "find_sum_finishers", "no_sum_finishers"]

_WORTH = 4  # a launch of its own costs some microseconds: finishers write at least this part of all rows
_SHARED = -2  # a row of a slot that has more sources than two, or is the earlier of two


class Merges(NamedTuple):
    """Merges as a plan has them: row, sources of each row, and the merges of each variant."""

    rows: np.ndarray
    indptr: np.ndarray
    sources: np.ndarray
    variants: np.ndarray


class Finishers(NamedTuple):
    """Which work items of a plan finish, and what is left to merge.

    Attributes
    ----------
    slots : (items,) int32 array
        The plan's, but -2 - i for finisher number i.
    priors : (finishers, block_q) int32 array
        The workspace row with the rest of each row; -1 for padding.
    merges : Merges
        The plan's without the rows of finishers.
    """

    slots: np.ndarray
    priors: np.ndarray
    merges: Merges

    @property
    def finishes(self) -> np.ndarray:
        """(items,) bool: which work items finish."""
        return self.slots <= -2


def find_finishers(plan: Plan) -> Finishers:
    """The work items that can write the output of their rows although they share them.

    A work item finishes when each of its rows has exactly one other source, an earlier one. It has to run after all
    that do not finish.
    """
    slots, block_q = plan.work["slot"].astype(np.int32), plan.block_q
    priors: list[np.ndarray] = []
    kept = np.ones(len(plan.merge_rows), dtype=bool)
    counts = np.diff(plan.merge_indptr)
    for variant in range(plan.variants):
        merges = np.arange(*plan.merge_variants[variant : variant + 2])
        prior = np.full((plan.slots, block_q), -1, dtype=np.int64)  # by slot and cell
        flat = prior.reshape(-1)
        bounds = plan.merge_indptr[plan.merge_variants[variant : variant + 2]]
        flat[plan.merge_sources[bounds[0] : bounds[1]]] = _SHARED
        of_two = merges[counts[merges] == 2]
        flat[plan.merge_sources[plan.merge_indptr[of_two] + 1]] = plan.merge_sources[plan.merge_indptr[of_two]]
        finishes = (prior != _SHARED).all(axis=1)
        first, last = plan.work_indptr[variant : variant + 2]
        own = first + np.nonzero(slots[first:last] >= 0)[0]
        own = own[finishes[slots[own]]]
        kept[of_two[finishes[plan.merge_sources[plan.merge_indptr[of_two] + 1] // block_q]]] = False
        new = -2 - sum(map(len, priors)) - np.arange(len(own), dtype=np.int32)
        priors.append(prior[slots[own]].astype(np.int32))
        slots[own] = new
    whole = Merges(plan.merge_rows, plan.merge_indptr, plan.merge_sources, plan.merge_variants)
    found = Finishers(slots, np.concatenate(priors), _without(whole, kept, counts))
    show("finishers", plan=plan, found=found)
    return found


class SumFinishers(NamedTuple):
    """Which work items of a pass finish, and what is left to sum.

    Attributes
    ----------
    slots : (items,) int32 array
        The pass's, but -2 - i for finisher number i.
    rest_indptr : (finishers · rows + 1,) int32 array
        For each row of each finisher, where its other sources are listed.
    rest_sources : int32 array
        Those sources: workspace rows, in the order in which they are added.
    merges : Merges
        The pass's without the rows of finishers.
    """

    slots: np.ndarray
    rest_indptr: np.ndarray
    rest_sources: np.ndarray
    merges: Merges


def find_sum_finishers(
    slots: np.ndarray, work_indptr: np.ndarray, merges: Merges, rows: int, length: int
) -> SumFinishers:
    """The work items that can write the sums of their rows: those that are the first source of each of these.

    They have to run after all others, in a launch of their own, which is worth it if they write a good part of all
    rows.

    Parameters
    ----------
    slots : (items,) int array
    rows : int
        Of an item.
    length : int
        Rows of a result.
    """
    given, slots, counts = slots, slots.astype(np.int32), np.diff(merges.indptr)
    found = [_first_sources(slots, work_indptr, merges, rows, variant) for variant in range(len(work_indptr) - 1)]
    item, merge = (np.concatenate(column) for column in zip(*found, strict=True))
    real = merge[merge >= 0]
    if _WORTH * len(real) < length * len(found):
        return no_sum_finishers(slots, merges)
    kept = np.ones(len(counts), bool)
    kept[real] = False
    slots[item] = -2 - np.arange(len(item), dtype=np.int32)
    others = np.where(merge >= 0, counts[merge] - 1, 0)
    place = np.repeat(merges.indptr[merge] + 1, others) + ramp(others)
    rest = offsets(others).astype(np.int32), merges.sources[place]
    made = SumFinishers(slots, *rest, _without(merges, kept, counts))
    show("sum finishers", slots=given, work_indptr=work_indptr, merges=merges, rows=rows, found=made)
    return made


def no_sum_finishers(slots: np.ndarray, merges: Merges) -> SumFinishers:
    """Every shared row is summed after all items."""
    return SumFinishers(slots.astype(np.int32), np.zeros(1, np.int32), np.zeros(0, np.int32), merges)


def _first_sources(
    slots: np.ndarray, work_indptr: np.ndarray, merges: Merges, rows: int, variant: int
) -> tuple[np.ndarray, np.ndarray]:
    """The items of a variant that are the first source of each of their rows, and the merges of these rows, -1 for
    padding."""
    first, last = work_indptr[variant : variant + 2]
    item = first + np.nonzero(slots[first:last] >= 0)[0]
    merge = np.arange(*merges.variants[variant : variant + 2])
    merge = merge[merges.indptr[merge] < merges.indptr[merge + 1]]
    shape = int(slots[item].max(initial=-1)) + 1, rows  # by slot and row
    of_row, later = np.full(shape, -1), np.zeros(shape, bool)
    every = slice(*merges.indptr[merges.variants[variant : variant + 2]])
    later.reshape(-1)[merges.sources[every]] = True
    earliest = merges.sources[merges.indptr[merge]]
    later.reshape(-1)[earliest], of_row.reshape(-1)[earliest] = False, merge
    item = item[~later[slots[item]].any(axis=1)]
    return item, of_row[slots[item]].ravel()


def _without(merges: Merges, kept: np.ndarray, counts: np.ndarray) -> Merges:
    """The merges that a mask keeps."""
    return Merges(
        merges.rows[kept],
        np.r_[0, np.cumsum(counts[kept])].astype(np.int32),
        merges.sources[np.repeat(kept, counts)],
        np.r_[0, np.cumsum(kept)].astype(np.int32)[merges.variants],
    )
