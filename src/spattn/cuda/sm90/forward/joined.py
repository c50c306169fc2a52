"""Concatenated tables of several plans for a grouped launch (NumPy only)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ...._util.checks import show
from ...._util.ragged import offsets
from .tables import PlanLayout

__all__ = ["Joined", "join"]


class Joined(NamedTuple):
    """Concatenated tables of all problems.

    Attributes
    ----------
    work, entries, entry_masks, masks, query_views, key_views, priors : arrays
        As in :class:`~spattn.cuda.sm90.forward.tables.PlanLayout`; each view has the index of its problem.
    items : (problems,) int64 array
        First work item of each problem.
    """

    work: np.ndarray
    entries: np.ndarray
    entry_masks: np.ndarray
    masks: np.ndarray
    query_views: np.ndarray
    key_views: np.ndarray
    priors: np.ndarray
    items: np.ndarray


def join(layouts: Sequence[PlanLayout], first_maps: Sequence[int]) -> Joined:
    """Concatenate the tables of several plans; `first_maps` has the index of each plan's first tensor map."""

    def starts(name: str) -> np.ndarray:
        return offsets([len(getattr(layout, name)) for layout in layouts])

    entries, views, masks, reductions = map(starts, ("entries", "query_views", "masks", "priors"))
    works, numbers = [], []
    for n, layout in enumerate(layouts):
        work = layout.work.copy()
        for name in ("begin", "end"):
            work[name] += entries[n]
        for name in ("query_view", "key_view"):
            work[name] += views[n]
        work["slot"][work["slot"] <= -2] -= reductions[n]
        works.append(work)
        own = layout.entry_masks
        numbers.append(np.where(own >= 0, own + masks[n], own).astype(own.dtype))
    joined = Joined(
        np.concatenate(works),
        np.concatenate([layout.entries for layout in layouts]),
        np.concatenate(numbers),
        np.concatenate([layout.masks for layout in layouts]),
        np.concatenate(list(_views([layout.query_views for layout in layouts], first_maps))),
        np.concatenate(list(_views([layout.key_views for layout in layouts], first_maps))),
        np.concatenate([layout.priors for layout in layouts]),
        starts("work")[:-1],
    )
    show("joined", layouts=layouts, joined=joined)
    return joined


def _views(records: Sequence[np.ndarray], first_maps: Sequence[int]) -> Iterator[np.ndarray]:
    for problem, (views, first) in enumerate(zip(records, first_maps, strict=True)):
        own = views.copy()
        own["map"] += first
        own["problem"] = problem
        yield own
