"""The networks of examples/dyck against a stack machine; the generator learns a small language."""

import importlib
import sys

import numpy as np
import pytest
from dyck import language, recognizer
from dyck.recognizer import Recognizer

import spattn
from spattn import attention
from spattn.patterns import PerHead, RowIntervals

ROUNDING = 8 * np.finfo(np.float32).eps  # of one weight, of its sum, product and quotient


def check(rng, count, longest, k, depth):
    """The answers of a stack machine and of the network, which are equal, for random strings."""
    made = language.strings(rng, count, longest, k, depth)
    expected = np.array([language.accepts(string, k, depth) for string in made])
    np.testing.assert_array_equal(Recognizer(k, depth)(language.padded(made, k)), expected)
    return expected


@pytest.mark.parametrize("k", range(1, 9))
def test_recognizer(k):
    rng = np.random.default_rng(k)
    expected = np.concatenate([check(rng, 6, 48, k, depth) for depth in range(1, 9)])
    assert 0.3 < expected.mean() < 0.8


@pytest.mark.parametrize("k, depth", [(1, 8), (8, 1), (8, 8), (5, 3)])
def test_recognizer_of_long_strings(k, depth):
    expected = check(np.random.default_rng(depth), 8, 1000, k, depth)
    assert {*expected} == {True, False}


@pytest.mark.parametrize("tokens", [[], [0], [1], [0, 1], [1, 0], [0, 0, 1, 1], [0, 0, 0, 1, 1, 1], [0, 1, 0, 1, 0, 1]])
def test_recognizer_of_short_strings(tokens):
    answer = Recognizer(1, 2)(language.padded([np.array(tokens, int)], 1))
    assert answer.tolist() == [language.accepts(tokens, 1, 2)]


@pytest.mark.parametrize("tokens", [[0, 1], [-1, 2], [1, 2, 1]])
def test_rejected_tokens(tokens):
    with pytest.raises(ValueError, match="expected 0 to 2, and 2 .padding. at the end"):
        Recognizer(1, 2)(np.array([tokens]))


@pytest.fixture
def calls(monkeypatch):
    """The (k, v, pattern, output) of each call of attention by the network."""
    made = []

    def recorded(q, k, v, pattern):
        assert (q == 1).all() and q.shape == k.shape
        made.append((k, v, pattern, attention(q, k, v, pattern)))
        return made[-1][-1]

    monkeypatch.setattr(spattn, "attention", recorded)
    return made


def test_layers_are_hard_attention(calls):
    """D + 1 calls; each row has one key, that of the highest score among the allowed ones, and the key's value."""
    k, depth = 5, 3
    Recognizer(k, depth)(language.padded(language.strings(np.random.default_rng(0), 8, 60, k, depth), k))
    assert len(calls) == depth + 1
    n = np.arange(calls[0][0].shape[2])
    for layer, (keys, values, pattern, out) in enumerate(calls):
        masks = [n[:, None] > n, n[:, None] < n] if layer < depth else [np.ones((len(n), len(n)), bool)]
        for b, head in np.ndindex(out.shape[:2]):
            key = np.where(masks[head], keys[b, head, :, 0], -np.inf).argmax(1)
            found = pattern.index_set(len(n), len(n), batch=b, head=head).to_dense()
            np.testing.assert_array_equal(found, masks[head] & (n == key[:, None]))
            expected = values[b, head][key] * masks[head].any(1)[:, None]
            np.testing.assert_allclose(out[b, head], expected, rtol=ROUNDING)


def test_sharp_softmax_gives_the_same_numbers(calls):
    """At a scale where all other weights underflow to 0, softmax attention to all allowed keys is hard attention."""
    k, depth = 6, 4
    Recognizer(k, depth)(language.padded(language.strings(np.random.default_rng(1), 4, 80, k, depth), k))
    n = np.arange(calls[0][0].shape[2])
    strictly = PerHead([RowIntervals(0 * n, n), RowIntervals(n + 1, 0 * n + len(n))])
    for layer, (keys, values, _, out) in enumerate(calls):
        q = np.ones_like(keys)
        sharp = attention(q, keys, values, strictly if layer < depth else "full", scale=1e5)
        np.testing.assert_allclose(sharp, out, rtol=ROUNDING)


def test_memory_of_the_network():
    """Each token holds its sign, its position, whether it is matched, and the bits of its type."""
    for k in range(1, 40):
        made = Recognizer(k, 3)
        assert made.width == 3 + int(np.ceil(np.log2(k)))
        assert len(np.unique(made.embedding, axis=0)) == 2 * k + 1
        weights = (made.own, made.found, made.bias)
        assert max(weight.shape[-1] for weight in weights) == made.width + 1


