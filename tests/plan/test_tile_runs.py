"""Lists of tiles are stored as runs, which the search finds without listing tiles."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given

from spattn import Tiling, plan
from spattn import patterns as p
from spattn.patterns.authoring import Lattice, Part
from spattn.planning import validate
from spattn.planning.contract.budget import Budget
from spattn.planning.contract.types import tile_lists
from spattn.planning.tiles import search as _search
from spattn.planning.tiles.search import search
from spattn.planning.tiles.tiling import make_view
from spattn.testing import check_plan
from spattn.testing.strategies import compositions

LONG = {
    "causal": (p.Causal(), 3),
    "window": (p.SlidingWindow(256), 5),
    "full": (p.Full(), 1),
    "documents": (p.Documents((5000,) * 13) & p.Causal(), 4),
    "global tokens": (p.longformer(64, global_tokens=8), 7),
    "columns": (p.fixed(1024, 32), 5),
}


def runs_of(made):
    """(list, key view, first tile, end, mask) of each run."""
    row = np.repeat(np.arange(len(made.indptr) - 1), np.diff(made.indptr))
    return np.stack([row, made.key_view, made.indices, made.indices + np.diff(made.tile_indptr), made.mask])


@pytest.mark.parametrize("name", LONG)
def test_lists_are_stored_as_runs(name):
    """As few as there can be: no run goes on in the next one, and a list has so many of them at any length."""
    pattern, most = LONG[name]
    made = plan(pattern, 1 << 16)
    row, view, first, stop, mask = runs_of(made)
    goes_on = (row[1:] == row[:-1]) & (view[1:] == view[:-1]) & (first[1:] == stop[:-1]) & (mask[1:] == mask[:-1])
    assert not goes_on.any()
    assert len(made.indices) <= most * (len(made.indptr) - 1)
    assert np.diff(made.tile_indptr).sum() == plan(pattern, 1 << 16).tiles


def test_a_list_may_be_a_single_run_of_masked_tiles():
    """A token that sees all keys: its tiles differ in nothing."""
    made = plan(p.GlobalTokens(1, keys=False), 1 << 14)
    assert len(made.indices) == len(made.masks) == 1 and made.tiles == (1 << 14) // 64


def test_runs_written_out():
    made = plan(p.longformer(40, global_tokens=(0, 150, 300)), 2000, tiling=Tiling(tile=(64, 64)))
    lists, (row, view, first, stop, mask) = tile_lists(made), runs_of(made)
    expected = [(r, v, t, m) for r, v, a, b, m in zip(row, view, first, stop, mask, strict=True) for t in range(a, b)]
    found_row = np.repeat(np.arange(len(lists.indptr) - 1), np.diff(lists.indptr))
    assert list(zip(found_row, lists.key_view, lists.indices, lists.mask, strict=True)) == expected
    assert len(expected) == made.tiles > len(made.indices)


@pytest.mark.slow
def test_more_tiles_than_can_be_written_out():
    made = plan(p.Causal(), 10**7)
    with pytest.raises(ValueError, match=r"^plan: expected at most 2147483647 tiles in expanded lists, got 61035\d+;"):
        tile_lists(made)


def test_runs_of_one_tile_are_the_same_plan():
    made = plan(p.Causal(), 700, tiling=Tiling(tile=(64, 64)))
    lists = tile_lists(made)
    own = dataclasses.replace(made, **lists._asdict(), tile_indptr=np.arange(made.tiles + 1))
    assert validate(own).tiles == made.tiles
    check_plan(own, [made.pattern.index_set(700, 700)])


class Halves(p.Pattern):
    """On a grid of 64 × 64 keys the right half of the upper rows, which end where the left half of the lower begins."""

    def allows(self, q, k):
        return ((k < 2048) & (k % 64 >= 32)) | ((k >= 2048) & (k % 64 < 32) & (q >= 0))

    def parts(self, q_len, kv_len):
        return (Part(self, None, Lattice(0, (64, 1), (64, 64))),)


class Planes(p.Pattern):
    """On a grid of 8 × 24 × 32 keys all but a few planes, or all but a few rows of one, or all."""

    def allows(self, q, k):
        return (k // 768 != q % 9) & (k // 32 != 77 + q // 64)

    def parts(self, q_len, kv_len):
        return (Part(self, None, Lattice(0, (768, 32, 1), (8, 24, 32))),)


@pytest.mark.parametrize(("kind", "kv_len"), [(Halves, 4096), (Planes, 6144), (p.Full, 6144)])
@pytest.mark.parametrize("at_once", [1, 40, 1 << 15])
def test_the_search_finds_what_cells_say(kind, kv_len, at_once, monkeypatch):
    """From any level, in grids of two axes and three."""
    pattern = kind()
    monkeypatch.setattr(_search, "_PAIRS_AT_ONCE", at_once)
    made = plan(pattern, 130 + at_once % 7, kv_len, tiling=Tiling(tile=(16, 64)))
    check_plan(made, [pattern.index_set(130 + at_once % 7, kv_len)])


@pytest.mark.slow
@given(compositions())
def test_any_composition_from_a_single_pair_of_boxes(case):
    pattern, sizes = case[:2]
    before = _search._PAIRS_AT_ONCE
    _search._PAIRS_AT_ONCE = 1
    try:
        made = plan(
            pattern,
            sizes.q_len,
            sizes.kv_len,
            tiling=Tiling(tile=(16, 64), workers=3),
            batch=sizes.batch,
            heads=sizes.heads_q,
        )
    finally:
        _search._PAIRS_AT_ONCE = before
    variants, _ = pattern.variants(sizes.batch, sizes.heads_q)
    check_plan(made, [each.index_set(sizes.q_len, sizes.kv_len) for each in variants])


def test_runs_that_the_search_decides_are_joined():
    """On every level, whichever side of a box of keys was decided first."""
    view = make_view(Lattice(0, (1,), (64 * 1000,)), 64)
    query, first, length = search(p.Causal() - p.SlidingWindow(3000, 2000), view, view, 0, Budget(1 << 30)).runs
    order = np.lexsort((first, query))
    query, first, stop = query[order], first[order], (first + length)[order]
    assert len(query) > 900 and not ((query[1:] == query[:-1]) & (first[1:] == stop[:-1])).any()
