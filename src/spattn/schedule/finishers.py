"""Finishers: work items that write the output of rows that they share, which saves the merge a trip through memory."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..plan._types import Plan

__all__ = ["Finishers", "Merges", "find_finishers"]

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
    return Finishers(slots, np.concatenate(priors), _without(plan, kept, counts))


def _without(plan: Plan, kept: np.ndarray, counts: np.ndarray) -> Merges:
    """The merges that a mask keeps."""
    return Merges(
        plan.merge_rows[kept],
        np.r_[0, np.cumsum(counts[kept])].astype(np.int32),
        plan.merge_sources[np.repeat(kept, counts)],
        np.r_[0, np.cumsum(kept)].astype(np.int32)[plan.merge_variants],
    )
