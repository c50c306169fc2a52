"""Validation of a plan's arrays before a kernel reads them.

The checks cannot overflow: they convert int32 entries to int64, and compute products and sums that could exceed int64
in float64. Rounding is harmless, because valid values are far below 2^53.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..._util.checks import MOST_CELLS
from ..._util.index_checks import q_offset
from ..._util.ragged import offsets
from ...patterns.base.predicate import allowed
from ..symbolic.cells import unique_rows
from ..tiles.parts import repeats
from .types import (
    COMPONENT,
    LARGEST,
    LARGEST_SIDE,
    VIEW,
    WORK,
    Plan,
    padded_before,
    padding_kinds,
    positions,
    real_cells,
    real_extents,
)

__all__ = ["check", "check_pairs", "pair_codes"]

_INT32 = (
    "indptr",
    "indices",
    "key_view",
    "mask",
    "work_indptr",
    "merge_rows",
    "merge_indptr",
    "merge_sources",
    "merge_variants",
    "variant",
    "q_order",
    "kv_order",
)
_DTYPES = {"views": VIEW, "components": COMPONENT, "work": WORK, "masks": np.dtype(np.uint64)}
_DTYPES["tile_indptr"] = np.dtype(np.int64)
_DTYPES |= dict.fromkeys(_INT32, np.dtype(np.int32))
_DIMENSIONS = {"masks": 3, "variant": 2, "q_order": 2, "kv_order": 2}
_TILES_AT_ONCE = 1 << 16  # bitmasks are checked in chunks of this number of tiles
_PLACES_AT_ONCE = 1 << 18  # gathered keys are compared in chunks of about this number of indices


class Family(NamedTuple):
    """Components that share CSR rows and differ in the offsets of their views; many checks read only the first one."""

    components: np.ndarray  # indices into Plan.components
    lists: np.ndarray  # (query tiles + 1,) first run of each list
    query_views: np.ndarray  # one per component
    key_views: np.ndarray  # (key views of a component, components)


def check(p: Plan) -> None:
    """Raise ValueError unless the plan is valid; see :func:`spattn.planning.validate`."""
    _check_numbers(p)
    _check_arrays(p)
    found = _families(p)
    pairs = sum(len(family.components) * _count_pairs(p, family) for family in found)
    _require(p.nnz == pairs, "nnz", f"{pairs} pairs")
    if p.gathered:
        columns = _columns(p)
        for family in found:
            _check_places(p, family, columns)
    _check_work(p, sum(len(family.components) * int(np.count_nonzero(np.diff(family.lists))) for family in found))
    _check_merges(p)


def check_pairs(p: Plan) -> None:
    """Raise ValueError unless a valid plan allows exactly the pairs of its pattern's predicate, each once.

    Skip plans with more than ``MOST_CELLS`` cells, q_len × kv_len.
    """
    if p.q_len * p.kv_len > MOST_CELLS or not p.q_len * p.kv_len:
        return
    for variant in range(p.variants):
        code = np.concatenate([np.zeros(0, np.int64), *pair_codes(p, variant)])
        times = np.bincount(code, minlength=p.q_len * p.kv_len)
        _require((times <= 1).all(), "components, masks", "each pair to be allowed once")
        # The plan of a per-head pattern with zero heads equals the plan of a head without pairs.
        for_no_head = p.pattern is not None and 0 in p.pattern.sizes() and not p.nnz
        if p.pattern is not None and not for_no_head and variant in p.variant:
            batch, head = np.argwhere(p.variant == variant)[0].tolist()
            expected = _predicate(p, batch, head).ravel()
            _require((times == expected).all(), "components, masks", "the pairs of the pattern's predicate")


def _predicate(p: Plan, batch: int, head: int) -> np.ndarray:
    """Evaluate the predicate of a batch entry and head on all pairs: (q_len, kv_len) bool."""
    assert p.pattern is not None, "a plan of a pattern"
    variants, index = p.pattern.variants(*p.variant.shape)
    own = variants[index[batch, head]].bind(p.q_len, p.kv_len)
    q, k = np.ogrid[q_offset(p.q_len, p.kv_len) : p.kv_len, : p.kv_len]
    return np.broadcast_to(allowed(own, q, k), (p.q_len, p.kv_len))


def pair_codes(p: Plan, variant: int) -> Iterator[np.ndarray]:
    """Yield each component's allowed pairs of a variant as row · kv_len + key, with duplicates."""
    tiles = p.tile_indptr[p.indptr]
    bits = np.unpackbits(p.masks.astype("<u8").view(np.uint8), axis=2, bitorder="little").astype(bool)
    for component in p.components[p.components["variant"] == variant]:
        lists = component["first_row"] + np.arange(component["query_tiles"] + 1)
        number = np.arange(tiles[lists[0]], tiles[lists[-1]])
        tile = np.searchsorted(tiles[lists], number, side="right") - 1
        run = np.searchsorted(p.tile_indptr, number, side="right") - 1
        place, real = positions(p.views[component["query_view"]], tile)
        row = p.q_order[variant, place] if p.q_order.size else place
        key, real_key = np.zeros((2, len(number), p.block_kv), np.int64)
        for view in np.unique(p.key_view[run]):
            own = p.key_view[run] == view
            first = p.indices[run[own]] + number[own] - p.tile_indptr[run[own]]
            at, inside = positions(p.views[component["key_view"] + view], first)
            key[own], real_key[own] = p.kv_order[variant, at] if p.kv_order.size else at, inside
        allowed = real[:, :, None] & (real_key[:, None, :] > 0)
        partial = p.mask[run] >= 0
        allowed[partial] &= bits[p.mask[run[partial]]]
        at, cell_q, cell_kv = np.nonzero(allowed)
        yield row[at, cell_q].astype(np.int64) * p.kv_len + key[at, cell_kv]


