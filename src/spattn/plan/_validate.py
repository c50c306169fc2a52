"""A plan's arrays are checked once, before any kernel reads them."""

from __future__ import annotations

import numpy as np

from ._types import COMPONENT, VIEW, WORK, Plan, positions


def validate(plan: Plan) -> Plan:
    """Check every index of a plan; returns it.

    Raises
    ------
    ValueError
        If an array has the wrong type or shape, or an entry points outside of what it refers to. Kernels trust plans,
        so plans that did not come from :func:`spattn.plan` (edited, unpickled, hand-made) are checked before they run.
    """
    if not plan.cache.get("valid"):
        for check in (_check_types, _check_views, _check_tiles, _check_padding, _check_work, _check_merges):
            check(plan)
        plan.cache["valid"] = True
    return plan


def _require(condition, message: str) -> None:
    if not np.all(condition):
        raise ValueError(f"plan: {message}")


def _partitions(ends: np.ndarray, length: int) -> bool:
    """Whether `ends` rises from 0 to `length`."""
    return bool(len(ends) and ends[0] == 0 and ends[-1] == length and (np.diff(ends) >= 0).all())


def _check_types(p: Plan) -> None:
    expected = {"views": VIEW, "components": COMPONENT, "work": WORK, "masks": np.dtype(np.uint64)}
    int32 = ("indptr", "indices", "key_view", "mask", "work_indptr", "merge_rows", "merge_indptr", "merge_sources",
             "merge_variants", "variant")  # fmt: skip
    for name, dtype in {**expected, **dict.fromkeys(int32, np.dtype(np.int32))}.items():
        array = getattr(p, name)
        dimensions = {"masks": 3, "variant": 2}.get(name, 1)
        _require(
            isinstance(array, np.ndarray) and array.dtype == dtype and array.ndim == dimensions,
            f"{name}: expected a {dimensions}-D array of {dtype}",
        )
        _require(array.flags.c_contiguous, f"{name}: expected a contiguous array")
    _require(p.block_kv % 64 == 0 and p.block_kv > 0 and p.block_q > 0, f"tile: got {p.block_q} × {p.block_kv}")
    _require(p.masks.shape[1:] == (p.block_q, p.block_kv // 64), "masks: shape does not fit the tile")


def _check_views(p: Plan) -> None:
    v, c = p.views, p.components
    _require((v["extent"] >= 1) & (v["box"] >= 1), "views: extents and boxes must be positive")
    _require(v["grid"] == -(-v["extent"] // v["box"]), "views: grid does not fit extent and box")
    _require(v["tiles"] == v["grid"].prod(axis=1, dtype=np.int64), "views: number of tiles does not fit the grid")
    reach = (v["extent"].astype(np.int64) - 1) * v["stride"]
    low, high = v["offset"] + np.minimum(reach, 0).sum(axis=1), v["offset"] + np.maximum(reach, 0).sum(axis=1)
    queries = np.zeros(len(v), dtype=bool)
    _require((c["query_view"] >= 0) & (c["query_view"] < len(v)), "components: query_view out of range")
    queries[c["query_view"]] = True
    _require((c["key_view"] >= 0) & (c["key_view"] < len(v)), "components: key_view out of range")
    length, block = np.where(queries, p.q_len, p.kv_len), np.where(queries, p.block_q, p.block_kv)
    _require((low >= 0) & (high < length), "views: positions out of range")
    _require(v["box"].prod(axis=1, dtype=np.int64) == block, "views: box does not have the tile's cells")
    _require(c["query_tiles"] == v["tiles"][c["query_view"]], "components: query_tiles does not fit the view")


def _check_tiles(p: Plan) -> None:
    c = p.components
    _require(_partitions(p.indptr, len(p.indices)), "indptr: not a rising array from 0 to the number of indices")
    _require(len(p.key_view) == len(p.indices) == len(p.mask), "indices, key_view, mask: lengths differ")
    last_row = c["first_row"].astype(np.int64) + c["query_tiles"]
    _require((c["first_row"] >= 0) & (last_row < len(p.indptr)), "components: rows out of range")
    _require((p.mask >= -1) & (p.mask < len(p.masks)), "mask: number out of range")
    for one in c:
        span = slice(p.indptr[one["first_row"]], p.indptr[one["first_row"] + one["query_tiles"]])
        view, tile = one["key_view"] + p.key_view[span], p.indices[span]
        _require((view >= one["key_view"]) & (view < len(p.views)), "key_view: out of range")
        _require((tile >= 0) & (tile < p.views["tiles"][view]), "indices: key tile out of range")
        row = np.repeat(
            np.arange(one["query_tiles"]), np.diff(p.indptr[one["first_row"] :][: one["query_tiles"] + 1])
        )
        code = (row.astype(np.int64) * len(p.views) + view) * (int(p.views["tiles"].max(initial=0)) + 1) + tile
        _require(np.diff(code) > 0, "indices: a list is unsorted or repeats a tile")


def _check_padding(p: Plan) -> None:
    """No real query is allowed a padding key."""
    for one in p.components:
        span = slice(p.indptr[one["first_row"]], p.indptr[one["first_row"] + one["query_tiles"]])
        lengths = np.diff(p.indptr[one["first_row"] :][: one["query_tiles"] + 1])
        query_tile, key_view = np.repeat(np.arange(one["query_tiles"]), lengths), one["key_view"] + p.key_view[span]
        for number in np.unique(key_view):
            view = p.views[number]
            if (view["extent"] % view["box"] == 0).all():
                continue
            entries = np.nonzero(key_view == number)[0]
            _, real = positions(view, p.indices[span][entries])
            ragged = ~real.all(axis=1)
            entries, padding = entries[ragged], ~real[ragged]
            _require(p.mask[span][entries] >= 0, "mask: -1 for a tile with padding keys")
            words = np.packbits(padding, axis=1, bitorder="little").view("<u8")
            _, real_query = positions(p.views[one["query_view"]], query_tile[entries])
            allowed = p.masks[p.mask[span][entries]] & words[:, None, :]
            _require(~allowed.any(axis=2) | ~real_query, "masks: a padding key is allowed")


def _check_work(p: Plan) -> None:
    w, c = p.work, p.components
    ends = p.work_indptr
    _require(len(ends) >= 2 and _partitions(ends, len(w)), "work_indptr: corrupt")
    _require((p.variant >= 0) & (p.variant < len(ends) - 1), "variant: number out of range")
    _require((w["component"] >= 0) & (w["component"] < len(c)), "work: component out of range")
    own = c[w["component"]]
    _require((w["query_tile"] >= 0) & (w["query_tile"] < own["query_tiles"]), "work: query tile out of range")
    row = own["first_row"] + w["query_tile"]
    _require(
        (p.indptr[row] <= w["begin"]) & (w["begin"] <= w["end"]) & (w["end"] <= p.indptr[row + 1]),
        "work: piece outside of its list",
    )
    _require((w["slot"] >= -1) & (w["slot"] < p.slots), "work: slot out of range")
    for first, last in zip(ends[:-1], ends[1:], strict=True):
        slot = w["slot"][first:last]
        _require(np.bincount(slot[slot >= 0], minlength=1) <= 1, "work: two items share a slot")


def _check_merges(p: Plan) -> None:
    _require(len(p.merge_indptr) == len(p.merge_rows) + 1, "merge_indptr: length does not fit")
    _require(_partitions(p.merge_indptr, len(p.merge_sources)), "merge_indptr: corrupt")
    _require((p.merge_rows >= 0) & (p.merge_rows < p.q_len), "merge_rows: out of range")
    _require((p.merge_sources >= 0) & (p.merge_sources < p.slots * p.block_q), "merge_sources: out of range")
    ends = p.merge_variants
    _require(len(ends) == len(p.work_indptr) and _partitions(ends, len(p.merge_rows)), "merge_variants: corrupt")
