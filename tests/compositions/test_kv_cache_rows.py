"""A KV cache gives the rows of the whole sequence, for compositions of patterns and any appends, crops and orders.

What is expected comes from :mod:`.oracle`: dense attention in float64 to all tokens that an entry has got.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import spattn
from spattn import patterns as p

from . import draws, oracle
from .draws import Drawn, Sizes
from .test_compositions import drawing

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*cannot be evaluated on whole tiles"),
    pytest.mark.filterwarnings("ignore::spattn.EfficiencyWarning"),
]

DIM, DIM_V = 5, 3


def streaming(source, sizes):
    """A window with sinks, which a cache slides over."""
    left, first = source.integer(0, 3), source.integer(0, 2)
    window = draws.Term(p.SlidingWindow(left, 0) | p.Sinks(first), None)
    mask = oracle.either(oracle.sliding_window(left, 0), oracle.sinks(first))
    found = window._replace(mask=mask)
    if source.integer(0, 1):
        found &= draws.Term(p.Causal(), oracle.causal())
    if source.integer(0, 2) == 0:
        found = draws.Term(p.PerHead((found.pattern, p.SlidingWindow(1, 2))), None)._replace(
            mask=oracle.per_head([found.mask, oracle.sliding_window(1, 2)], sizes.heads_q)
        )
    return found


class Tokens:
    """All tokens of the entries of a cache."""

    def __init__(self, source, sizes):
        self.rng, self.sizes = source.rng(), sizes
        self.k = [np.zeros((sizes.heads_kv, 0, DIM))] * sizes.batch
        self.v = [np.zeros((sizes.heads_kv, 0, DIM_V))] * sizes.batch

    @property
    def lengths(self):
        return np.array([x.shape[1] for x in self.k])

    def drawn(self, heads, tokens, dim):
        return self.rng.standard_normal((self.sizes.batch, heads, tokens, dim))

    def append(self, k, v, new):
        self.k = [np.concatenate([x, y[:, :n]], 1) for x, y, n in zip(self.k, k, new, strict=True)]
        self.v = [np.concatenate([x, y[:, :n]], 1) for x, y, n in zip(self.v, v, new, strict=True)]

    def crop(self, lengths):
        self.k = [x[:, :n] for x, n in zip(self.k, lengths, strict=True)]
        self.v = [x[:, :n] for x, n in zip(self.v, lengths, strict=True)]

    def reorder(self, index):
        self.k, self.v = [self.k[i] for i in index], [self.v[i] for i in index]


def score(s, b, h, q, k):
    return 1.5 * s + 0.03 * q - 0.02 * k + 0.1 * b * (k % 3) + 0.05 * h * (q - k)


def rows_of(tokens, mask, q, new, any_length, max_len, scored, sinks):
    """Out and lse of the newest tokens of each entry; rows without a query have 0 and −inf."""
    out, lse = np.zeros((*q.shape[:3], DIM_V)), np.full(q.shape[:3], -np.inf)
    for b, (k, v, count) in enumerate(zip(tokens.k, tokens.v, new, strict=True)):
        n = k.shape[1]
        own = n if any_length else max_len
        if not n or not count:
            continue
        allowed = oracle.whole(mask, len(q), q.shape[1], own, own)[b, :, n - count : n, :n]
        for h in range(q.shape[1]):
            key, value = (x[h * len(x) // q.shape[1]] for x in (k, v))
            s = q[b, h, :count] @ key.T / np.sqrt(DIM)
            if scored:
                s = score(s, b, h, np.arange(n - count, n)[:, None], np.arange(n)[None])
            s = np.where(allowed[h], s, -np.inf)
            if sinks is not None:
                s = np.concatenate([s, np.full((count, 1), sinks[h])], 1)
            with np.errstate(all="ignore"):
                top = s.max(1, keepdims=True)
                weights = np.exp(s - np.where(np.isfinite(top), top, 0))
                lse[b, h, :count] = np.log(weights.sum(1)) + np.where(np.isfinite(top), top, 0)[:, 0]
                found = weights[:, :n] @ value / weights.sum(1, keepdims=True)
            out[b, h, :count] = np.where(weights.sum(1, keepdims=True) > 0, found, 0)
    return out, lse


def supports(pattern, sizes, tokens):
    """Whether every pattern of the batch accepts so many tokens."""
    try:
        for own in pattern.variants(sizes.batch, sizes.heads_q)[0]:
            own.bind(tokens, tokens)
    except ValueError:
        return False
    return True


def check_steps(source, sizes, term, chunk, steps):
    max_len, convert = sizes.kv_len, source.choice([np.asarray, torch.from_numpy])
    cache = spattn.KVCache(
        *(term.pattern, max_len),
        batch=sizes.batch,
        heads_kv=sizes.heads_kv,
        head_dim=DIM,
        head_dim_v=DIM_V,
        like=convert(np.zeros(1)),
        chunk=chunk,
    )
    tokens, any_length = Tokens(source, sizes), supports(term.pattern, sizes, 1)
    cropped = np.zeros(sizes.batch, np.int64)  # and not appended again
    scored, sinks = source.integer(0, 1), source.choice([None, tokens.rng.standard_normal(sizes.heads_q)])
    source.note((term.pattern, sizes, chunk, convert, scored, sinks))
    for _ in range(steps):
        way, before = source.integer(0, 9), tokens.lengths
        if way == 0:
            index = tokens.rng.integers(0, sizes.batch, sizes.batch)
            cache.reorder(convert(index))
            tokens.reorder(index)
            cropped = cropped[index]
        elif way == 1 and (before > 0).any():
            most = np.maximum(before - tokens.rng.integers(0, 3, sizes.batch), 0)
            try:
                cache.crop(most.astype(np.int8))
            except ValueError:
                assert ((before - most + cropped)[most > 0] >= chunk).any()
            else:
                tokens.crop(most)
                cropped += before - most
        elif way == 2:
            entry = source.integer(0, sizes.batch - 1)
            cache.reset(entry)
            tokens.crop([0 if b == entry else n for b, n in enumerate(before)])
        width = source.choice([1, 1, chunk, source.integer(0, 9)])
        width = min(width, max_len - int(tokens.lengths.max()))
        new = np.full(sizes.batch, width)
        ragged = source.integer(0, 2) == 0
        if ragged:
            new = tokens.rng.integers(0, width + 1, sizes.batch)
        k, v = tokens.drawn(sizes.heads_kv, width, DIM), tokens.drawn(sizes.heads_kv, width, DIM_V)
        source.note((way, new, ragged))
        cache.append(convert(k), convert(v), **({"lengths": convert(new)} if ragged else {}))
        tokens.append(k, v, new)
        cropped = np.maximum(cropped - new, 0)
        assert cache.lengths.tolist() == tokens.lengths.tolist()
        count = np.minimum(new if ragged else source.integer(0, max(chunk, width)), tokens.lengths)
        check_rows(cache, tokens, term, (count, cropped, any_length, scored, sinks), convert, chunk)


def check_rows(cache, tokens, term, case, convert, chunk):
    count, cropped, any_length, scored, sinks = case
    width = int(count.max())
    q = tokens.drawn(tokens.sizes.heads_q, width, DIM)
    options = {"score": score} if scored else {}
    options |= {} if sinks is None else {"sinks": convert(sinks)}
    options |= {} if (count == width).all() else {"lengths": count}
    try:
        out, lse = (np.asarray(x) for x in cache.attention(convert(q), return_lse=True, **options))
    except ValueError as error:
        assert "chunk" in str(error) and (count + cropped > chunk).any()
        return
    expected = rows_of(tokens, term.mask, q, count, any_length, cache.max_len, scored, sinks)
    for got, want in zip((out, lse), expected, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-11, rtol=1e-11)


@drawing()
@given(data=st.data())
def test_cached_rows_of_compositions(data):
    source = Drawn(data)
    heads_kv, group = source.choice([(1, 1), (1, 2), (2, 1), (2, 2)])
    max_len = source.integer(1, 60)
    sizes = Sizes(source.integer(1, 3), heads_kv * group, heads_kv, max_len, max_len)
    check_steps(source, sizes, draws.draw_term(source, sizes, 3, draws.TERMS), source.integer(1, 4), steps=4)


@drawing()
@given(data=st.data())
def test_cached_rows_behind_a_window(data):
    """Keys are dropped, and those that remain are moved."""
    source = Drawn(data)
    sizes = Sizes(source.integer(1, 3), 2, source.integer(1, 2), 200, 200)
    check_steps(source, sizes, streaming(source, sizes), source.integer(1, 4), steps=16)
