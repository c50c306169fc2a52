"""Check backend tables against their plan; an observer for ``spattn._util.checks.observers``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from spattn._util.checks import MOST_CELLS
from spattn._util.ragged import ramp
from spattn.planning import Plan
from spattn.planning.contract.types import positions, real_cells
from spattn.planning.contract.validate import pair_codes
from spattn.schedule.gradients import Units
from spattn.schedule.reductions import Merges, Reductions, SumReductions
from spattn.schedule.subtiles import EMPTY, FULL, KEYS, Pass, SubtileMasks, subtile_masks
from spattn.schedule.tasks import Listed

__all__ = ["check_table"]

_MOST_CELLS = MOST_CELLS >> 2  # lower, because these checks are Python loops
_Cells = tuple[np.ndarray, np.ndarray]  # row or key, and whether the cell is real


def check_table(table: str, **of: Any) -> None:
    """Assert that a table is consistent with its plan.

    Parameters
    ----------
    table : str
        "reductions", "sum reductions", "pass by queries", "pass by keys", "units", "tasks", "selected items" or
        "joined".
    **of
        The table and its sources.
    """
    _CHECKS[table](**of)


def _check_reductions(plan: Plan, found: Reductions) -> None:
    """Check that items, in-kernel reductions and combines write each row once and read each workspace row once."""
    variants = np.repeat(np.arange(plan.variants), np.diff(plan.work_indptr))
    for variant in range(plan.variants):
        own = variants == variant
        work, slots = plan.work[own], found.slots[own]
        item, cell, row = real_cells(plan.views[plan.components["query_view"][work["component"]]], work["query_tile"])
        row = plan.q_order[variant, row] if plan.q_order.size else row
        alone, reduces, partial = (slots[item] == -1), (slots[item] <= -2), (slots[item] >= 0)
        rows, of_row, sources = _merged(found.merges, variant)
        _assert_once(np.concatenate([row[alone], row[reduces], rows]), plan.q_len, "row")
        place = work["slot"][item].astype(np.int64) * plan.block_q + cell  # workspace row of a partial
        prior = found.priors[-2 - slots[item[reduces]], cell[reduces]]
        assert (prior >= 0).all(), "an in-kernel reduction lacks the other partial of a row"
        read = np.concatenate([np.stack([prior, row[reduces]]), np.stack([sources, of_row])], axis=1)
        # A reducing item reads the partial of an earlier item and never writes its own to the workspace.
        _assert_same(read, np.stack([place[partial], row[partial]]), "workspace rows written and read")


def _check_sum_reductions(
    slots: np.ndarray, work_indptr: np.ndarray, merges: Merges, rows: int, found: SumReductions
) -> None:
    """Check that each sum is done by one reducing item, with the same sources in the same order, or still listed."""
    for variant in range(len(work_indptr) - 1):
        of = slice(*work_indptr[variant : variant + 2])
        sums = {int(s[0]): tuple(s) for s in _sources(merges, variant) if len(s)}
        empty = sum(not len(s) for s in _sources(merges, variant))
        left = _sources(found.merges, variant)
        assert sum(not len(s) for s in left) == empty, "an empty sum is lost"
        done = [tuple(s) for s in left if len(s)]
        for item in np.nonzero(found.slots[of] <= -2)[0] + work_indptr[variant]:
            number = -2 - int(found.slots[item])
            for row in range(rows):
                first = int(slots[item]) * rows + row
                rest = found.rest_sources[slice(*found.rest_indptr[number * rows + row :][:2])]
                if first in sums:
                    done.append((first, *rest.tolist()))
                else:
                    assert not len(rest), "padding has sources"
        assert sorted(done) == sorted(sums.values()), "a sum is not done exactly once"


def _check_pass_by_queries(plan: Plan, made: Pass, subtiles: SubtileMasks) -> None:
    """Check that the dQ tables visit each pair of the plan once, with the plan's work items and split-KV partials."""
    assert np.array_equal(made.work["tile"], plan.work["query_tile"]) and made.slots == plan.slots
    assert np.array_equal(made.work["slot"], plan.work["slot"])
    if plan.q_len * plan.kv_len > _MOST_CELLS or plan.gathered:
        return
    for variant in range(plan.variants):
        codes = [np.zeros(0, np.int64)]
        for item in made.work[made.work_indptr[variant] : made.work_indptr[variant + 1]]:
            order = subtiles.cut.orders[subtiles.cut.of_view[item["view"]]]
            row, real = _tile(plan, plan.q_order, variant, int(item["view"]), int(item["tile"]))
            for entry in range(item["begin"], item["end"]):
                column = made.entries[entry]
                key, real_key = _subtile(
                    plan, variant, item["columns"] + column["view"], column["tile"], column["part"]
                )
                allowed = _allowed(subtiles, made.masks[entry], columns_first=False)
                at, of = np.nonzero(allowed & real[order][:, None] & real_key)
                codes.append(row[order][at].astype(np.int64) * plan.kv_len + key[of])
        _assert_same_codes(np.concatenate(codes), _codes(plan, variant), "pass by queries")


