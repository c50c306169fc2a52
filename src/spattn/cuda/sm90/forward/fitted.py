"""Key boxes fitted to the regions that query tiles intersect.

A plan cuts every view into boxes of `block_kv` cells, for example a region of 14 × 14 keys into four boxes of 8 × 8.
TMA reads all their cells, because regions at equal distances share a tensor map, which ends at the image border. Four
boxes of 7 × 7 cover the region exactly. The kernel accepts boxes of any size; this module cuts them.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from ....planning.contract.types import AXES, Plan, TileLists, first_coordinates, grid_of, tile_lists
from ....planning.tiles.tiling import factorisations
from ....schedule.roles import roles

__all__ = ["Fitted", "fit_keys"]

_BITS_AT_ONCE = 1 << 24  # of unpacked bitmasks, one byte each


class Fitted(NamedTuple):
    """Key views, tile lists and bitmasks as in a plan; boxes may have fewer cells than a tile."""

    views: np.ndarray
    lists: TileLists
    masks: np.ndarray


def fit_keys(plan: Plan) -> Fitted:
    """Cut the regions of a plan's lists into the same number of boxes with the fewest cells.

    Unchanged unless every list is a region: a whole view along two or three axes.
    """
    lists = tile_lists(plan)
    regions = _regions(plan, lists)
    if regions is None:
        return Fitted(plan.views, lists, plan.masks)
    views, mask, masks = plan.views.copy(), lists.mask.copy(), [plan.masks]
    for view in np.unique(plan.views[regions.view][["extent", "box", "grid"]]):
        box = _fitting_box(*(tuple(map(int, view[name])) for name in ("extent", "grid", "box")))
        if math.prod(box) == plan.block_kv:
            continue
        alike = np.flatnonzero(_same(plan.views, view))
        fitted = views[alike[0]].copy()
        fitted["box"], fitted["grid"] = box, grid_of(fitted["extent"], box)
        own = np.flatnonzero(_same(plan.views[regions.view], view))
        entries = regions.first[own, None] + np.arange(fitted["tiles"])
        combinations, of_list = np.unique(lists.mask[entries], axis=0, return_inverse=True)
        made, numbers = _recut(plan.masks, combinations, _sources(plan.views[alike[0]], fitted))
        mask[entries] = numbers[of_list.reshape(-1)] + sum(map(len, masks))
        masks.append(made)
        views["box"][alike], views["grid"][alike] = fitted["box"], fitted["grid"]
    used, number = np.unique(mask, return_inverse=True)  # hardly any are the plan's
    kept = used[used >= 0]
    number = number.reshape(-1) - (len(used) - len(kept))
    return Fitted(views, lists._replace(mask=number.astype(mask.dtype)), np.concatenate(masks)[kept])


class _Regions(NamedTuple):
    """Nonempty lists: the index of their first entry, and their view."""

    first: np.ndarray
    view: np.ndarray


def _regions(plan: Plan, lists: TileLists) -> _Regions | None:
    """The nonempty lists of a plan, if all of them are regions."""
    if plan.ordered:
        return None
    _, _, row_component = roles(plan)
    count = np.diff(lists.indptr)
    rows = np.flatnonzero(count)
    first, count = lists.indptr[rows].astype(np.int64), count[rows]
    view = plan.components["key_view"][row_component[rows]] + lists.key_view[first]
    own = plan.views[view]
    if (count != own["tiles"]).any() or ((own["extent"] > 1).sum(axis=1) < 2).any():
        return None
    number = np.arange(len(lists.indices)) - np.repeat(first, count)
    if (lists.indices != number).any() or (lists.key_view != np.repeat(lists.key_view[first], count)).any():
        return None
    return _Regions(first, view)


def _same(views: np.ndarray, view: np.void) -> np.ndarray:
    """Mask of the views with the extent and box of this one."""
    return np.logical_and.reduce([(views[name] == view[name]).all(axis=1) for name in ("extent", "box")])


@functools.cache
def _fitting_box(extent: tuple[int, ...], grid: tuple[int, ...], box: tuple[int, ...]) -> tuple[int, ...]:
    """The smallest box with which a view has the same number of boxes; among equals, the widest."""
    found = [box]
    for parts in factorisations(math.prod(grid), AXES):
        other = tuple(-(-n // p) for n, p in zip(extent, parts, strict=True))
        if grid_of(extent, other) == parts:
            found.append(other)
    return min(found, key=lambda one: (math.prod(one), -one[-1]))


def _sources(view: np.void, fitted: np.void) -> np.ndarray:
    """(tiles, block) int64: for each cell of the new tiles of a view, the cell in the concatenated old tiles, -1 for
    padding."""
    tiles = np.arange(fitted["tiles"])
    cells = np.indices(fitted["box"]).reshape(AXES, -1).T
    at = first_coordinates(np.broadcast_to(fitted, tiles.shape), tiles)[:, None] + cells
    tile, cell = np.divmod(at, view["box"])
    block = math.prod(view["box"].tolist())
    number = tile @ _steps(view["grid"]) * block + cell @ _steps(view["box"])
    found = np.full((len(tiles), block), -1)
    found[:, : len(cells)] = np.where((at < view["extent"]).all(axis=2), number, -1)
    return found


def _steps(shape: np.ndarray) -> np.ndarray:
    """Row-major strides of a shape."""
    return np.append(np.cumprod(shape[:0:-1])[::-1], 1)


def _recut(masks: np.ndarray, combinations: np.ndarray, sources: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct bitmasks of the new tiles, and their indices for each combination of a list's old bitmasks (-1: all
    pairs)."""
    tiles, block = sources.shape
    rows, words = masks.shape[1:]
    every = np.concatenate([masks, np.full((1, rows, words), ~np.uint64(0))])  # index -1
    found = np.empty((len(combinations), tiles, rows, words), "<u8")
    at_once = max(1, _BITS_AT_ONCE // (tiles * rows * block))
    for start in range(0, len(combinations), at_once):
        some = every[combinations[start : start + at_once]].astype("<u8")
        bits = np.unpackbits(some.view(np.uint8), axis=-1, bitorder="little")  # lists, tiles, rows, cells
        bits = np.moveaxis(bits, 2, 1).reshape(len(some), rows, -1)[:, :, sources] & (sources >= 0)
        packed = np.packbits(np.moveaxis(bits, 1, 2), axis=-1, bitorder="little")
        found[start : start + at_once] = np.ascontiguousarray(packed).view("<u8")
    made, numbers = np.unique(found.reshape(-1, rows * words), axis=0, return_inverse=True)
    return made.reshape(-1, rows, words), numbers.reshape(len(combinations), tiles)
