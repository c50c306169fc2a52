"""The pairs that the patterns of each page allow, written in NumPy from their definitions and without spattn.

A pattern is found by the expression that builds it, as ``ast.unparse`` writes it, or by the command that draws it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Asked(NamedTuple):
    """Which pairs are asked for: `q` (rows, 1) and `k` (keys,) are positions, `page` is the page's namespace."""

    b: int
    h: int
    q: np.ndarray
    k: np.ndarray
    page: dict[str, Any]


class Pairs(NamedTuple):
    """The pairs of one pattern at these lengths, of each batch entry and head that it tells apart."""

    lengths: tuple[int, int]
    allowed: Callable[[Asked], np.ndarray]
    batch: int = 1
    heads: int = 1


def square(tokens, allowed, **sizes):
    return Pairs((tokens, tokens), allowed, **sizes)


def both(*masks):
    return lambda at: np.logical_and.reduce(np.broadcast_arrays(*(mask(at) for mask in masks)))


def either(*masks):
    return lambda at: np.logical_or.reduce(np.broadcast_arrays(*(mask(at) for mask in masks)))


def causal(at):
    return at.k <= at.q


def keys_before(count):
    return lambda at: at.k < count


def window(left, right):
    """`left` keys before the query and `right` behind it."""
    return lambda at: (at.k >= at.q - left) & (at.k <= at.q + right)


def dilated(each_side, dilation):
    """Every n-th key."""
    return lambda at: (abs(at.q - at.k) <= each_side * dilation) & ((at.q - at.k) % dilation == 0)


def strided(stride):
    """The last keys and every n-th before them."""
    return lambda at: (at.k <= at.q) & ((at.q - at.k < stride) | ((at.q - at.k) % stride == 0))


def global_tokens(*tokens):
    return lambda at: np.isin(at.q, tokens) | np.isin(at.k, tokens)


