"""The network of D + 1 hard-attention layers that recognizes Dyck-(k, D). Nothing in it is trained.

Each of the first D layers matches the innermost brackets: an opening one attends to the next unmatched bracket, a
closing one to the previous unmatched one. After d layers, whatever forms a string of depth at most d is matched. The
last layer looks for an unmatched bracket.
"""

from __future__ import annotations

import numpy as np

import spattn
from spattn.patterns import RowIntervals

SIGN, POSITION, MATCHED = 0, 1, 2  # the first numbers of a token; the bits of its type follow
BEFORE, AFTER = 0, 1  # heads


class Recognizer:
    """Recognizes the strings of Dyck-(k, D).

    Parameters
    ----------
    k, depth : int
        Types of brackets, and how deep they may be nested.
    """

    def __init__(self, k, depth):
        bits = (k - 1).bit_length()
        self.k, self.depth, self.width = k, depth, 3 + bits
        kind = np.arange(k)[:, None] >> np.arange(bits) & 1
        self.embedding = np.zeros((2 * k + 1, self.width), np.float32)  # of opening and closing brackets, and padding
        self.embedding[:k, SIGN], self.embedding[k:-1, SIGN] = 1, -1
        self.embedding[-1, MATCHED] = 1
        self.embedding[:-1, MATCHED + 1 :] = np.tile(2 * kind - 1, (2, 1))
        # A bracket and the one that a head found match unless a row of these differences is not zero.
        own, found = np.zeros((2, 4 + bits, self.width), np.float32)
        own[0, SIGN] = found[1, SIGN] = 1
        own[2, MATCHED] = found[3, MATCHED] = 1
        own[4:, MATCHED + 1 :], found[4:, MATCHED + 1 :] = np.eye(bits), -np.eye(bits)
        self.own, self.found = own.T, found.T
        self.bias = np.zeros((2, 1, 4 + bits), np.float32)  # (head, token, difference)
        self.bias[BEFORE, 0, :2] = 1, -1  # closes a bracket that opens
        self.bias[AFTER, 0, :2] = -1, 1

    def __call__(self, tokens):
        """Whether each row of `tokens` (batch, length), which ends with padding, is in the language."""
        length = tokens.shape[1]
        if tokens.min() < 0 or (tokens[:, -1] != 2 * self.k).any():
            raise ValueError(f"tokens: expected 0 to {2 * self.k}, and {2 * self.k} (padding) at the end of each row")
        x = self.embedding[tokens]
        x[..., POSITION] = np.arange(length, dtype=np.float32) / length
        for _ in range(self.depth):
            x = self.match(x)
        return self.accept(x)

    def match(self, x):
        """One layer: each bracket compares itself with the nearest unmatched ones before and behind it."""
        found = hard_attention(self.scores(x), np.stack([x, x], axis=1), strictly_before, strictly_after)
        difference = (x @ self.own)[:, None] + found @ self.found + self.bias
        error = relu(difference).sum(-1) + relu(-difference).sum(-1)
        x = x.copy()
        x[..., MATCHED] += step(1 - error).sum(1)  # of the two heads, one at most
        return x

    def scores(self, x):
        """Scores (batch, 2, length) of the keys: unmatched brackets first, then the latest, or the earliest."""
        unmatched = 1 - x[..., MATCHED]
        return np.stack([2 * unmatched + x[..., POSITION], 2 * unmatched - x[..., POSITION]], axis=1)

    def accept(self, x):
        """The last layer: each token attends to an unmatched bracket if there is one; the last token answers."""
        found = hard_attention(self.scores(x)[:, :1], x[:, None], anywhere)
        return step(found[:, 0, -1, MATCHED]) == 1


def relu(x):
    return np.maximum(x, 0)


def step(x):
    """0 up to 1/4, 1 from 3/4 on: integers that attention has rounded become exact again."""
    return relu(2 * x - 0.5) - relu(2 * x - 1.5)


def hard_attention(scores, values, *masks):
    """Attend from each token to the one key with the highest score (batch, heads, length); a mask per head.

    The keys become a pattern with one key per row, or none where the mask allows none, so that softmax attention over
    it is hard attention.
    """
    key = np.stack([mask(scores[:, head]) for head, mask in enumerate(masks)], axis=1)
    q, k = np.ones_like(scores)[..., None], scores[..., None]
    return spattn.attention(q, k, values, RowIntervals(key, key + 1))


def strictly_before(scores):
    """The key of the highest score before each token, as a running maximum; -1 at the first token."""
    highest = np.maximum.accumulate(scores, axis=1)
    at = np.where(scores == highest, np.arange(scores.shape[1]), 0)
    return np.pad(np.maximum.accumulate(at, axis=1), ((0, 0), (1, 0)), constant_values=-1)[:, :-1]


def strictly_after(scores):
    """The key of the highest score behind each token; the length at the last token."""
    return scores.shape[1] - 1 - strictly_before(scores[:, ::-1])[:, ::-1]


def anywhere(scores):
    """The key of the highest score."""
    return np.repeat(scores.argmax(1, keepdims=True), scores.shape[1], axis=1)
