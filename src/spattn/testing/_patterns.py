"""Random parameters for each registered pattern, by registered name.

A maker takes Hypothesis' ``draw`` and the sizes drawn so far and returns a pattern and the sizes that it fits: the
same, or other lengths where the parameters fix them (a grid, a layout of whole blocks).
"""

from __future__ import annotations

import itertools
import math
import sys
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from .. import patterns as p

__all__ = ["MAKERS", "Sizes", "composition"]


class Sizes(NamedTuple):
    """Batch entries, query heads, key heads, and the lengths in tokens."""

    batch: int
    heads_q: int
    heads_kv: int
    q_len: int
    kv_len: int


MAKERS: dict = {}
ANY_LENGTHS: list[str] = []


def maker(name: str, fixes_lengths: bool = False):
    """Registers a maker by a pattern's name; one that `fixes_lengths` returns (pattern, sizes), others a pattern."""

    def add(function):
        if fixes_lengths:
            MAKERS[name] = function
        else:
            MAKERS[name] = lambda draw, sizes: (function(draw, sizes), sizes)
            ANY_LENGTHS.append(name)
        return function

    return add


def composition(draw, sizes: Sizes, depth: int):
    """(pattern, sizes): registered patterns that suit any lengths, joined by operators."""
    def compose(depth):
        operator = draw(st.sampled_from("&|-~")) if depth and draw(st.integers(0, 3)) else ""
        match operator:
            case "&":
                return compose(depth - 1) & compose(depth - 1)
            case "|":
                return compose(depth - 1) | compose(depth - 1)
            case "-":
                return compose(depth - 1) - compose(depth - 1)
            case "~":
                return ~compose(depth - 1)
        return MAKERS[draw(st.sampled_from(ANY_LENGTHS))](draw, sizes)[0]

    return compose(depth), sizes


# -- what the makers are made of -------------------------------------------------------------------------------------


BEYOND = st.sampled_from([2**31, 2**40 - 1, 2**40 + 1, 2**62, sys.maxsize, 2**64, 10**30])


def number(draw, least: int, most: int) -> int:
    return draw(st.integers(least, max(least, most)))


def size(draw, least: int, most: int) -> int:
    """As `number`, but now and then a legal number that reaches beyond every sequence, and beyond 64 bits."""
    return draw(BEYOND) if draw(st.integers(0, 15)) == 15 else number(draw, least, most)


def block_size(draw, s: Sizes) -> int:
    return size(draw, 1, s.kv_len + 3)


def flags(draw, shape, share=None) -> np.ndarray:
    """A random boolean array; the share of True is drawn too, none and all included."""
    share = draw(st.sampled_from([0.0, 0.03, 0.3, 0.7, 1.0])) if share is None else share
    return np.random.default_rng(number(draw, 0, 2**32 - 1)).random(shape) < share


def leading(draw, s: Sizes, heads: int) -> tuple[int, ...]:
    """Leading axes of an array pattern: none, heads, or batch and heads, each also of size 1."""
    return draw(st.sampled_from([(), (1,), (heads,), (1, heads), (s.batch, 1), (s.batch, heads)]))


def positions(draw, below: int, most: int = 6) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.integers(0, max(below - 1, 0)) | BEYOND, max_size=most)))


def token_set(draw, s: Sizes):
    spaced = st.builds(lambda first, step, n: tuple(range(first, first + step * n, step)),
                       st.integers(0, s.kv_len), st.integers(2, 9), st.integers(0, 8))  # fmt: skip
    return draw(st.one_of(st.just(size(draw, 0, s.kv_len + 2)), st.just(positions(draw, s.kv_len + 2)), spaced))


