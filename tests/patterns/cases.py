"""Random patterns and lengths: Hypothesis strategies of (pattern of one head, q_len, kv_len)."""

from __future__ import annotations

import math
from itertools import accumulate

import numpy as np
from hypothesis import strategies as st

from spattn import patterns as p

ds = p.deepspeed
LENGTHS = st.tuples(st.integers(0, 26), st.integers(0, 40), st.booleans())
FLAG = st.booleans()
DIRECTION = st.sampled_from(["bidirectional", "unidirectional"])
SEED = st.sampled_from([0, 1, 2**64 - 1])


def small(least: int, most: int):
    return st.integers(least, most)


def tokens():
    spaced = st.builds(lambda first, step: tuple(range(first, 45, step)), small(0, 12), small(2, 15))
    return st.one_of(small(0, 5), st.lists(small(0, 45), max_size=6).map(tuple), spaced)


def stride_and_offset():
    return small(1, 9).flatmap(lambda s: st.builds(p.Stride, st.just(s), small(0, s - 1)))


def columns():
    period_start = small(1, 9).flatmap(lambda n: st.tuples(st.just(n), small(0, n - 1)))
    return period_start.flatmap(lambda ps: st.builds(p.Columns, *map(st.just, ps), small(ps[1] + 1, ps[0])))


def documents(kv_len):
    """Documents that fit; the longest first where they would look like cumulative lengths."""
    def make(lengths):
        fitting = [n for n, end in zip(lengths, accumulate(lengths), strict=True) if end <= kv_len]
        return p.Documents(fitting[::-1] if fitting == sorted(fitting) else fitting)

    return st.lists(small(0, 15), max_size=5).map(make)


ANY_LENGTHS = {
    "full": st.just(p.Full()),
    "causal": st.just(p.Causal()),
    "sliding_window": st.builds(p.SlidingWindow, st.none() | small(0, 9), st.none() | small(0, 9)),
    "dilated_window": st.builds(p.DilatedWindow, small(0, 5), small(0, 5), small(1, 6)),
    "block_local": st.builds(p.BlockLocal, small(1, 12)),
    "global_tokens": st.builds(p.GlobalTokens, tokens(), FLAG, FLAG),
    "sinks": st.builds(p.Sinks, small(0, 6)),
    "stride": stride_and_offset(),
    "columns": columns(),
    "prefix_lm": st.builds(p.PrefixLM, small(0, 50)),
    "vertical_slash": st.builds(p.VerticalSlash, *(st.lists(small(0, 45), max_size=6).map(tuple) for _ in range(2))),
    "strided": st.builds(p.Strided, small(1, 12)),
    "fixed": small(1, 12).flatmap(lambda b: st.builds(p.Fixed, st.just(b), small(1, b))),
    "longformer": st.builds(p.Longformer, small(1, 5).map(lambda n: 2 * n), small(1, 4), tokens()),
    "bigbird": st.builds(
        p.BigBird, small(1, 9), small(1, 5), small(0, 2), small(0, 5), SEED, FLAG, head=small(0, 3)
    ),
}


@st.composite
def lengths(draw):
    q_len, kv_len, square = draw(LENGTHS)
    return (kv_len if square else q_len), kv_len