def _check_pass_by_keys(
    plan: Plan, made: Pass, subtiles: SubtileMasks, heads: tuple[int, int, int], together: int
) -> None:
    """Check that the dK/dV tables visit each pair of the plan once per query head of a key-value head."""
    batch, heads_q, heads_kv = heads
    if plan.q_len * plan.kv_len > _MOST_CELLS or plan.gathered:
        return
    of_head = np.broadcast_to(plan.variant, (batch, heads_q)).reshape(batch, heads_kv, -1)
    known: dict[int, np.ndarray] = {}
    pairs = [_codes(plan, variant) for variant in range(plan.variants)]
    for entry, head in np.ndindex(batch, heads_kv):
        own = int(np.broadcast_to(made.variant, (batch, heads_kv))[entry, head])
        if own not in known:
            known[own] = _codes_by_keys(plan, made, subtiles, own, of_head[entry, head], together)
        cells = plan.q_len * plan.kv_len
        expected = np.concatenate([pairs[variant] + n * cells for n, variant in enumerate(of_head[entry, head])])
        _assert_same_codes(known[own], np.sort(expected), "pass by keys")


def _codes_by_keys(
    plan: Plan, made: Pass, subtiles: SubtileMasks, own: int, variants: np.ndarray, together: int
) -> np.ndarray:
    """Encode pairs as (query head of the group, row, key)."""
    codes = [np.zeros(0, np.int64)]
    for item in made.work[made.work_indptr[own] : made.work_indptr[own + 1]]:
        tiles = range(item["tile"], min(item["tile"] + together, plan.views["tiles"][item["view"]]))
        for number in range(item["begin"], item["end"]):
            column = made.entries[number]
            for head in range(item["heads"]):
                group_head = int(column["head"]) + head
                variant = int(variants[group_head])
                order = subtiles.cut.orders[subtiles.cut.of_view[column["view"]]]
                cells = order[column["part"] * subtiles.cut.side : (column["part"] + 1) * subtiles.cut.side]
                row, real = (x[cells] for x in _tile(plan, plan.q_order, variant, column["view"], column["tile"]))
                keys = [_tile(plan, plan.kv_order, variant, int(item["view"]), tile) for tile in tiles]
                key, real_key = (np.concatenate(column) for column in zip(*keys, strict=True))
                allowed = _allowed(subtiles, made.masks[number], columns_first=True)[:, : len(key)]
                at, of = np.nonzero(allowed & real[:, None] & real_key)
                codes.append((group_head * plan.q_len + row[at].astype(np.int64)) * plan.kv_len + key[of])
    return np.sort(np.concatenate(codes))


