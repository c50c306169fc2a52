"""The passes of a backward against the plan's predicate, pair by pair."""

from __future__ import annotations

import numpy as np
import pytest

from spattn import Tiling, patterns, plan
from spattn.planning.contract.types import positions
from spattn.schedule.roles import roles
from spattn.schedule.subtiles import EMPTY, FULL, Cut, by_keys, by_queries, subtile_masks
from spattn.testing import dense_mask

PROBLEMS = {
    "causal": (patterns.Causal(), 260, 391, 1, 2),
    "window": (patterns.SlidingWindow(70), 400, 400, 1, 2),
    "strided": (patterns.strided(16), 400, 400, 1, 4),
    "longformer": (patterns.longformer(64, global_tokens=(0, 1, 200)), 400, 400, 1, 2),
    "neighborhood": (patterns.Neighborhood((18, 22), 7), 396, 396, 1, 2),
    "per head": (patterns.PerHead((patterns.Causal(), patterns.SlidingWindow(30))), 260, 260, 2, 2),
    "per batch entry": (patterns.Documents(((100, 150), (30, 40, 180))), 250, 250, 2, 4),
    "tiles of two shapes": (patterns.PeriodicWindow(2, 0, 0) & patterns.BigBird(1, 1, 0, 0), 7, 7, 1, 2),
    "nothing": (patterns.Full() - patterns.Full(), 150, 150, 1, 2),
}


def any_cut(made, side):
    """Subtiles of any cells of a tile, others in boxes that are longer along the last axis."""
    orders = np.stack([np.random.default_rng(seed).permutation(made.block_q) for seed in range(2)])
    return Cut(side, orders, (made.views["box"][:, 2] > 16).astype(int))


def subtile_positions(views, work_view, tile, part, cells):
    """(positions, real) of a subtile of these cells of a tile; nothing is real behind a view's last tile."""
    view = views[work_view]
    if tile >= view["tiles"]:
        return np.zeros(cells.shape[1], np.int64), np.zeros(cells.shape[1], bool)
    position, valid = positions(view, np.array([tile]))
    return (x[0, cells[part]] for x in (position, valid))


