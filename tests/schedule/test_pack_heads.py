"""Heads of a group in one query tile: the packed plan allows the same pairs."""

from __future__ import annotations

import numpy as np
import pytest

from spattn import Tiling, patterns, plan
from spattn.cuda.sm90.forward.tables import make_layout
from spattn.planning import positions, validate
from spattn.planning.contract.types import tile_lists
from spattn.schedule.pack_heads import heads_that_fit, pack_heads

CASES = {
    "full": (patterns.Full(), 1, 1000),
    "causal": (patterns.Causal(), 7, 3000),
    "window": (patterns.SlidingWindow(500), 16, 700),
    "dilated": (patterns.DilatedWindow(90, 90, 4), 13, 1500),
    "strided": (patterns.strided(16), 16, 2000),
    "some empty rows": (patterns.BlockLocal(50) & ~patterns.SlidingWindow(20, 90), 16, 300),
    "per batch entry": (patterns.Documents(((100, 150), (30, 40, 180))), 5, 250),
    "per group": (patterns.PerHead((patterns.Causal(),) * 3 + (patterns.strided(12),) * 3), 9, 260),
}


def pairs(plan, variant):
    """(q_len, kv_len) how often the items of a variant allow each pair, and {workspace row: row}."""
    count, rows_of, lists = np.zeros((plan.q_len, plan.kv_len), int), {}, tile_lists(plan)
    for item in plan.work[slice(*plan.work_indptr[variant : variant + 2])]:
        component = plan.components[item["component"]]
        row, real = (x[0] for x in positions(plan.views[component["query_view"]], np.array([item["query_tile"]])))
        for e in range(item["begin"], item["end"]):
            view = plan.views[component["key_view"] + lists.key_view[e]]
            key, there = (x[0] for x in positions(view, lists.indices[e : e + 1]))
            allowed = np.ones((plan.block_q, plan.block_kv), bool)
            if lists.mask[e] >= 0:
                words = plan.masks[lists.mask[e]].astype("<u8").view(np.uint8)
                allowed = np.unpackbits(words, axis=1, bitorder="little").astype(bool)
            np.add.at(count, (row[real][:, None], key[None, there]), allowed[real][:, there].astype(int))
        if item["slot"] >= 0:
            rows_of |= {int(item["slot"]) * plan.block_q + c: int(row[c]) for c in np.nonzero(real)[0]}
    return count, rows_of


@pytest.mark.parametrize("group", [2, 3, 8])
@pytest.mark.parametrize("case", CASES)
def test_packed_plans_allow_the_same_pairs(case, group):
    pattern, q_len, kv_len = CASES[case]
    batch, heads = (max(1, n) for n in pattern.sizes())
    group = 3 if heads > 1 else group
    heads = max(heads, group)
    made = plan(pattern, q_len, kv_len, tiling=Tiling(workers=4), batch=batch, heads=heads)
    packed = validate(pack_heads(made, group))
    assert packed.variants == made.variants and packed.q_len == group * q_len
    assert packed.variant.shape[1] in (1, heads // group)
    for variant in range(made.variants):
        count, _ = pairs(made, variant)
        packed_count, rows_of = pairs(packed, variant)
        np.testing.assert_array_equal(packed_count, np.tile(count, (group, 1)))
        for m in range(*packed.merge_variants[variant : variant + 2]):
            for source in packed.merge_sources[packed.merge_indptr[m] : packed.merge_indptr[m + 1]]:
                assert rows_of[int(source)] == packed.merge_rows[m]
    make_layout(packed)


@pytest.mark.parametrize(
    ("group", "q_len", "rows", "heads"),
    [
        (4, 16, 64, 4),
        (4, 17, 128, 4),
        (4, 64, 128, 2),
        (4, 65, 128, 1),
        (6, 40, 128, 2),
        (12, 11, 128, 6),
        (3, 33, 128, 1),
    ],
)
def test_as_many_heads_as_fit_are_packed(group, q_len, rows, heads):
    """The most heads of which the plan can be packed, among the divisors of the group."""
    assert heads_that_fit(group, q_len, rows) == heads
    made = plan(patterns.Causal(), q_len, 300, tiling=Tiling(tile=(rows, 64)))
    packable = [n for n in range(2, group + 1) if group % n == 0 and pack_heads(made, n) is not None]
    assert max(packable, default=1) == heads


def test_what_cannot_be_packed():
    """Too many rows, heads of a group that differ, queries in more than one tile or dimension."""
    assert pack_heads(plan(patterns.Causal(), 65, 300), 2) is None
    assert pack_heads(plan(patterns.Causal(), 300, 300), 2) is None
    different = patterns.PerHead((patterns.Causal(), patterns.strided(12)))
    assert pack_heads(plan(different, 4, 260, heads=2), 2) is None
    assert pack_heads(plan(patterns.Neighborhood((6, 8), 3), 48, 48), 2) is None
