"""Clusters: what they take and refuse."""

from __future__ import annotations

import numpy as np
import pytest

from spattn import patterns as p


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: p.Clusters([0.5]), TypeError, "^labels: expected an array of integers"),
        (lambda: p.Clusters(3), ValueError, "^labels: expected 1-D or 2-D or 3-D, got shape"),
        (lambda: p.Clusters(np.ma.array([1, 2])), TypeError, "^labels: expected a plain array"),
        (lambda: p.Clusters([[0], [1]], [0]), ValueError, r"^q_labels: expected shape \(2, 'q_len'\), got \(1,\)"),
        (lambda: p.Clusters([0, 1]).bind(3, 3), ValueError, r"^labels: expected shape \(..., 3\), got \(2,\)"),
        (lambda: p.Clusters([0, 1], [0]).bind(2, 2), ValueError, r"^q_labels: expected shape \(..., 2\), got \(1,\)"),
        (lambda: p.Clusters([0, 1]).allows(0, 0), ValueError, r"use \.bind\(q_len, kv_len\)"),
        (lambda: p.Clusters([[0], [1]]).allows(0, 0), ValueError, r"use \.at\(batch, head\)"),
    ],
)
def test_errors(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_labels_may_be_any_integers():
    labels = np.array([2**62, -(2**62), -1, 2**62, 7, 0])
    found = p.Clusters(labels).index_set(6, 6).to_dense()
    assert np.array_equal(found, (labels[:, None] == labels) & (labels >= 0))


def test_queries_before_the_first_key_have_no_cluster():
    assert not p.Clusters([0, 0]).index_set(4, 2).to_dense()[:2].any()


def test_rows_come_from_elsewhere_or_are_not_there():
    """As another pattern may ask for them."""
    bound = p.Clusters([0, 1, 0]).bind(3, 3)
    assert bound.allows(np.array([-1, 0, 2, 3]), np.array([0, 2, 2, 0])).tolist() == [False, True, True, False]


def test_text_makes_the_same():
    for pattern in (p.Clusters([0, 1, 0]), p.Clusters([[0, 1]], [[1, 0, 1]])):
        assert p.from_json(pattern.to_json()) == pattern
