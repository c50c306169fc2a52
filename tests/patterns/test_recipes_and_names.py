"""Recipes, and what may be registered under which name."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given

import spattn
from spattn import patterns as p
from spattn.patterns.authoring import recipe, register
from spattn.patterns.base import class_registry as registry
from spattn.testing.strategies import compositions


@pytest.fixture
def forget():
    yield
    for name in ("of_a_cell", "of_a_class"):
        registry._REGISTRY.pop(name, None)


def cell(extra):
    @recipe("of_a_cell", example=((2,), 8))
    def of_a_cell(left: int):
        return p.SlidingWindow(left + extra, 0)

    return of_a_cell


def test_a_cell_that_runs_again_replaces_what_was_read(forget):
    """Serialized forms that were read before are read anew."""
    first = cell(0)(1)
    text = first.to_json()
    assert p.from_json(text) == first and spattn.plan(p.from_json(text), 9).nnz == 17
    second = cell(5)(1)
    assert second.to_json() == text
    assert p.from_json(text) == second and spattn.plan(p.from_json(text), 9).nnz == spattn.plan(second, 9).nnz == 42


def test_built_in_names_stay(forget):
    """Also for a class of the same name, and for patterns whose module is not imported yet."""
    for name, title in (
        ("causal", "Causal"),
        ("bigbird", "BigBird"),
        ("deepspeed_fixed", "fixed"),
        ("strided", "strided"),
    ):
        cls = dataclasses.dataclass(frozen=True)(type(title, (p.Pattern,), {"allows": lambda self, q, k: q == k}))
        for module in (__name__, "bigbird", "deepspeed", "my.papers.bigbird"):
            cls.__module__ = module
            with pytest.raises(ValueError, match="is already registered"):
                register(name)(cls)
        assert p.registry.get("causal") == p.Causal()


@pytest.mark.parametrize("name", [None, 5, b"x", ("a",), True, ""])
def test_names_are_strings(name):
    with pytest.raises(TypeError, match="^name: expected a non-empty string"):
        register(name)


def test_parameters_that_recipes_cannot_have():
    for source, error in (
        ("def r(*, a: int): ...", TypeError),
        ("def r(*a): ...", TypeError),
        ("def r(_depth: int): ...", ValueError),
        ("def r(at: int): ...", ValueError),
        ("def r(made: int): ...", ValueError),
    ):
        scope = {}
        exec(source, scope)
        with pytest.raises(error, match="a recipe "):
            recipe("of_a_cell", example=((1,), 8))(scope["r"])


def test_a_recipe_returns_a_pattern(forget):
    @recipe("of_a_cell", example=((1,), 8))
    def of_a_cell(left: int):
        return "causal"

    with pytest.raises(TypeError, match="of_a_cell: a recipe returns a pattern, got str"):
        of_a_cell(1)


def test_parameters_are_normalized():
    """Lists, arrays and NumPy's integers are what they stand for."""
    for made, same in (
        (p.windowed([4, 4], 2), p.windowed((4, 4), 2)),
        (p.windowed((4, 4), np.array([2, 2])), p.windowed((4, 4), (2, 2))),
        (p.axial(np.array([4, 4]), np.int8(0)), p.axial((4, 4), 0)),
        (p.axial(range(2, 4), 0), p.axial((2, 3), 0)),
        (p.longformer(np.int64(4), 1, [4, 2]), p.longformer(4, 1, (4, 2))),
    ):
        assert made == same and repr(made) == repr(same) and p.from_json(made.to_json()) == made


@pytest.mark.parametrize("empty", [p.Columns(8, 5, 8), p.Sinks(0), p.GlobalTokens(())], ids=repr)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_axis_without_pairs(empty, place):
    patterns = [p.Full(), p.BlockLocal(1), p.Causal()]
    patterns[place] = empty
    pattern = p.PerAxis((3, 4, 2), tuple(patterns))
    plan = spattn.plan(pattern | p.BlockLocal(1), 24)
    assert spattn.plan(pattern, 24).nnz == 0 and plan.nnz == 24


def evaluated(pattern):
    """The pattern that its repr makes, in a session that has imported all patterns."""
    scope = vars(p) | {"deepspeed": p.deepspeed}  # vars: also patterns that are not in __all__
    exec("from spattn.patterns import *", scope)
    return eval(repr(pattern), scope)


@pytest.mark.parametrize("name", registry.names())
def test_a_repr_evaluates_to_its_pattern(name):
    """Unless it holds arrays, whose reprs are their shapes."""
    cls = registry.pattern_class(name)
    for pattern, _ in (cls.example(), cls.typical()):
        text = pattern.to_json()
        assert p.from_json(text) == pattern and f'"pattern":"{name}"' in text
        if "=<" in repr(pattern):
            assert isinstance(pattern, p.authoring.ByContent)
        else:
            assert evaluated(pattern) == pattern and evaluated(pattern).to_json() == text


@given(compositions(max_len=40))
def test_the_repr_of_a_composition_evaluates_to_it(case):
    if "<" not in repr(case.pattern):
        assert evaluated(case.pattern) == case.pattern


def test_windows_that_do_not_fill_the_axis():
    """As a cyclic shift has it: tokens that it moves may be of two windows."""
    for length in range(1, 12):
        for window in range(1, length + 1):
            for shift in range(window):
                x = np.arange(length)
                label = (x - shift) % length // window + 100 * (x < shift)
                found = p.windowed((length,), window, shift).index_set(length, length).to_dense()
                assert (found == (label[:, None] == label)).all(), (length, window, shift)
