"""A byte model of the King James Version with a choice of patterns, and a task that needs a distant byte.

Needs PyTorch and the package of the text (``king_james.py``).
"""

from __future__ import annotations

import torch
from dyck.generator import Layer
from king_james import verses
from torch import nn

from spattn.patterns import Causal, DilatedWindow, Sinks, SlidingWindow, strided

MARK = ord("#")  # neither it nor digits are in the text


def patterns(width, front):
    """Five causal patterns. All but the full one have about `width` keys per query; `front` tokens are global."""
    near = SlidingWindow(width // 2 - 1, 0)
    return {
        "full": Causal(),
        "window": SlidingWindow(width - 1, 0),
        "dilated": Causal() & (near | DilatedWindow(width // 2, dilation=8)),
        "strided": strided(width // 2),
        "global": Causal() & (Sinks(front) | SlidingWindow(width - front - 1, 0)),
    }


def text():
    """The bytes of the Bible, verse by verse."""
    return torch.frombuffer(bytearray(" ".join(verses()).encode()), dtype=torch.uint8).long()


class ByteModel(nn.Module):
    """Logits (batch, length, 256) of the next byte."""

    def __init__(self, pattern, features=64, heads=4, layers=2):
        super().__init__()
        self.token, self.norm = nn.Embedding(256, features), nn.LayerNorm(features)
        self.layers = nn.ModuleList(Layer(features, heads, pattern) for _ in range(layers))
        self.read = nn.Linear(features, 256)

    def forward(self, tokens):
        x = self.token(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.read(self.norm(x))


def excerpts(source, count, length, random):
    """Random pieces of the text, (count, length)."""
    return source[torch.randint(len(source) - length, (count, 1), generator=random) + torch.arange(length)]


def questions(source, count, length, front, random, asked=16):
    """Excerpts with one digit, the only one, among the first `front` bytes or in the first half, and "#" behind it.

    Returns tokens (count, length), whether the digit is among the first `front` bytes, the digit, and the positions of
    the last "#" (count, asked), all in the second half. The model should answer each with the digit.
    """
    tokens = excerpts(source, count, length, random)
    digit = torch.randint(ord("0"), ord("9") + 1, (count,), generator=random)
    in_front = torch.arange(count) % 2 == 0
    at = torch.randint(length // 2, (count,), generator=random)
    tokens[torch.arange(count), torch.where(in_front, at % front, at)] = digit
    places = length // 2 + torch.rand(count, length // 2, generator=random).argsort(1)[:, :asked]
    tokens.scatter_(1, places, MARK)
    return tokens, in_front, digit, places
