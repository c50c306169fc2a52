"""The plan as the Hopper kernel reads it: every cell and every mask bit, without a GPU."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

import spattn.patterns as patterns
from spattn import Tiling, plan
from spattn.arrays.operand import Operand
from spattn.cuda.host.forward_pass import ForwardPass
from spattn.cuda.sm90.family import why_not
from spattn.cuda.sm90.forward.tables import fragment_masks, make_layout
from spattn.planning import positions
from spattn.planning.contract.types import tile_lists
from spattn.schedule import compiler

pytestmark = pytest.mark.family("sm90")

CASES = [
    (patterns.Full(), 300, 300),
    (patterns.Causal(), 200, 333),
    (patterns.SlidingWindow(50), 512, 512),
    (patterns.DilatedWindow(20, 20, 4), 515, 515),
    (patterns.strided(16), 512, 512),
    (patterns.strided(16), 523, 523),
    (patterns.fixed(32, 8), 512, 512),
    (patterns.Neighborhood((24, 32), 7), 768, 768),
    (patterns.Neighborhood((24, 32), 5, 2), 768, 768),
    (patterns.Neighborhood((6, 8, 16), 3), 768, 768),
    (patterns.PerHead((patterns.Neighborhood((6, 8, 16), 3), patterns.Neighborhood((6, 8, 16), 5))), 768, 768),
]
TILES = [(128, 64), (192, 64), (64, 64)]


def cells(spec, view, corner, box):
    """Positions that TMA reads for the box at `corner` (axis 2 first), -1 outside the map."""
    shift = (0, int(view["shift_y"]), int(view["shift_z"]))
    total = np.full(1, spec.offset, dtype=np.int64)
    inside = np.ones(1, dtype=bool)
    for axis in (2, 1, 0):
        coordinate = corner[axis] + shift[axis] + np.arange(box[axis])
        total = (total[:, None] + coordinate * spec.strides[axis]).ravel()
        inside = (inside[:, None] & (coordinate < spec.extents[axis])).ravel()
    return np.where(inside, total, -1)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("pattern, q_len, kv_len", CASES, ids=lambda c: repr(c) if not isinstance(c, int) else str(c))
def test_maps_read_the_cells_of_the_plan(pattern, q_len, kv_len, tile):
    made = plan(pattern, q_len, kv_len, tiling=Tiling(tile=tile, workers=4))
    layout, lists = make_layout(made), tile_lists(made)
    specs = layout.query_specs + layout.key_specs
    for item, work in zip(layout.work, made.work, strict=True):
        component = made.components[work["component"]]
        view = layout.query_views[item["query_view"]]
        spec = specs[view["map"] // 2]
        parts = [
            cells(spec, view, [item[a] + part * view["half"][2 - i] for i, a in enumerate("xyz")], spec.box)
            for part in range(tile[0] // 64)
        ]
        assert_same_cells(np.concatenate(parts), made.views[component["query_view"]], work["query_tile"])
        for e in range(work["begin"], work["end"]):
            entry = layout.entries[e]
            number = item["key_view"] + entry["view"]
            view = layout.key_views[number]
            spec = specs[view["map"] // 2]
            found = cells(spec, view, [entry[a] for a in "xyz"], spec.box)
            assert_same_cells(found, made.views[number], lists.indices[e])


def assert_same_cells(found, view, tile):
    position, valid = positions(view, np.array([tile]))
    np.testing.assert_array_equal(found, np.where(valid[0], position[0], -1))


@pytest.mark.parametrize("shape", [(3, 128, 1), (2, 192, 1), (300, 64, 1)], ids=str)
def test_fragment_masks_hold_the_same_bits(shape):
    masks = np.random.default_rng(0).integers(0, 2**64, shape, dtype=np.uint64)
    fragments = fragment_masks(masks)
    assert fragments.shape == (shape[0], shape[1] // 64, 128)
    number, row, column = np.indices((shape[0], shape[1], shape[2] * 64)).reshape(3, -1)
    thread = row % 64 // 16 * 32 + row % 8 * 4 + column % 8 // 2
    bit = column // 8 * 4 + row % 16 // 8 * 2 + column % 2
    found = fragments[number, row // 64, thread] >> bit.astype(fragments.dtype) & fragments.dtype.type(1)
    expected = masks[number, row, column // 64] >> (column % 64).astype(np.uint64) & np.uint64(1)
    np.testing.assert_array_equal(found.astype(int), expected.astype(int))


LABELS = np.random.default_rng(0).integers(0, 5, 300)
SCATTERED = patterns.interop.from_pairs(*(np.random.default_rng(1).random((300, 333)) < 0.05).nonzero(), 300, 333)
LOOKED_UP = [
    (patterns.Clusters(LABELS), 300, {"ordered": True}),
    (patterns.PerHead([patterns.Clusters(LABELS), patterns.Clusters(LABELS % 3)]), 300, {"ordered": True}),
    (patterns.Clusters(LABELS) & patterns.Causal(), 300, {"ordered": True}),
    (SCATTERED, 333, {"gathered": True}),
    (patterns.PerHead([SCATTERED, patterns.SlidingWindow(20)]), 333, {"gathered": True}),
]


@pytest.mark.parametrize("block_q", [20, 64, 128])
@pytest.mark.parametrize(("pattern", "kv_len", "how"), LOOKED_UP, ids=lambda x: repr(x)[:40])
def test_rows_that_are_looked_up_are_those_of_the_plan(pattern, kv_len, how, block_q):
    made = compiler.plan(pattern, 300, kv_len, heads=2, tile=(block_q, 64), workers=4, **how)
    layout, lists = make_layout(made), tile_lists(made)
    assert layout.gathers and not layout.key_specs and bool(len(layout.query_rows)) == bool(made.q_order.size)
    for item, work in zip(layout.work, made.work, strict=True):
        component = made.components[work["component"]]
        if made.q_order.size:
            expected = rows_of(made, made.q_order, component, component["query_view"], work["query_tile"])
            np.testing.assert_array_equal(layout.query_rows[item["x"]], expected)
        for e in range(work["begin"], work["end"]):
            entry = layout.entries[e]
            number = item["key_view"] + entry["view"]
            expected = rows_of(made, made.kv_order, component, number, lists.indices[e])
            found = layout.key_rows[layout.key_views["map"][number] + entry["x"]]
            np.testing.assert_array_equal(found, expected)


def rows_of(made, order, component, view, tile):
    """The rows of a tile's cells, -1 for padding."""
    place, real = positions(made.views[view], np.array([tile]))
    return np.where(real[0], order[component["variant"]][place[0]] if order.size else place[0], -1)


