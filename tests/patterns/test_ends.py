"""Where the last queries find their keys: what patterns say of it agrees with the predicate at every length."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spattn import patterns as p
from spattn.testing.check import check_ends, check_pattern
from spattn.testing.strategies import cases

SMALL = st.integers(0, 12)
ATOMS = st.one_of(
    st.sampled_from([p.Full(), p.Causal()]),
    st.builds(p.Sinks, SMALL),
    st.builds(p.SlidingWindow, st.just(-1) | SMALL, st.just(-1) | SMALL),
    st.builds(p.DilatedWindow, SMALL, SMALL),
    st.builds(p.GlobalTokens, SMALL | st.lists(SMALL, max_size=3).map(tuple), st.booleans(), st.booleans()),
    st.builds(p.longformer, SMALL.map(lambda n: 2 * n + 2), st.just(1), SMALL),
)
JOINED = st.recursive(
    ATOMS,
    lambda own: st.one_of(
        own.map(lambda a: ~a),
        st.tuples(own, own).map(lambda pair: pair[0] & pair[1]),
        st.tuples(own, own).map(lambda pair: pair[0] | pair[1]),
    ),
    max_leaves=5,
)


FURTHER = st.lists(st.integers(1, 90), min_size=2, max_size=2, unique=True).map(tuple)


@settings(max_examples=4 * settings.default.max_examples)
@given(JOINED, st.integers(1, 9), FURTHER)
def test_what_compositions_say_of_their_ends(pattern, q_len, further):
    check_ends(pattern, q_len, further)


@pytest.mark.parametrize("name", p.registry.names())
@given(data=st.data(), q_len=st.integers(1, 9), further=FURTHER)
def test_what_patterns_say_of_their_ends(name, data, q_len, further):
    case = data.draw(cases(name, max_len=40))
    for own in case.pattern.variants(case.sizes.batch, case.sizes.heads_q)[0]:
        check_ends(own, q_len, further)


WINDOW = p.SlidingWindow(6, 0)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (p.Full(), p.authoring.Ends(0, 0, True)),
        (p.Causal(), p.authoring.Ends(0, 3, True)),
        (p.Sinks(4), p.authoring.Ends(4, 0)),
        (WINDOW, p.authoring.Ends(0, 9)),
        (p.SlidingWindow(-1, 2), p.authoring.Ends(0, 3, True)),
        (p.DilatedWindow(6), p.authoring.Ends(0, 9)),
        (p.DilatedWindow(6, dilation=2), None),
        (p.GlobalTokens(5), p.authoring.Ends(5, 3)),
        (p.GlobalTokens((0, 1, 7)), p.authoring.Ends(8, 3)),
        (p.GlobalTokens((1, 4, 7)), None),
        (p.GlobalTokens(()), p.authoring.Ends(0, 3)),
        (p.longformer(6, global_tokens=2), p.authoring.Ends(2, 6)),
        ((p.Sinks(4) | WINDOW) & p.Causal(), p.authoring.Ends(4, 9)),
        (~p.Sinks(4) & WINDOW, p.authoring.Ends(4, 9)),
        (~p.Sinks(4) & p.Causal(), p.authoring.Ends(4, 3, True)),
        (~p.Causal(), p.authoring.Ends(0, 3)),
        (p.PerBatch((WINDOW,)), p.authoring.Ends(0, 9)),
        (p.Stride(3) & WINDOW, None),
        (p.KeyPadding(np.ones(9, bool)) & WINDOW, None),
        (p.QueriesAt(WINDOW, 0), None),
    ],
    ids=repr,
)
def test_which_patterns_have_ends(pattern, expected):
    assert pattern.ends(3) == expected


@pytest.mark.parametrize(
    "wrong", [p.authoring.Ends(0, 8), p.authoring.Ends(0, 9, True), p.authoring.Ends(3, 6)], ids=repr
)
def test_wrong_ends_are_found(wrong, monkeypatch):
    check_pattern(p.SlidingWindow(6, 0), 3, 20)
    monkeypatch.setattr(p.SlidingWindow, "ends", lambda self, q_len: wrong)
    with pytest.raises(AssertionError, match="3 queries, Ends"):
        check_pattern(p.SlidingWindow(6, 0), 3, 20)


def test_ends_of_one_length_are_found(monkeypatch):
    """Those of queries in the middle of the sequence."""
    monkeypatch.setattr(p.Sinks, "allows", lambda self, q, k: (k < self.count) & (q < 60))
    with pytest.raises(AssertionError, match="the first keys differ"):
        check_ends(p.Sinks(4), 3)
