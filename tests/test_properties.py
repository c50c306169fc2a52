"""What every registered pattern and every composition promises, at random parameters and lengths."""

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from spattn import Tiling, patterns, reference
from spattn import plan as make_plan
from spattn.testing import check, check_plan, dense_mask, execute, inputs
from spattn.testing.strategies import cases, compositions

NAMES = patterns.registry.names()


def fewer(share: int):
    """The profile's number of examples divided by `share`, for what costs more."""
    return settings(max_examples=max(5, settings.default.max_examples // share))


def lengths(case):
    s = case.sizes
    return s.batch, s.heads_q, s.q_len, s.kv_len


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_index_set_equals_predicate(name, data):
    case = data.draw(cases(name, max_len=120))
    check.check_index_set(case.pattern, *lengths(case))


@fewer(1)
@given(cases() | compositions())
def test_index_set_of_anything_equals_predicate(case):
    check.check_index_set(case.pattern, *lengths(case))


TILES = [(128, 64), (64, 64), (32, 128), (7, 64), (1, 192)]


@pytest.mark.parametrize("name", NAMES)
@fewer(8)
@given(data=st.data())
def test_plan_equals_predicate_and_is_disjoint(name, data):
    case = data.draw(cases(name, max_len=300, max_heads=2))
    check_planned(case, data.draw(st.sampled_from(TILES)), data.draw(st.sampled_from([1, 4, 1000])))


@fewer(2)
@given(compositions(max_len=300, max_heads=2), st.sampled_from(TILES), st.sampled_from([1, 4, 1000]))
def test_plan_of_composition_equals_predicate_and_is_disjoint(case, tile, workers):
    check_planned(case, tile, workers)


@pytest.mark.parametrize("name", NAMES)
@fewer(25)
@given(data=st.data())
def test_plan_of_long_sequence_equals_predicate(name, data):
    """Long enough for coarse levels of the tile search, for several pieces a list and for merges."""
    case = data.draw(cases(name, max_len=1500, max_batch=1, max_heads=1).filter(lambda c: c.sizes.kv_len > 400))
    check_planned(case, data.draw(st.sampled_from([(64, 64), (128, 64)])), 1000)


def check_planned(case, tile, workers):
    batch, heads, q_len, kv_len = lengths(case)
    made = make_plan(case.pattern, q_len, kv_len, batch=batch, heads=heads, tiling=Tiling(tile=tile, workers=workers))
    note(repr(made))
    variants, _ = case.pattern.variants(batch, heads)
    check_plan(made, [own.index_set(q_len, kv_len) for own in variants])


@fewer(2)
@given(cases(max_len=150) | compositions(max_len=150), st.sampled_from(TILES), st.sampled_from([1, 1000]))
def test_executed_plan_equals_reference(case, tile, workers):
    batch, heads, q_len, kv_len = lengths(case)
    made = make_plan(case.pattern, q_len, kv_len, batch=batch, heads=heads, tiling=Tiling(tile=tile, workers=workers))
    q, k, v = inputs(batch, heads, case.sizes.heads_kv, q_len, kv_len, 8, 3, dtype="float64")
    results = execute(made, q, k, v, -0.7), reference.attend(q, k, v, made.pattern, -0.7)
    for actual, expected in zip(*results, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-11, atol=1e-12)


@fewer(2)
@given(cases(max_len=80))
def test_laws_of_composition(case):
    check.check_laws(case.pattern, *lengths(case))


@fewer(2)
@given(cases(max_len=80) | compositions(max_len=80))
def test_survives_to_json(case):
    check.check_round_trip(case.pattern, *lengths(case))


@fewer(2)
@given(compositions(max_len=80), st.data())
def test_operators_are_those_of_sets(case, data):
    one, other = case.pattern, data.draw(compositions(max_len=80)).pattern
    batch, heads, q_len, kv_len = lengths(case)
    try:
        masks = [dense_mask(p, batch, heads, q_len, kv_len) for p in (one, other)]
        joined = (one | other).variants(batch, heads)
    except ValueError:  # `other` is made for other sizes
        joined = None
    if joined is None:
        return
    a, b = masks
    for pattern, expected in ((one | other, a | b), (one & other, a & b), (one - other, a & ~b), (~one, ~a)):
        assert np.array_equal(dense_mask(pattern, batch, heads, q_len, kv_len), expected)


@pytest.mark.parametrize("name", NAMES)
def test_example_of_pattern_keeps_every_promise(name):
    pattern, q_len, kv_len = patterns.registry.example(name)
    check.check_pattern(pattern, q_len, kv_len, batch=max(1, pattern.sizes()[0]))


@pytest.mark.parametrize("name", NAMES)
def test_picture(name):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pattern, q_len, kv_len = patterns.registry.example(name)
    assert patterns.show.draw(pattern, q_len, kv_len).images
    pyplot.close("all")
