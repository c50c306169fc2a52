"""A network of two soft-attention layers that learns to generate Dyck-(k, D), and an LSTM to compare it with.

The first layer can count: averages of all earlier tokens hold the depth, up to a factor. The second layer can then look
for the last bracket that opened at this depth. Needs PyTorch.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import nn

import spattn

from . import language


class Layer(nn.Module):
    """Attention with a learned preference for recent keys, and an MLP; each is normalized, then added."""

    def __init__(self, features, heads, pattern="causal"):
        super().__init__()
        self.heads, self.pattern = heads, pattern
        self.inner, self.outer = nn.Linear(features, 3 * features), nn.Linear(features, features)
        # What the average holds of a token shrinks with the number of tokens: the norm makes up for it.
        self.norms = nn.ModuleList(nn.LayerNorm(features, eps=1e-10) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(features, 2 * features), nn.GELU(), nn.Linear(2 * features, features))
        self.slopes = nn.Parameter(torch.linspace(0, 0.2, heads))  # one head starts without a preference

    def forward(self, x):
        slopes = self.slopes
        q, k, v = self.projected(x)
        found = spattn.attention(
            q, k, v, self.pattern, layout="bshd", score=lambda score, b, h, q, k: score - slopes[h] * (q - k)
        )
        x = x + self.norms[0](self.outer(found.flatten(2)))
        return x + self.norms[1](self.mlp(x))

    def projected(self, x):
        """q, k and v, (batch, length, heads, head_dim)."""
        return self.inner(x).unflatten(2, (3, self.heads, -1)).unbind(2)

    def weights(self, x):
        """The weights of causal attention, which `forward` never stores, (batch, heads, length, length)."""
        q, k, _ = (part.transpose(1, 2) for part in self.projected(x))
        n = torch.arange(x.shape[1])
        distance = n[:, None] - n
        scores = q @ k.mT * q.shape[-1] ** -0.5 - self.slopes[:, None, None] * distance
        return scores.masked_fill(distance < 0, -torch.inf).softmax(-1)


class Generator(nn.Module):
    """Next-token logits (batch, length, 2k) of tokens (batch, length); the first token, 2k, starts a string."""

    def __init__(self, k, features=48, heads=2, layers=2):
        super().__init__()
        self.token, self.norm = nn.Embedding(2 * k + 1, features), nn.LayerNorm(features)
        self.layers = nn.ModuleList(Layer(features, heads) for _ in range(layers))
        self.read = nn.Linear(features, 2 * k)

    def forward(self, tokens):
        x = self.token(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.read(self.norm(x))


class Recurrent(nn.Module):
    """The same with an LSTM, whose memory is all that it knows of earlier tokens."""

    def __init__(self, k, features):
        super().__init__()
        self.token, self.lstm = nn.Embedding(2 * k + 1, features), nn.LSTM(features, features, batch_first=True)
        self.read = nn.Linear(features, 2 * k)

    def forward(self, tokens):
        return self.read(self.lstm(self.token(tokens))[0])


def batch(rng, count, length, k, depth):
    """Inputs (count, length + 1), which start with 2k, and the innermost open type after each, or -1."""
    tokens, innermost = (torch.from_numpy(x) for x in language.prefixes(rng, count, length, k, depth))
    return nn.functional.pad(tokens, (1, 0), value=2 * k), nn.functional.pad(innermost, (1, 0), value=-1)


def train(model, k, depth, length, steps, pieces=32, rate=0.003):
    """Train on random prefixes; return the loss of each step and the CPU seconds of all."""
    rng, losses, start = np.random.default_rng(0), [], time.process_time()
    optimizer = torch.optim.Adam(model.parameters(), rate, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        tokens, _ = batch(rng, pieces, length, k, depth)
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses, time.process_time() - start


def closings(model, k, depth, length, count=64):
    """The share of positions with an open bracket at which the model is right about the bracket that closes it.

    Returns two shares: the closing bracket of the highest probability is right; and the right one has at least 80 % of
    the probability of all closing brackets.
    """
    tokens, innermost = batch(np.random.default_rng(1), count, length, k, depth)
    with torch.no_grad():
        closing = model(tokens)[..., k:].softmax(-1)[innermost >= 0]
    right = innermost[innermost >= 0]
    of_right = closing.gather(1, right[:, None])[:, 0]
    return (closing.argmax(1) == right).double().mean().item(), (of_right >= 0.8).double().mean().item()


def generate(model, k, length, count, seed=0):
    """Sample `count` strings of `length` tokens from the model."""
    random, tokens = torch.Generator().manual_seed(seed), torch.full((count, 1), 2 * k)
    with torch.no_grad():
        for _ in range(length):
            chosen = torch.multinomial(model(tokens)[:, -1].softmax(-1), 1, generator=random)
            tokens = torch.cat([tokens, chosen], dim=1)
    return tokens[:, 1:].numpy()
