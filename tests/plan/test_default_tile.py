"""The tile of a plan that nobody asked one of: 128 × 64, or 64 × 64 where listed pairs are scattered."""

import numpy as np
import pytest

import spattn
from spattn import Tiling, plan
from spattn import patterns as p
from spattn.schedule import compiler
from spattn.testing import check_plan

USUAL, SMALL = (128, 64), (64, 64)


def scattered(q_len, kv_len, each=1):
    """Pairs at random, about `each` a row."""
    row = np.repeat(np.arange(q_len), each)
    return p.interop.from_pairs(row, np.random.default_rng(0).integers(0, kv_len, len(row)), q_len, kv_len)


def in_one_key_tile(*each):
    """Of query tile n the first ``each[n]`` queries attend to one key."""
    row = np.concatenate([128 * n + np.arange(queries) for n, queries in enumerate(each)])
    return p.interop.from_pairs(row, np.zeros_like(row), 128 * len(each), 64)


@pytest.mark.parametrize("q_len, kv_len", [(2048, 2048), (256, 3000), (130, 2000), (3000, 1900)])
def test_of_scattered_pairs_they_are_small(q_len, kv_len):
    pattern = scattered(q_len, kv_len)
    made = plan(pattern, q_len, kv_len)
    assert made.tile == SMALL
    check_plan(made, [pattern.index_set(q_len, kv_len)])
    assert "tile: 64 queries × 64 keys" in str(spattn.explain(made))


@pytest.mark.parametrize("tile", [USUAL, (48, 64), (64, 128)], ids=str)
def test_a_tile_that_is_asked_for_is_taken(tile):
    assert plan(scattered(2048, 2048), 2048, tiling=Tiling(tile=tile)).tile == tile


@pytest.mark.parametrize(
    "pattern, q_len, kv_len",
    [
        (scattered(127, 2000), 127, 2000),  # no whole tile of queries
        (scattered(1024, 1024, 0), 1024, 1024),
        (scattered(1024, 0, 0), 1024, 0),
        (scattered(1024, 1024, 500), 1024, 1024),
        (p.Clusters(np.arange(1024) % 4), 1024, 1024),
        (p.Mask(np.eye(1024, dtype=bool)), 1024, 1024),  # which lists nothing
        (p.SlidingWindow(1), 1024, 1024),
    ],
    ids=["few queries", "no pairs", "no keys", "many pairs", "clusters", "mask", "window"],
)
def test_of_all_else_they_are_not(pattern, q_len, kv_len):
    assert plan(pattern, q_len, kv_len).tile == USUAL


@pytest.mark.parametrize("each, tile", [((7,), SMALL), ((8,), USUAL), ((0, 7), SMALL), ((2, 12), SMALL)])
@pytest.mark.parametrize("turn", [1, -1])
def test_eight_pairs_in_the_mean_of_tiles_that_hold_some_are_many(each, tile, turn):
    """Of all of a sequence, wherever they are."""
    pattern = in_one_key_tile(*np.repeat(each[::turn], 16))
    assert plan(pattern, len(pattern.indptr) - 1, 64).tile == tile


def test_one_head_of_scattered_pairs_is_enough():
    """Its bitmasks are as many, whatever the others are."""
    pattern = p.PerHead((p.Causal(), scattered(2048, 2048, 500), scattered(2048, 2048)))
    made = plan(pattern, 2048)
    assert made.tile == SMALL
    check_plan(made, [own.index_set(2048, 2048) for own in pattern.patterns])


def test_boxes_are_of_the_usual_tile():
    pattern = scattered(2048, 2048)
    assert plan(pattern, 2048, tiling=Tiling(box=(128,))).tile == USUAL
    with pytest.raises(ValueError, match=r"^box: expected 128 queries"):
        plan(pattern, 2048, tiling=Tiling(box=(64,)))


def test_plans_of_scattered_pairs_take_less_memory_than_in_the_usual_tile():
    pattern, most = scattered(1 << 16, 1 << 16, 4), 24 << 20
    assert plan(pattern, 1 << 16, max_bytes=most).nbytes < most
    with pytest.raises(ValueError, match="^pattern: expected a plan of at most max_bytes"):
        plan(pattern, 1 << 16, tiling=Tiling(tile=USUAL), max_bytes=most)


def test_the_tile_is_chosen_once():
    """What is kept is found without a look at the pairs."""
    pattern = scattered(2048, 2048)
    made, misses = plan(pattern, 2048), spattn.plan_cache_info().misses
    assert plan(pattern, 2048) is made and spattn.plan_cache_info().misses == misses


def test_nothing_is_bound_for_a_look_at_fewer_queries_than_a_tile_has(monkeypatch):
    pattern = scattered(100, 2048)
    monkeypatch.setattr(type(pattern), "bind", lambda *args: pytest.fail("bound"))
    assert not compiler.are_scattered(pattern, 100, 2048, 1, 1, USUAL)