def _check_numbers(p: Plan) -> None:
    for name in ("q_len", "kv_len", "block_q", "block_kv", "slots", "nnz"):
        number = getattr(p, name)
        _require(type(number) is int and number >= 0, name, "an integer >= 0")
    _require(max(p.q_len, p.kv_len) <= LARGEST, "q_len, kv_len", f"lengths up to {LARGEST}")
    sides = 1 <= p.block_q <= LARGEST_SIDE and 1 <= p.block_kv <= LARGEST_SIDE and p.block_kv % 64 == 0
    _require(sides, "block_q, block_kv", f"up to {LARGEST_SIDE} queries and a multiple of 64 keys")


def _check_arrays(p: Plan) -> None:
    for name, dtype in _DTYPES.items():
        array, dimensions = getattr(p, name), _DIMENSIONS.get(name, 1)
        fits = isinstance(array, np.ndarray) and array.dtype == dtype and array.ndim == dimensions
        _require(fits, name, f"a {dimensions}-D array of {dtype}")
    _require(p.masks.shape[1:] == (p.block_q, p.block_kv // 64), "masks", "bitmasks of the tile's shape")
    _require(len(p.key_view) == len(p.indices) == len(p.mask), "indices, key_view, mask", "arrays of one length")
    count = np.diff(p.tile_indptr)
    _require(len(count) == len(p.indices) and p.tile_indptr[0] == 0, "tile_indptr", "a range of tiles for each run")
    _require((count >= 1) & (count <= LARGEST), "tile_indptr", "runs of at least one tile")
    _require((p.mask >= -1) & (p.mask < len(p.masks)), "mask", "-1 or indices of bitmasks")
    for name, owned in (
        ("indptr", p.indices),
        ("work_indptr", p.work),
        ("merge_indptr", p.merge_sources),
        ("merge_variants", p.merge_rows),
    ):
        _require(_partitions(getattr(p, name), len(owned)), name, f"a non-decreasing array from 0 to {len(owned)}")
    _require(p.variants >= 1 and len(p.merge_variants) == p.variants + 1, "merge_variants", "one range per variant")
    _require(len(p.merge_indptr) == len(p.merge_rows) + 1, "merge_indptr", "one range per merge")
    _require(p.variant.size > 0, "variant", "at least one batch entry and head")
    _require(((p.variant >= 0) & (p.variant < p.variants)).all(), "variant", "indices of variants")
    if p.q_order.shape != (0, 0):
        _require(p.q_order.shape == (p.variants, p.q_len), "q_order", f"shape {p.variants, p.q_len}")
        _require((np.sort(p.q_order, axis=1) == np.arange(p.q_len)).all(), "q_order", "each row once")
    if p.q_order.shape != (0, 0) or p.kv_order.shape != (0, 0):
        _require(len(p.kv_order) == p.variants, "kv_order", "one row of keys per variant")
        _require(((p.kv_order >= 0) & (p.kv_order < p.kv_len)).all(), "kv_order", f"keys in [0, {p.kv_len})")


def _families(p: Plan) -> list[Family]:
    """Return the plan's families; raise ValueError unless all views and components are valid."""
    _check_views(p)
    c, views = p.components, len(p.views)
    _require((c["query_view"] >= 0) & (c["query_view"] < views), "components", "indices of query views")
    _require(c["query_tiles"] == p.views["tiles"][c["query_view"]], "components", "query_tiles of the query view")
    _require((c["variant"] >= 0) & (c["variant"] < p.variants), "components", "indices of variants")
    found = list(_grouped(p))
    _check_roles(p, found)
    return found


def _check_views(p: Plan) -> None:
    v = p.views
    _require(((v["extent"] >= 1) & (v["box"] >= 1)).all(axis=1), "views", "extents and boxes >= 1")
    grid = -(-v["extent"].astype(np.int64) // v["box"])
    _require((v["grid"] == grid).all(axis=1), "views", "grids of ceil(extent / box)")
    _require(v["tiles"] == grid.prod(axis=1, dtype=np.float64), "views", "as many tiles as the grid has boxes")


def _grouped(p: Plan) -> Iterator[Family]:
    """Group components by their first row; raise ValueError unless each group is a family."""
    c = p.components
    first_row, start, family = np.unique(c["first_row"], return_index=True, return_inverse=True)
    ends = np.concatenate([[0], np.cumsum(c["query_tiles"][start], dtype=np.int64)])
    follow = np.array_equal(ends[:-1], first_row) and ends[-1] == len(p.indptr) - 1
    _require(follow, "components", "families with consecutive rows")
    _require(c["query_tiles"] == c["query_tiles"][start[family]], "components", "equal query_tiles within a family")
    members = np.split(np.argsort(family, kind="stable"), np.cumsum(np.bincount(family)))
    for own, low, high in zip(members, ends[:-1], ends[1:], strict=False):
        lists = p.indptr[low : high + 1]
        used = p.key_view[lists[0] : lists[-1]]
        first, count = c["key_view"][own].astype(np.int64), int(used.max(initial=-1)) + 1
        _require(used >= 0, "key_view", "indices of key views")
        _require((first >= 0) & (first + count <= len(p.views)), "components", "indices of key views")
        yield Family(own, lists, c["query_view"][own], first + np.arange(count)[:, None])


def _check_roles(p: Plan, found: list[Family]) -> None:
    """Raise ValueError unless a family's views share a shape, stay inside the sequence and have distinct positions."""
    places = p.kv_len if p.kv_order.shape == (0, 0) else p.kv_order.shape[1]
    v, shape = p.views, np.concatenate([p.views["stride"], p.views["extent"], p.views["box"]], axis=1)
    cells, offset = v["box"].prod(axis=1, dtype=np.float64), v["offset"].astype(np.float64)
    reach = v["stride"].astype(np.float64) * (v["extent"] - 1)
    low, high = offset + np.minimum(reach, 0).sum(axis=1), offset + np.maximum(reach, 0).sum(axis=1)
    used = np.zeros(len(v), dtype=bool)
    for family in found:
        sides = [(family.query_views, p.q_len, p.block_q), *((keys, places, p.block_kv) for keys in family.key_views)]
        for views, length, block in sides:
            used[views] = True
            _require((shape[views] == shape[views[0]]).all(), "views", "one shape for all components of a family")
            _require((cells[views] == block).all(), "views", f"boxes of {block} cells")
            _require(((low[views] >= 0) & (high[views] < length)).all(), "views", f"positions in [0, {length})")
    for row in np.unique(shape[used, :6], axis=0).tolist():
        _require(not repeats(row[:3], row[3:]), "views", "lattices without duplicate positions")


def _count_pairs(p: Plan, family: Family) -> int:
    """Count the pairs of a family's first component; raise ValueError for invalid lists and bits of padding keys."""
    runs = slice(family.lists[0], family.lists[-1])
    row = np.repeat(np.arange(len(family.lists) - 1), np.diff(family.lists))
    number, first, mask = p.key_view[runs], p.indices[runs].astype(np.int64), p.mask[runs]
    if not len(row):
        return 0
    stop = first + np.diff(p.tile_indptr)[runs]
    _require((first >= 0) & (stop <= p.views["tiles"][family.key_views[number, 0]]), "indices", "key tiles of the view")
    later = (number[1:] > number[:-1]) | (number[1:] == number[:-1]) & (first[1:] >= stop[:-1])
    _require(later | (row[1:] > row[:-1]), "indices", "sorted lists without duplicates")
    table = np.stack([row, number, first, stop])
    return _count_full(p, family, table[:, mask < 0]) + _count_masked(p, family, table[:, mask >= 0], mask[mask >= 0])


def _count_full(p: Plan, family: Family, runs: np.ndarray) -> int:
    """Count the pairs in runs (query tile, key view, first tile, end) of full tiles, which must not contain padding."""
    row, number, first, stop = runs
    for own in np.unique(number):
        before, of_view = padded_before(p.views[family.key_views[own, 0]]), number == own
        whole = before[first[of_view]] == before[stop[of_view]]
        _require(whole, "mask", "a bitmask for a tile with padding keys")
    queries = real_extents(np.broadcast_to(p.views[family.query_views[0]], len(row)), row).prod(axis=1)
    return int((queries * (stop - first)).sum()) * p.block_kv


def _count_masked(p: Plan, family: Family, runs: np.ndarray, mask: np.ndarray) -> int:
    """Count the pairs in runs with bitmasks, in chunks of tiles."""
    row, number, first, stop = runs
    ends = offsets(stop - first)
    pairs = 0
    for start in range(0, int(ends[-1]), _TILES_AT_ONCE):
        place = np.arange(start, min(start + _TILES_AT_ONCE, int(ends[-1])))
        own = np.searchsorted(ends, place, side="right") - 1
        pairs += _count_tiles(p, family, row[own], number[own], first[own] + place - ends[own], mask[own])
    return pairs


def _count_tiles(
    p: Plan, family: Family, row: np.ndarray, number: np.ndarray, tile: np.ndarray, mask: np.ndarray
) -> int:
    query, key = p.views[family.query_views[:1]], p.views[family.key_views[:, 0]]
    queries, keys = real_extents(np.repeat(query, len(row)), row), real_extents(key[number], tile)
    pairs, padding = 0, np.column_stack([queries, number, keys])
    first, kind = unique_rows(padding)
    for own, extents in enumerate(padding[first]):  # tiles with equal padding
        rows = p.masks[mask[kind == own]][:, _real(query["box"][0], extents[:3])]
        real = np.packbits(_real(key["box"][extents[3]], extents[4:]), bitorder="little").view("<u8")
        _require(not (rows & ~real).any(), "masks", "zero bits for padding keys")
        pairs += int(np.bitwise_count(rows).sum(dtype=np.int64))
    return pairs


def _real(box: np.ndarray, extents: np.ndarray) -> np.ndarray:
    """Return which cells of a box lie within `extents`: (cells,) bool."""
    inside = [np.arange(size) < extent for size, extent in zip(box, extents, strict=True)]
    return (inside[0][:, None, None] & inside[1][:, None] & inside[2]).ravel()


def _columns(p: Plan) -> np.ndarray:
    """Return which key cells have a set bit in each bitmask: (n + 1, block_kv) bool; the last row is a full tile."""
    of_masks = np.bitwise_or.reduce(p.masks, axis=1).astype("<u8").view(np.uint8)
    found = np.ones((len(of_masks) + 1, p.block_kv), bool)
    found[:-1] = np.unpackbits(of_masks, axis=1, bitorder="little")
    return found


def _check_places(p: Plan, family: Family, columns: np.ndarray) -> None:
    """Raise ValueError if a list allows a pair at two indices of the same key."""
    ends = p.tile_indptr[family.lists]
    kind, real = padding_kinds(p.views[family.query_views[0]], np.arange(len(ends) - 1))
    first = 0
    while first < len(ends) - 1:
        stop = max(first + 1, int(np.searchsorted(ends, ends[first] + _PLACES_AT_ONCE // p.block_kv, "right")) - 1)
        number = np.arange(ends[first], ends[stop])
        row = np.searchsorted(ends, number, side="right") - 1
        run = np.searchsorted(p.tile_indptr, number, side="right") - 1
        mask, (at, cell) = p.mask[run], np.nonzero(columns[p.mask[run]])
        for component in range(len(family.components)):
            key = _keys_of_tiles(p, family, component, run, p.indices[run] + number - p.tile_indptr[run])
            code = row[at] * p.kv_len + key[at, cell]
            order = np.argsort(code, kind="stable")  # nearly sorted in the planner's own plans
            same = np.flatnonzero(code[order[1:]] == code[order[:-1]])
            again = order[np.union1d(same, same + 1)]  # cells of keys that occur more than once
            allowed = _rows_of_cells(p, mask[at[again]], cell[again]) & real[kind[row[at[again]]]]
            starts = np.flatnonzero(np.diff(code[again], prepend=-1))
            _require((np.add.reduceat(allowed, starts, dtype=np.int64) <= 1).all(), "kv_order", "each pair once")
        first = stop


def _keys_of_tiles(p: Plan, family: Family, component: int, run: np.ndarray, tile: np.ndarray) -> np.ndarray:
    """Return the key of each cell, undefined in padding cells: (tiles, block_kv) int64."""
    variant, number = p.components["variant"][family.components[component]], p.key_view[run]
    key = np.zeros((len(run), p.block_kv), np.int64)
    for own in np.unique(number):
        place, _ = positions(p.views[family.key_views[own, component]], tile[number == own])
        key[number == own] = p.kv_order[variant, place]
    return key


def _rows_of_cells(p: Plan, mask: np.ndarray, cell: np.ndarray) -> np.ndarray:
    """Return which query cells may attend to the given key cells: (cells, block_q) bool."""
    found, partial = np.ones((len(cell), p.block_q), bool), mask >= 0
    word, bit = np.divmod(cell[partial], 64)
    found[partial] = p.masks[mask[partial], :, word] >> bit.astype(np.uint64)[:, None] & np.uint64(1)
    return found


def _check_work(p: Plan, lists: int) -> None:
    """Raise ValueError unless the work items partition the plan's non-empty lists, `lists` in number."""
    w, c = p.work, p.components
    _require((w["component"] >= 0) & (w["component"] < len(c)), "work", "indices of components")
    own = c[w["component"]]
    _require(own["variant"] == _variant(p.work_indptr), "work", "components of the item's variant")
    _require((w["query_tile"] >= 0) & (w["query_tile"] < own["query_tiles"]), "work", "query tiles of the component")
    row, tiles = own["first_row"] + w["query_tile"], p.tile_indptr[p.indptr]
    order = np.lexsort((w["begin"], w["query_tile"], w["component"]))
    w, row = w[order], row[order]
    starts = np.ones(len(w) + 1, dtype=bool)  # whether an item is the first of its list
    starts[1:-1] = (w["query_tile"][1:] != w["query_tile"][:-1]) | (w["component"][1:] != w["component"][:-1])
    before = np.roll(w["end"], 1)
    pieces = (w["begin"] == np.where(starts[:-1], tiles[row], before)) & (w["begin"] < w["end"])
    pieces &= ~starts[1:] | (w["end"] == tiles[row + 1])
    _require(pieces.all(), "work", "items that partition their lists")
    _require(starts[:-1].sum() == lists, "work", f"{lists} lists")


def _check_merges(p: Plan) -> None:
    """Raise ValueError unless each row of each variant is written once, and combines read what items write."""
    slots = 0
    owner = np.repeat(np.arange(len(p.merge_rows)), np.diff(p.merge_indptr))
    for variant in range(p.variants):
        items = p.work[slice(*p.work_indptr[variant : variant + 2])]
        number = np.sort(items["slot"][items["slot"] >= 0])
        _require((items["slot"] >= -1).all(), "work", "slots or -1")
        _require(np.array_equal(number, np.arange(len(number))), "work", "distinct consecutive slots")
        slots = max(slots, len(number))
        item, cell, position = real_cells(p.views[p.components["query_view"][items["component"]]], items["query_tile"])
        position = p.q_order[variant, position] if p.q_order.size else position
        slot = items["slot"][item].astype(np.int64)
        merges = slice(*p.merge_variants[variant : variant + 2])
        rows = np.sort(np.concatenate([position[slot < 0], p.merge_rows[merges]]))
        once = len(rows) == p.q_len and (rows == np.arange(p.q_len)).all()
        _require(once, "work, merge_rows", "each row to be written once")
        written = np.column_stack([slot * p.block_q + cell, position])[slot >= 0]
        sources = slice(*p.merge_indptr[[merges.start, merges.stop]])
        read = np.column_stack([p.merge_sources[sources], p.merge_rows[owner[sources]]])
        written, read = (pairs[np.argsort(pairs[:, 0])] for pairs in (written, read))
        same = np.array_equal(written, read)
        _require(same, "merge_sources", "each row of the workspace to be read once, for its own row")
    _require(p.slots == slots, "slots", f"{slots}, the maximum over variants")


def _variant(ends: np.ndarray) -> np.ndarray:
    return np.repeat(np.arange(len(ends) - 1), np.diff(ends))


def _require(sound: npt.ArrayLike, field: str, expected: str) -> None:
    """Raise ValueError ``plan: expected EXPECTED in FIELD`` unless all of `sound`; name the first bad index."""
    if not np.all(sound):
        at = f"[{int(np.argmin(sound))}]" if np.ndim(sound) == 1 else ""
        raise ValueError(f"plan: expected {expected} in {field}{at}")


def _partitions(ends: np.ndarray, length: int) -> bool:
    """Return whether `ends` is non-decreasing from 0 to `length`."""
    return bool(len(ends) and ends[0] == 0 and ends[-1] == length and (ends[1:] >= ends[:-1]).all())