def longformer(width, tokens, dilation=1):
    """A window of both sides' width and global tokens."""
    return either(dilated(width // 2, dilation), global_tokens(*tokens))


def streaming(sinks, keys):
    """Sinks, and a window of so many keys, the query's own included."""
    return both(causal, either(keys_before(sinks), window(keys - 1, 0)))


def documents(*lengths):
    """Tokens of one document; tokens behind the last document belong to none."""

    def allowed(at):
        document = [np.searchsorted(np.cumsum(lengths), tokens, side="right") for tokens in (at.q, at.k)]
        return (document[0] == document[1]) & (document[0] < len(lengths))

    return allowed


def neighborhood(grid, kernel, causal=None, stride=(1, 1, 1)):
    """The nearest `kernel` coordinates on each axis: shifted at the edges, or the last ones where an axis is causal.

    `stride` queries of an axis share the neighborhood of the one in their middle.
    """

    def allowed(at):
        found = True
        for axis, (length, width) in enumerate(zip(grid, kernel, strict=True)):
            x, y = (np.unravel_index(tokens, grid)[axis] for tokens in (at.q, at.k))
            if causal and causal[axis]:
                found &= (y <= x) & (y > x - width)
            else:
                middle = np.minimum(x - x % stride[axis] + stride[axis] // 2, length - 1)
                first = np.clip(middle - width // 2, 0, length - width)
                found &= (first <= y) & (y < first + width)
        return found

    return allowed


def grid_window(grid, each_side):
    """Coordinates at most so far away on each axis, cut off at the edges."""

    def allowed(at):
        (y, x), (other_y, other_x) = (np.divmod(tokens, grid[1]) for tokens in (at.q, at.k))
        return (abs(y - other_y) <= each_side) & (abs(x - other_x) <= each_side)

    return allowed


def swin(grid, width, shift=0):
    """Windows that do not overlap; those that the shift wraps around an edge are cut there."""

    def allowed(at):
        found = True
        for axis, length in enumerate(grid):
            x, y = (np.unravel_index(tokens, grid)[axis] for tokens in (at.q, at.k))
            found &= ((x - shift) % length // width == (y - shift) % length // width) & ((x < shift) == (y < shift))
        return found

    return allowed


def cross(side):
    """The row and the column of a pixel."""
    return lambda at: (at.q // side == at.k // side) | (at.q % side == at.k % side)


def last_blocks(block, each):
    """The query's own group of `each` blocks, and the last block of every group."""
    return lambda at: (at.q // (block * each) == at.k // (block * each)) | (at.k // block % each == each - 1)


def behind_prefix(count, grid, kernel):
    """A neighbourhood of an image behind tokens that attend to everything and that everything attends to."""

    def allowed(at):
        in_image = at._replace(q=np.maximum(at.q - count, 0), k=np.maximum(at.k - count, 0))
        return (at.q < count) | (at.k < count) | neighborhood(grid, kernel)(in_image)

    return allowed


def powers_of_two(count):
    return lambda at: np.isin(at.q - at.k, [0, *(2**n for n in range(count))])


def listed(rows, keys, first):
    """Listed pairs of rows, of which the first has the position `first`."""
    return lambda at: np.logical_or.reduce(
        [(at.q - first == row) & (at.k == key) for row, key in zip(rows, keys, strict=True)]
    )


def left_padded(*padding):
    """Streaming attention of sequences that start behind the padding."""

    def allowed(at):
        start = padding[at.b]
        return (start <= at.k) & (at.k <= at.q) & ((at.k < start + 4) | (at.q - at.k <= 255))

    return allowed


def best_blocks(at):
    """The query's own block of 64 keys and the three earlier ones that fit best, but no later key."""
    q_means, k_means = (at.page[name][0, at.h].numpy().reshape(16, 64, 64).mean(1) for name in "qk")
    chosen = np.eye(16, dtype=bool)
    for block, scores in enumerate(q_means @ k_means.T):
        chosen[block, np.argsort(-scores[:block])[:3]] = True
    return (at.k <= at.q) & chosen[at.q // 64, at.k // 64]


def owners(at):
    owner = at.page["owner"].numpy()
    return owner[at.q] == owner[at.k]


def band_with_noise(at):
    """Neighbours, without the pair (70, 70) and with (70, 9)."""
    return (abs(at.q - at.k) <= 1) & ((at.q != 70) | (at.k != 70)) | ((at.q == 70) & (at.k == 9))


STREAMING = "Causal() & (Sinks(4) | SlidingWindow(255, 0))"

ALLOWED = {
    "README.md": {
        STREAMING: square(1000, streaming(4, 256)),
        "spattn draw 'causal & (sinks(4) | sliding_window(15, 0))'": square(64, streaming(4, 16)),
    },
    "concepts.rst": {
        "SlidingWindow(2, 0)": square(50, window(2, 0)),
        "strided(128)": square(1000, strided(128)),
        "SlidingWindow(256)": square(1000, window(256, 256)),
        "DilatedWindow(64, dilation=8)": square(1024, dilated(64, 8)),
        "Mask(dilated.index_set(1024, 1024).to_dense())": square(1024, dilated(64, 8)),
    },
    "contract.rst": {
        "spattn.patterns.interop.from_pairs(*pairs, 4, 100)": Pairs(
            (4, 100), listed([0, 0, 1, 2, 3], [40, 7, 40, 7, 90], first=96)
        ),
        "spattn.patterns.Causal()": square(50, causal),
    },
    "design.rst": {
        "spattn.patterns.strided(128)": square(1000, strided(128)),
        "spattn.patterns.SlidingWindow(256)": square(1000, window(256, 256)),
    },
    "index.rst": {"spattn.patterns.SlidingWindow(256)": square(1000, window(256, 256))},
    "layouts.rst": {
        "Neighborhood((14, 14), 7)": square(196, neighborhood((14, 14), (7, 7))),
        "Documents.from_cu_seqlens(cu_seqlens) & Causal()": square(10, both(documents(3, 0, 7), causal)),
        "from_flash_attention(causal=True, cu_seqlens_q=[0, 1, 2], cu_seqlens_k=[0, 4, 10])": Pairs(
            (2, 10), lambda at: np.where(at.q == 8, at.k < 4, at.k >= 4)
        ),
    },
    "numerics.rst": {
        "SlidingWindow(16)": square(100, window(16, 16)),
        "SlidingWindow(4, 0)": square(64, window(4, 0)),
    },
    "price.rst": {"spattn.patterns.windowed((56, 56), 7)": square(56 * 56, swin((56, 56), 7))},
    "slow.rst": {
        "spattn.patterns.SlidingWindow(64)": square(1024, window(64, 64)),
        "spattn.patterns.interop.from_pairs(row, key, 1024, 1024)": square(1024, dilated(8, 64)),
        "spattn.patterns.discover(listed)": square(1024, dilated(8, 64)),
    },
    "guarantees.rst": {"SlidingWindow(64, 0)": square(500, window(64, 0))},
    "limits.rst": {"SlidingWindow(64, 0)": square(1000, window(64, 0))},
    "verify.rst": {
        "SlidingWindow(3, 0)": square(16, window(3, 0)),
        "SlidingWindow(4, 0)": square(16, window(4, 0)),
        "Causal()": square(9, causal),
    },
    "dropout.rst": {"SlidingWindow(16, 0)": square(200, window(16, 0))},
    "scores.rst": {
        "SlidingWindow(16, 0)": square(200, window(16, 0)),
        "SlidingWindow(16)": square(200, window(16, 16)),
    },
    "quickstart.rst": {
        "SlidingWindow(128)": square(1000, window(128, 128)),
        STREAMING: square(1000, streaming(4, 256)),
        "PerBatch([behind(tokens) for tokens in (0, 30)])": square(1000, left_padded(0, 30), batch=2),
        "spattn.patterns.from_json(text)": square(1000, streaming(4, 256)),
        "SlidingWindow(2, 0)": square(6, window(2, 0)),
        "spattn.patterns.DilatedWindow(256, dilation=4)": square(2048, dilated(256, 4)),
        "SlidingWindow(8)": square(50, window(8, 8)),
        "spattn draw sliding_window --param left=8 -o window.png": square(64, window(8, 8)),
    },
    "bias_and_sinks.rst": {
        "SlidingWindow(15, 0)": square(64, window(15, 0)),
    },
    "character_model.rst": {
        "Causal()": square(1024, causal),
        "strided(32)": square(1024, strided(32)),
        "SlidingWindow(47, 0)": square(1024, window(47, 0)),
    },
    "dyck.rst": {
        "RowIntervals(key, key + 1)": square(4, lambda at: at.k == np.array([1, 0, 3, 2])[at.q]),
    },
    "from_flex_attention.rst": {
        "from_mask_mod(causal)": square(256, causal),
        "from_block_mask(block_mask)": square(256, causal),
        "patterns.Causal()": square(256, causal),
        "patterns.SlidingWindow(32, 0)": square(256, window(32, 0)),
        "patterns.Causal() & (patterns.Sinks(4) | patterns.SlidingWindow(32, 0))": square(256, streaming(4, 33)),
        "patterns.prefix_lm(50)": square(256, either(keys_before(50), causal)),
        "patterns.DilatedWindow(60 // 4, dilation=4)": square(256, dilated(15, 4)),
        "from_mask_mod(dilated)": square(256, dilated(15, 4)),
        "patterns.Neighborhood((16, 16), 5)": square(256, neighborhood((16, 16), (5, 5))),
        "patterns.Causal() & patterns.Documents(lengths)": square(256, both(causal, documents(100, 30, 126))),
        "patterns.Causal() & patterns.Documents((lengths, (56, 200)))": square(
            256, both(causal, lambda at: documents(*[(100, 30, 126), (56, 200)][at.b])(at)), batch=2
        ),
        "from_mask_mod(documents(owner))": square(256, owners),
        "from_mask_mod(lambda b, h, q_idx, kv_idx: torch.gcd(q_idx, kv_idx) == 1)": square(
            256, lambda at: np.gcd(at.q, at.k) == 1
        ),
        "patterns.Clusters(bucket)": square(256, lambda at: (at.q - at.k) % 8 == 0),
        "patterns.Causal() & patterns.KeyPadding.from_lengths((256, 190), 256)": square(
            256, both(causal, lambda at: at.k < (256, 190)[at.b]), batch=2
        ),
        "patterns.PerHead((patterns.SlidingWindow(8, 0), local, local, patterns.Causal()))": square(
            256, lambda at: window((8, 32, 32, 256)[at.h], 0)(at), heads=4
        ),
        "from_mask_mod(by_head)": square(256, lambda at: window((8, 32, 32, 256)[at.h], 0)(at), heads=4),
        "patterns.QueriesAt(patterns.Causal(), 0)": Pairs((10, 256), lambda at: at.k <= at.q - 246),
        "patterns.Causal() & patterns.KeyPadding(kept)": square(
            256, both(causal, lambda at: at.page["kept"].numpy()[at.k])
        ),
        "from_mask_mod(window)": square(256, window(32, 0)),
        "patterns.Causal() - patterns.Sinks(10)": square(256, lambda at: (at.k <= at.q) & (at.k >= 10)),
    },
    "generation.rst": {
        STREAMING: square(1000, streaming(4, 256)),
        "Sinks(4) | SlidingWindow(15, 0)": square(150, either(keys_before(4), window(15, 0))),
    },
    "images.rst": {
        "Neighborhood((64, 64), 13)": square(64**2, neighborhood((64, 64), (13, 13))),
        "Neighborhood((128, 128), 13)": square(128**2, neighborhood((128, 128), (13, 13))),
        "Neighborhood((128, 128), 33)": square(128**2, neighborhood((128, 128), (33, 33))),
        "Neighborhood((8, 16, 16), (3, 7, 7), causal=(True, False, False))": square(
            8 * 16 * 16, neighborhood((8, 16, 16), (3, 7, 7), (True, False, False))
        ),
        "Prefix(Neighborhood((14, 14), 7), 1)": square(1 + 14**2, behind_prefix(1, (14, 14), (7, 7))),
        "Prefix(Neighborhood((128, 128), 13), 5)": square(5 + 128**2, behind_prefix(5, (128, 128), (13, 13))),
        "windowed((64, 64), 8, shift=4)": square(64**2, swin((64, 64), 8, 4)),
        "axial((64, 64), 0) | axial((64, 64), 1)": square(64**2, cross(64)),
    },
    "jax.rst": {
        "SlidingWindow(128, 0)": square(1000, window(128, 0)),
        "SlidingWindow(16, 0)": square(100, window(16, 0)),
        "SlidingWindow(64, 0)": square(1000, window(64, 0)),
    },
    "many_gpus.rst": {
        STREAMING: square(4096, streaming(4, 256)),
        "SlidingWindow(256, 0)": square(65536, window(256, 0)),
    },
    "long_encoder.rst": {
        "Documents((512,) * 31 + (128,))": square(16_000, documents(*[512] * 31, 128)),
    },
    "long_documents.rst": {
        "longformer(512, global_tokens=64)": square(2048, longformer(512, range(64))),
        "spattn.patterns.PerBatch([pattern, longformer(512, global_tokens=(0, 300, 1200))])": square(
            2048, lambda at: longformer(512, [range(64), (0, 300, 1200)][at.b])(at), batch=2
        ),
        "spattn.patterns.PerHead([SlidingWindow(64), SlidingWindow(256), pattern, pattern])": square(
            2048,
            lambda at: [window(64, 64), window(256, 256), *[longformer(512, range(64))] * 2][at.h](at),
            heads=4,
        ),
        "longformer(512, dilation=4, global_tokens=64)": square(2048, longformer(512, range(64), dilation=4)),
        "Causal() & (Sinks(4) | SlidingWindow(1023, 0))": square(2048, streaming(4, 1024)),
        "spattn.patterns.a_shape(4, 1023)": square(2048, streaming(4, 1024)),
    },
    "own_masks.rst": {
        "patterns.discover(mask)": square(2048, dilated(64, 4)),
        "patterns.discover((j <= i) & ((i // 64 == j // 64) | (j % 64 >= 56)))": square(
            2048, both(causal, lambda at: (at.q // 64 == at.k // 64) | (at.k % 64 >= 56))
        ),
        "patterns.discover((abs(i - j) <= 64) | (i < 4) | (j < 4))": square(
            2048, either(window(64, 64), global_tokens(0, 1, 2, 3))
        ),
        "patterns.discover(near, grid=(32, 32))": square(32**2, grid_window((32, 32), 4)),
        "patterns.discover(band)": square(100000, band_with_noise),
    },
    "packed_documents.rst": {
        "Causal() & Documents(lengths)": square(2048, both(causal, documents(700, 120, 1100, 90))),
        "Documents.from_cu_seqlens(cu_seqlens)": square(2048, documents(700, 120, 1100, 90)),
        "Documents(lengths)": square(2048, documents(700, 120, 1100, 90)),
        "Causal() & Documents.from_cu_seqlens(cu_seqlens)": square(2010, both(causal, documents(700, 120, 1100, 90))),
        "Causal() & Documents(((700, 1348), (2048,)))": square(
            2048, both(causal, lambda at: documents(*[(700, 1348), (2048,)][at.b])(at)), batch=2
        ),
        "Causal()": square(2048, causal),
        "Documents(lengths) & SlidingWindow(255, 0)": square(2048, both(documents(700, 120, 1100, 90), window(255, 0))),
        "Causal() & KeyPadding.from_lengths((700, 120), 1024)": square(
            1024, both(causal, lambda at: at.k < (700, 120)[at.b]), batch=2
        ),
        "spattn.patterns.shared_prefix(500, (200, 300, 250))": square(
            1250, both(causal, either(keys_before(500), documents(500, 200, 300, 250)))
        ),
    },
    "selected_blocks.rst": {
        "Causal() & KeyBlocks(chosen, 64, 64)": square(1024, best_blocks, heads=4),
        "Causal() & (KeyBlocks(chosen, 64, 64) | Sinks(4) | SlidingWindow(127, 0))": square(
            1024, both(causal, either(best_blocks, keys_before(4), window(127, 0))), heads=4
        ),
    },
    "torch_tensors.rst": {
        "SlidingWindow(128, 0)": square(1000, window(128, 0)),
        "spattn.patterns.Causal() & spattn.patterns.KeyBlocks(chosen, 64, 64)": square(1024, best_blocks, heads=8),
    },
    "torch_training.rst": {
        "SlidingWindow(16, 0)": square(100, window(16, 0)),
        "SlidingWindow(4, 0)": square(100, window(4, 0)),
    },
    "trainer.rst": {
        "Sinks(4) | SlidingWindow(31, 0)": square(256, either(keys_before(4), window(31, 0))),
    },
    "transformers.rst": {
        "Sinks(4) | SlidingWindow(31, 0)": square(200, either(keys_before(4), window(31, 0))),
        "SlidingWindow(31, 0)": square(200, window(31, 0)),
    },
    "write_a_pattern.rst": {
        "LogSparse(9)": square(1000, powers_of_two(9)),
        "LogSparse(5)": square(101, powers_of_two(5)),
        "LogSparse(10)": square(2048, powers_of_two(10)),
        "LogSparse(9) | spattn.patterns.SlidingWindow(16, 0)": square(1000, either(powers_of_two(9), window(16, 0))),
        "spattn.patterns.from_json(nearby.to_json())": square(1000, either(powers_of_two(9), window(16, 0))),
        "spattn.patterns.registry.get('log_sparse', powers=9)": square(1000, powers_of_two(9)),
        "Speakers(np.arange(40) % 3)": square(40, lambda at: (at.k <= at.q) & (at.q % 3 == at.k % 3)),
        "EveryFourth()": square(4096, dilated(256, 4)),
        "InViews()": square(4096, dilated(256, 4)),
    },
    "splat.rst": {"spattn.patterns.DilatedWindow(2, dilation=3)": square(100, dilated(2, 3))},
    "neighborhood_attention.rst": {
        "from_natten((16, 16), 5, stride=(1, 2))": square(256, neighborhood((16, 16), (5, 5), stride=(1, 2))),
    },
    "sparse_fusion.rst": {"spattn.patterns.SlidingWindow(16)": square(300, window(16, 16))},
    "concurrency.rst": {"SlidingWindow(64, 0)": square(500, window(64, 0))},
    "traced_scores.rst": {"SlidingWindow(16, 0)": square(200, window(16, 0))},
    "tensor_parallel.rst": {
        "PerHead([SlidingWindow(64 >> head, 0) for head in range(4)])": square(
            300, lambda at: window((64, 32, 16, 8)[at.h], 0)(at), heads=4
        ),
        "PerHead([SlidingWindow(64 >> head, 0) for head in range(4)[heads]])": square(  # those of the last rank
            300, lambda at: window((16, 8)[at.h], 0)(at), heads=2
        ),
    },
    "block_masks.rst": {
        "from_flashmask(ends[None, None, :, None])": square(300, both(causal, documents(120, 180))),
        "Causal() & Documents((120, 180))": square(300, both(causal, documents(120, 180))),
    },
    "deepspeed_layouts.rst": {
        "Causal() & from_deepspeed(section)": square(512, both(causal, last_blocks(16, 4))),
    },
    "windows.rst": {
        "SlidingWindow(6, 2)": square(64, window(6, 2)),
        "SlidingWindow(6, 0)": square(64, window(6, 0)),
        "SlidingWindow(6 - 1, 0)": square(64, window(5, 0)),
        "SlidingWindow(6)": square(64, window(6, 6)),
        "SlidingWindow(12 // 2)": square(64, window(6, 6)),
        "QueriesAt(SlidingWindow(6, 2), 0)": Pairs((16, 64), lambda at: window(6, 2)(at._replace(q=at.q - 48))),
        "longformer(6)": square(64, window(3, 3)),
        "BigBird(4, random_blocks=0) | GlobalTokens(tuple(range(60, 64)))": square(
            64, either(lambda at: abs(at.q // 4 - at.k // 4) <= 1, global_tokens(0, 1, 2, 3, 60, 61, 62, 63))
        ),
        "longformer(6, global_tokens=2)": square(64, either(window(3, 3), global_tokens(0, 1))),
        "SlidingWindow(3) | GlobalTokens(2)": square(64, either(window(3, 3), global_tokens(0, 1))),
        "Neighborhood(64, 7)": square(64, neighborhood((64,), (7,))),
        "SlidingWindow(3)": square(64, window(3, 3)),
        "Causal() & (Sinks(4) | SlidingWindow(5 - 1, 0))": square(64, streaming(4, 5)),
        "Causal()": Pairs((2, 4), causal),
        "QueriesAt(Causal(), 0)": Pairs((2, 4), lambda at: at.k <= at.q - 2),
        "QueriesAt(Causal(), 1)": Pairs((1, 4), lambda at: at.k <= 1),
        "from_flash_attention((6, 2), causal=True)": square(64, window(6, 0)),
    },
}
