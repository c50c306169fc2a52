"""Plans in boxes of queries, each with the keys that it reaches, have the same pairs; spans say what predicates say."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import spattn
from spattn import patterns as sp
from spattn.patterns.authoring import Lattice, Part
from spattn.patterns.base.class_registry import pattern_class
from spattn.patterns.hints.closed_forms import Span
from spattn.testing.strategies import Draw, sizes

GRIDS = st.sampled_from((sp.Neighborhood, pattern_class("windowed")))
IMAGE, WINDOWS = sp.Neighborhood((56, 56), 7), sp.windowed((56, 56), 7)


def points(lattice):
    strides, extents = lattice.strides, lattice.extents
    return lattice.offset + sum(
        s * c for s, c in zip(strides, np.indices(extents).reshape(len(extents), -1), strict=True)
    )


@given(cls=GRIDS, size=sizes(), data=st.data())
def test_spans_are_the_keys_that_predicates_allow(cls, size, data):
    pattern, size = cls.random(Draw(data.draw), size)
    for part in pattern.bind(size.kv_len, size.kv_len).parts(size.kv_len, size.kv_len):
        if part.spans is None:
            continue
        inside = np.ones((math.prod(part.query.extents), math.prod(part.key.extents)), bool)
        sides = (np.indices(x.extents).reshape(len(x.extents), -1) for x in (part.query, part.key))
        axes = zip(part.spans, *sides, strict=True)
        for span, q, k in axes:
            inside &= (np.array(span.first)[q][:, None] <= k) & (k <= np.array(span.last)[q][:, None])
        allowed = pattern.allows(points(part.query)[:, None], points(part.key)[None, :])
        assert np.array_equal(inside, allowed)


@given(cls=GRIDS, size=sizes(), data=st.data())
def test_boxes_allow_the_same_pairs(cls, size, data):
    pattern, size = cls.random(Draw(data.draw), size)
    tokens = math.prod(pattern.grid)
    box = data.draw(st.tuples(*(st.integers(1, 5) for _ in pattern.grid)))
    plan = spattn.plan(pattern, tokens, tiling=spattn.Tiling(tile=(math.prod(box), 64), box=box))
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 1, tokens, 4))
    found = spattn.attention(q, k, v, plan, backend="cpu")
    assert np.allclose(found, spattn.attention(q, k, v, pattern, backend="reference"), rtol=1e-10, atol=1e-12)
    assert plan.nnz == pattern.index_set(tokens, tokens).nnz and spattn.plan(pattern, tokens).nnz == plan.nnz


def test_boxes_have_keys_of_their_own():
    whole, boxes = (spattn.plan(IMAGE, 3136, tiling=spattn.Tiling(tile=(48, 64), box=box)) for box in (None, (6, 8)))
    assert len(whole.components) == 1 and len(boxes.components) == 70 and boxes.slots == 0
    assert boxes.efficiency > 2 * whole.efficiency
    assert spattn.plan(WINDOWS, 3136, tiling=spattn.Tiling(tile=(49, 64), box=(7, 7))).efficiency == 49 / 64


def test_parts_without_spans_are_as_without_boxes():
    for pattern in (sp.SlidingWindow(40), IMAGE & sp.Causal(), sp.Neighborhood(3136, 7)):
        plain, boxed = (
            spattn.plan(pattern, 3136, tiling=spattn.Tiling(tile=(48, 64), box=box)) for box in (None, (6, 8))
        )
        assert len(plain.components) == len(boxed.components) and plain.tiles == boxed.tiles


def test_what_is_joined_to_a_grid_decides_box_by_box():
    """Boxes of one kind are alike in the grid's pattern, and not in one that tells positions apart."""
    pattern = sp.Neighborhood((24, 24), 5) & sp.Columns(7, 3, 5)
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 1, 576, 8))
    found = spattn.attention(
        q, k, v, spattn.plan(pattern, 576, tiling=spattn.Tiling(tile=(16, 64), box=(4, 4))), backend="cpu"
    )
    assert np.allclose(found, spattn.attention(q, k, v, pattern, backend="reference"), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("box", [(7, 7), (48, 1, 1, 1), (), (-6, -8), (0, 8), (6.0, 8), 48, "68"])
def test_a_box_that_is_no_tile(box):
    with pytest.raises((TypeError, ValueError), match="^box: expected "):
        spattn.plan(IMAGE, 3136, tiling=spattn.Tiling(tile=(48, 64), box=box))


@pytest.mark.parametrize(
    "spans",
    [
        (Span((0,) * 8, (7,) * 8),) * 3,
        (Span((0,) * 8, (7,) * 8),),
        (Span((0,) * 7, (7,) * 7), Span((0,) * 8, (7,) * 8)),
        (Span((0,) * 8, (8,) * 8), Span((0,) * 8, (7,) * 8)),
        (Span((-1,) * 8, (7,) * 8), Span((0,) * 8, (7,) * 8)),
        (Span((5,) * 8, (4,) * 8), Span((0,) * 8, (7,) * 8)),
        ((0, 7), (0, 7)),
    ],
)
def test_spans_that_are_not_of_the_lattices(spans):
    class Wrong(sp.Pattern):
        def allows(self, q, k):
            return (q >= 0) & (k >= 0)

        def parts(self, q_len, kv_len):
            lattice = Lattice(0, (8, 1), (8, 8))
            return (Part(self, lattice, lattice, spans=spans),)

    with pytest.raises(ValueError, match="^parts\\(\\): expected spans of "):
        spattn.plan(Wrong(), 64, tiling=spattn.Tiling(tile=(16, 64), box=(4, 4)))