def executed(network, tokens):
    """The bytecode instructions of the network's module that one call executes."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        if frame.f_code.co_filename == recognizer.__file__:
            frame.f_trace_opcodes = True
            count += event == "opcode"
            return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        network(tokens)
    finally:
        sys.settrace(before)
    return count


def test_python_does_not_loop_over_strings_or_tokens():
    """As many instructions for one short string as for many long ones; each layer takes as many as the others."""
    rng = np.random.default_rng(2)
    few, many = (language.padded(language.strings(rng, n, longest, 4, 3), 4) for n, longest in ((1, 4), (20, 90)))
    counts = [executed(Recognizer(4, depth), tokens) for depth in (3, 4, 5) for tokens in (few, many)]
    assert counts[0] == counts[1] > 100 and counts[2] == counts[3] and counts[4] == counts[5]
    assert counts[2] - counts[0] == counts[4] - counts[2] > 0
    imported = {name for name, value in vars(recognizer).items() if type(value) is type(sys)}
    assert imported == {"np", "spattn"}


def test_all_but_attention_is_per_token(monkeypatch):
    """Without what attention returns, a token's numbers after a layer depend on the token alone."""
    monkeypatch.setattr(recognizer, "hard_attention", lambda scores, values, *masks: np.ones_like(values))
    network, rng = Recognizer(4, 2), np.random.default_rng(3)
    tokens = language.padded(language.strings(rng, 6, 40, 4, 2), 4)
    x = network.embedding[tokens]
    order = rng.permutation(tokens.shape[1])
    np.testing.assert_array_equal(network.match(x[:, order]), network.match(x)[:, order])


def test_prefixes():
    """Random prefixes stay within the depth, and the innermost open bracket is a stack machine's."""
    tokens, innermost = language.prefixes(np.random.default_rng(4), 20, 50, 3, 4)
    deepest = 0
    for string, expected in zip(tokens, innermost, strict=True):
        stack = []
        for token, top in zip(string, expected, strict=True):
            if token < 3:
                stack.append(token)
            else:
                assert stack.pop() == token - 3
            deepest = max(deepest, len(stack))
            assert top == (stack[-1] if stack else -1)
    assert deepest == 4


@pytest.fixture
def generator():
    """The module, which needs PyTorch, on one thread."""
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield importlib.import_module("dyck.generator")
    torch.set_num_threads(threads)


def test_generator_attends_with_the_weights_that_pictures_show(generator):
    model = generator.Generator(3)
    tokens, _ = generator.batch(np.random.default_rng(5), 2, 20, 3, 4)
    x = model.token(tokens)
    for layer in model.layers:
        found = layer.weights(x) @ layer.projected(x)[2].transpose(1, 2)
        expected = x + layer.norms[0](layer.outer(found.transpose(1, 2).flatten(2)))
        x = layer(x)
        np.testing.assert_allclose(x.detach(), (expected + layer.norms[1](layer.mlp(expected))).detach(), atol=1e-4)


@pytest.mark.slow
def test_generator_learns_a_small_language(generator):
    """At twice the training length it is better than whoever guesses the type of the last opened bracket."""
    k, depth, length = 2, 2, 12
    model = generator.Generator(k, 16)
    tokens, innermost = generator.batch(np.random.default_rng(1), 64, 2 * length, k, depth)
    opened = np.maximum.accumulate(np.where(tokens < k, np.arange(2 * length + 1), 0), axis=1)
    guess = np.take_along_axis(tokens.numpy(), opened, 1)[innermost >= 0]
    guessed = (guess == innermost[innermost >= 0].numpy()).mean()
    generator.train(model, k, depth, length, 120, pieces=16, rate=0.01)
    right, confident = generator.closings(model, k, depth, 2 * length)
    assert 0.7 < guessed < 0.95 < confident <= right
    strings = generator.generate(model, k, length, 4)
    assert strings.shape == (4, length) and 0 <= strings.min() and strings.max() < 2 * k


def test_measure_of_closings(generator):
    """A model that knows the innermost bracket is always right; one that gives it half of the probability is not."""
    torch = generator.torch
    tokens, innermost = generator.batch(np.random.default_rng(1), 64, 30, 4, 3)

    def knowing(logit):
        def model(given):
            assert torch.equal(given, tokens)
            return torch.cat([torch.zeros(*tokens.shape, 4), logit * torch.eye(5)[innermost, :4]], dim=-1)

        return model

    assert generator.closings(knowing(9.0), 4, 3, 30) == (1, 1)
    assert generator.closings(knowing(1.0), 4, 3, 30) == (1, 0)
    assert generator.closings(knowing(-9.0), 4, 3, 30) == (0, 0)
