"""The networks of examples/dyck against a stack machine."""

import sys

import numpy as np
import pytest
from dyck import language, recognizer
from dyck.recognizer import Recognizer

import spattn
from spattn import attention
from spattn.patterns import PerHead, RowIntervals

ROUNDING = 8 * np.finfo(np.float32).eps  # of one weight, of its sum, product and quotient


def accepts(tokens, k, depth):
    """A stack machine: whether a string is in Dyck-(k, D)."""
    stack = []
    for token in tokens:
        if token == 2 * k:
            continue
        if token < k:
            stack.append(token)
        elif not stack or stack.pop() != token - k:
            return False
        if len(stack) > depth:
            return False
    return not stack


def strings(rng, count, longest, k, depth):
    """Members, some of them too deep by one, and edited members."""
    made = []
    for n in range(count):
        length = 2 * rng.integers(longest // 2 + 1) if n > 3 else longest
        string = language.member(rng, length, k, depth + (n % 8 == 7))
        made.append(language.edited(rng, string, k) if n % 2 and len(string) else string)
    return made


def check(rng, count, longest, k, depth):
    """The answers of a stack machine and of the network, which are equal, for random strings."""
    made = strings(rng, count, longest, k, depth)
    expected = np.array([accepts(string, k, depth) for string in made])
    np.testing.assert_array_equal(Recognizer(k, depth)(language.padded(made, k)), expected)
    return expected


@pytest.mark.parametrize("k", range(1, 9))
def test_recognizer(k):
    rng = np.random.default_rng(k)
    expected = np.concatenate([check(rng, 6, 80, k, depth) for depth in range(1, 9)])
    assert 0.3 < expected.mean() < 0.8


@pytest.mark.parametrize("k, depth", [(1, 8), (8, 1), (8, 8), (5, 3)])
def test_recognizer_of_long_strings(k, depth):
    expected = check(np.random.default_rng(depth), 8, 1000, k, depth)
    assert {*expected} == {True, False}


@pytest.mark.parametrize("tokens", [[], [0], [1], [0, 1], [1, 0], [0, 0, 1, 1], [0, 0, 0, 1, 1, 1], [0, 1, 0, 1, 0, 1]])
def test_recognizer_of_short_strings(tokens):
    answer = Recognizer(1, 2)(language.padded([np.array(tokens, int)], 1))
    assert answer.tolist() == [accepts(tokens, 1, 2)]


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
    Recognizer(k, depth)(language.padded(strings(np.random.default_rng(0), 8, 60, k, depth), k))
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
    Recognizer(k, depth)(language.padded(strings(np.random.default_rng(1), 4, 80, k, depth), k))
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
    few, many = (language.padded(strings(rng, n, longest, 4, 3), 4) for n, longest in ((1, 4), (20, 90)))
    counts = [executed(Recognizer(4, depth), tokens) for depth in (3, 4, 5) for tokens in (few, many)]
    assert counts[0] == counts[1] > 100 and counts[2] == counts[3] and counts[4] == counts[5]
    assert counts[2] - counts[0] == counts[4] - counts[2] > 0
    imported = {name for name, value in vars(recognizer).items() if type(value) is type(sys)}
    assert imported == {"np", "spattn"}


def test_all_but_attention_is_per_token(monkeypatch):
    """Without what attention returns, a token's numbers after a layer depend on the token alone."""
    monkeypatch.setattr(recognizer, "hard_attention", lambda scores, values, *masks: np.ones_like(values))
    network, rng = Recognizer(4, 2), np.random.default_rng(3)
    tokens = language.padded(strings(rng, 6, 40, 4, 2), 4)
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
