"""Tiles of spans, which are found along each axis alone, are those that the search finds in their cells."""

import itertools
import os
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import spattn
from spattn import patterns as p
from spattn.index_set import Runs
from spattn.patterns.authoring import Lattice, Part
from spattn.patterns.hints.closed_forms import Span
from spattn.planning.contract.types import padding_kinds, tile_lists
from spattn.planning.tiles import tiling as _tiling
from spattn.planning.tiles._along import TilesAlong
from spattn.schedule import compiler
from spattn.testing import check_plan
from spattn.testing.strategies import cases, compositions


def cut(first, last, box_q, box_k):
    """(pairs, {(query box, key box): the keys of each query in the tile}), by the definition."""
    tiles = {}
    for box in range(-(-len(first) // box_q)):
        rows = np.minimum(np.arange(box * box_q, (box + 1) * box_q), len(first) - 1)
        for tile in range(max(last, default=0) // box_k + 1):
            keys = np.arange(tile * box_k, (tile + 1) * box_k)
            inside = (first[rows][:, None] <= keys) & (keys <= last[rows][:, None])
            if inside.any():
                tiles[box, tile] = inside
    return np.maximum(last + 1 - first, 0).sum(), tiles


def written_out(along, box_k):
    """The same of what was found."""
    bounds, keys = along.bounds_of_kinds(), np.arange(box_k)
    tiles = {}
    for box, tile, length, kind in along.runs().T.tolist():
        own = bounds[kind]
        inside = (own[:, :1] <= keys) & (keys < own[:, 1:])
        assert inside.all() == (kind == 0)
        for at in range(length):
            assert (box, tile + at) not in tiles
            tiles[box, tile + at] = inside
    assert list(tiles) == sorted(tiles)
    return along.pairs, tiles


@st.composite
def spans(draw):
    """First and last keys of queries: any, or those of boxes that are moved on from one to the next."""
    box_q, box_k, keys = draw(st.integers(1, 5)), draw(st.integers(1, 6)), 40
    one = st.tuples(st.integers(0, keys), st.integers(-1, keys - 1))
    found = []
    while len(found) < 60 and draw(st.booleans()):
        box = np.array(draw(st.lists(one, min_size=1, max_size=2 * box_q)))
        moves = itertools.product(
            range(draw(st.integers(1, 4))), [draw(st.tuples(st.integers(0, 9), st.integers(0, 9)))]
        )
        found += [np.clip(box + n * np.array(by), (0, -1), (keys, keys - 1)) for n, by in moves]
    pairs = np.concatenate([np.zeros((0, 2), np.int64), *found])
    return box_q, box_k, np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])


@example(case=(2, 4, np.array([0, 0, 2, 2, 4, 4]), np.array([30, 30, 32, 32, 34, 34])), at=2)
@example(case=(2, 4, np.array([0, 30, 4, 34]), np.array([1, 31, 5, 35])), at=2)
@example(case=(2, 4, np.array([0, 0, 4, 4]), np.array([1, 2, 5, 7])), at=2)
@example(case=(2, 4, np.array([1, 2, 5, 7]), np.array([9, 9, 13, 13])), at=2)
@example(case=(2, 4, np.array([0, 16]), np.array([5, 30])), at=1)
@given(case=spans(), at=st.integers(0, 20))
def test_tiles_along_an_axis(case, at):
    """Also where the queries come in two steps, which begin with a whole box."""
    box_q, box_k, first, last = case
    along = TilesAlong(box_q, box_k)
    for own in (slice(0, at * box_q), slice(at * box_q, None)):
        along.add(first[own], last[own])
    pairs, tiles = cut(first, last, box_q, box_k)
    found_pairs, found = written_out(along, box_k)
    assert found_pairs == pairs and found.keys() == tiles.keys()
    assert all((found[at] == tiles[at]).all() for at in tiles)
    assert len(along) == along.runs().shape[1] <= len(tiles)


def test_tiles_that_look_alike_are_of_one_kind():
    """A window has as many at any length, and a query far behind the others does not cost what lies between."""
    first = np.arange(1 << 16)
    kinds = {}
    for queries in (1 << 12, 1 << 16):
        along = TilesAlong(128, 64)
        along.add(first[:queries], first[:queries] + 300)
        kinds[queries] = len(along.bounds_of_kinds())
    assert kinds[1 << 12] == kinds[1 << 16] == 6
    along = TilesAlong(2, 64)
    along.add(np.array([0, 1 << 30]), np.array([0, 1 << 30]))
    assert along.runs().T.tolist() == [[0, 0, 1, 1], [0, 1 << 24, 1, 2]]


def same_tiles(one, other):
    """Whether two plans have the same tiles, and bitmasks that allow the same to queries that are not padding."""
    lists, others = tile_lists(one), tile_lists(other)
    assert all(np.array_equal(a, b) for a, b in zip(lists[:3], others[:3], strict=True))
    assert np.array_equal(one.views, other.views) and np.array_equal(one.components, other.components)
    assert np.array_equal(one.work, other.work) and one.nnz == other.nnz
    assert np.array_equal(lists.mask < 0, others.mask < 0)
    for component in one.components:
        tiles = np.arange(component["query_tiles"])
        padding, real = padding_kinds(one.views[component["query_view"]], tiles)
        starts = lists.indptr[component["first_row"] :]
        for tile, rows in enumerate(real[padding]):
            own = np.arange(starts[tile], starts[tile + 1])
            own = own[lists.mask[own] >= 0]
            a, b = (made.masks[found.mask[own]][:, rows] for made, found in ((one, lists), (other, others)))
            assert np.array_equal(a, b)


@pytest.mark.parametrize("name", [*p.registry.names(), pytest.param(None, marks=pytest.mark.slow)])
@given(data=st.data())
def test_spans_and_the_search_find_the_same(name, data):
    pattern, size = data.draw(compositions() if name is None else cases(name))
    arguments = {"batch": size.batch, "heads": size.heads_q, "tile": (data.draw(st.sampled_from([3, 16, 64])), 64)}
    made = []
    for find in (_tiling.tiles_of_spans, lambda *_: None):
        spattn.clear_plan_cache()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(_tiling, "tiles_of_spans", find)
            made.append(compiler.plan(pattern, size.q_len, size.kv_len, **arguments))
    same_tiles(*made)


class Spans(p.Pattern):
    """Pairs whose key lies in the query's span along each axis of a grid; the lattices start at token 5."""

    def __init__(self, spans, keys):
        self.spans, self.keys = spans, keys

    def _lattice(self, extents):
        strides = [int(np.prod(extents[axis + 1 :])) for axis in range(len(extents))]
        return Lattice(5, tuple(strides), tuple(extents))

    def parts(self, q_len, kv_len):
        query = self._lattice([len(span.first) for span in self.spans])
        return (Part(self, query, self._lattice(self.keys), spans=self.spans),)

    def allows(self, q, k):
        queries = [len(span.first) for span in self.spans]
        allowed = (5 <= q) & (q < 5 + np.prod(queries)) & (5 <= k) & (k < 5 + np.prod(self.keys))
        at, place = (np.unravel_index((x - 5) % np.prod(grid), grid) for x, grid in ((q, queries), (k, self.keys)))
        for span, x, y in zip(self.spans, at, place, strict=True):
            allowed = allowed & (np.array(span.first)[x] <= y) & (y <= np.array(span.last)[x])
        return allowed


@given(data=st.data())
def test_spans_on_several_axes(data):
    """On one axis to three, of other extents for queries than for keys."""
    keys = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    spans = []
    for count in keys:
        key = st.integers(0, count - 1)
        own = data.draw(st.lists(st.tuples(key, key).map(sorted), min_size=1, max_size=9))
        spans.append(Span(*(tuple(each) for each in zip(*own, strict=True))))
    pattern = Spans(tuple(spans), tuple(keys))
    made = spattn.plan(pattern, 740, tiling=spattn.Tiling(tile=(data.draw(st.sampled_from([4, 12, 30])), 64)))
    check_plan(made, [pattern.index_set(740, 740)])


class Listed(p.Pattern):
    """A pattern whose closed form is given, on every second query and every third key."""

    def __init__(self, start, step, count):
        self.of_runs, self.asked = (start, step, count), []

    def allows(self, q, k):
        raise AssertionError("what has spans is not evaluated")

    def runs(self, q, kv_len):
        self.asked.append(len(q))
        return Runs(*(np.array(column)[q][:, None] for column in self.of_runs))

    def parts(self, q_len, kv_len):
        return (Part(self, Lattice(1, (2,), (q_len // 2,)), Lattice(2, (3,), (kv_len // 3,))),)


@given(seed=st.integers(0, 1 << 20), step=st.sampled_from([1, 3]))
def test_runs_become_spans_of_the_key_lattice(seed, step):
    """The keys 2, 5, 8, ... of runs of consecutive keys, or of every third one from anywhere."""
    random = np.random.default_rng(seed)
    start = random.integers(0, 100, 100)
    count = np.minimum(random.integers(0, 40, 100), (99 - start) // step + 1)
    pattern = Listed(start, np.full(100, step), count)
    with mock.patch.dict(os.environ, SPATTN_CHECK_PLANS="0"):  # its parts are not all that it allows
        made = spattn.plan(pattern, 100, tiling=spattn.Tiling(tile=(8, 64)))
    keys = np.arange(100)
    dense = (start[:, None] <= keys) & (keys < (start + step * count)[:, None]) & ((keys - start[:, None]) % step == 0)
    dense[::2] = False
    dense[:, (keys < 2) | (keys % 3 != 2)] = False
    check_plan(made, [p.Mask(dense).index_set(100, 100)])


class Told(p.Pattern):
    """A pattern whose hint is given."""

    def __init__(self, hint):
        self.hint = hint

    def allows(self, q, k):
        return k <= q

    def runs(self, q, kv_len):
        return self.hint(q)


COLUMN = np.zeros((100, 1), np.int64)


@pytest.mark.parametrize(
    "hint, error, match",
    [
        (lambda q: (q, q, q), TypeError, "expected Runs or None from"),
        (lambda q: Runs(COLUMN, COLUMN + 1, COLUMN + 0.5), TypeError, "count: expected an array of integers"),
        (lambda q: Runs(COLUMN, COLUMN + 1, COLUMN.astype(np.uint64) - 1), ValueError, "count: expected integers in"),
        (lambda q: Runs(COLUMN[:50], COLUMN[:50] + 1, COLUMN[:50]), ValueError, r"shape \(100, runs\) from"),
        (lambda q: Runs(COLUMN, COLUMN + 1, COLUMN[:, 0]), ValueError, r"shape \(100, runs\) from"),
    ],
)
def test_closed_forms_that_are_none(hint, error, match):
    with pytest.raises(error, match=match):
        spattn.plan(Told(hint), 100)


def test_closed_forms_of_other_integers():
    """Numbers of few bits, of a row that is not contiguous."""
    count = np.arange(1, 101, dtype=np.int8)
    hint = Runs(*(np.repeat(x, 2, axis=0)[::2].astype(np.int8) for x in (COLUMN, COLUMN + 1, count[:, None])))
    check_plan(spattn.plan(Told(lambda q: hint), 100), [p.Causal().index_set(100, 100)])


def test_the_runs_that_spans_make_are_bounded():
    """Queries with scattered spans have a tile each; no more of them are asked once these are too many."""
    first = np.random.default_rng(0).permutation(1 << 17)
    pattern = Listed(first, np.ones_like(first), np.ones_like(first))
    with pytest.raises(ValueError, match="max_bytes"):
        spattn.plan(pattern, 1 << 17, max_bytes=200_000)
    assert sum(pattern.asked) < 1 << 16
