"""Orders in which listed pairs lie together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spattn.patterns.hints import order as _alike
from spattn.patterns.hints.order import cluster_pairs

N = 1024
RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 16, N)


def listed(mask):
    """Compressed sparse rows of a mask, and its keys."""
    return np.append(0, np.cumsum(mask.sum(axis=1))), np.nonzero(mask)[1].astype(np.int32), mask.shape[1]


def squares(mask):
    """How many squares of 64 × 64 hold a pair."""
    padded = np.pad(mask, [(0, -n % 64) for n in mask.shape])
    return padded.reshape(padded.shape[0] // 64, 64, -1, 64).any(axis=(1, 3)).sum()


def reordered(mask):
    q_order, kv_order = cluster_pairs(*listed(mask))
    assert np.array_equal(np.sort(q_order), np.arange(mask.shape[0]))
    assert np.array_equal(np.sort(kv_order), np.arange(mask.shape[1]))
    return mask[q_order][:, kv_order]


@pytest.mark.parametrize("clusters", [8, 32, 100])
@pytest.mark.parametrize("share", [1.0, 0.6])
def test_clusters_are_found(clusters, share):
    """Whether all of their pairs are there or most; clusters of keys need not be those of queries."""
    q, k = RNG.integers(0, clusters, (2, N))
    mask = (q[:, None] == k) & (RNG.random((N, N)) < share)
    # A side of a cluster that begins within a square takes one more of them.
    assert squares(reordered(mask)) <= 1.3 * clusters * (N / clusters / 64 + 1) ** 2


def test_keys_and_queries_without_pairs_lie_apart():
    q, k = RNG.integers(0, 16, (2, N))
    mask = (q[:, None] == k) & (q >= 8)[:, None]
    found = reordered(mask)
    assert not found[: (q < 8).sum()].any() and not found[:, : (k < 8).sum()].any()


@pytest.mark.parametrize(
    "mask",
    [
        np.zeros((N, N), bool),
        np.zeros((0, 0), bool),
        np.zeros((3, 0), bool),
        np.ones((N, N), bool),
        RNG.random((N, N)) < 0.02,
        abs(np.arange(N)[:, None] - np.arange(N)) < 40,
        np.eye(N, dtype=bool),
        np.repeat(np.arange(16), 64)[:, None] == np.repeat(np.arange(16), 64),
        (LABELS[:, None] == LABELS) ^ (RNG.random((N, N)) < 0.002),
    ],
    ids=["empty", "no tokens", "no keys", "full", "random", "window", "diagonal", "in a row", "noise"],
)
def test_nothing_is_gained(mask):
    assert cluster_pairs(*listed(mask)) is None


def test_scattered_pairs_cost_a_look_at_few_rows(monkeypatch):
    """And no pass over all pairs."""
    mask = RNG.random((4 * N, 4 * N)) < 0.01
    seen = []
    monkeypatch.setattr(_alike, "_squares", lambda *args: seen.append(args))
    assert cluster_pairs(*listed(mask)) is None and not seen


def test_large_tables_of_squares_are_not_made(monkeypatch):
    mask = RNG.random((200, 300)) < 0.1
    row, key = np.nonzero(mask)
    expected = squares(mask)
    assert _alike._squares(row, key, 200, 300) == expected
    monkeypatch.setattr(_alike, "_TABLE", 3)
    assert _alike._squares(row, key, 200, 300) == expected


@given(rows=st.integers(1, 40), keys=st.integers(1, 40), labels=st.integers(1, 4), seed=st.integers(0, 99))
def test_orders_are_permutations(rows, keys, labels, seed):
    """Of whatever is found, in small problems too."""
    rng = np.random.default_rng(seed)
    mask = rng.integers(0, labels, rows)[:, None] == rng.integers(-1, labels, keys)
    found = cluster_pairs(*listed(mask))
    for order, length in zip(found or (), (rows, keys), strict=False):
        assert np.array_equal(np.sort(order), np.arange(length))
