"""The plan as the Hopper kernel reads it: every cell, every mask bit and every unit, without a GPU."""

from __future__ import annotations

import re

import numpy as np
import pytest

import spattn.patterns as patterns
from spattn.cuda import hopper, hopper_layout
from spattn.cuda.params import Call, Operand
from spattn.plan import plan, positions

CASES = [
    (patterns.Full(), 300, 300),
    (patterns.Causal(), 200, 333),
    (patterns.SlidingWindow(50), 512, 512),
    (patterns.DilatedWindow(20, 20, 4), 515, 515),
    (patterns.Strided(16), 512, 512),
    (patterns.Strided(16), 523, 523),
    (patterns.Fixed(32, 8), 512, 512),
    (patterns.Neighborhood((24, 32), 7), 768, 768),
    (patterns.Neighborhood((24, 32), 5, 2), 768, 768),
    (patterns.Neighborhood((6, 8, 16), 3), 768, 768),
]
TILES = [(128, 64), (128, 128), (192, 64), (64, 64)]


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
    made = plan(pattern, q_len, kv_len, tile=tile, workers=4)
    layout = hopper_layout.make_layout(made)
    specs = layout.query_specs + layout.key_specs
    for item, work in zip(layout.items, made.work, strict=True):
        component = made.components[work["component"]]
        view = layout.query_views[item["query_view"]]
        spec = specs[view["map"] // 2]
        parts = [
            cells(spec, view, [item[a] + part * view["half"][2 - i] for i, a in enumerate("xyz")], spec.box)
            for part in range(tile[0] // 64)
        ]
        assert_same_cells(np.concatenate(parts), made.views[component["query_view"]], work["query_tile"])
        for e in range(work["begin"], work["end"]):
            number = item["key_view"] + layout.entries[e, 3]
            view = layout.key_views[number]
            spec = specs[view["map"] // 2]
            assert_same_cells(cells(spec, view, layout.entries[e, :3], spec.box), made.views[number], made.indices[e])


def assert_same_cells(found, view, tile):
    position, valid = positions(view, np.array([tile]))
    np.testing.assert_array_equal(found, np.where(valid[0], position[0], -1))


@pytest.mark.parametrize("shape", [(3, 128, 1), (2, 128, 2), (2, 192, 1)], ids=str)
def test_fragment_masks_hold_the_same_bits(shape):
    masks = np.random.default_rng(0).integers(0, 2**64, shape, dtype=np.uint64)
    fragments = hopper_layout.fragment_masks(masks)
    assert fragments.shape == (shape[0], shape[1] // 64, 128)
    number, row, column = np.indices((shape[0], shape[1], shape[2] * 64)).reshape(3, -1)
    thread = row % 64 // 16 * 32 + row % 8 * 4 + column % 8 // 2
    bit = column // 8 * 4 + row % 16 // 8 * 2 + column % 2
    found = fragments[number, row // 64, thread] >> bit.astype(fragments.dtype) & fragments.dtype.type(1)
    expected = masks[number, row, column // 64] >> (column % 64).astype(np.uint64) & np.uint64(1)
    np.testing.assert_array_equal(found.astype(int), expected.astype(int))


def test_residue_classes_share_one_map():
    made = plan(patterns.DilatedWindow(20, 20, 4), 512, tile=(128, 64))
    assert hopper_layout.make_layout(made).maps == 4
    made = plan(patterns.DilatedWindow(20, 20, 4), 515, tile=(128, 64))
    assert hopper_layout.make_layout(made).maps == 8


def test_units_cover_every_item_of_every_head():
    made = plan(patterns.Causal(), 1024, tile=(128, 64))
    units = hopper_layout.make_units(made, np.ones(len(made.work), bool), 2, 4, 2)
    assert len(np.unique(units)) == len(units) == len(made.work) * 8
    assert (units["head_kv"] == units["head_q"] // 2).all()


@pytest.mark.parametrize("pattern, length", [(patterns.Strided(16), 512), (patterns.Longformer(64, 1, 16), 1024),
                                             (patterns.Causal(), 700), (patterns.Full(), 4000)], ids=repr)  # fmt: skip
def test_every_shared_row_is_joined_once(pattern, length):
    """A row's sources are those of the plan, whether the merge kernel or a finishing item joins them."""
    made = plan(pattern, length, tile=(128, 64), workers=40)
    layout = hopper_layout.make_layout(made)
    joined = {}
    for number, row in enumerate(layout.merges.rows):
        joined[int(row)] = layout.merges.sources[slice(*layout.merges.indptr[number : number + 2])].tolist()
    for item, work in zip(layout.items[layout.finishes], made.work[layout.finishes], strict=True):
        position, valid = positions(made.views[item["query_view"]], np.array([work["query_tile"]]))
        priors = layout.priors[-2 - item["slot"]]
        for cell in np.nonzero(valid[0])[0]:
            assert int(position[0, cell]) not in joined
            joined[int(position[0, cell])] = [int(priors[cell]), int(work["slot"]) * 128 + int(cell)]
        assert (priors[~valid[0]] == -1).all()
    expected = {int(row): made.merge_sources[slice(*made.merge_indptr[number : number + 2])].tolist()
                for number, row in enumerate(made.merge_rows)}  # fmt: skip
    assert joined == expected
    if isinstance(pattern, patterns.Strided):
        assert layout.finishes.any() and not len(layout.merges.rows)


ROWS = Operand(4096, (1, 2, 64, 64), (8192, 4096, 64, 1))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"q": ROWS._replace(pointer=4098)}, "q starts at 0x1002, which is not on 16 bytes"),
        ({"k": ROWS._replace(strides=(8320, 4160, 65, 1))}, r"k has the shape \(1, 2, 64, 64\) and the strides \(832"),
        ({"v": ROWS._replace(strides=(8192, 0, 64, 1))}, "v has .* strides be positive"),
        ({"out": ROWS._replace(strides=(8192, 4096, -64, 1))}, "out has .* strides be positive"),
        ({}, "the plan needs more than 240 tensor maps"),
    ],
)  # fmt: skip
def test_why_the_portable_kernels_run(changed, reason):
    operands = {"q": ROWS, "k": ROWS, "v": ROWS, "out": ROWS} | changed
    call = Call(device=None, stream=0, plan=None, lse=0, dtype="float16", scale=1.0, allocate=None, **operands)
    assert re.match(reason, hopper.why_not(call))