@st.composite
def of_arrays(draw, name):
    q_len, kv_len = draw(lengths())
    rng = np.random.default_rng(draw(small(0, 99)))
    block, block_q = draw(small(1, 9)), draw(small(1, 9))
    blocks, rows = -(-kv_len // block), -(-kv_len // block_q)
    share = draw(st.sampled_from([0, 0.1, 0.5, 1]))
    match name:
        case "mask":
            pattern = p.Mask(rng.random((q_len, kv_len)) < share)
        case "block_layout":
            pattern = p.BlockLayout(rng.random((blocks, blocks)) < share, block)
        case "key_blocks":
            pattern = p.KeyBlocks(rng.integers(-1, blocks, (rows, draw(small(0, 4)))), block_q, block)
        case "column_intervals":
            bounds = rng.integers(-2, kv_len + 3, (draw(st.sampled_from([2, 4])), kv_len))
            pattern = p.ColumnIntervals(*bounds, causal=draw(FLAG))
    return pattern, q_len, kv_len


@st.composite
def of_grids(draw, name):
    axes = draw(small(1, 3))
    grid = tuple(draw(small(1, {1: 36, 2: 7, 3: 4}[axes])) for _ in range(axes))
    tokens = math.prod(grid)
    q_len = draw(st.one_of(st.just(tokens), small(0, tokens + 3)))
    match name:
        case "axial":
            pattern = p.Axial(grid, draw(small(-axes, axes - 1)))
        case "windowed":
            window = tuple(draw(small(1, n)) for n in grid)
            pattern = p.Windowed(grid, window, tuple(draw(small(0, w - 1)) for w in window))
        case "neighborhood":
            kernel = tuple(draw(small(1, n)) for n in grid)
            dilation = tuple(draw(small(1, n // w)) for n, w in zip(grid, kernel, strict=True))
            stride = tuple(draw(small(1, w)) for w in kernel)
            pattern = p.Neighborhood(grid, kernel, dilation, stride, tuple(draw(FLAG) for _ in grid))
    return pattern, q_len, tokens


@st.composite
def ds_fixed(draw):
    width, times = draw(small(1, 3)), draw(small(1, 3))
    attention = draw(DIRECTION)
    horizontal = attention == "bidirectional" and draw(FLAG)
    versions = draw(small(1, times))
    return 3, ds.Fixed(3, width * times, width, attention, horizontal, versions, head=draw(small(0, 4)))


@st.composite
def ds_global(draw, make):
    first = draw(st.lists(small(0, 9), max_size=3))
    ends = [f + draw(small(1, 3)) for f in first] if draw(FLAG) else None
    ranges = {"global_block_indices": first, "global_block_end_indices": ends}
    return 3, make(draw, ranges | {"attention": draw(DIRECTION)})


def variable(draw, common):
    windows = draw(st.lists(small(1, 4), min_size=1, max_size=3))
    return ds.Variable(
        3, draw(small(0, 3)), windows, horizontal_global_attention=draw(FLAG), seed=draw(SEED), head=draw(small(0, 3)),
        **common,
    )


DEEPSPEED = {
    "deepspeed_dense": st.just((3, ds.Dense(3))),
    "deepspeed_fixed": ds_fixed(),
    "deepspeed_variable": ds_global(variable),
    "deepspeed_bigbird": st.builds(
        lambda *a, head: (3, ds.BigBird(3, *a, head=head)), small(0, 4), small(1, 5), small(0, 2), DIRECTION, SEED,
        head=small(0, 3),
    ),
    "deepspeed_bslongformer": ds_global(lambda draw, common: ds.BSLongformer(3, draw(small(1, 5)), **common)),
    "deepspeed_local_sliding_window": st.builds(
        lambda *a: (3, ds.LocalSlidingWindow(3, *a)), small(1, 5), DIRECTION
    ),
}


@st.composite
def of_deepspeed(draw, name):
    block, pattern = draw(DEEPSPEED[name])
    blocks = draw(small(0, 11))
    if isinstance(pattern, ds.Fixed):  # its global group must fit into the sequence
        blocks = max(blocks, pattern.num_global_blocks)
    kv_len = blocks * block
    return pattern, draw(st.one_of(st.just(kv_len), small(0, kv_len + 4))), kv_len


def of(name: str):
    """Strategy of (pattern, q_len, kv_len) for a registered pattern of one head."""
    if name == "documents":
        return lengths().flatmap(lambda both: st.tuples(documents(both[1]), *map(st.just, both)))
    if name in ANY_LENGTHS:
        return st.tuples(ANY_LENGTHS[name], lengths()).map(lambda x: (x[0], *x[1]))
    if name in DEEPSPEED:
        return of_deepspeed(name)
    return of_grids(name) if name in ("axial", "windowed", "neighborhood") else of_arrays(name)


NAMES = sorted([
    *ANY_LENGTHS, *DEEPSPEED, "documents", "axial", "windowed", "neighborhood", "mask", "block_layout", "key_blocks",
    "column_intervals",
])  # fmt: skip