def test_views_of_two_variants_are_not_looked_up():
    """Their rows are not the same."""
    made = compiler.plan(LOOKED_UP[1][0], 300, heads=2, tile=(64, 64), ordered=True)
    components = made.components.copy()
    components["query_view"] = 0
    with pytest.raises(ValueError, match="^plan: an ordered or gathered plan must not share views between variants"):
        make_layout(replace(made, components=components))


def test_residue_classes_share_one_map():
    made = plan(patterns.DilatedWindow(20, 20, 4), 512, tiling=Tiling(tile=(128, 64)))
    assert make_layout(made).maps == 4
    made = plan(patterns.DilatedWindow(20, 20, 4), 515, tiling=Tiling(tile=(128, 64)))
    assert make_layout(made).maps == 8


ROWS = Operand(4096, (1, 2, 64, 64), (8192, 4096, 64, 1))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"q": ROWS._replace(pointer=4098)}, "q starts at 0x1002, which is not 16-byte aligned"),
        ({"k": ROWS._replace(strides=(8320, 4160, 65, 1))}, r"k has shape \(1, 2, 64, 64\) and strides \(832"),
        ({"v": ROWS._replace(strides=(8192, 0, 64, 1))}, "v has .* strides positive"),
        ({"out": ROWS._replace(strides=(8192, 4096, -64, 1))}, "out has .* strides positive"),
        ({}, "the plan needs more than 240 tensor maps"),
    ],
)
def test_why_the_portable_kernels_run(changed, reason):
    operands = {"q": ROWS, "k": ROWS, "v": ROWS, "out": ROWS} | changed
    made = plan(patterns.Full(), 64, tiling=Tiling(tile=(128, 64)))
    call = ForwardPass(device=None, stream=0, plan=made, lse=0, dtype="float16", scale=1.0, allocate=None, **operands)
    assert re.match(reason, why_not(call))
