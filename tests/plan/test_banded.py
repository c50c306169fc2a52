"""From bands of queries and ranges of distances to tiles."""

import itertools
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import spattn
from spattn import patterns as p
from spattn.patterns.base.class_registry import pattern_class
from spattn.patterns.hints.closed_forms import Bands, either
from spattn.planning.contract.budget import Budget
from spattn.planning.tiles import tiling as _tiling
from spattn.planning.tiles._lists import RunLists
from spattn.planning.tiles.banded import tiles_of_bands
from spattn.planning.tiles.masks import Masks
from spattn.planning.tiles.tiling import cut_view
from spattn.schedule import compiler
from spattn.testing import check_plan
from spattn.testing.strategies import Draw, sizes

CLASSES = [
    p.BlockLayout,
    p.Causal,
    p.Documents,
    p.KeyBlocks,
    p.KeyPadding,
    pattern_class("prefix_lm"),
    p.Sinks,
    p.SlidingWindow,
    p.VerticalSlash,
]
TILES = [(16, 64), (1, 64), (7, 64), (48, 64), (64, 64), (128, 64), (33, 192), (64, 128)]


def allowed(conjuncts, q, k):
    """The pairs of positions, each of which is looked for in every run and range."""
    found = np.ones((len(q), len(k)), bool)
    for own in conjuncts:
        some = np.zeros_like(found)
        for band, (start, stop) in enumerate(itertools.pairwise(own.start)):
            rows = (start <= q) & (q < stop)
            for run in range(own.indptr[band], own.indptr[band + 1]):
                some |= rows[:, None] & ((own.first[run] <= k) & (k < own.stop[run]))[None, :]
        for least, stop in own.near:
            apart = q[:, None] - k[None, :]
            some |= (least <= apart) & (apart < stop)
        found &= some
    return found


