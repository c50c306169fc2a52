"""Boxes of keys that fit regions: the same pairs, in as many boxes, of fewer cells."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from spattn import cuda, patterns
from spattn.choose.specializations import build, variant
from spattn.cuda.sm90.forward import fitted as fitted_module
from spattn.cuda.sm90.forward.fitted import fit_keys
from spattn.cuda.sm90.forward.layout import fragment_masks, make_layout
from spattn.planning import positions
from spattn.planning.contract.types import tile_lists
from spattn.schedule import compiler
from spattn.testing import inputs

pytestmark = pytest.mark.family("sm90")

BEFORE = patterns.Neighborhood((14, 14), (13, 13), causal=(True, False))


def in_boxes(pattern, box, heads=1, workers=1):
    length = math.prod(pattern.grid)
    return compiler.plan(pattern, length, heads=heads, tile=(math.prod(box), 64), box=box, workers=workers)


def pairs_of(plan, views, lists, masks):
    """How often each pair is allowed, by the tables that a kernel reads; no cell is but one of a key."""
    found = np.zeros((plan.q_len, plan.kv_len), int)
    for component in plan.components:
        for tile in range(component["query_tiles"]):
            query, is_query = (one[0] for one in positions(plan.views[component["query_view"]], np.array([tile])))
            row = component["first_row"] + tile
            for n in range(lists.indptr[row], lists.indptr[row + 1]):
                view = views[component["key_view"] + lists.key_view[n]]
                key, is_key = (one[0] for one in positions(view, lists.indices[n : n + 1]))
                bits = np.ones((plan.block_q, plan.block_kv), bool)
                if lists.mask[n] >= 0:
                    words = masks[lists.mask[n]].astype("<u8").view(np.uint8)
                    bits = np.unpackbits(words, axis=1, bitorder="little").astype(bool)
                bits = bits[is_query]
                assert not bits[:, len(key) :].any() and not bits[:, : len(key)][:, ~is_key].any()
                rows, columns = np.nonzero(bits[:, : len(key)])
                np.add.at(found, (query[is_query][rows], key[columns]), 1)
    return found


@st.composite
def grids(draw):
    axes = draw(st.sampled_from([2, 2, 3]))
    shape = tuple(draw(st.integers(4, 20 if axes == 2 else 9)) for _ in range(axes))
    window = tuple(draw(st.integers(1, n)) for n in shape)
    if draw(st.booleans()):
        return patterns.windowed(shape, window, tuple(draw(st.integers(0, n - 1)) for n in window))
    return patterns.Neighborhood(shape, tuple(min(n, w | 1) for n, w in zip(shape, window, strict=True)))


@given(pattern=grids(), data=st.data())
def test_fitted_boxes_allow_the_pairs_of_the_plan(pattern, data):
    box = tuple(data.draw(st.integers(1, n)) for n in pattern.grid)
    made = in_boxes(pattern, box, workers=data.draw(st.integers(1, 3)))
    fitted = fit_keys(made)
    np.testing.assert_array_equal(pairs_of(made, *fitted), pairs_of(made, made.views, tile_lists(made), made.masks))
    keys = np.unique([component["key_view"] for component in made.components])
    cells = fitted.views["box"].prod(axis=1)[keys]
    assert (cells <= 64).all() and (fitted.views["tiles"] == made.views["tiles"]).all()
    assert (fitted.views["grid"].prod(axis=1) == made.views["tiles"])[keys].all()


@pytest.mark.parametrize(
    ("pattern", "box", "cells"),
    [
        (patterns.Neighborhood((56, 56), 7), (8, 8), {44, 49, 55}),  # regions of 11 × 11, 14 × 14 and 11 × 14
        (patterns.windowed((56, 56), 7), (7, 7), {49}),
        (patterns.windowed((56, 56), 7, 3), (7, 7), {9, 12, 16, 21, 28, 49}),
        (patterns.Neighborhood((6, 8, 16), 3), (3, 4, 4), {40}),
    ],
    ids=repr,
)
def test_boxes_of_known_regions(pattern, box, cells):
    made = in_boxes(pattern, box)
    layout = make_layout(made)
    assert (
        {math.prod(spec.box) for spec in layout.key_specs}
        == cells
        == set(layout.key_views["cells"][made.components["key_view"]])
    )
    assert (layout.fewest_cells, layout.most_cells) == (min(cells), max(cells))
    assert len(layout.entries) == len(tile_lists(made).indices)
    np.testing.assert_array_equal(layout.masks, fragment_masks(fit_keys(made).masks))
    assert set(np.unique(layout.entry_masks)) == set(range(len(layout.masks)))  # no other is sent to the device


@pytest.mark.parametrize(
    "made",
    [
        compiler.plan(patterns.SlidingWindow(20), 300, tile=(64, 64)),
        compiler.plan(patterns.Neighborhood((24, 24), 5), 576, tile=(64, 64)),  # one view, of which lists have parts
        compiler.plan(BEFORE, 196, tile=(64, 64)),  # parts that begin where the view does
        compiler.plan(patterns.windowed((24, 24), 8), 576, tile=(64, 64), box=(8, 8)),  # nothing to gain
        compiler.plan(patterns.Clusters(np.arange(300) % 5), 300, tile=(64, 64), ordered=True),
    ],
    ids=["one axis", "one view", "first parts", "full boxes", "another order"],
)
def test_other_plans_stay_as_they_are(made):
    fitted, lists = fit_keys(made), tile_lists(made)
    np.testing.assert_array_equal(fitted.views, made.views)
    partial = lists.mask >= 0
    np.testing.assert_array_equal(fitted.lists.mask >= 0, partial)
    np.testing.assert_array_equal(fitted.masks[fitted.lists.mask[partial]], made.masks[lists.mask[partial]])
    assert make_layout(made).fewest_cells == make_layout(made).most_cells == 64


def test_many_combinations_of_bitmasks_are_recut_in_parts(monkeypatch):
    pattern = patterns.Neighborhood((24, 24), 7)
    made = in_boxes(pattern, (8, 8))
    whole = fit_keys(made)
    monkeypatch.setattr(fitted_module, "_BITS_AT_ONCE", 1)
    parts = fit_keys(made)
    np.testing.assert_array_equal(whole.masks, parts.masks)
    np.testing.assert_array_equal(whole.lists.mask, parts.lists.mask)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_products_have_as_many_columns_as_boxes_have_cells(head_dim):
    row = build(64, head_dim, keys=196)
    columns = [variant(row, "bfloat16", 16, cells=cells)["SPATTN_COLUMNS"] for cells in (9, 56, 57, 64)]
    assert columns == [56, 56, 64, 64]
    wide = build(128, 128)
    assert variant(wide, "bfloat16", 16, cells=49)["SPATTN_COLUMNS"] == wide.step_kv


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_kernels")
@pytest.mark.parametrize("head_dim", [32, 128])
@pytest.mark.parametrize(
    ("pattern", "box"),
    [
        (patterns.windowed((28, 28), 7, 3), (7, 7)),
        (patterns.Neighborhood((40, 33), 7), (8, 8)),  # 56 cells at most, and fewer
        (patterns.Neighborhood((40, 33), 9), (8, 8)),  # 64 at most
        (patterns.Neighborhood((9, 8, 16), 3), (3, 4, 4)),
        (patterns.Neighborhood((40, 33), 5), (8, 16)),  # two warpgroups, two tiles a step
    ],
    ids=repr,
)
def test_values_that_are_not_finite_stay_with_those_who_see_them(assert_alike, pattern, box, head_dim):
    """Cells behind those of a box hold what a larger box has left there."""
    length = math.prod(pattern.grid)
    q, k, v = inputs(2, 3, 3, length, length, head_dim, dtype="bfloat16")
    k[:, :, 7], v[:, :, 20], v[:, 1, length // 2] = np.nan, np.inf, np.nan
    usual = compiler.plan(pattern, length, batch=2, heads=3, tile=(128, 64))
    made = compiler.plan(pattern, length, batch=2, heads=3, tile=(math.prod(box), 64), box=box)
    assert make_layout(made).fewest_cells < 64
    assert_alike(*[cuda.forward(q, k, v, own, head_dim**-0.5) for own in (made, usual)])
