"""Random parameters for DeepSpeed's layouts; see :mod:`._patterns`."""

from __future__ import annotations

from hypothesis import strategies as st

from ..patterns import deepspeed
from ._patterns import Sizes, maker, number, positions, size

__all__: list[str] = []


def whole_blocks(draw, s: Sizes) -> tuple[int, int, Sizes]:
    """Tokens of a block, how many blocks, and sizes of so many whole blocks."""
    block = number(draw, 1, min(24, s.kv_len))
    blocks = number(draw, 1, s.kv_len // block)
    q_len = draw(st.one_of(st.just(block * blocks), st.integers(1, block * blocks)))
    return block, blocks, s._replace(q_len=q_len, kv_len=block * blocks)


def direction(draw) -> str:
    return draw(st.sampled_from(["bidirectional", "unidirectional"]))


def block_ranges(draw, blocks: int) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Global block indices and, half the time, the ends of disjoint ranges that start there."""
    if draw(st.booleans()):
        return tuple(sorted(set(positions(draw, blocks + 1, 3)))), None
    cuts = sorted(set(positions(draw, blocks + 2, 4)))
    return tuple(cuts[0 : len(cuts) // 2 * 2 : 2]), tuple(cuts[1 : len(cuts) // 2 * 2 : 2])


@maker("deepspeed_dense", fixes_lengths=True)
def deepspeed_dense(draw, s):
    block, _, s = whole_blocks(draw, s)
    return deepspeed.Dense(block), s


@maker("deepspeed_fixed", fixes_lengths=True)
def deepspeed_fixed(draw, s):
    block, _, s = whole_blocks(draw, s)
    width, times = size(draw, 1, 3), size(draw, 1, 4)
    attention = direction(draw)
    horizontal = attention == "bidirectional" and draw(st.booleans())
    return deepspeed.Fixed(block, width * times, width, attention, horizontal, number(draw, 1, times)), s


@maker("deepspeed_variable", fixes_lengths=True)
def deepspeed_variable(draw, s):
    block, blocks, s = whole_blocks(draw, s)
    windows = tuple(size(draw, 1, 5) for _ in range(number(draw, 1, 4)))
    starts, ends = block_ranges(draw, blocks)
    return deepspeed.Variable(
        block, size(draw, 0, min(3, blocks)), windows, starts, ends, direction(draw), draw(st.booleans()),
        number(draw, 0, 2**64 - 1),
    ), s  # fmt: skip


@maker("deepspeed_bigbird", fixes_lengths=True)
def deepspeed_bigbird(draw, s):
    block, blocks, s = whole_blocks(draw, s)
    return deepspeed.BigBird(
        block, size(draw, 0, min(3, blocks)), size(draw, 1, 5), size(draw, 0, 2), direction(draw),
        number(draw, 0, 2**64 - 1),
    ), s  # fmt: skip


@maker("deepspeed_bslongformer", fixes_lengths=True)
def deepspeed_bslongformer(draw, s):
    block, blocks, s = whole_blocks(draw, s)
    return deepspeed.BSLongformer(block, size(draw, 1, 5), *block_ranges(draw, blocks), direction(draw)), s


@maker("deepspeed_local_sliding_window", fixes_lengths=True)
def deepspeed_local_sliding_window(draw, s):
    block, _, s = whole_blocks(draw, s)
    return deepspeed.LocalSlidingWindow(block, size(draw, 1, 7), direction(draw)), s
