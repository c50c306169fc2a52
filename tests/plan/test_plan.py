"""Plans at the sizes that people use: figures of merit that do not depend on the machine, options, caching, errors."""

import tracemalloc

import numpy as np
import pytest

import spattn
import spattn.testing
from spattn import Tiling
from spattn import patterns as p
from spattn import plan as make_plan
from spattn.planning import positions

FIGURES = [  # at 16384 tokens: (pattern, least efficiency, efficiency of contiguous 128 × 128 blocks)
    (p.SlidingWindow(256), 0.75, 0.80),
    (p.DilatedWindow(256, 256, 4), 0.75, 0.24),
    (p.strided(128), 0.40, 0.02),
    (p.fixed(128, 8), 0.65, 0.07),
    (p.Neighborhood((128, 128), 13), 0.20, 0.10),
]


@pytest.mark.parametrize("pattern, least, contiguous", FIGURES, ids=[repr(pattern) for pattern, _, _ in FIGURES])
def test_efficiency_and_memory_at_16384_tokens(pattern, least, contiguous, record_property):
    spattn.plan(p.Causal(), 100)  # whatever the first plan of a process allocates once
    tracemalloc.start()
    plan = make_plan(
        pattern, 16384, tiling=Tiling(tile=(128, 64), workers=3)
    )  # not in the cache: nobody else asks for 3 workers
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    record_property("efficiency", plan.efficiency)
    record_property("peak_bytes", peak)
    assert plan.efficiency >= least and plan.efficiency > 0.99 * contiguous
    assert plan.nbytes < 16 << 20 and peak < 16 << 20, f"{peak / 2**20:.1f} MiB"
    assert plan.nnz == pattern.index_set(16384, 16384).nnz


@pytest.mark.parametrize("form", [p.Causal(), p.Causal() & p.Full()], ids=repr)  # the second one is searched
def test_causal_has_one_bitmask_at_any_length(form):
    for length in (128, 1000, 1024, 16384):
        assert len(make_plan(form, length, tiling=Tiling(tile=(64, 64))).masks) == 1


def test_repr_tells_the_story_in_one_line():
    text = repr(make_plan(p.SlidingWindow(256), 16384))
    assert "\n" not in text
    for word in ("SlidingWindow", "16384", "8339200", "efficiency", "tiles", "work items", "KiB"):
        assert word in text, text


def test_equal_patterns_share_a_plan():
    assert make_plan(p.SlidingWindow(7), 90) is make_plan(p.SlidingWindow(7), 90, 90)
    assert make_plan(p.SlidingWindow(7), 90) is not make_plan(p.SlidingWindow(8), 90)
    mask = np.random.default_rng(0).random((90, 90)) < 0.5
    assert make_plan(p.Mask(mask), 90) is make_plan(p.Mask(mask.copy()), 90)


def test_editing_a_mask_afterwards_changes_nothing():
    mask = np.ones((30, 30), dtype=bool)
    pattern = p.Mask(mask)
    mask[:] = False
    assert make_plan(pattern, 30).nnz == 900


@pytest.mark.parametrize(
    "pattern", [p.BigBird(16), p.PerHead((p.Full(), p.Causal())), p.Documents(((50, 50), (100,)))], ids=repr
)
def test_variants_are_made_once_each(pattern):
    plan = make_plan(pattern, 100, batch=2, heads=4)
    assert plan.variants == len(pattern.variants(2, 4)[0])
    assert np.broadcast_to(plan.variant, (2, 4)).max() == plan.variants - 1


@pytest.mark.parametrize("tile", [(0, 64), (64, 0), (64, 32), (64, 65), (-1, 64)])
def test_tile_must_be_a_multiple_of_64_keys(tile):
    with pytest.raises(ValueError, match=r"^tile: expected .*, got \("):
        make_plan(p.Causal(), 64, tiling=Tiling(tile=tile))


@pytest.mark.parametrize("q_len, kv_len", [(-1, 5), (5, -1), (2.5, 5), ("5", 5), (True, 5)])
def test_lengths_must_be_integers(q_len, kv_len):
    with pytest.raises((ValueError, TypeError), match="^(q_len|kv_len): expected"):
        make_plan(p.Causal(), q_len, kv_len)


def test_grid_that_does_not_fit():
    with pytest.raises(ValueError, match="^kv_len: expected 4096 .*, got 4097"):
        make_plan(p.Neighborhood((64, 64), 5), 4097)


def test_pattern_for_other_heads():
    with pytest.raises(ValueError, match="^pattern: expected .* heads"):
        make_plan(p.PerHead((p.Full(), p.Causal())), 64, heads=3)


def test_positions_of_padding_cells_are_valid():
    """The contract: a cell that reaches the extent repeats the nearest real one."""
    view = make_plan(p.Neighborhood((10, 9), 3), 90, tiling=Tiling(tile=(64, 64))).views[0]
    position, valid = positions(view, np.arange(view["tiles"]))
    assert not valid.all() and (position >= 0).all() and (position < 90).all()
    assert sorted(position[valid].tolist()) == list(range(90))


def test_plan_as_pattern_gives_the_same_bits():
    q, k, v = spattn.testing.inputs(1, 2, 2, 130, 130, 16)
    plan = make_plan(p.Causal(), 130, heads=2)
    expected = spattn.attention(q, k, v, p.Causal())
    np.testing.assert_allclose(spattn.attention(q, k, v, plan), expected, rtol=1e-5, atol=1e-6)
    assert np.array_equal(spattn.attention(q, k, v, "causal"), expected)
    mask = np.tril(np.ones((130, 130), dtype=bool))
    for array in (mask, np.stack([mask] * 2), np.stack([mask] * 2)[None]):
        np.testing.assert_allclose(spattn.attention(q, k, v, array), expected, rtol=1e-5, atol=1e-6)
