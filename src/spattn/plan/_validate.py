"""A plan's arrays are checked once, before any kernel reads them.

Whoever made the plan, the arithmetic is exact: int64 where entries are int32, and float64 where a product or a sum of
theirs could leave int64, because a float64 that was rounded is far beyond every number that is allowed.
"""

from __future__ import annotations

import numpy as np

from ._cells import real_extents
from ._coverage import check_merges, check_work
from ._families import Family, families
from ._require import partitions, require
from ._symbolic import unique_rows
from ._types import COMPONENT, LARGEST, LARGEST_SIDE, VIEW, WORK, Plan

__all__ = ["check"]

_INT32 = ("indptr", "indices", "key_view", "mask", "work_indptr", "merge_rows", "merge_indptr", "merge_sources",
          "merge_variants", "variant")  # fmt: skip
_DTYPES = {"views": VIEW, "components": COMPONENT, "work": WORK, "masks": np.dtype(np.uint64)}
_DTYPES |= dict.fromkeys(_INT32, np.dtype(np.int32))


def check(p: Plan) -> None:
    """ValueError unless a plan is sound; see :func:`spattn.plan.validate`."""
    _check_numbers(p)
    _check_arrays(p)
    found = families(p)
    pairs = sum(len(family.components) * _count_pairs(p, family) for family in found)
    require(p.nnz == pairs, "nnz", f"{pairs} pairs")
    check_work(p, sum(len(family.components) * np.count_nonzero(np.diff(family.lists)) for family in found))
    check_merges(p)


def _check_numbers(p: Plan) -> None:
    for name in ("q_len", "kv_len", "block_q", "block_kv", "slots", "nnz"):
        number = getattr(p, name)
        require(type(number) is int and number >= 0, name, "an integer >= 0")
    require(max(p.q_len, p.kv_len) <= LARGEST, "q_len, kv_len", f"lengths up to {LARGEST}")
    sides = 1 <= p.block_q <= LARGEST_SIDE and 1 <= p.block_kv <= LARGEST_SIDE and p.block_kv % 64 == 0
    require(sides, "block_q, block_kv", f"up to {LARGEST_SIDE} queries and a multiple of 64 keys")


def _check_arrays(p: Plan) -> None:
    for name, dtype in _DTYPES.items():
        array, dimensions = getattr(p, name), {"masks": 3, "variant": 2}.get(name, 1)
        fits = isinstance(array, np.ndarray) and array.dtype == dtype and array.ndim == dimensions
        require(fits, name, f"a {dimensions}-D array of {dtype}")
    require(p.masks.shape[1:] == (p.block_q, p.block_kv // 64), "masks", "bitmasks of the tile's shape")
    require(len(p.key_view) == len(p.indices) == len(p.mask), "indices, key_view, mask", "arrays of one length")
    require((p.mask >= -1) & (p.mask < len(p.masks)), "mask", "-1 or numbers of bitmasks")
    for name, owned in (("indptr", p.indices), ("work_indptr", p.work), ("merge_indptr", p.merge_sources),
                        ("merge_variants", p.merge_rows)):  # fmt: skip
        require(partitions(getattr(p, name), len(owned)), name, f"numbers that rise from 0 to {len(owned)}")
    require(p.variants >= 1 and len(p.merge_variants) == p.variants + 1, "merge_variants", "one range per variant")
    require(len(p.merge_indptr) == len(p.merge_rows) + 1, "merge_indptr", "one range per merge")
    require(p.variant.size > 0, "variant", "at least one batch entry and head")
    require(((p.variant >= 0) & (p.variant < p.variants)).all(), "variant", "numbers of variants")


def _count_pairs(p: Plan, family: Family) -> int:
    """Pairs that the family's first component allows; checks its lists and that no padding key is allowed to a query."""
    entries = slice(family.lists[0], family.lists[-1])
    row = np.repeat(np.arange(len(family.lists) - 1), np.diff(family.lists))
    number, tile, mask = p.key_view[entries], p.indices[entries], p.mask[entries]
    if not len(tile):
        return 0
    query, key = p.views[family.query_views[:1]], p.views[family.key_views[:, 0]]
    require((tile >= 0) & (tile < key["tiles"][number]), "indices", "key tiles of the view")
    later = (number[1:] > number[:-1]) | (number[1:] == number[:-1]) & (tile[1:] > tile[:-1])
    require(later | (row[1:] > row[:-1]), "indices", "sorted lists without repeats")
    queries = real_extents(np.repeat(query, len(row)), row)
    keys = real_extents(key[number], tile)
    full = mask < 0
    require(~full | (keys.prod(axis=1) == p.block_kv), "mask", "a bitmask for a tile with padding keys")
    pairs = int(queries[full].prod(axis=1).sum()) * p.block_kv
    # Tiles that agree in bitmask and in padding are looked at once.
    kinds = np.column_stack([mask, queries, number, keys]).astype(np.int64)[~full]
    first, kind = unique_rows(kinds)
    return pairs + sum(
        times * _count_mask(p.masks[one[0]], query["box"][0], one[1:4], key["box"][one[4]], one[5:])
        for one, times in zip(kinds[first], np.bincount(kind).tolist(), strict=True)
    )


def _count_mask(mask: np.ndarray, query_box, queries, key_box, keys) -> int:
    """Pairs of a bitmask in its rows that are queries; checks that none is a pair with a padding key."""
    rows = mask[_real(query_box, queries)]
    real = np.packbits(_real(key_box, keys), bitorder="little").view("<u8")
    require(not (rows & ~real).any(), "masks", "no padding key to be allowed")
    return int(np.bitwise_count(rows).sum())


def _real(box, extents) -> np.ndarray:
    """(cells,) whether each cell of a box is real, the first `extents` along each axis being so."""
    inside = [np.arange(size) < extent for size, extent in zip(box, extents, strict=True)]
    return (inside[0][:, None, None] & inside[1][:, None] & inside[2]).ravel()
