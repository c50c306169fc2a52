"""DeepSpeed's sparsity configurations: block layouts for a given sequence length.

Each function takes the parameters of the DeepSpeed class that its docstring names. The sequence length must be a
multiple of `block`. Every pair in an allowed block is allowed, even above the diagonal if
``attention="unidirectional"``: DeepSpeed applies the element-wise causal mask separately; here, add ``& Causal()``. If
q_len > kv_len, queries before position 0 have no row in the layout and attend to no key, not even to global blocks.
Random blocks depend on `seed` and on the head, as in :class:`spattn.patterns.BigBird`.

References
----------
DeepSpeed, ``deepspeed/ops/sparse_attention/sparsity_config.py``. https://www.deepspeed.ai/tutorials/sparse-attention
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Literal, NoReturn, ParamSpec

import numpy as np

from .._util.imports import whole_imports
from .base.check import Count, Positive, Word, reach
from .base.class_registry import pattern_class
from .base.pattern import Pattern
from .base.recipe import recipe
from .papers.layouts import LengthLayout, check_ranges, global_ranges, lower, random_layout, window_layout

__all__ = ["bigbird", "bslongformer", "dense", "fixed", "local_sliding_window", "variable"]

_P = ParamSpec("_P")
Direction = Literal["bidirectional", "unidirectional"]
_DIRECTIONS: tuple[Direction, ...] = ("bidirectional", "unidirectional")


def _configuration(
    name: str, example: tuple[Any, ...], parameters: Callable[[Any, int], tuple[Any, ...]]
) -> Callable[[Callable[_P, Pattern]], Callable[_P, Pattern]]:
    """Register a recipe; ``parameters(draw, blocks)`` draws the random arguments that follow `block`."""

    def random(draw: Any, sizes: Any) -> tuple[tuple[Any, ...], Any]:
        block = draw.integer(1, min(24, sizes.kv_len))
        blocks = draw.integer(1, sizes.kv_len // block)
        return (block, *parameters(draw, blocks)), draw.fitted(sizes, block * blocks)

    registered = f"deepspeed_{name}"
    make = recipe(registered, (example, 64), ((), 4096), random=random, fixes_lengths=True)

    def decorate(function: Callable[_P, Pattern]) -> Callable[_P, Pattern]:
        made = make(function)
        cls: Any = pattern_class(registered)
        call = cls.__repr__
        cls.__repr__ = lambda self: f"deepspeed.{call(self)}"
        return made

    return decorate


def _random_ranges(draw: Any, blocks: int) -> tuple[Any, Any]:
    """Draw indices of global blocks, or starts and ends of disjoint ranges of them."""
    if draw.flag():
        return tuple(sorted(set(draw.positions(blocks + 1, 3)))), None
    cuts = sorted(set(draw.positions(blocks + 2, 4)))
    return tuple(cuts[0 : len(cuts) // 2 * 2 : 2]), tuple(cuts[1 : len(cuts) // 2 * 2 : 2])


def _random_head(draw: Any) -> Any:
    return draw.choice([None, draw.integer(0, 9)])


def _random_fixed(draw: Any, blocks: int) -> tuple[Any, ...]:
    width, times = draw.size(1, 3), draw.size(1, 4)
    attention = draw.choice(_DIRECTIONS)
    horizontal = attention == "bidirectional" and draw.flag()
    return width * times, width, attention, horizontal, draw.integer(1, times), _random_head(draw)


@_configuration("dense", (8,), lambda draw, blocks: ())
def dense(block: Positive = 16) -> Pattern:
    """Allow all blocks (``DenseSparsityConfig``).

    Parameters
    ----------
    block : int, optional
        Tokens per block.

    Returns
    -------
    Pattern
    """
    return LengthLayout(block, lambda n, head: np.ones((n, n), dtype=bool))


@_configuration("fixed", (4, 4, 1, "unidirectional"), _random_fixed)
def fixed(
    block: Positive = 16,
    num_local_blocks: Positive = 4,
    num_global_blocks: Positive = 1,
    attention: Direction = "bidirectional",
    horizontal_global_attention: bool = False,
    num_different_global_patterns: Positive = 1,
    head: Word | None = None,
) -> Pattern:
    """Allow local windows, and the last blocks of each window as global columns (``FixedSparsityConfig``).

    Parameters
    ----------
    block : int, optional
        Tokens per block.
    num_local_blocks, num_global_blocks : int, optional
        Blocks per local window, and how many of them are global; `num_global_blocks` must divide `num_local_blocks`.
    attention : {"bidirectional", "unidirectional"}, optional
    horizontal_global_attention : bool, optional
        Whether global blocks also attend to every block; bidirectional only.
    num_different_global_patterns : int, optional
        Head h uses the ``h % num_different_global_patterns``-th group of `num_global_blocks` blocks as global blocks,
        counted from 0 at the end of the window.
    head : int or None, optional
        Use the global blocks of this head for all heads.

    Returns
    -------
    Pattern
    """
    size, width, versions = num_local_blocks, num_global_blocks, num_different_global_patterns
    one_way = attention == "unidirectional"
    if size % width:
        raise ValueError(f"num_global_blocks: expected a divisor of {size} (num_local_blocks), got {width}")
    if horizontal_global_attention and one_way:
        raise ValueError("horizontal_global_attention: expected False with unidirectional attention, got True")
    if versions > size // width:
        raise ValueError(f"num_different_global_patterns: expected at most {size // width}, got {versions}")

    def layout(n: int, head: int) -> np.ndarray:
        r, c = np.ogrid[:n, :n]
        found = lower(r // reach(size) == c // reach(size), attention)
        first = size - (1 + head % versions) * width
        complete = n - n % size
        starts = list(range(first, complete, size))
        if n % size:
            starts.append(max(min(complete + first, n - width), 0))
        for start in starts:
            found[start if one_way else 0 :, start : start + width] = True
            if horizontal_global_attention:
                found[start : start + width] = True
        return found

    return LengthLayout(block, layout, versions, head)


def _random_variable(draw: Any, blocks: int) -> tuple[Any, ...]:
    windows = tuple(draw.size(1, 5) for _ in range(draw.integer(1, 4)))
    ranges, flags = _random_ranges(draw, blocks), (draw.choice(_DIRECTIONS), draw.flag())
    return draw.size(0, min(3, blocks)), windows, *ranges, *flags, draw.integer(0, 99), _random_head(draw)


@_configuration("variable", (4, 0, (2, 4), (0, 7)), _random_variable)
def variable(
    block: Positive = 16,
    num_random_blocks: Count = 0,
    local_window_blocks: tuple[Positive, ...] = (4,),
    global_block_indices: tuple[Count, ...] = (0,),
    global_block_end_indices: tuple[Count, ...] | None = None,
    attention: Direction = "bidirectional",
    horizontal_global_attention: bool = False,
    seed: Word = 0,
    head: Word | None = None,
) -> Pattern:
    """Allow local windows of given sizes, selected global blocks and random blocks (``VariableSparsityConfig``).

    Parameters
    ----------
    block : int, optional
        Tokens per block.
    num_random_blocks : int, optional
        Random blocks per block row, drawn from all blocks.
    local_window_blocks : tuple of int, optional
        Blocks per local window, in order; the last size repeats to the end of the sequence.
    global_block_indices, global_block_end_indices : tuple of int, optional
        Indices of global blocks, or starts and exclusive ends of ranges of them. Blocks past the end of the sequence
        are ignored.
    attention : {"bidirectional", "unidirectional"}, optional
    horizontal_global_attention : bool, optional
        Whether global blocks also attend to every block.
    seed, head : int, optional
        Key of the generator, and the head whose random blocks all heads use; by default, each head draws its own.

    Returns
    -------
    Pattern
    """
    if not local_window_blocks:
        raise ValueError("local_window_blocks: expected at least one window, got ()")
    check_ranges(global_block_indices, global_block_end_indices)

    def layout(n: int, head: int) -> np.ndarray:
        ends = np.array([reach(end) for end in itertools.accumulate(local_window_blocks)])
        number = np.arange(n)
        past = len(ends) + (number - ends[-1]) // reach(local_window_blocks[-1])
        window = np.where(number < ends[-1], np.searchsorted(ends, number, side="right"), past)
        found = lower(window[:, None] == window, attention)
        for start, end in global_ranges(global_block_indices, global_block_end_indices):
            found[start if attention == "unidirectional" else 0 :, start:end] = True
            if horizontal_global_attention:
                found[start:end] = True
        return found | random_layout(seed, head, np.full(n, n), num_random_blocks) if num_random_blocks else found

    return LengthLayout(block, layout, 0 if num_random_blocks else 1, head)


def _random_bigbird(draw: Any, blocks: int) -> tuple[Any, ...]:
    numbers = draw.size(0, min(3, blocks)), draw.size(1, 5), draw.size(0, 2)
    return *numbers, draw.choice(_DIRECTIONS), draw.integer(0, 99), _random_head(draw)


@_configuration("bigbird", (4,), _random_bigbird)
def bigbird(
    block: Positive = 16,
    num_random_blocks: Count = 1,
    num_sliding_window_blocks: Positive = 3,
    num_global_blocks: Count = 1,
    attention: Direction = "bidirectional",
    seed: Word = 0,
    head: Word | None = None,
) -> Pattern:
    """Allow window, global and random blocks (``BigBirdSparsityConfig``).

    Parameters
    ----------
    block : int, optional
        Tokens per block.
    num_random_blocks : int, optional
        Random blocks per block row, drawn from all blocks or, if unidirectional, from the row's own and earlier blocks.
    num_sliding_window_blocks : int, optional
        Blocks of the window, including the query's own.
    num_global_blocks : int, optional
        Leading block rows and columns that are global.
    attention : {"bidirectional", "unidirectional"}, optional
    seed, head : int, optional
        Key of the generator, and the head whose random blocks all heads use; by default, each head draws its own.

    Returns
    -------
    Pattern
    """

    def layout(n: int, head: int) -> np.ndarray:
        found = window_layout(n, num_sliding_window_blocks // 2)
        found[:num_global_blocks] = True
        found[:, :num_global_blocks] = True
        if num_random_blocks:
            candidates = np.arange(1, n + 1) if attention == "unidirectional" else np.full(n, n)
            found |= random_layout(seed, head, candidates, num_random_blocks)
        return lower(found, attention)

    return LengthLayout(block, layout, 0 if num_random_blocks else 1, head)


@_configuration(
    "bslongformer",
    (4, 3, (0, 9)),
    lambda draw, blocks: (draw.size(1, 5), *_random_ranges(draw, blocks), draw.choice(_DIRECTIONS)),
)
def bslongformer(
    block: Positive = 16,
    num_sliding_window_blocks: Positive = 3,
    global_block_indices: tuple[Count, ...] = (0,),
    global_block_end_indices: tuple[Count, ...] | None = None,
    attention: Direction = "bidirectional",
) -> Pattern:
    """Allow a window of blocks and selected global blocks (``BSLongformerSparsityConfig``).

    Parameters
    ----------
    block : int, optional
        Tokens per block.
    num_sliding_window_blocks : int, optional
        Blocks of the window, including the query's own.
    global_block_indices, global_block_end_indices : tuple of int, optional
        Indices of global blocks, or starts and exclusive ends of ranges of them.
    attention : {"bidirectional", "unidirectional"}, optional

    Returns
    -------
    Pattern
    """
    check_ranges(global_block_indices, global_block_end_indices)

    def layout(n: int, head: int) -> np.ndarray:
        found = window_layout(n, num_sliding_window_blocks // 2)
        for start, end in global_ranges(global_block_indices, global_block_end_indices):
            found[start:end] = True
            found[:, start:end] = True
        return lower(found, attention)

    return LengthLayout(block, layout)


@_configuration("local_sliding_window", (4,), lambda draw, blocks: (draw.size(1, 5), draw.choice(_DIRECTIONS)))
def local_sliding_window(
    block: Positive = 16, num_sliding_window_blocks: Positive = 3, attention: Direction = "unidirectional"
) -> Pattern:
    """Allow a window of blocks (``LocalSlidingWindowSparsityConfig``).

    Parameters
    ----------
    block : int, optional
        Tokens per block.
    num_sliding_window_blocks : int, optional
        Blocks of the window, including the query's own; ``num_sliding_window_blocks // 2`` on either side.
    attention : {"bidirectional", "unidirectional"}, optional
        Unidirectional drops the blocks after the query's own.

    Returns
    -------
    Pattern
    """
    return LengthLayout(block, lambda n, head: lower(window_layout(n, num_sliding_window_blocks // 2), attention))


def __getattr__(name: str) -> NoReturn:
    with whole_imports:
        from .._util.renamed import unknown

    raise unknown(__name__, name)
