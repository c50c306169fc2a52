"""What plans cost is counted from their lists: block by block, once for each head, and as their kernels read memory."""

import math

import numpy as np
import pytest

import spattn
from spattn import cpu
from spattn import patterns as sp
from spattn.choose.chooser import Sizes, predicted_ms
from spattn.choose.features_cpu import Kernels, count, count_dense, count_pairs, count_rows
from spattn.planning.contract.types import positions
from spattn.schedule import compiler

FLOAT32 = Kernels(16)
PANELS = Kernels(16, copies=True, panel=32)


def sizes(batch=1, heads=1, head_dim_v=64):
    return Sizes(batch, heads, heads, 32, head_dim_v)


def counted(pattern, tokens, kernels=FLOAT32, heads=1, head_dim_v=64, **how):
    return count(compiler.plan(pattern, tokens, heads=heads, **how), sizes(1, heads, head_dim_v), kernels)


@pytest.mark.parametrize("kernels", [*map(Kernels, (4, 8, 16)), PANELS], ids=str)
@pytest.mark.parametrize("tokens", [20, 48, 300, 1000])
def test_dense_attention_is_counted_as_its_plan_would_be(tokens, kernels):
    """One document, whose plan does not grow and so has the tiles of a closed form."""
    plan = spattn.plan(sp.Documents((tokens,)), tokens, tiling=spattn.Tiling(tile=(48, 64)))
    dense = count_dense(tokens, tokens, (48, 64), sizes(2, 3), kernels)
    assert count(plan, sizes(2, 3), kernels) == pytest.approx(dense, rel=1e-14)


