"""The families of a plan's components, and the check of the views that they use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ._lattices import repeats
from ._require import require
from ._types import Plan

__all__ = ["Family", "families"]


class Family(NamedTuple):
    """Components that share their CSR rows and differ in where their views start; the first stands for all."""

    components: np.ndarray  # numbers
    lists: np.ndarray  # (query tiles + 1,) where each list starts
    query_views: np.ndarray  # of each component
    key_views: np.ndarray  # (key views of a component, components)


def families(p: Plan) -> list[Family]:
    """The plan's families; ValueError unless all of its views and components are sound."""
    _check_views(p)
    c, views = p.components, len(p.views)
    require((c["query_view"] >= 0) & (c["query_view"] < views), "components", "numbers of query views")
    require(c["query_tiles"] == p.views["tiles"][c["query_view"]], "components", "the tiles of the query view")
    require((c["variant"] >= 0) & (c["variant"] < p.variants), "components", "numbers of variants")
    found = list(_grouped(p))
    _check_roles(p, found)
    return found


def _check_views(p: Plan) -> None:
    v = p.views
    require(((v["extent"] >= 1) & (v["box"] >= 1)).all(axis=1), "views", "extents and boxes >= 1")
    grid = -(-v["extent"].astype(np.int64) // v["box"])
    require((v["grid"] == grid).all(axis=1), "views", "grids of ceil(extent / box)")
    require(v["tiles"] == grid.prod(axis=1, dtype=np.float64), "views", "as many tiles as the grid has boxes")


def _grouped(p: Plan) -> Iterator[Family]:
    """Components by their first row."""
    c = p.components
    first_row, start, family = np.unique(c["first_row"], return_index=True, return_inverse=True)
    ends = np.concatenate([[0], np.cumsum(c["query_tiles"][start], dtype=np.int64)])
    follow = np.array_equal(ends[:-1], first_row) and ends[-1] == len(p.indptr) - 1
    require(follow, "components", "rows of families that follow one another")
    require(c["query_tiles"] == c["query_tiles"][start[family]], "components", "families of as many query tiles")
    members = np.split(np.argsort(family, kind="stable"), np.cumsum(np.bincount(family)))
    for own, low, high in zip(members, ends[:-1], ends[1:], strict=False):
        lists = p.indptr[low : high + 1]
        used = p.key_view[lists[0] : lists[-1]]
        first, count = c["key_view"][own].astype(np.int64), int(used.max(initial=-1)) + 1
        require(used >= 0, "key_view", "numbers of key views")
        require((first >= 0) & (first + count <= len(p.views)), "components", "numbers of key views")
        yield Family(own, lists, c["query_view"][own], first + np.arange(count)[:, None])


def _check_roles(p: Plan, found: list[Family]) -> None:
    """Views of a family's components are of one shape and stay inside of the sequence, each position once."""
    v, shape = p.views, np.concatenate([p.views["stride"], p.views["extent"], p.views["box"]], axis=1)
    cells, offset = v["box"].prod(axis=1, dtype=np.float64), v["offset"].astype(np.float64)
    reach = v["stride"].astype(np.float64) * (v["extent"] - 1)
    low, high = offset + np.minimum(reach, 0).sum(axis=1), offset + np.maximum(reach, 0).sum(axis=1)
    used = np.zeros(len(v), dtype=bool)
    for family in found:
        sides = [(family.query_views, p.q_len, p.block_q), *((keys, p.kv_len, p.block_kv) for keys in family.key_views)]
        for views, length, block in sides:
            used[views] = True
            require((shape[views] == shape[views[0]]).all(), "views", "one shape for all components of a family")
            require((cells[views] == block).all(), "views", f"boxes of {block} cells")
            require(((low[views] >= 0) & (high[views] < length)).all(), "views", f"positions in [0, {length})")
    for row in np.unique(shape[used, :6], axis=0).tolist():
        require(not repeats(row[:3], row[3:]), "views", "lattices that visit no position twice")
