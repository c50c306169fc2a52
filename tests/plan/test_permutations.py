"""Plans in an order of the tokens: the same pairs, and orders that nobody can break."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import spattn
from spattn import patterns as p
from spattn.planning import validate
from spattn.schedule import compiler
from spattn.testing import check_plan
from spattn.testing.strategies import compositions

LABELS = np.random.default_rng(0).integers(-1, 6, (3, 140))


def ordered(pattern, q_len, kv_len, **how):
    return compiler.plan(pattern, q_len, kv_len, ordered=True, **how)


def check(pattern, made):
    """The plan visits the pattern's pairs, and is sound."""
    variants, _ = pattern.variants(*made.variant.shape)
    check_plan(made, [own.index_set(made.q_len, made.kv_len) for own in variants])
    validate(dataclasses.replace(made))


@given(
    case=compositions(max_len=120, depth=2),
    tile=st.sampled_from([(48, 64), (3, 64), (1, 64)]),
    workers=st.sampled_from([1, 9]),
    data=st.data(),
)
def test_pairs_of_compositions(case, tile, workers, data):
    """Clusters joined with anything, also with what tells heads apart, and where few have a cluster."""
    sizes = case.sizes
    labels = np.random.default_rng(data.draw(st.integers(0, 99))).integers(-2, 5, (1, sizes.kv_len))
    pattern = case.pattern & p.Clusters(labels)
    made = ordered(
        pattern, sizes.q_len, sizes.kv_len, batch=sizes.batch, heads=sizes.heads_q, tile=tile, workers=workers
    )
    check(pattern, made)


@pytest.mark.parametrize(
    "also", [p.Causal(), p.SlidingWindow(30, 9), p.Documents((50, 40, 20)), p.Stride(3), ~p.Sinks(4)]
)
@pytest.mark.parametrize("q_len", [1, 70, 140, 160])
def test_pairs_of_clusters(also, q_len):
    """More queries than keys, too: the first ones stand before them."""
    for pattern in (p.Clusters(LABELS), also & p.Clusters(LABELS), p.Clusters(LABELS) & also & p.Full()):
        check(pattern, ordered(pattern, q_len, 140, heads=3, tile=(16, 64)))


def test_labels_of_queries():
    labels = np.random.default_rng(1).integers(-1, 6, 50)
    pattern = p.Clusters(LABELS[0], labels)
    expected = (labels[:, None] == LABELS[0]) & (labels[:, None] >= 0)
    assert np.array_equal(pattern.index_set(50, 140).to_dense(), expected)
    check(pattern, ordered(pattern, 50, 140, tile=(16, 64)))


def test_an_operand_without_an_order_leaves_it_to_another():
    """Scattered pairs may have one, and have none."""
    row, key = np.random.default_rng(0).integers(0, 140, (2, 3000))
    pattern = p.interop.from_pairs(row, key, 140, 140) & p.Clusters(LABELS[0])
    made = ordered(pattern, 140, 140, tile=(16, 64))
    assert made.ordered
    check(pattern, made)


def test_spans_stay_spans():
    """Of keys from one to another the order leaves some side by side, so that nothing is searched for."""
    labels = np.random.default_rng(0).integers(0, 8, 4096)
    made = ordered(p.Causal() & p.Clusters(labels), 4096, 4096)
    rows = ordered(p.Clusters(labels), 4096, 4096)
    assert made.nnz < 0.6 * rows.nnz and made.tiles < 0.75 * rows.tiles and rows.efficiency > 0.5


def test_plans_with_an_order_do_not_move():
    """They are of so many tokens, whatever the heads beside them are of."""
    pattern = p.PerHead((p.Causal(), p.Clusters(LABELS[0])))
    made = ordered(pattern, 140, 140, heads=2)
    assert made.ordered and not ordered(p.Causal(), 140, 140).ordered
    with pytest.raises(ValueError, match=r"labels: expected shape \(..., 141\), got \(140,\)"):
        ordered(pattern, 140, 141, heads=2)


@pytest.mark.parametrize(
    "field, spoil",
    [
        ("q_order", lambda order: order[:, :-1]),
        ("q_order", lambda order: np.zeros_like(order)),
        ("q_order", lambda order: np.where(order == order[0, 0], order[0, 1], order)),  # rows that attend to nothing
        ("kv_order", lambda order: order + 1),
        ("kv_order", lambda order: np.where(order == order[0, -1], order[0, -2], order)),  # pairs of one cluster twice
        ("kv_order", lambda order: np.where(order == 0, -1, order).astype(np.int32)),
        ("kv_order", lambda order: order[[0, 0]]),
        ("kv_order", lambda order: np.zeros((0, 0), np.int32)),
        ("q_order", lambda order: order.astype(np.int64)),
        ("kv_order", lambda order: order[0]),
        ("q_order", lambda order: order[:, ::-1].copy()),  # merges are of other rows then
    ],
)
def test_orders_are_checked(field, spoil):
    made = ordered(p.Clusters(LABELS[0]), 140, 140, tile=(16, 64), workers=30)
    assert made.slots or len(made.merge_rows)
    with pytest.raises(ValueError, match=r"^plan: expected .* in"):
        validate(dataclasses.replace(made, **{field: spoil(getattr(made, field))}))


def test_a_budget_bounds_orders():
    pattern = p.PerHead(tuple(p.Clusters(np.random.default_rng(n).permutation(4096) % 9) for n in range(8)))
    with pytest.raises(ValueError, match="max_bytes"):
        ordered(pattern, 4096, 4096, heads=8, max_bytes=8 * 2 * 4 * 4096 - 1)


def test_other_backends_plan_anew():
    """A backend that takes tokens in their order makes a plan of its own from the pattern of one that does not."""
    made = ordered(p.Clusters(LABELS[0]), 140, 140)
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 1, 140, 16))
    np.testing.assert_allclose(
        spattn.attention(q, k, v, made, backend="reference"), spattn.attention(q, k, v, made, backend="cpu"), atol=1e-12
    )
