"""BlockTable against slices of its array."""

import numpy as np
import pytest

from spattn.patterns.hints import table as _table
from spattn.patterns.hints.table import BlockTable, NumberTable


def rectangles(shape, count=400):
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-3, n + 3, (2, count)) for n in shape)
    return np.sort(a, axis=0), np.sort(b, axis=0)


def exact(cells, a, b):
    rows, columns = cells.shape
    inside = 0 <= a[0] and a[1] < rows and 0 <= b[0] and b[1] < columns
    part = cells[max(a[0], 0) : max(a[1] + 1, 0), max(b[0], 0) : max(b[1] + 1, 0)]
    return part.any(), inside and part.all()


@pytest.mark.parametrize("share", [0.0, 0.05, 0.95, 1.0])
@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (7, 12), (130, 70)])
@pytest.mark.parametrize("coarse", [False, True])
def test_rectangles(share, shape, coarse, monkeypatch):
    if coarse:
        monkeypatch.setattr(_table, "_FALLBACK_CELLS", 0)
    cells = np.random.default_rng(0).random(shape) < share
    table = BlockTable(cells)
    (a_lo, a_hi), (b_lo, b_hi) = rectangles(shape)
    some, every = table.any_in(a_lo, a_hi, b_lo, b_hi), table.all_in(a_lo, a_hi, b_lo, b_hi)
    for n in range(len(a_lo)):
        true_any, true_all = exact(cells, (a_lo[n], a_hi[n]), (b_lo[n], b_hi[n]))
        assert some[n] >= true_any
        assert every[n] <= true_all
        if not coarse:
            assert (some[n], every[n]) == (true_any, true_all)


def test_contains():
    table = BlockTable(np.eye(3, dtype=bool))
    a, b = np.arange(-2, 5)[:, None], np.arange(-2, 5)
    assert np.array_equal(table.contains(a, b), (a == b) & (a >= 0) & (a < 3))
    assert bool(table.contains(1, 1))


def test_contains_asks_symbolic_positions():
    class Symbol:
        def contains(self, table, a, b):
            return table, a, b

    table, symbol = BlockTable(np.eye(3, dtype=bool)), Symbol()
    assert table.contains(symbol, 4) == (table, symbol, 4)
    assert table.contains(4, symbol) == (table, 4, symbol)


def test_content_decides():
    cells = np.eye(3, dtype=bool)
    table = BlockTable(cells)
    cells[0, 1] = True
    assert table == BlockTable(np.eye(3, dtype=bool))
    assert hash(table) == hash(BlockTable(np.eye(3, dtype=bool)))
    assert table != BlockTable(cells)
    with pytest.raises(ValueError, match="read-only"):
        table.cells[0, 0] = False


@pytest.mark.parametrize("shape", [(1,), (7,), (300,), (1, 1), (9, 70), (33, 5)])
@pytest.mark.parametrize("dtype", [bool, np.int64, np.float32])
def test_extremes_of_boxes(shape, dtype):
    rng = np.random.default_rng(2)
    values = (rng.random(shape) < 0.1) if dtype is bool else rng.integers(-99, 99, shape).astype(dtype)
    ends = [np.sort(rng.integers(0, n, (2, 200)), axis=0) for n in shape]
    table = NumberTable(values)
    for _ in range(2):  # made and remembered
        least, greatest = table.bounds(*zip(*ends, strict=True))
        for n in range(200):
            part = values[tuple(slice(low[n], high[n] + 1) for low, high in ends)]
            assert (least[n], greatest[n]) == (part.min(), part.max())