def _check_units(plan: Plan, split: Units, heads: tuple[int, int, int]) -> None:
    """Check that each item of each query head is in one unit, which covers its keys, and units share no workspace."""
    batch, heads_q, heads_kv = heads
    of_head = np.broadcast_to(plan.variant, (batch, heads_q)).reshape(batch, heads_kv, -1)
    for entry, head in np.ndindex(batch, heads_kv):
        units = split.units[(split.units["batch"] == entry) & (split.units["head_kv"] == head)]
        items = np.concatenate([np.arange(*plan.work_indptr[v : v + 2]) for v in of_head[entry, head]])
        taken = np.concatenate([np.arange(unit["first"], unit["last"]) for unit in units])
        assert np.array_equal(taken, np.arange(len(items))), "units do not partition the items"
        for unit in units:
            for item in split.work[items[unit["first"] : unit["last"]]]:
                key = _keys_of_item(plan, item)
                assert not len(key) or unit["begin"] <= key.min() <= key.max() < unit["end"], "keys outside a unit"
    rows = np.diff(np.append(split.units["offset"], split.rows))
    assert (rows == split.units["end"] - split.units["begin"]).all(), "units share rows of the workspace"


def _keys_of_item(plan: Plan, item: np.void) -> np.ndarray:
    component = plan.components[item["component"]]
    number = np.arange(item["begin"], item["end"])
    run = np.searchsorted(plan.tile_indptr, number, side="right") - 1
    views = plan.views[component["key_view"] + plan.key_view[run]]
    key = real_cells(views, plan.indices[run] + number - plan.tile_indptr[run])[2]
    return plan.kv_order[component["variant"], key] if plan.kv_order.size else key


