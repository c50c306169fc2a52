"""What plans cost is counted from their lists: block by block, once for each head, and as their kernels read memory."""

import numpy as np
import pytest

import spattn
from spattn import cpu
from spattn import patterns as sp
from spattn.schedule.price import Features, count, count_dense, predicted_ms

FLOAT32 = Features(32, 64, 16)


def counted(pattern, tokens, of=FLOAT32, heads=1, **how):
    return count(spattn.plan(pattern, tokens, heads=heads, **how), 1, heads, of)


@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("tokens", [20, 48, 300, 1000])
def test_dense_attention_is_counted_as_its_plan_would_be(tokens, lanes):
    """One document, whose plan does not grow and so has the tiles of a closed form."""
    of = Features(32, 64, lanes)
    planned = count(spattn.plan(sp.Documents((tokens,)), tokens, tile=(48, 64)), 2, 3, of)
    assert planned == pytest.approx(count_dense(tokens, tokens, 2, 3, (48, 64), of), rel=1e-14)


def test_a_block_without_an_allowed_pair_is_not_counted():
    """A band of 9 keys in a tile of 64 × 64: a vector of 16 queries meets three blocks of keys, the first one two."""
    found = counted(sp.SlidingWindow(8, 0), 64, tile=(64, 64))
    assert found.scores == 32 * 8 * (2 + 3 * 3)
    assert found.weights == 4 * 64
    assert found.output == (64 // 16) * sum(min(6, 64 - row) + min(8, row) for row in range(0, 64, 6))


def test_rows_that_hold_no_query_are_not_counted():
    """Ten queries in a tile of 48: one vector and two blocks of rows."""
    found = count(spattn.plan(sp.Full(), 10, 64, tile=(48, 64)), 1, 1, Features(32, 16, 16))
    assert found.rows == 10 * (32 + 16) and found.scores == 32 * 64 and found.output == 2 * 64


@pytest.mark.parametrize(
    ("pattern", "of", "copied"),
    [
        (sp.Causal(), FLOAT32, 0),
        (sp.Causal(), FLOAT32._replace(copies=True), 32 + 64),
        (sp.Causal(), FLOAT32._replace(head_dim_v=24), 24),  # no whole vectors
        (sp.DilatedWindow(4, dilation=4), FLOAT32, 64),  # even keys are read where they are, and values are not
        (sp.Windowed((16, 16), 8), FLOAT32, 32 + 64),
    ],
)
def test_what_cannot_be_read_in_place_is_copied_once(pattern, of, copied):
    assert counted(pattern, 256, of).gathered == 256 * copied


def test_each_head_counts():
    heads = sp.PerHead((sp.Causal(), sp.SlidingWindow(8)))
    one, other = (counted(pattern, 300) for pattern in heads.patterns)
    assert np.allclose(counted(heads, 300, heads=2), np.add(one, other))
    assert np.allclose(counted(sp.Causal(), 300, heads=5), 5 * np.array(one))


def test_merged_rows_are_counted_by_their_sources():
    plan = spattn.plan(sp.Full(), 48, 4096, tile=(48, 64), workers=4)
    assert plan.slots and count(plan, 1, 1, FLOAT32).merged == 48 * plan.slots * 64


def test_milliseconds_are_of_nanoseconds():
    found = counted(sp.Causal(), 64)
    assert predicted_ms(found, (1e6, *(0.0,) * 7)) == found.items


def test_large_calls_take_no_memory():
    plan = spattn.plan(sp.Causal(), 64)
    one, many = (cpu.predicted_ms(plan, batch, 1, 64, 64, "float32") for batch in (1, 10**15))
    assert many == pytest.approx(10**15 * one)
