"""Documents: what fits, what looks like cumulative lengths, and reading those."""

import numpy as np
import pytest

import spattn
from spattn import patterns as p


@pytest.mark.parametrize(
    "cu_seqlens, lengths",
    [
        ([0, 5, 10, 20], (5, 5, 10)),
        ((0, 7), (7,)),
        ([0], ()),
        ([0, 0, 5, 5, 12], (5, 7)),
        ([[0, 4, 9, 9], [0, 2, 3, 9]], ((4, 5), (2, 1, 6))),
        (np.array([0, 3, 4], np.int32), (3, 1)),
        (np.array([0, 2], np.uint64), (2,)),
    ],
)
def test_from_cu_seqlens(cu_seqlens, lengths):
    assert p.Documents.from_cu_seqlens(cu_seqlens) == p.Documents(lengths)


def test_from_cu_seqlens_of_torch():
    torch = pytest.importorskip("torch")
    assert p.Documents.from_cu_seqlens(torch.tensor([0, 4, 6], dtype=torch.int32)) == p.Documents((4, 2))


@pytest.mark.parametrize(
    "cu_seqlens, error, message",
    [
        ([], ValueError, "cu_seqlens: expected non-decreasing numbers from 0, got"),
        ([1, 5], ValueError, "cu_seqlens: expected non-decreasing"),
        ([0, 5, 4], ValueError, "cu_seqlens: expected non-decreasing"),
        ([[[0, 5]]], ValueError, "cu_seqlens: expected 1-D or 2-D"),
        ([[0, 5], [1, 5]], ValueError, "cu_seqlens: expected non-decreasing"),
        (5, ValueError, "cu_seqlens: expected 1-D"),
        ([0, 2**63], ValueError, "cu_seqlens: expected integers in"),
        ([0, 2**40], ValueError, "cu_seqlens: expected at most"),
        ([0.0, 5.0], TypeError, "cu_seqlens: expected an array of integers"),
        ([False, True], TypeError, "cu_seqlens: expected an array of integers"),
        (None, TypeError, "cu_seqlens: expected"),
    ],
)
def test_not_cu_seqlens(cu_seqlens, error, message):
    with pytest.raises(error, match="^" + message):
        p.Documents.from_cu_seqlens(cu_seqlens)


@pytest.mark.parametrize(
    "lengths", [(0, 5, 10, 20), (0, 0, 5), (0, 0, 5, 5), ((3, 4), (0, 2, 7)), np.array([0, 5, 10])]
)
def test_cumulative_lengths_are_refused(lengths):
    with pytest.raises(ValueError, match=r"^lengths: expected the tokens of each document, got .*from_cu_seqlens"):
        p.Documents(lengths)


@pytest.mark.parametrize("lengths", [(0,), (0, 0), (), (0, 5), (0, 5, 3), (5, 0), ((0,), (5,)), (3, 4, 5)])
def test_other_lengths_are_taken(lengths):
    p.Documents(lengths)


@pytest.mark.parametrize("lengths", [(10, 11), ((20,), (10, 11)), ((21,), (20,))])
def test_documents_longer_than_the_sequence(lengths):
    for use in (lambda x: x.bind(20, 20), lambda x: spattn.plan(x & p.Causal(), 20, batch=len(lengths))):
        with pytest.raises(ValueError, match="^lengths: expected at most 20 tokens .kv_len., got 21"):
            use(p.Documents(lengths))


def test_documents_shorter_than_the_sequence():
    dense = p.Documents((3, 4)).index_set(10, 10).to_dense()
    assert dense.sum() == 9 + 16 and not dense[7:].any() and not dense[:, 7:].any()


def test_shared_prefix_of_nothing():
    assert p.shared_prefix(0, (5, 5)).index_set(10, 10) == (p.Causal() & p.Documents((5, 5))).index_set(10, 10)