def test_a_block_without_an_allowed_pair_is_not_counted():
    """A band of 9 keys in a tile of 64 × 64: a vector of 16 queries meets three blocks of keys, the first one two."""
    found = counted(sp.SlidingWindow(8, 0), 64, tile=(64, 64))
    assert found.scores == 32 * 8 * (2 + 3 * 3)
    assert found.weights == 4 * 64
    assert found.output == (64 // 16) * sum(min(6, 64 - row) + min(8, row) for row in range(0, 64, 6))


def test_panels_are_counted_from_the_first_key_to_the_last():
    """Of the same band: 32 queries meet 32 keys, the others 40, which lie in two steps of products; and none of a panel
    that attends to nothing."""
    found = counted(sp.SlidingWindow(8, 0), 64, PANELS, tile=(64, 64))
    assert found.weights == 2 * 32 + 2 * 64 and found.scores == found.weights * (32 + 64)
    assert found.output == 2 * (64 // 16)
    few = counted(sp.RowIntervals(np.zeros(96, int), np.repeat([0, 3], [80, 16])), 96, PANELS, tile=(96, 64))
    assert few.weights == 32 and few.output == 64 // 16


def test_rows_that_hold_no_query_are_not_counted():
    """Ten queries in a tile of 48: one vector and two blocks of rows."""
    plan = spattn.plan(sp.Full(), 10, 64, tiling=spattn.Tiling(tile=(48, 64)))
    found = count(plan, sizes(head_dim_v=16), FLOAT32)
    assert found.rows == 10 * (32 + 16) and found.scores == 32 * 64 and found.output == 2 * 64


@pytest.mark.parametrize(
    ("pattern", "kernels", "head_dim_v", "copied"),
    [
        (sp.Causal(), FLOAT32, 64, 0),
        (sp.Causal(), FLOAT32._replace(copies=True), 64, 32 + 64),
        (sp.Causal(), FLOAT32, 24, 24),  # no whole vectors
        (sp.DilatedWindow(4, dilation=4), FLOAT32, 64, 64),  # even keys are read where they are, and values are not
        (sp.windowed((16, 16), 8), FLOAT32, 64, 32 + 64),
    ],
)
def test_what_cannot_be_read_in_place_is_copied_once(pattern, kernels, head_dim_v, copied):
    assert counted(pattern, 256, kernels, head_dim_v=head_dim_v).gathered == 256 * copied


def test_each_head_counts():
    heads = sp.PerHead((sp.Causal(), sp.SlidingWindow(8)))
    one, other = (counted(pattern, 300) for pattern in heads.patterns)
    assert np.allclose(counted(heads, 300, heads=2), np.add(one, other))
    assert np.allclose(counted(sp.Causal(), 300, heads=5), 5 * np.array(one))


def test_merged_rows_are_counted_by_their_sources():
    plan = spattn.plan(sp.Full(), 48, 4096, tiling=spattn.Tiling(tile=(48, 64), workers=4))
    assert plan.slots and count(plan, sizes(), FLOAT32).merged == 48 * plan.slots * 64


def test_milliseconds_are_of_nanoseconds():
    found = counted(sp.Causal(), 64)
    assert predicted_ms(found, (1e6, *(0.0,) * 7)) == found.items


def test_large_calls_take_no_memory():
    plan = spattn.plan(sp.Causal(), 64)
    one, many = (cpu.predicted_ms(plan, batch, 1, 64, 64, "float32") for batch in (1, 10**15))
    assert many == pytest.approx(10**15 * one)


@pytest.mark.parametrize("lanes", [4, 16])
@pytest.mark.parametrize(("kernel", "box"), [(7, (2, 2)), (5, (2, 2)), (3, (4, 2)), (5, (1, 4)), (7, (8, 2))])
def test_rows_are_computed_with_whole_vectors_of_keys(kernel, box, lanes):
    """Of four rows at once those from the first to the last key that any of them may attend to."""
    pattern = sp.Neighborhood((24, 32), kernel)
    plan, pairs = spattn.plan(pattern, 768, tiling=spattn.Tiling(tile=(math.prod(box), 128), box=box)), 0
    for component in plan.components:
        (queries, are), (keys, real) = (
            positions(plan.views[component[name]], np.arange(1)) for name in ("query_view", "key_view")
        )
        assert plan.views["tiles"][component["query_view"]] == plan.views["tiles"][component["key_view"]] == 1
        allowed = pattern.bind(768, 768).allows(queries.reshape(-1, 1), keys.reshape(1, -1))
        for rows in np.split((allowed & real)[: are.sum()], range(4, are.sum(), 4)):
            met = rows.any(axis=0).nonzero()[0]
            pairs += len(rows) * lanes * (met.max() // lanes + 1 - met.min() // lanes)
    found = count_rows(plan, sizes(2, 3), lanes)
    assert found == (6 * 768, 6 * 768 * (32 + 64), 6 * pairs, 6 * pairs * (32 + 64))


def test_rows_of_a_plan_without_bitmasks_meet_all_keys():
    plan = spattn.plan(sp.Full(), 64, tiling=spattn.Tiling(tile=(16, 64)))
    assert count_rows(plan, sizes(), 16).weights == 64 * 64


def test_rows_of_views_of_several_tiles_meet_whole_tiles():
    """But for what four rows do not reach."""
    plan = spattn.plan(sp.Neighborhood((20, 30), 9), 600, tiling=spattn.Tiling(tile=(4, 64), box=(2, 2)))
    views = plan.views[plan.components["key_view"]]
    assert (views["tiles"] > 1).all()
    assert 4 * 32 * views["tiles"].sum() < count_rows(plan, sizes(), 16).weights <= 4 * 64 * views["tiles"].sum()


def test_pairs_are_those_that_are_allowed():
    """Whatever tile the plan has, and as many for each head as its pattern allows."""
    heads = sp.PerHead((sp.Causal(), sp.SlidingWindow(8)))
    for tile in ((48, 64), (1, 64)):
        plan = spattn.plan(heads, 300, tiling=spattn.Tiling(tile=tile), heads=2)
        assert count_pairs(plan, sizes(5, 2))[::2] == (5 * 2 * 300, 5 * plan.nnz)