def _check_tasks(plan: Listed, chosen: np.ndarray, batch: int, heads_q: int, heads_kv: int, tasks: np.ndarray) -> None:
    """Check that each chosen item runs once for each head of its variant."""
    variant = np.broadcast_to(plan.variant, (batch, heads_q))
    of_item = np.repeat(np.arange(len(plan.work_indptr) - 1), np.diff(plan.work_indptr))
    assert chosen[tasks["item"]].all() and (of_item[tasks["item"]] == variant[tasks["batch"], tasks["head_q"]]).all()
    assert (tasks["head_kv"] == tasks["head_q"] // (heads_q // heads_kv)).all()
    code = (tasks["item"].astype(np.int64) * batch + tasks["batch"]) * heads_q + tasks["head_q"]
    expected = int((np.bincount(variant.ravel(), minlength=len(plan.work_indptr) - 1)[of_item] * chosen).sum())
    assert len(np.unique(code)) == len(code) == expected, "a task is missing or runs twice"


def _check_masked_items(plan: Plan, items: Any) -> None:
    """Check that heads of a variant and a dynamic mask have the variant's work items, and lists do not overlap."""
    for pair in range(len(items.work_indptr) - 1):
        own = items.items[items.work_indptr[pair] : items.work_indptr[pair + 1]]
        variant = int(np.searchsorted(plan.work_indptr, own[0], side="right")) - 1 if len(own) else -1
        whole = np.arange(*plan.work_indptr[variant : variant + 2]) if len(own) else own
        assert np.array_equal(own, whole), "a dynamic mask lacks work items"
    length = plan.work["end"] - plan.work["begin"]
    room = np.diff(items.starts)
    assert (room == items.work["end"]).all() and (0 <= room).all() and (room <= length[items.items]).all()


def _check_joined(layouts: Any, joined: Any) -> None:
    """Check that the tables of a group are its problems' tables concatenated, with indices adjusted."""
    for n, layout in enumerate(layouts):
        first = int(joined.items[n])
        work = joined.work[first : first + len(layout.work)]
        length = layout.work["end"] - layout.work["begin"]
        entry = np.repeat(work["begin"], length) + ramp(length)
        own = np.repeat(layout.work["begin"], length) + ramp(length)
        assert (joined.entries[entry] == layout.entries[own]).all(), "entries of another problem"
        mask, of = joined.entry_masks[entry], layout.entry_masks[own]
        assert ((mask < 0) == (of < 0)).all() and (joined.masks[mask[of >= 0]] == layout.masks[of[of >= 0]]).all()
        for name in ("query_view", "key_view"):
            views, others = getattr(joined, f"{name}s"), getattr(layout, f"{name}s")
            assert (views["problem"][work[name]] == n).all(), "a view of another problem"
            fields = [field for field in others.dtype.names if field not in ("map", "problem")]
            for field in fields:
                assert (views[field][work[name]] == others[field][layout.work[name]]).all()
        reduces = layout.work["slot"] <= -2
        prior, before = joined.priors[-2 - work["slot"][reduces]], layout.priors[-2 - layout.work["slot"][reduces]]
        assert (prior == before).all() and (work["slot"][~reduces] == layout.work["slot"][~reduces]).all()


def _merged(merges: Merges, variant: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the rows that a variant combines, the row of each source, and the sources."""
    own = slice(*merges.variants[variant : variant + 2])
    rows, count = merges.rows[own], np.diff(merges.indptr)[own]
    return rows, np.repeat(rows, count), merges.sources[merges.indptr[own.start] : merges.indptr[own.stop]]


def _sources(merges: Merges, variant: int) -> list[list[int]]:
    first, last = merges.variants[variant : variant + 2]
    ends = merges.indptr[first : last + 1].tolist()
    return [merges.sources[a:b].tolist() for a, b in zip(ends, ends[1:], strict=False)]


def _tile(plan: Plan, order: np.ndarray, variant: int, view: int, tile: int) -> _Cells:
    """Return the rows or keys of a tile."""
    place, real = positions(plan.views[view], np.array([tile]))
    return (order[variant][place[0]] if order.size else place[0]), real[0]


def _subtile(plan: Plan, variant: int, view: int, tile: int, part: int) -> _Cells:
    key, real = _tile(plan, plan.kv_order, variant, int(view), int(tile))
    return key[part * KEYS : (part + 1) * KEYS], real[part * KEYS : (part + 1) * KEYS]


def _allowed(subtiles: SubtileMasks, numbers: np.ndarray, columns_first: bool) -> np.ndarray:
    """Concatenate the bits of sub-tiles, along queries or along keys."""
    whole = {FULL: True, EMPTY: False}
    shape = subtiles.cut.side, KEYS
    bits = [np.full(shape, whole[n]) if n < 0 else subtiles.bits[n] for n in numbers.tolist()]
    return np.concatenate(bits, axis=1 if columns_first else 0)


def _codes(plan: Plan, variant: int) -> np.ndarray:
    """Return the sorted codes of a variant's pairs."""
    return np.sort(np.concatenate([np.zeros(0, np.int64), *pair_codes(plan, variant)]))


def _assert_once(rows: np.ndarray, length: int, what: str) -> None:
    assert np.array_equal(np.sort(rows), np.arange(length)), f"a {what} is not written exactly once"


def _assert_same(read: np.ndarray, written: np.ndarray, what: str) -> None:
    read, written = (pairs[:, np.lexsort(pairs[::-1])] for pairs in (read, written))
    assert np.array_equal(read, written), f"{what} differ"


def _assert_same_codes(found: np.ndarray, expected: np.ndarray, what: str) -> None:
    assert np.array_equal(np.sort(found), expected), f"{what}: pairs differ from the plan, or a pair repeats"


_CHECKS: dict[str, Callable[..., None]] = {
    "reductions": _check_reductions,
    "sum reductions": _check_sum_reductions,
    "pass by queries": lambda plan, made, cut: _check_pass_by_queries(plan, made, subtile_masks(plan, cut)),
    "pass by keys": lambda plan, made, cut, heads, together: _check_pass_by_keys(
        plan, made, subtile_masks(plan, cut), heads, together
    ),
    "units": _check_units,
    "tasks": _check_tasks,
    "selected items": _check_masked_items,
    "joined": _check_joined,
}