@st.composite
def conjuncts(draw):
    """Bands without runs, and without queries; runs and ranges in any order, empty, and beyond the sequence."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    far, long = draw(st.sampled_from([(60, 9), (300, 80), (400, 300)]))
    bands = int(rng.integers(0, 6))
    indptr = np.append(0, np.cumsum(rng.integers(0, 4, bands)))
    first = rng.integers(-20, far, indptr[-1])
    near = rng.integers(-far, far, (rng.integers(0, 4), 1)) + [0, 1]
    near[:, 1] += rng.integers(-1, long, len(near))
    start = np.sort(rng.integers(-30, far, bands + 1))
    return Bands(start, indptr, first, first + rng.integers(-2, long, len(first)), near)


class Tiles(NamedTuple):
    """The runs that were found, and their pairs."""

    query_tile: np.ndarray
    key_tile: np.ndarray
    length: np.ndarray
    mask: np.ndarray
    nnz: int

    @classmethod
    def of(cls, conjuncts, query, key, masks, budget=None):
        """Those of conjuncts on two views; lists that are there already stay in front of them."""
        lists = RunLists()
        lists.add(2, *(np.array(column, np.int32) for column in ([0, 0, 1], [3, 7, 1], [2, 1, 5], [-1, 0, 4])))
        nnz = tiles_of_bands(conjuncts, query, key, 0, masks, lists, budget or Budget(1 << 30))
        indptr, tile_indptr, key_tile, mask = lists.arrays()
        assert indptr[:3].tolist() == [0, 2, 3] and tile_indptr[:4].tolist() == [0, 2, 3, 8]
        assert len(indptr) == 3 + query["tiles"] and indptr[-1] == len(mask) == len(tile_indptr) - 1
        query_tile = np.repeat(np.arange(query["tiles"]), np.diff(indptr[2:]))
        return cls(query_tile, key_tile[3:], np.diff(tile_indptr)[3:], mask[3:], nnz)


def unpacked(tiles, query, key, masks):
    """The cells of the tiles of two views of consecutive positions, True where they are allowed."""
    block_q, block_kv = masks.tile
    found = np.zeros((int(query["tiles"]) * block_q, int(key["tiles"]) * block_kv), bool)
    bits = np.unpackbits(masks.array().view(np.uint8), axis=2, bitorder="little").astype(bool)
    bits = np.concatenate([bits, np.ones((1, block_q, block_kv), bool)])  # the last one, number -1, is full
    for query_tile, first, length, mask in zip(*tiles[:4], strict=True):
        for tile in range(first, first + length):
            cells = found[query_tile * block_q :, tile * block_kv :][:block_q, :block_kv]
            assert not cells.any(), "each tile once"
            cells[...] = bits[mask]
    return found[: query["extent"][-1], : key["extent"][-1]]


@given(
    given=st.lists(conjuncts(), max_size=2),
    tile=st.sampled_from(TILES),
    places=st.tuples(st.integers(-20, 90), st.integers(0, 90)),
    lengths=st.tuples(st.integers(1, 300), st.integers(1, 400)),
)
@settings(max_examples=200)
def test_tiles_are_the_pairs_of_all_conjuncts(given, tile, places, lengths):
    """On views that start anywhere; runs that could be one are one, and no tile without a pair is there."""
    query, key = (cut_view(*side) for side in zip(places, [(1,)] * 2, [(n,) for n in lengths], zip(tile), strict=True))
    masks = Masks(*tile, Budget(1 << 30))
    tiles = Tiles.of(tuple(given), query, key, masks)
    q, k = (place + np.arange(n) for place, n in zip(places, lengths, strict=True))
    expected = allowed(given, q, k)
    np.testing.assert_array_equal(unpacked(tiles, query, key, masks), expected)
    assert tiles.nnz == expected.sum()
    blocks = [np.arange(0, n, side) for n, side in zip(lengths, tile, strict=True)]
    pairs = np.add.reduceat(np.add.reduceat(expected, blocks[0], axis=0, dtype=int), blocks[1], axis=1)
    assert tiles.length.sum() == (pairs > 0).sum()
    whole = pairs == np.diff(blocks[0], append=lengths[0])[:, None] * tile[1]
    assert tiles.length[tiles.mask < 0].sum() == whole.sum()
    query_tile, key_tile, length, mask = tiles[:4]
    follows = (query_tile[1:] == query_tile[:-1]) & (key_tile[1:] == key_tile[:-1] + length[:-1])
    assert not (follows & (mask[1:] == mask[:-1])).any()
    assert len(np.unique(masks.array(), axis=0)) == len(masks.array())


@given(one=conjuncts(), other=conjuncts(), more=conjuncts())
def test_either_of_two(one, other, more):
    q, k = np.arange(-40, 400), np.arange(400)
    joined = either([(one, other), (more,)])
    np.testing.assert_array_equal(allowed(joined, q, k), allowed((one, other), q, k) | allowed((more,), q, k))


@given(size=sizes(300), data=st.data())
def test_patterns_have_the_same_plans_as_by_the_search(size, data):
    """Table by table, but for the numbers of bitmasks and for their rows that are padding."""

    def drawn(depth):
        if depth and data.draw(st.integers(0, 2)):
            one, other = drawn(depth - 1), drawn(depth - 1)
            return one & other if data.draw(st.booleans()) else one | other
        return data.draw(st.sampled_from(CLASSES)).random(Draw(data.draw), size)[0]

    pattern = drawn(2)
    tile = data.draw(st.sampled_from(TILES))
    how = {"batch": size.batch, "heads": size.heads_q, "tile": tile, "workers": 3}
    spattn.clear_plan_cache()
    made = compiler.plan(pattern, size.q_len, size.kv_len, **how)
    index_sets = [one.index_set(size.q_len, size.kv_len) for one in pattern.variants(size.batch, size.heads_q)[0]]
    check_plan(made, index_sets)
    spattn.clear_plan_cache()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_tiling, "_bands", lambda *_: None)
        searched = compiler.plan(pattern, size.q_len, size.kv_len, **how)
    spattn.clear_plan_cache()
    names = (
        "views",
        "components",
        "indptr",
        "tile_indptr",
        "indices",
        "key_view",
        "work",
        "merge_rows",
        "merge_indptr",
    )
    for name in (*names, "merge_indptr", "merge_sources", "merge_variants", "variant", "nnz", "slots"):
        np.testing.assert_array_equal(getattr(made, name), getattr(searched, name), err_msg=name)
    np.testing.assert_array_equal(made.mask < 0, searched.mask < 0)
    assert len(made.masks) == len(searched.masks)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_built_in_patterns_have_bands(cls):
    for pattern, length in (cls.example(), cls.typical()):
        one = pattern.at(0, 0).bind(length, length)
        assert (one)._bands(0, length) is not None
        assert (p.Causal() & one | p.Sinks(2))._bands(0, length) is not None
        assert (one - p.Causal())._bands(0, length) is None


@pytest.mark.parametrize("tile", [(48, 64), (128, 64), (100, 128)], ids=str)
def test_blocks_across_query_tiles(tile):
    """Bands part at other rows than in the query tile before; blocks lie among keys that are allowed anyway."""
    own = p.KeyBlocks(np.random.default_rng(0).integers(0, 16, (16, 3)), 64, 64)
    for pattern in (own, p.Causal() & own, p.Causal() | own, p.SlidingWindow(500, 0) | own):
        check_plan(spattn.plan(pattern, 1024, tiling=spattn.Tiling(tile=tile)), [pattern.index_set(1024, 1024)])


@pytest.mark.parametrize(
    "pattern", [p.Sinks(640) | p.SlidingWindow(2000, 0), p.KeyBlocks([[0, 1, 3, 5]] * 32, 64, 64)], ids=str
)
def test_runs_of_full_tiles(pattern):
    """Full tiles are one run where they meet, and two where there is a gap between them."""
    made = spattn.plan(pattern, 2048, tiling=spattn.Tiling(tile=(64, 64)))
    check_plan(made, [pattern.index_set(2048, 2048)])
    stop = made.indices + np.diff(made.tile_indptr)
    full = made.mask < 0
    meet = (stop[:-1] == made.indices[1:]) & full[:-1] & full[1:]
    meet[made.indptr[1:-1] - 1] = False  # of two lists
    assert full.any() and not meet.any()


def test_few_queries_have_few_bands():
    """A step of generation looks at the rows of its own queries alone."""
    pattern = p.KeyBlocks(np.zeros((1000, 3), int), 8, 8).bind(1, 8000)
    (own,) = pattern._bands(7999, 8000)
    assert len(own.start) == 2 and len(own.first) == 3


def test_what_takes_many_conjuncts_is_searched():
    """(a & b) | (c & d) | ... has two to the number of operands."""
    windows = [p.SlidingWindow(40 * n + 9, -1) & p.SlidingWindow(-1, 30 * n + 5) & p.Sinks(90) for n in range(3)]
    pattern = windows[0] | windows[1] | windows[2]
    assert (windows[0] | p.Causal())._bands(0, 9) is not None and (pattern)._bands(0, 9) is None
    check_plan(spattn.plan(pattern, 200), [pattern.index_set(200, 200)])


@pytest.mark.slow
def test_documents_of_ten_million_tokens(unchecked_plans):
    """Marks lie in several words of words; a run of full tiles is found without visiting each."""
    made = spattn.plan(p.Causal() & p.Documents((9_999_000, 500)), 9_999_900, tiling=spattn.Tiling(tile=(4096, 64)))
    assert made.nnz == 9_999_000 * 9_999_001 // 2 + 500 * 501 // 2
    assert len(made.indices) < 70 * len(made.indptr)


def test_too_many_runs_are_refused_before_all_are_found():
    chequered = p.KeyBlocks(np.arange(0, 2048, 2) + np.zeros((1024, 1), int), 128, 64)
    with pytest.raises(ValueError, match=r"^pattern: expected a plan of at most max_bytes = 100000 bytes, got one"):
        spattn.plan(chequered, 131072, tiling=spattn.Tiling(tile=(128, 64)), max_bytes=100000)


@pytest.mark.parametrize(
    "change",
    [
        {"indptr": [1, 2]},
        {"indptr": [0, 3]},
        {"indptr": [0, 2, 1]},
        {"start": [0]},
        {"start": [9, 0]},
        {"stop": [4]},
        {"near": [[1, 2, 3]]},
    ],
    ids=str,
)
def test_arrays_that_do_not_fit_are_refused(change):
    sound = {"start": [0, 9], "indptr": [0, 2], "first": [1, 5], "stop": [4, 7], "near": [[0, 1]]}
    fields = {name: np.array(value, np.int64) for name, value in {**sound, **change}.items()}
    view = cut_view(0, (1,), (9,), (16,))
    with pytest.raises(ValueError, match="bands: expected consistent arrays"):
        budget = Budget(1 << 20)
        Tiles.of((Bands(**fields),), view, view, Masks(16, 64, budget), budget)