def grid(draw, s: Sizes) -> tuple[tuple[int, ...], Sizes]:
    """A grid of one to three axes of at most kv_len tokens, and the sizes that fit it; q_len mostly the whole grid."""
    axes = number(draw, 1, 3)
    longest = 2 * int(s.kv_len ** (1 / axes))
    shape: tuple[int, ...] = ()
    for _ in range(axes):
        shape += (number(draw, 1, min(longest, s.kv_len // math.prod(shape))),)
    tokens = math.prod(shape)
    q_len = draw(st.one_of(st.just(tokens), st.integers(1, tokens)))
    return shape, s._replace(q_len=q_len, kv_len=tokens)


def per_axis(draw, values: list):
    """The values as a tuple, or one number where all are equal."""
    return values[0] if len(set(values)) == 1 and draw(st.booleans()) else tuple(values)


# -- basic -----------------------------------------------------------------------------------------------------------


@maker("full")
def full(draw, s):
    return p.Full()


@maker("causal")
def causal(draw, s):
    return p.Causal()


@maker("sliding_window")
def sliding_window(draw, s):
    left, right = (draw(st.sampled_from([None, size(draw, 0, s.kv_len + 2)])) for _ in range(2))
    return draw(st.sampled_from([p.SlidingWindow(left, right), p.SlidingWindow(left)]))


@maker("dilated_window")
def dilated_window(draw, s):
    left, right = size(draw, 0, s.kv_len // 2), size(draw, 0, s.kv_len // 2)
    return p.DilatedWindow(left, right, size(draw, 1, s.kv_len // 3))


@maker("block_local")
def block_local(draw, s):
    return p.BlockLocal(block_size(draw, s))


@maker("global_tokens")
def global_tokens(draw, s):
    return p.GlobalTokens(token_set(draw, s), queries=draw(st.booleans()), keys=draw(st.booleans()))


@maker("sinks")
def sinks(draw, s):
    return p.Sinks(size(draw, 0, s.kv_len + 2))


@maker("stride")
def stride(draw, s):
    n = size(draw, 1, s.kv_len + 2)
    near_the_end = n - 1 - number(draw, 0, min(n - 1, s.kv_len))
    return p.Stride(n, draw(st.sampled_from([number(draw, 0, n - 1), near_the_end])))


@maker("columns")
def columns(draw, s):
    period = size(draw, 1, s.kv_len + 2)
    start = number(draw, 0, period - 1)
    return p.Columns(period, start, number(draw, start + 1, period))


@maker("documents")
def documents(draw, s):
    def fitting(lengths):
        """Those that fit into the sequence; the longest first where they would look like cumulative lengths."""
        lengths = tuple(n for n, end in zip(lengths, itertools.accumulate(lengths), strict=True) if end <= s.kv_len)
        return tuple(reversed(lengths)) if list(lengths) == sorted(lengths) else lengths

    entry = st.lists(st.integers(0, max(1, s.kv_len // 2)), max_size=6).map(fitting)
    return p.Documents(draw(st.one_of(entry, st.tuples(*(entry for _ in range(s.batch))))))


@maker("prefix_lm")
def prefix_lm(draw, s):
    one = st.integers(0, s.kv_len + 2) | BEYOND
    return p.PrefixLM(draw(st.one_of(one, st.tuples(*(one for _ in range(s.batch))))))


@maker("vertical_slash")
def vertical_slash(draw, s):
    return p.VerticalSlash(positions(draw, s.kv_len + 2), positions(draw, s.kv_len + 2))


@maker("column_intervals")
def column_intervals(draw, s):
    shape = (*leading(draw, s, s.heads_q), s.kv_len)
    rng = np.random.default_rng(number(draw, 0, 2**32 - 1))
    bounds = rng.integers(-2, s.kv_len + 3, size=(draw(st.sampled_from([2, 4])), *shape))
    return p.ColumnIntervals(*bounds, causal=draw(st.booleans()))


@maker("mask")
def mask(draw, s):
    return p.Mask(flags(draw, (*leading(draw, s, s.heads_q), s.q_len, s.kv_len)))


@maker("block_layout")
def block_layout(draw, s):
    block = block_size(draw, s)
    blocks = -(-s.kv_len // block)
    return p.BlockLayout(flags(draw, (*leading(draw, s, s.heads_q), blocks, blocks)), block)


@maker("key_blocks")
def key_blocks(draw, s):
    block_q, block_kv = block_size(draw, s), block_size(draw, s)
    shape = (*leading(draw, s, s.heads_kv), -(-s.kv_len // block_q), number(draw, 0, 5))
    rng = np.random.default_rng(number(draw, 0, 2**32 - 1))
    return p.KeyBlocks(rng.integers(-1, -(-s.kv_len // block_kv), size=shape), block_q, block_kv)


@maker("per_head")
def per_head(draw, s):
    names = [name for name in ANY_LENGTHS if name != "per_head"]
    heads = draw(st.sampled_from([n for n in range(1, s.heads_q + 1) if s.heads_q % n == 0]))
    own = s._replace(heads_q=1, heads_kv=1)
    return p.PerHead(tuple(MAKERS[draw(st.sampled_from(names))](draw, own)[0] for _ in range(heads)))


# -- published families ----------------------------------------------------------------------------------------------


@maker("strided")
def strided(draw, s):
    return p.Strided(size(draw, 1, s.kv_len + 2))


@maker("fixed")
def fixed(draw, s):
    block = block_size(draw, s)
    return p.Fixed(block, number(draw, 1, block))


@maker("longformer")
def longformer(draw, s):
    tokens = token_set(draw, s)
    return p.Longformer(2 * size(draw, 1, s.kv_len // 2), size(draw, 1, s.kv_len // 4), tokens)


@maker("bigbird")
def bigbird(draw, s):
    return p.BigBird(
        size(draw, 1, max(2, s.kv_len // 4)), size(draw, 1, 5), size(draw, 0, 2), size(draw, 0, 4),
        seed=number(draw, 0, 2**64 - 1), causal=draw(st.booleans()),
    )  # fmt: skip


@maker("axial", fixes_lengths=True)
def axial(draw, s):
    shape, s = grid(draw, s)
    return p.Axial(shape, number(draw, -len(shape), len(shape) - 1)), s


@maker("windowed", fixes_lengths=True)
def windowed(draw, s):
    shape, s = grid(draw, s)
    window = [number(draw, 1, n) for n in shape]
    shift = [number(draw, 0, w - 1) for w in window]
    return p.Windowed(shape, per_axis(draw, window), per_axis(draw, shift)), s


@maker("neighborhood", fixes_lengths=True)
def neighborhood(draw, s):
    shape, s = grid(draw, s)
    dilation = [number(draw, 1, max(1, n // 3)) for n in shape]
    kernel = [number(draw, 1, n // d) for n, d in zip(shape, dilation, strict=True)]
    step = [number(draw, 1, w) for w in kernel]
    ahead = [draw(st.booleans()) for _ in shape]
    return p.Neighborhood(shape, *(per_axis(draw, each) for each in (kernel, dilation, step, ahead))), s
