"""Excerpts of tables are their cells as bits, however the table is stored."""

import numpy as np
import pytest

from spattn.patterns import CSR
from spattn.patterns.hints.table import BlockTable, ListedCells


@pytest.mark.parametrize(("height", "width"), [(1, 1), (3, 4), (8, 7), (2, 31)])
@pytest.mark.parametrize("share", [0, 0.02, 0.5, 1])
def test_excerpts_are_the_cells(share, height, width):
    rng = np.random.default_rng(0)
    cells = rng.random((20, 33)) < share
    a, b = rng.integers(-10, 30, 500), rng.integers(-10, 40, 500)
    padded = np.zeros((80, 120), bool)
    padded[20:40, 20:53] = cells
    expected = [
        int("".join("01"[int(bit)] for bit in padded[20 + i : 20 + i + height, 20 + j : 20 + j + width].ravel()), 2)
        for i, j in zip(a, b, strict=True)
    ]
    row, column = np.nonzero(cells)
    pairs = CSR(np.searchsorted(row, np.arange(21)), column, 33).bind(20, 33)._table
    for table in BlockTable(cells), ListedCells(row, column, cells.shape), pairs:
        assert table.excerpts(a, b, height, width).tolist() == expected
