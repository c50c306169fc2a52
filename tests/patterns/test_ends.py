"""Where the last queries find their keys: what patterns say of it agrees with the predicate at every length."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spattn import patterns as p
from spattn.testing import dense_mask
from spattn.testing.strategies import cases

SMALL = st.integers(0, 12)
ATOMS = st.one_of(
    st.sampled_from([p.Full(), p.Causal()]),
    st.builds(p.Sinks, SMALL),
    st.builds(p.SlidingWindow, st.none() | SMALL, st.none() | SMALL),
    st.builds(p.DilatedWindow, SMALL, SMALL),
    st.builds(p.GlobalTokens, SMALL | st.lists(SMALL, max_size=3).map(tuple), st.booleans(), st.booleans()),
    st.builds(p.Longformer, SMALL.map(lambda n: 2 * n + 2), st.just(1), SMALL),
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


def check_ends(pattern, q_len, further):
    """The same pairs at the first keys, at the last ones and between them, at any two lengths beyond both ends."""
    ends = pattern.ends(q_len)
    if ends is None or max(ends[:2]) > 500:
        return
    lengths = [ends.first + ends.last + more for more in further]
    short, long = (dense_mask(pattern, 1, 1, q_len, kv_len)[0, 0] for kv_len in lengths)
    np.testing.assert_array_equal(short[:, : ends.first], long[:, : ends.first])
    for mask, kv_len in ((short, lengths[0]), (long, lengths[1])):
        assert (mask[:, ends.first : kv_len - ends.last] == ends.between).all()
        np.testing.assert_array_equal(mask[:, kv_len - ends.last :], short[:, lengths[0] - ends.last :])


FURTHER = st.lists(st.integers(1, 90), min_size=2, max_size=2, unique=True)


@settings(max_examples=4 * settings.default.max_examples)
@given(JOINED, st.integers(1, 9), FURTHER)
def test_what_compositions_say_of_their_ends(pattern, q_len, further):
    check_ends(pattern, q_len, further)


@pytest.mark.parametrize("name", p.names())
@given(data=st.data(), q_len=st.integers(1, 9), further=FURTHER)
def test_what_patterns_say_of_their_ends(name, data, q_len, further):
    case = data.draw(cases(name, max_len=40))
    for own in case.pattern.variants(case.sizes.batch, case.sizes.heads_q)[0]:
        check_ends(own, q_len, further)


WINDOW = p.SlidingWindow(6, 0)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (p.Full(), p.Ends(0, 0, True)),
        (p.Causal(), p.Ends(0, 3, True)),
        (p.Sinks(4), p.Ends(4, 0)),
        (WINDOW, p.Ends(0, 9)),
        (p.SlidingWindow(None, 2), p.Ends(0, 3, True)),
        (p.DilatedWindow(6), p.Ends(0, 9)),
        (p.DilatedWindow(6, dilation=2), None),
        (p.GlobalTokens(5), p.Ends(5, 3)),
        (p.GlobalTokens((0, 1, 7)), p.Ends(8, 3)),
        (p.GlobalTokens((1, 4, 7)), None),
        (p.GlobalTokens(()), p.Ends(0, 3)),
        (p.Longformer(6, global_tokens=2), p.Ends(2, 6)),
        ((p.Sinks(4) | WINDOW) & p.Causal(), p.Ends(4, 9)),
        (~p.Sinks(4) & WINDOW, p.Ends(4, 9)),
        (~p.Sinks(4) & p.Causal(), p.Ends(4, 3, True)),
        (~p.Causal(), p.Ends(0, 3)),
        (p.PerBatch((WINDOW,)), p.Ends(0, 9)),
        (p.Stride(3) & WINDOW, None),
        (p.KeyPadding(np.ones(9, bool)) & WINDOW, None),
        (p.QueriesAt(WINDOW, 0), None),
    ],
    ids=repr,
)
def test_which_patterns_have_ends(pattern, expected):
    assert pattern.ends(3) == expected
