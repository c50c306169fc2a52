"""The passes of a backward against the plan's predicate, pair by pair."""

from __future__ import annotations

import numpy as np
import pytest

from spattn import patterns, plan
from spattn.plan._types import positions
from spattn.schedule.roles import roles
from spattn.schedule.slabs import EMPTY, FULL, by_keys, by_queries, slab_masks
from spattn.testing import dense_mask

PROBLEMS = {
    "causal": (patterns.Causal(), 260, 391, 1, 2),
    "window": (patterns.SlidingWindow(70), 400, 400, 1, 2),
    "strided": (patterns.Strided(16), 400, 400, 1, 4),
    "longformer": (patterns.Longformer(64, global_tokens=(0, 1, 200)), 400, 400, 1, 2),
    "neighborhood": (patterns.Neighborhood((18, 22), 7), 396, 396, 1, 2),
    "per head": (patterns.PerHead((patterns.Causal(), patterns.SlidingWindow(30))), 260, 260, 2, 2),
    "per batch entry": (patterns.Documents(((100, 150), (30, 40, 180))), 250, 250, 2, 4),
    "tiles of two shapes": (patterns.PeriodicWindow(2, 0, 0) & patterns.BigBird(1, 1, 0, 0), 7, 7, 1, 2),
    "nothing": (patterns.Full() - patterns.Full(), 150, 150, 1, 2),
}


def slab_positions(views, work_view, tile, part, side):
    """(positions, real) of a slab; nothing is real behind a view's last tile."""
    view = views[work_view]
    if tile >= view["tiles"]:
        return np.zeros(side, np.int64), np.zeros(side, bool)
    position, valid = positions(view, np.array([tile]))
    return (x[0, part * side : (part + 1) * side] for x in (position, valid))


def visited(made, item, rows, columns, bits, transposed):
    """How often an item visits each (query head of its group, query, key), and which rows of it are which positions."""
    side_rows, parts_rows = rows
    side_columns, _ = columns
    views = made.views
    for entry_number in range(item["begin"], item["end"]):
        entry, masks = bits.made.entries[entry_number], bits.made.masks[entry_number]
        column, column_real = slab_positions(
            views, item["columns"] + entry["view"], entry["tile"], entry["part"], side_columns
        )
        for slab, number in enumerate(masks):
            if number == EMPTY:
                continue
            row, row_real = slab_positions(
                views, item["view"], item["tile"] + slab // parts_rows, slab % parts_rows, side_rows
            )
            allowed = np.ones((side_rows, side_columns), bool)
            if number != FULL:
                allowed = bits.bits[number].T if transposed else bits.bits[number]
            yield entry["head"], row, column, allowed & row_real[:, None] & column_real[None, :]


class Bits:
    def __init__(self, made, bits):
        self.made, self.bits = made, bits


@pytest.mark.parametrize(("tile", "side", "together"), [((128, 64), 64, 2), ((32, 64), 32, 1), ((48, 128), 16, 1)])
@pytest.mark.parametrize("workers", [1, 40])
@pytest.mark.parametrize("name", PROBLEMS)
def test_both_passes_visit_each_allowed_pair_once(name, workers, tile, side, together):
    pattern, q_len, kv_len, batch, heads = PROBLEMS[name]
    made = plan(pattern, q_len, kv_len, batch=batch, heads=heads, tile=tile, workers=workers)
    mask = dense_mask(pattern, batch, heads, q_len, kv_len)
    _, bits = slab_masks(made, side)
    q, kv = (side, tile[0] // side), (64, tile[1] // 64)
    queries = by_queries(made, side)
    variant = np.broadcast_to(queries.variant, (batch, heads))
    for b, h in np.ndindex(batch, heads):
        count = np.zeros((q_len, kv_len), int)
        for item in queries.work[slice(*queries.work_indptr[variant[b, h] :][:2])]:
            assert item["heads"] == 1
            for head, row, column, allowed in visited(made, item, q, kv, Bits(queries, bits), False):
                assert head == 0
                np.add.at(count, (row[:, None], column[None, :]), allowed)
        np.testing.assert_array_equal(count, mask[b, h])
    for heads_kv in {1, heads}:
        group = heads // heads_kv
        keys = by_keys(made, batch, heads, heads_kv, side, together, workers)
        assert keys.variant.shape == (batch, heads_kv)
        for b, h in np.ndindex(batch, heads_kv):
            count = np.zeros((group, kv_len, q_len), int)
            for item in keys.work[slice(*keys.work_indptr[keys.variant[b, h] :][:2])]:
                for repeat in range(item["heads"]):
                    for head, row, column, allowed in visited(made, item, kv, q, Bits(keys, bits), True):
                        np.add.at(count, (head + repeat, row[:, None], column[None, :]), allowed)
            np.testing.assert_array_equal(count, mask[b, h * group : (h + 1) * group].swapaxes(1, 2))


@pytest.mark.parametrize("workers", [1, 40])
@pytest.mark.parametrize("name", PROBLEMS)
def test_each_key_is_written_once_or_merged(name, workers):
    """By an item without a slot, or by a merge of every item with a slot that has the key among its rows."""
    pattern, q_len, kv_len, batch, heads = PROBLEMS[name]
    made = plan(pattern, q_len, kv_len, batch=batch, heads=heads, workers=workers)
    keys = by_keys(made, batch, heads, heads, 64, 2, workers)
    assert set(keys.work["view"]) <= set(roles(made)[1])  # kernels know no others
    for variant in range(len(keys.work_indptr) - 1):
        written, sources = np.zeros(kv_len, int), [[] for _ in range(kv_len)]
        for item in keys.work[slice(*keys.work_indptr[variant : variant + 2])]:
            for slab in range(2):
                row, real = slab_positions(made.views, item["view"], item["tile"] + slab, 0, 64)
                for cell in np.nonzero(real)[0]:
                    if item["slot"] < 0:
                        written[row[cell]] += 1
                    else:
                        sources[row[cell]].append(item["slot"] * 128 + slab * 64 + cell)
        merges = keys.merges
        for merge in range(*merges.variants[variant : variant + 2]):
            row = merges.rows[merge]
            written[row] += 1
            own = merges.sources[merges.indptr[merge] : merges.indptr[merge + 1]]
            assert own.tolist() == sorted(sources[row])
            sources[row] = []
        assert (written == 1).all()
        assert not any(sources)


def test_long_columns_are_split():
    """A few keys that all queries see: their lists are in pieces, so that no worker is left with one."""
    made = plan(patterns.Longformer(64, global_tokens=range(8)), 20000, heads=1, workers=1)
    few, many = (by_keys(made, 1, 1, 1, 64, 2, workers).work for workers in (1, 132))
    assert (many["end"] - many["begin"]).max() <= 16 < (few["end"] - few["begin"]).max()
