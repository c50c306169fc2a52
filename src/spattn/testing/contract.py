"""Reference executor of plans in plain NumPy, and checks of the plan contract.

The code implements the text of :mod:`spattn.planning.contract.types`, independently of the planner and the kernels. It
is an executable specification for kernels, and detects invalid plans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from ..index_set import AffineRows
from ..planning import Plan

__all__ = ["check_plan", "execute", "plan_pairs"]


def plan_pairs(plan: Plan, variant: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return all (query row, key) pairs that the work items of a variant visit, with repeats, sorted by row and key.

    Parameters
    ----------
    plan : Plan
    variant : int, optional
        Index of the variant.

    Returns
    -------
    rows, keys : int64 arrays of equal length

    Examples
    --------
    >>> import spattn
    >>> rows, keys = plan_pairs(spattn.plan(spattn.patterns.Causal(), 3))
    >>> list(zip(rows.tolist(), keys.tolist()))
    [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]
    """
    rows, keys = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for item in _items(plan, variant):
        for query, key, allowed in _tiles(plan, item):
            r, c = np.nonzero(allowed)
            rows.append(query[r])
            keys.append(key[c])
    row, column = np.concatenate(rows), np.concatenate(keys)
    order = np.lexsort((column, row))
    return row[order], column[order]


def check_plan(plan: Plan, index_sets: Sequence[AffineRows]) -> None:
    """Assert that a plan visits each pair of the index sets exactly once, and no other, and writes each row once.

    Parameters
    ----------
    plan : Plan
    index_sets : sequence of AffineRows
        One per variant.
    """
    assert len(index_sets) == plan.variants, f"expected {len(index_sets)} variants, got {plan.variants}"
    for variant, index_set in enumerate(index_sets):
        expected = np.zeros((plan.q_len, plan.kv_len), dtype=np.uint16)
        for i in range(plan.q_len):
            expected[i, index_set.row(i)] = 1
        visits = _visits(plan, variant)
        wrong = [tuple(pair) for pair in np.argwhere(visits != expected).tolist()]
        assert not wrong, (
            f"variant {variant}: pair {wrong[0]} is visited {visits[wrong[0]]} times, expected {expected[wrong[0]]}; "
            f"{len(wrong)} pairs are wrong"
        )
        _check_lists(plan, variant)
        _check_writers(plan, variant)
    assert plan.nnz == sum(s.nnz for s in index_sets), "nnz differs from that of the index sets"