def visited(plan, made, item, subtiles, transposed):
    """How often an item visits each (query head of its group, query, key), and which rows of it are which positions."""
    views, cut = plan.views, subtiles.cut
    keys = np.arange(plan.block_kv).reshape(-1, 64)

    def subtile(of_queries, view, tile, part):
        queries = cut.orders[cut.of_view[view]].reshape(-1, cut.side)
        return subtile_positions(views, view, tile, part, queries if of_queries else keys)

    parts_rows = len(keys) if transposed else plan.block_q // cut.side
    for entry_number in range(item["begin"], item["end"]):
        entry, masks = made.entries[entry_number], made.masks[entry_number]
        column, column_real = subtile(transposed, item["columns"] + entry["view"], entry["tile"], entry["part"])
        for part, number in enumerate(masks):
            if number == EMPTY:
                continue
            row, row_real = subtile(not transposed, item["view"], item["tile"] + part // parts_rows, part % parts_rows)
            allowed = np.ones((len(row), len(column)), bool)
            if number != FULL:
                allowed = subtiles.bits[number].T if transposed else subtiles.bits[number]
            yield entry["head"], row, column, allowed & row_real[:, None] & column_real[None, :]


@pytest.mark.parametrize(("tile", "side", "together"), [((128, 64), 64, 2), ((32, 64), 32, 1), ((48, 128), 16, 1)])
@pytest.mark.parametrize("workers", [1, 40])
@pytest.mark.parametrize("name", PROBLEMS)
def test_both_passes_visit_each_allowed_pair_once(name, workers, tile, side, together):
    pattern, q_len, kv_len, batch, heads = PROBLEMS[name]
    made = plan(pattern, q_len, kv_len, tiling=Tiling(tile=tile, workers=workers), batch=batch, heads=heads)
    mask = dense_mask(pattern, batch, heads, q_len, kv_len)
    subtiles = subtile_masks(made, any_cut(made, side))
    queries = by_queries(made, subtiles.cut)
    variant = np.broadcast_to(queries.variant, (batch, heads))
    for b, h in np.ndindex(batch, heads):
        count = np.zeros((q_len, kv_len), int)
        for item in queries.work[slice(*queries.work_indptr[variant[b, h] :][:2])]:
            assert item["heads"] == 1
            for head, row, column, allowed in visited(made, queries, item, subtiles, False):
                assert head == 0
                np.add.at(count, (row[:, None], column[None, :]), allowed)
        np.testing.assert_array_equal(count, mask[b, h])
    for heads_kv in {1, heads}:
        group = heads // heads_kv
        keys = by_keys(made, batch, heads, heads_kv, subtiles.cut, together, workers)
        assert keys.variant.shape == (batch, heads_kv)
        for b, h in np.ndindex(batch, heads_kv):
            count = np.zeros((group, kv_len, q_len), int)
            for item in keys.work[slice(*keys.work_indptr[keys.variant[b, h] :][:2])]:
                for repeat in range(item["heads"]):
                    for head, row, column, allowed in visited(made, keys, item, subtiles, True):
                        np.add.at(count, (head + repeat, row[:, None], column[None, :]), allowed)
            np.testing.assert_array_equal(count, mask[b, h * group : (h + 1) * group].swapaxes(1, 2))


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("workers", [1, 40])
@pytest.mark.parametrize("name", PROBLEMS)
def test_each_row_is_written_once_or_merged(name, workers, keyed):
    """By an item without a slot, or by a merge of every item with a slot that has the position among its rows."""
    pattern, q_len, kv_len, batch, heads = PROBLEMS[name]
    made = plan(pattern, q_len, kv_len, tiling=Tiling(workers=workers), batch=batch, heads=heads)
    cut = any_cut(made, 64)
    own = by_keys(made, batch, heads, heads, cut, 2, workers) if keyed else by_queries(made, cut)
    assert set(own.work["view"]) <= set(roles(made)[keyed])  # kernels know no others
    for variant in range(len(own.work_indptr) - 1):
        length = kv_len if keyed else q_len
        written, sources = np.zeros(length, int), [[] for _ in range(length)]
        for item in own.work[slice(*own.work_indptr[variant : variant + 2])]:
            cells = np.arange(64)[None] if keyed else cut.orders[cut.of_view[item["view"]]].reshape(-1, 64)
            for subtile in range(2):
                place = (item["tile"] + subtile, 0) if keyed else (item["tile"], subtile)
                row, real = subtile_positions(made.views, item["view"], *place, cells)
                for cell in np.nonzero(real)[0]:
                    if item["slot"] < 0:
                        written[row[cell]] += 1
                    else:
                        sources[row[cell]].append(item["slot"] * 128 + subtile * 64 + cell)
        merges = own.merges
        for merge in range(*merges.variants[variant : variant + 2]):
            row = merges.rows[merge]
            written[row] += 1
            found = merges.sources[merges.indptr[merge] : merges.indptr[merge + 1]].tolist()
            assert sorted(found) == sorted(sources[row])
            assert found == sorted(found) or not keyed
            sources[row] = []
        assert (written == 1).all()
        assert not any(sources)


def test_long_columns_are_split():
    """A few keys that all queries see: their lists are in pieces, so that no worker is left with one."""
    made = plan(patterns.longformer(64, global_tokens=range(8)), 20000, tiling=Tiling(workers=1), heads=1)
    cut = Cut.consecutive(made, 64)
    few, many = (by_keys(made, 1, 1, 1, cut, 2, workers).work for workers in (1, 132))
    assert (many["end"] - many["begin"]).max() <= 16 < (few["end"] - few["begin"]).max()
