"""The boxes that TMA reads of a query tile."""

from __future__ import annotations

import math

import numpy as np
import pytest

from spattn import Tiling, patterns, plan
from spattn.schedule.tensor_maps import can_halve, halve, mapped


@pytest.mark.parametrize("rows", [128, 192])
@pytest.mark.parametrize(
    "grid", [(300,), (20, 23), (7, 100), (1, 300), (3, 50), (56, 56), (12, 12, 16), (3, 1, 90), (30, 5, 5)], ids=str
)
def test_each_warpgroup_has_consecutive_rows_in_a_box_of_its_own(grid, rows):
    """TMA reads a query tile as one box for each 64 rows; masks and results number the rows of the whole tile."""
    made = plan(patterns.Neighborhood(grid, 1), math.prod(grid), tiling=Tiling(tile=(rows, 64)))
    parts, views = rows // 64, made.views[made.components["query_view"]]
    fits = can_halve(made, parts)
    assert fits or rows > 128
    (specs, records), _ = mapped(made, False)
    if not fits:
        with pytest.raises(ValueError, match="cannot split a query box"):
            halve(specs, records, parts)
        return
    halved, records = halve(specs, records, parts)
    for view, record in zip(views, records[: len(views)], strict=False):
        cells = np.arange(rows).reshape(view["box"])
        box, corner = halved[record["map"] // 2].box[::-1], np.zeros(3, int)
        for part in range(parts):
            own = cells[tuple(slice(first, first + size) for first, size in zip(corner, box, strict=True))]
            assert own.ravel().tolist() == list(range(64 * part, 64 * part + 64))
            corner += record["half"]