def execute(plan: Plan, q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Execute a plan in float64 like a kernel: work items write outputs or split-KV partials, which are then combined.

    Parameters
    ----------
    plan : Plan
    q, k, v, scale
        As for ``backends.PreparedForward``.

    Returns
    -------
    out, lse : float64 arrays
        NaN in rows that were not written.
    """
    out = np.full((*q.shape[:3], v.shape[-1]), np.nan)
    lse = np.full(q.shape[:3], np.nan)
    variants = np.broadcast_to(plan.variant, q.shape[:2])
    for b, h in np.ndindex(q.shape[:2]):
        kv = h // (q.shape[1] // k.shape[1])
        q_of, k_of, v_of = (x.astype(np.float64) for x in (q[b, h], k[b, kv], v[b, kv]))
        _execute_head(plan, int(variants[b, h]), q_of, k_of, v_of, scale, out[b, h], lse[b, h])
    return out, lse


def _visits(plan: Plan, variant: int) -> np.ndarray:
    """Count how often the work items of a variant visit each pair, (q_len, kv_len)."""
    visits = np.zeros((plan.q_len, plan.kv_len), dtype=np.uint16)
    for item in _items(plan, variant):
        for row, key, allowed in _tiles(plan, item):
            r, c = allowed.any(axis=1), allowed.any(axis=0)
            np.add.at(visits, np.ix_(row[r], key[c]), allowed[np.ix_(r, c)])  # gathered keys may repeat
    return visits


def _execute_head(
    plan: Plan,
    variant: int,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float,
    out: np.ndarray,
    lse: np.ndarray,
) -> None:
    slot_out = np.full((plan.slots * plan.block_q, v.shape[-1]), np.nan)
    slot_lse = np.full(plan.slots * plan.block_q, np.nan)
    for item in _items(plan, variant):
        row, valid = _query_cells(plan, item)
        own_out, own_lse = _attend(plan, item, q, k, v, scale)
        first = int(item["slot"]) * plan.block_q
        target_out, target_lse, at = (
            (out, lse, row[valid]) if item["slot"] < 0 else (slot_out, slot_lse, first + np.nonzero(valid)[0])
        )
        target_out[at], target_lse[at] = own_out[valid], own_lse[valid]
    for m in range(plan.merge_variants[variant], plan.merge_variants[variant + 1]):
        sources = plan.merge_sources[plan.merge_indptr[m] : plan.merge_indptr[m + 1]]
        row = plan.merge_rows[m]
        out[row], lse[row] = _weighted(slot_lse[sources], slot_out[sources])


def _attend(
    plan: Plan, item: np.void, q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """Compute softmax attention of the item's query cells over the keys of its tiles."""
    row, valid = _query_cells(plan, item)
    tiles = list(_tiles(plan, item))
    key = np.concatenate([key for _, key, _ in tiles])
    allowed = np.concatenate([allowed for _, _, allowed in tiles], axis=1)
    out, lse = np.zeros((len(row), v.shape[-1])), np.full(len(row), -np.inf)
    for cell in np.nonzero(valid)[0]:
        keys = key[allowed[cell]]
        with np.errstate(invalid="ignore", over="ignore"):
            out[cell], lse[cell] = _weighted((k[keys] @ q[row[cell]]) * scale, v[keys])
    return out, lse


def _weighted(scores: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, float]:
    """Return (softmax(scores) @ values, log Σ exp(scores)), or (0, −inf) if all scores are −inf."""
    row_max = scores.max(initial=-np.inf)
    if row_max == -np.inf:
        return np.zeros(values.shape[-1]), -np.inf
    p = np.exp(scores - row_max)
    return (p / p.sum()) @ values, np.log(p.sum()) + row_max


def _items(plan: Plan, variant: int) -> np.ndarray:
    return plan.work[plan.work_indptr[variant] : plan.work_indptr[variant + 1]]


def _cells(view: np.void, tile: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (position, False for padding) of each cell of a tile; see *view* and *tile* in the contract."""
    place = np.unravel_index(tile, tuple(view["grid"]))
    coordinate = np.indices(tuple(view["box"])).reshape(3, -1) + (np.array(place) * view["box"])[:, None]
    real = (coordinate < view["extent"][:, None]).all(axis=0)
    return view["offset"] + (coordinate * view["stride"][:, None]).sum(axis=0), real


def _query_cells(plan: Plan, item: np.void) -> tuple[np.ndarray, np.ndarray]:
    component = plan.components[item["component"]]
    assert component["variant"] >= 0
    place, real = _cells(plan.views[component["query_view"]], int(item["query_tile"]))
    return _at(plan.q_order, component, place, real), real


def _at(order: np.ndarray, component: np.void, place: np.ndarray, real: np.ndarray) -> np.ndarray:
    """Map indices of a permutation to rows or keys, arbitrary at padding cells; see *permutation* in the contract."""
    return order[component["variant"]][np.where(real, place, 0)] if order.size else place


def _tiles(plan: Plan, item: np.void) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield (row per query cell, key per key cell, allowed pairs) for each tile of a work item."""
    component = plan.components[item["component"]]
    row, row_real = _query_cells(plan, item)
    for number in range(item["begin"], item["end"]):
        run = int(np.nonzero(plan.tile_indptr <= number)[0][-1])
        tile = int(plan.indices[run] + number - plan.tile_indptr[run])
        place, key_real = _cells(plan.views[component["key_view"] + plan.key_view[run]], tile)
        key = _at(plan.kv_order, component, place, key_real)
        if plan.mask[run] < 0:
            assert key_real.all(), f"key tile {number} of the lists is marked full but has padding keys"
            allowed = np.ones((plan.block_q, plan.block_kv), dtype=bool)
        else:
            words = plan.masks[plan.mask[run]].astype("<u8").view(np.uint8).reshape(plan.block_q, -1)
            allowed = np.unpackbits(words, axis=1, bitorder="little").astype(bool)
            assert not allowed[row_real][:, ~key_real].any(), f"key tile {number} of the lists allows padding keys"
        yield row, key, allowed & row_real[:, None]


def _check_lists(plan: Plan, variant: int) -> None:
    """Check that each tile of a variant's lists is in one work item, and each item in a component of the variant."""
    visited: Counter[tuple[int, int]] = Counter()
    for item in _items(plan, variant):
        assert plan.components[item["component"]]["variant"] == variant, "a work item of another variant's component"
        assert item["begin"] < item["end"], "an empty work item"
        visited.update((int(item["component"]), tile) for tile in range(item["begin"], item["end"]))
    for number in np.nonzero(plan.components["variant"] == variant)[0]:
        component = plan.components[number]
        rows = component["first_row"], component["first_row"] + component["query_tiles"]
        for tile in range(*plan.tile_indptr[plan.indptr[[*rows]]]):
            times = visited.pop((int(number), tile), 0)
            assert times == 1, f"tile {tile} of component {number} is in {times} work items, expected 1"
    assert not visited, "work items exceed their lists"


def _check_writers(plan: Plan, variant: int) -> None:
    """Check that each row and each partial is written once, and that the combine reads each source once."""
    written: Counter[int] = Counter()
    filled: Counter[tuple[int, int]] = Counter()  # row of the workspace, row of the output
    slots: Counter[int] = Counter()
    for item in _items(plan, variant):
        row, valid = _query_cells(plan, item)
        if item["slot"] < 0:
            written.update(row[valid].tolist())
        else:
            slots[int(item["slot"])] += 1
            at = int(item["slot"]) * plan.block_q + np.nonzero(valid)[0]
            filled.update(zip(at.tolist(), row[valid].tolist(), strict=True))
    assert not slots or max(slots.values()) == 1, "two work items write the same split-KV partial"
    merges = range(plan.merge_variants[variant], plan.merge_variants[variant + 1])
    written.update(int(plan.merge_rows[m]) for m in merges)
    for m in merges:
        sources = plan.merge_sources[plan.merge_indptr[m] : plan.merge_indptr[m + 1]]
        filled.subtract((source, int(plan.merge_rows[m])) for source in sources.tolist())
    assert all(n == 1 for n in written.values()) and len(written) == plan.q_len, "a row is not written exactly once"
    assert not any(filled.values()), "a workspace row is not combined exactly once"
    costs = (_items(plan, variant)["end"] - _items(plan, variant)["begin"]).tolist()
    assert costs == sorted(costs, reverse=True), "work items are not sorted by decreasing cost"
