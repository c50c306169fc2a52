"""In-kernel reduction (fix-up): a work item combines the partials of its rows itself.

The item's own partial then needs no round trip through memory. In the forward kernel the later of two sources combines
a row. Gradient rows are sums: the item that is a row's first source adds any number of others, in order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .._util.checks import show
from .._util.ragged import offsets, ramp
from ..planning.contract.types import Plan

__all__ = [
    "Merges",
    "Reductions",
    "SumReductions",
    "find_reductions",
    "find_sum_reductions",
    "merges_of_rows",
    "no_sum_reductions",
]

_WORTH = 4  # fix-up items need a launch of some microseconds, so they must write at least 1/_WORTH of all rows
_FEW_ROWS = 64  # largest tile of plans of a few queries
_SHARED = -2  # marks a partial's row that its item cannot fix up: more than two sources, or it is the earlier one


class Merges(NamedTuple):
    """Combines, as in a plan: rows, the sources of each row, and the rows of each variant."""

    rows: np.ndarray
    indptr: np.ndarray
    sources: np.ndarray
    variants: np.ndarray


class Reductions(NamedTuple):
    """Fix-up items of a plan, and the rows left to the combine kernel."""

    slots: np.ndarray  # (items,) int32: the plan's slots; fix-up item i has -2 - i instead
    priors: np.ndarray  # (reductions, block_q) int32: workspace row of each row's other partial; -1 for padding
    merges: Merges  # the plan's combines, without the rows of fix-up items

    @property
    def reduces(self) -> np.ndarray:
        """Whether each item is a fix-up item: (items,) bool."""
        return self.slots <= -2


def find_reductions(plan: Plan) -> Reductions:
    """Find the work items that can write the output of rows to which another item contributes.

    Each row of a fix-up item has exactly one other source, an earlier one. Fix-up items run after all other items.
    Plans of a few queries have none, so that their results have the bits of steps (cuda/sm90/forward/steps.py).
    """
    whole = Merges(plan.merge_rows, plan.merge_indptr, plan.merge_sources, plan.merge_variants)
    if plan.block_q <= _FEW_ROWS and (plan.components["query_tiles"] == 1).all():
        return Reductions(plan.work["slot"].astype(np.int32), np.zeros((0, plan.block_q), np.int32), whole)
    slots, block_q = plan.work["slot"].astype(np.int32), plan.block_q
    priors: list[np.ndarray] = []
    kept = np.ones(len(plan.merge_rows), dtype=bool)
    counts = np.diff(plan.merge_indptr)
    for variant in range(plan.variants):
        merges = np.arange(*plan.merge_variants[variant : variant + 2])
        prior = np.full((plan.slots, block_q), -1, dtype=np.int64)
        flat = prior.reshape(-1)
        bounds = plan.merge_indptr[plan.merge_variants[variant : variant + 2]]
        flat[plan.merge_sources[bounds[0] : bounds[1]]] = _SHARED
        of_two = merges[counts[merges] == 2]
        flat[plan.merge_sources[plan.merge_indptr[of_two] + 1]] = plan.merge_sources[plan.merge_indptr[of_two]]
        reduces = (prior != _SHARED).all(axis=1)
        first, last = plan.work_indptr[variant : variant + 2]
        own = first + np.nonzero(slots[first:last] >= 0)[0]
        own = own[reduces[slots[own]]]
        kept[of_two[reduces[plan.merge_sources[plan.merge_indptr[of_two] + 1] // block_q]]] = False
        new = -2 - sum(map(len, priors)) - np.arange(len(own), dtype=np.int32)
        priors.append(prior[slots[own]].astype(np.int32))
        slots[own] = new
    found = Reductions(slots, np.concatenate(priors), select_merges(whole, kept))
    show("reductions", plan=plan, found=found)
    return found


def merges_of_rows(merges: Merges, rows: np.ndarray) -> Merges:
    """Return the combines of `rows`, (variants, length) bool."""
    variant = np.repeat(np.arange(len(rows)), np.diff(merges.variants))
    return select_merges(merges, rows[variant, merges.rows])


class SumReductions(NamedTuple):
    """Fix-up items of a gradient kernel, and the sums left to the combine kernel."""

    slots: np.ndarray  # (items,) int32: the kernel's slots; fix-up item i has -2 - i instead
    rest_indptr: np.ndarray  # (reductions · rows + 1,) int32: start of each fix-up row's other sources
    rest_sources: np.ndarray  # int32: the other sources as workspace rows, in the order of addition
    merges: Merges  # the kernel's combines, without the rows of fix-up items


def find_sum_reductions(
    slots: np.ndarray, work_indptr: np.ndarray, merges: Merges, rows: int, length: int
) -> SumReductions:
    """Find the work items that are the first source of all their rows, so that they can write the sums.

    They run after all other items, in a launch that pays off only if they write enough rows. `rows` is the number of
    rows of an item, `length` that of a result.
    """
    given, slots, counts = slots, slots.astype(np.int32), np.diff(merges.indptr)
    found = [_first_sources(slots, work_indptr, merges, rows, variant) for variant in range(len(work_indptr) - 1)]
    item, merge = (np.concatenate(column) for column in zip(*found, strict=True))
    real = merge[merge >= 0]
    if _WORTH * len(real) < length * len(found):
        return no_sum_reductions(slots, merges)
    kept = np.ones(len(counts), bool)
    kept[real] = False
    slots[item] = -2 - np.arange(len(item), dtype=np.int32)
    others = np.where(merge >= 0, counts[merge] - 1, 0)
    place = np.repeat(merges.indptr[merge] + 1, others) + ramp(others)
    rest = offsets(others).astype(np.int32), merges.sources[place]
    made = SumReductions(slots, *rest, select_merges(merges, kept))
    show("sum reductions", slots=given, work_indptr=work_indptr, merges=merges, rows=rows, found=made)
    return made


def no_sum_reductions(slots: np.ndarray, merges: Merges) -> SumReductions:
    """Return a result without fix-up items: the combine kernel sums all shared rows."""
    return SumReductions(slots.astype(np.int32), np.zeros(1, np.int32), np.zeros(0, np.int32), merges)


def _first_sources(
    slots: np.ndarray, work_indptr: np.ndarray, merges: Merges, rows: int, variant: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return a variant's items that are the first source of all their rows, and each row's combine (-1: padding)."""
    first, last = work_indptr[variant : variant + 2]
    item = first + np.nonzero(slots[first:last] >= 0)[0]
    merge = np.arange(*merges.variants[variant : variant + 2])
    merge = merge[merges.indptr[merge] < merges.indptr[merge + 1]]
    shape = int(slots[item].max(initial=-1)) + 1, rows  # (partials, rows)
    of_row, later = np.full(shape, -1), np.zeros(shape, bool)
    every = slice(*merges.indptr[merges.variants[variant : variant + 2]])
    later.reshape(-1)[merges.sources[every]] = True
    earliest = merges.sources[merges.indptr[merge]]
    later.reshape(-1)[earliest], of_row.reshape(-1)[earliest] = False, merge
    item = item[~later[slots[item]].any(axis=1)]
    return item, of_row[slots[item]].ravel()


def select_merges(merges: Merges, kept: np.ndarray) -> Merges:
    """Return the combines where `kept` is true."""
    counts = np.diff(merges.indptr)
    return Merges(
        merges.rows[kept],
        np.r_[0, np.cumsum(counts[kept])].astype(np.int32),
        merges.sources[np.repeat(kept, counts)],
        np.r_[0, np.cumsum(kept)].astype(np.int32)[merges.variants],
    )
