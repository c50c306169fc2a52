"""Rows by strides: what tiles know goes to their rows, and comes back."""

import numpy as np
import pytest

from spattn.patterns.authoring import Lattice
from spattn.planning.contract.types import positions
from spattn.planning.tiles.tiling import make_view
from spattn.schedule.rows import places

VIEWS = {
    "a sequence": [Lattice(3, (1,), (100,))],
    "residues": [Lattice(first, (7,), (14,)) for first in range(7)],
    "residues backwards": [Lattice(93 + first, (-7,), (14,)) for first in range(5)],
    "a grid": [Lattice(0, (20, 1), (6, 20))],
    "columns": [Lattice(first, (20, 5), (6, 4)) for first in (0, 1, 2, 4)],
    "a volume": [Lattice(1 + 60 * first, (20, 5, 1), (3, 4, 5)) for first in range(2)],
    "uneven": [Lattice(first, (30,), (4,)) for first in (0, 1, 2, 9, 11, 13, 25)],
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("block", [4, 16])
def test_rows_have_what_their_tiles_have(name, block):
    views = np.array([make_view(lattice, block) for lattice in VIEWS[name]])
    tiles = int(views["tiles"][0])
    number = np.where(np.arange(tiles) % 3 == 1, -1, np.cumsum(np.arange(tiles) % 3 != 1) - 1)
    lists = int(number.max()) + 1
    of_list, of_cell = np.full(130, -5), np.full(130, -5)
    found = list(places(views, number, 10))
    for place in found:
        place.rows(of_list)[...] = place.of_lists(np.arange(10 + lists * len(views)), -1)
        place.rows(of_cell)[...] = place.cells()
    assert sum(place.copies for place in found) == len(views)
    expected, cells = np.full(130, -5), np.full(130, -5)
    for n, view in enumerate(views):
        rows, real = positions(view, np.arange(tiles))
        own = np.where(number < 0, -1, 10 + n * lists + number)
        expected[rows[real]] = np.repeat(own, block).reshape(tiles, block)[real]
        cells[rows[real]] = np.tile(np.arange(block), (tiles, 1))[real]
    assert np.array_equal(of_list, expected) and np.array_equal(of_cell, cells)
    chosen = np.random.default_rng(0).random(130) < 0.1
    for n, place in enumerate(found):
        first = sum(before.copies for before in found[:n])
        for copy, tiles_of in enumerate(place.any_of_tiles(place.rows(chosen))):
            rows, real = positions(views[first + copy], np.arange(tiles))
            assert np.array_equal(tiles_of, (chosen[rows] & real).any(axis=1))


def test_evenly_spaced_views_are_one_place():
    views = np.array([make_view(lattice, 4) for lattice in VIEWS["uneven"]])
    assert [place.copies for place in places(views, np.zeros(1, int), 0)] == [3, 3, 1]


def test_views_that_meet_are_places_of_their_own():
    """Nobody could add to their rows at once."""
    views = np.array([make_view(Lattice(first, (1,), (20,)), 4) for first in (0, 5, 10)])
    assert [place.copies for place in places(views, np.arange(5), 0)] == [1, 1, 1]
