"""From a predicate to tiles: how views are cut, and what the search for tiles costs and finds."""

import math

import numpy as np
import pytest

from spattn import PlanningWarning, Tiling, plan
from spattn import patterns as p
from spattn.patterns.authoring import Lattice, Part
from spattn.planning.contract.types import grid_of
from spattn.planning.tiles import search as _search
from spattn.planning.tiles import tiling as tiling
from spattn.planning.tiles.tiling import choose_box
from spattn.testing import check_plan


@pytest.mark.parametrize(
    "extents, block, box",
    [
        ((1000,), 64, (64,)),
        ((64, 64), 64, (8, 8)),
        ((64, 64), 128, (8, 16)),
        ((16, 16, 16), 64, (4, 4, 4)),
        ((100, 2), 64, (32, 2)),
        ((3, 64), 64, (1, 64)),
        ((1, 100), 64, (1, 64)),
        ((7, 8), 128, (16, 8)),  # (8, 16) is as cubic, its last cell 103 and not 55
        ((6, 4), 64, (16, 4)),
        ((7, 7), 64, (8, 8)),
        ((2, 3, 4), 64, (4, 4, 4)),
    ],
)
def test_boxes_are_as_cubic_as_they_may_be(extents, block, box):
    """Among those that need at most a tenth more boxes than necessary; of one box the last cell comes early."""
    assert choose_box(extents, block) == box
    fewest = min(math.prod(grid_of(extents, b)) for b in tiling.factorisations(block, len(extents)))
    assert math.prod(grid_of(extents, box)) <= 1.1 * fewest


@pytest.fixture
def searched(monkeypatch):
    """Nothing is known but predicates."""
    monkeypatch.setattr(tiling, "_bands", lambda *_: None)
    monkeypatch.setattr(tiling, "tiles_of_spans", lambda *_: None)


@pytest.fixture
def pairs_asked(searched, monkeypatch):
    """The numbers of tile pairs that the rules were asked for."""
    asked = []

    def counting(query, key, query_box, key_box, made=_search.tile_pairs, **options):
        asked.append(len(query_box))
        return made(query, key, query_box, key_box, **options)

    monkeypatch.setattr(_search, "tile_pairs", counting)
    return asked


@pytest.mark.parametrize("pattern", [p.SlidingWindow(64), p.BlockLocal(64), p.DilatedWindow(8, 8, 5)], ids=repr)
def test_cost_follows_the_tiles_found(pattern, pairs_asked):
    """Of 512 × 512 pairs of tiles (for one residue class a fifth each way), few are ever looked at."""
    plan(pattern, 512 * 64, tiling=Tiling(tile=(64, 64), workers=5))
    assert sum(pairs_asked) < _search._PAIRS_AT_ONCE


@pytest.mark.parametrize("grid", [(40, 50), (9, 10, 21)], ids=str)
def test_coarse_levels_find_every_tile(grid, searched, monkeypatch):
    """Boxes of several axes whose numbers of children differ, and from queries to keys."""
    monkeypatch.setattr(_search, "_PAIRS_AT_ONCE", 8)
    tokens = math.prod(grid)
    pattern = p.Neighborhood(grid, (5,) * len(grid))
    for q_len, tile in ((tokens, (32, 64)), (tokens // 3, (7, 64))):
        check_plan(
            plan(pattern, q_len, tokens, tiling=Tiling(tile=tile, workers=6)), [pattern.index_set(q_len, tokens)]
        )


@pytest.mark.parametrize(
    "pattern",
    [
        p.Neighborhood((40, 50), 5),
        p.strided(37),
        p.fixed(64, 8),
        p.SlidingWindow(90) | p.Sinks(3),
        p.BigBird(64, random_blocks=1, head=0),
        p.Causal() & p.Documents((700, 130, 5, 1165)),
    ],
    ids=lambda pattern: type(pattern).__name__,
)
def test_pairs_that_are_alike_have_one_sample(pattern, searched, monkeypatch):
    """What is decided of a sample holds for all, at the sequence's ends too."""
    found = []
    monkeypatch.setattr(_search, "_PAIRS_AT_ONCE", 8)
    monkeypatch.setattr(_search, "_COMPARED_FROM", 32)
    monkeypatch.setattr(_search, "_COMPARED_FIRST", 32)
    shared = _search._shared
    monkeypatch.setattr(_search, "_shared", lambda *args: found.append(shared(*args)) or found[-1])
    made = plan(pattern, 2000, tiling=Tiling(tile=(16, 64), workers=6))
    check_plan(made, [pattern.at(0, 0).index_set(2000, 2000)])
    assert any(len(open_.samples[0]) < len(open_.pairs[0]) for open_ in found)


def test_a_long_window_is_searched_once(pairs_asked):
    """Its coarse tiles are alike but at the ends, and of those that are alike one is refined."""
    made = plan(p.SlidingWindow(256), 1 << 20)
    assert sum(pairs_asked) < _search._PAIRS_AT_ONCE + made.tiles


class OnGrid(p.Pattern):
    """Every pair, of tokens of a grid."""

    def allows(self, q, k):
        return (q >= 0) & (k >= 0)

    def parts(self, q_len, kv_len):
        return (Part(self, Lattice(0, (14, 1), (q_len // 14, 14)), Lattice(0, (14, 1), (kv_len // 14, 14))),)


def test_tiles_that_differ_in_their_padding_alone():
    """Of 14 × 14 tokens in boxes of 8 × 8, one has no padding and three have it elsewhere."""
    made = plan(OnGrid(), 196, tiling=Tiling(tile=(64, 64)))
    assert made.tiles == 16 and len(made.masks) == 3
    check_plan(made, [OnGrid().index_set(196, 196)])


class Coprime(p.Pattern):
    """Of a greatest common divisor intervals tell bounds alone."""

    def allows(self, q, k):
        return np.gcd(q + 1, k + 1) == 1


@pytest.mark.unfollowed
@pytest.mark.usefixtures("slow_plans", "no_plans")
def test_predicate_without_rules_is_evaluated_in_every_cell():
    """The slow way finds the same tiles, and says that it was taken."""
    pattern = Coprime()
    with pytest.warns(PlanningWarning, match="evaluated one by one, because allows"):
        made = plan(pattern, 100, 130, tiling=Tiling(tile=(16, 64)))
    check_plan(made, [pattern.index_set(100, 130)])
