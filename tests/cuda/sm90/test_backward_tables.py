"""What the Hopper backward is given: NumPy alone, so no GPU is needed."""

from __future__ import annotations

import numpy as np
import pytest

from spattn import Tiling, patterns, plan
from spattn.cuda.sm90.backward import prepared, specializations
from spattn.cuda.sm90.backward import tables as layout
from spattn.planning.contract.types import positions
from spattn.schedule.subtiles import EMPTY, by_keys, subtile_masks

pytestmark = pytest.mark.family("sm90")

GPU = type("Gpu", (), {"ordinal": 0, "sm_count": 132})()


def positions_at(view, coordinates, box):
    """Positions of the subtile that starts at (axis 2, 1, 0); -1 for padding."""
    cells = np.stack(np.unravel_index(np.arange(int(np.prod(box))), box), axis=1) + np.asarray(coordinates)[::-1]
    inside = (cells < view["extent"]).all(axis=1)
    return np.where(inside, view["offset"] + (cells * view["stride"]).sum(axis=1), -1)


@pytest.mark.parametrize(
    "pattern", [patterns.strided(16), patterns.Neighborhood((18, 22), 7), patterns.Causal()], ids=repr
)
def test_subtiles_of_queries_are_halves_of_tiles(pattern):
    """What tensor maps load is what bitmasks are about."""
    made = plan(pattern, 396)
    views = layout.lay_out_views(made)
    keys = by_keys(made, 1, 1, 1, views.cut, 2, 1)
    entries = layout.lay_out(made, views, keys, keys.work["slot"], True)["entries"]
    for entry, subtile in zip(entries, keys.entries, strict=True):
        view = made.views[subtile["view"]]
        expected, valid = positions(view, np.array([subtile["tile"]]))
        part = views.cut.orders[views.cut.of_view[subtile["view"]]].reshape(2, 64)[subtile["part"]]
        got = positions_at(view, (entry["x"], entry["y"], entry["z"]), views.query_records["box"][subtile["view"]])
        np.testing.assert_array_equal(got, np.where(valid[0, part], expected[0, part], -1))


@pytest.mark.parametrize("pattern", [patterns.Full(), patterns.Causal(), patterns.BlockLocal(300)], ids=repr)
@pytest.mark.parametrize("tokens", [44, 300, 396])
def test_lists_have_no_sub_tile_without_queries(pattern, tokens):
    """TMA must not load a box outside of an array: the second half of the last query tile has no row here."""
    made = plan(pattern, tokens)
    views = layout.lay_out_views(made)
    keys = by_keys(made, 1, 1, 1, views.cut, 2, 1)
    assert (tokens - 1) % made.block_q < 64 == made.block_q // 2
    last = keys.entries["tile"] == -(-tokens // made.block_q) - 1
    assert last.any() and (keys.entries["part"][last] == 0).all()
    entries = layout.lay_out(made, views, keys, keys.work["slot"], True)["entries"]
    assert (entries["x"] < tokens).all()


def test_masks_by_keys_are_transposed():
    made = plan(patterns.Causal() & patterns.SlidingWindow(40), 300)
    cut = layout.lay_out_views(made).cut
    bits, words = subtile_masks(made, cut).bits, layout.lay_out_masks(made, cut, True)
    for number, thread, i, h, b in ((0, 5, 3, 1, 0), (0, 77, 7, 0, 1), (1, 127, 0, 1, 1)):
        row, column = thread // 32 * 16 + 8 * h + thread % 32 // 4, 8 * i + 2 * (thread % 4) + b
        assert (words[number, thread] >> (4 * i + 2 * h + b) & 1) == bits[number, column, row]


def test_one_pass_needs_one_query_view():
    made = plan(patterns.strided(16), 400)
    views = layout.lay_out_views(made)
    assert layout.query_subtiles(made, views, by_keys(made, 1, 1, 1, views.cut, 2, 1)) is None


def test_subtiles_are_compact():
    """Tiles of 8 × 16 queries are cut into squares, each of which meets three times three of the keys' squares."""
    made = plan(patterns.Neighborhood((64, 64), 13), 4096, tiling=Tiling(tile=(128, 64)))
    (box,) = {tuple(box) for box in layout.lay_out_views(made).query_records["box"].tolist() if np.prod(box) == 64}
    assert box == (1, 8, 8)
    keys = by_keys(made, 1, 1, 1, layout.lay_out_views(made).cut, 2, 1)
    assert (keys.masks != EMPTY).sum() == 22**2


def test_sums_of_dq_are_worth_some_memory(monkeypatch):
    """Of an item as long as this one, one pass is taken while the sums of all heads are no more than they may be."""
    monkeypatch.setattr(prepared, "upload", lambda device, arrays: (None, dict.fromkeys(arrays, 0)))
    made = plan(patterns.Full(), 8192)
    for most, one_pass in ((16 * 128, True), (16 * 128 - 1, False)):
        monkeypatch.setattr(prepared, "_MOST_SUMS", most)
        assert (prepared.BackwardPlan(made, GPU, 1, 16, 16).one_pass is not None) == one_pass


def test_every_head_dimension_has_kernels_for_all_gradients():
    for head_dim in range(8, 257, 8):
        for one_pass in (False, True):
            rows = specializations.builds(head_dim, one_pass)
            assert {name for row in rows for name in row.results.split()} == {"dq", "dk", "dv"}
            assert rows[-1].results == "dq" and all(row.head_dim >= head_dim for row in rows)
