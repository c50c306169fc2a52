"""Masks that people write for FlexAttention, as mask_mods: (function, batch, heads, q_len, kv_len) by name."""

import torch
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks


def causal(b, h, q, k):
    return q >= k


def sliding_window(size):
    return and_masks(causal, lambda b, h, q, k: q - k <= size)


def dilated_window(size, dilation):
    def mask_mod(b, h, q, k):
        apart = torch.abs(q - k)
        return (apart <= size) & (apart % dilation == 0)

    return mask_mod


def prefix_lm(length):
    return or_masks(lambda b, h, q, k: k < length, causal)


def sinks_and_window(sinks, size):
    return or_masks(and_masks(lambda b, h, q, k: k < sinks, causal), sliding_window(size))


def documents(lengths, inner=noop_mask):
    """Each document sees itself as a sequence of its own."""
    start = torch.tensor([0, *lengths]).cumsum(0).int()
    owner = torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), torch.tensor(lengths))

    def mask_mod(b, h, q, k):
        return (owner[q] == owner[k]) & inner(b, h, q - start[owner[q]], k - start[owner[k]])

    return mask_mod


def documents_by_start(lengths):
    start = torch.tensor([0, *lengths]).cumsum(0)[:-1].repeat_interleave(torch.tensor(lengths))
    return lambda b, h, q, k: (k >= start[q]) & (k <= q)


def shared_prefix(lengths, prefix_of):
    start = torch.tensor([0, *lengths]).cumsum(0)
    owner, prefix = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)), torch.tensor(prefix_of)

    def mask_mod(b, h, q, k):
        first = prefix[owner[q]]
        own = (k >= start[owner[q]]) & (k <= q)
        return own | ((owner[q] != first) & (k >= start[first]) & (k < start[first + 1]))

    return mask_mod


def in_batches(size, inner=noop_mask):
    return lambda b, h, q, k: (q // size == k // size) & inner(b, h, q % size, k % size)


def neighbours(coordinates, sides, kernel):
    """Attention within a window that is pushed back from the edges of a grid."""

    def mask_mod(b, h, q, k):
        near = None
        for x, y, side in zip(coordinates(q), coordinates(k), sides, strict=True):
            centre = x.clamp(kernel // 2, side - 1 - kernel // 2)
            close = (centre - y).abs() <= kernel // 2
            near = close if near is None else near & close
        return near

    return mask_mod


def row_major(width):
    return lambda token: (token // width, token % width)


def in_tiles(width, tile):
    def coordinates(token):
        number, inside = token // tile**2, token % tile**2
        return number // (width // tile) * tile + inside // tile, number % (width // tile) * tile + inside % tile

    return coordinates


def morton(token):
    """Every second bit, of either kind."""

    def squeeze(bits):
        bits = bits & 0x5555
        for shift, mask in ((1, 0x3333), (2, 0x0F0F), (4, 0x00FF)):
            bits = (bits | (bits >> shift)) & mask
        return bits

    return squeeze(token), squeeze(token >> 1)


def stand_alone(width, kernel):
    """A window that the edges of the grid cut off."""

    def mask_mod(b, h, q, k):
        (x, y), (u, v) = row_major(width)(q), row_major(width)(k)
        return ((x - u).abs() <= kernel // 2) & ((y - v).abs() <= kernel // 2)

    return mask_mod


def sliding_tiles(grid, tile, kernel, text):
    """Tiles of a grid see the nearest tiles; text behind the grid sees all and is seen by all."""
    image = grid[0] * grid[1]

    def tile_of(token):
        number = token // tile**2
        return number // (grid[1] // tile), number % (grid[1] // tile)

    def mask_mod(b, h, q, k):
        near = (q < image) & (k < image)
        for x, y, side in zip(tile_of(q), tile_of(k), grid, strict=True):
            after = kernel // 2 + kernel % 2 - 1
            centre = x.clamp(kernel // 2, side // tile - 1 - after)
            near = near & (y >= centre - kernel // 2) & (y <= centre + after)
        return near | ((q < image) & (k >= image) & (k < image + text)) | ((q >= image) & (k < image + text))

    return mask_mod


def video_by_frame(prompt, width):
    return lambda b, h, q, k: (q < prompt) | (k < prompt) | (torch.abs(q - k) < width)


def video_by_place(prompt, frame, width):
    return lambda b, h, q, k: (
        (q < prompt) | (k < prompt) | (torch.abs((q - prompt) % frame - (k - prompt) % frame) < width)
    )


def images_in_text(intervals, tokens):
    interval, image = torch.tensor(intervals), torch.arange(len(intervals)).repeat_interleave(tokens)

    def mask_mod(b, h, q, k):
        first, end = interval[image[k]]
        return (q >= first) & (q < end)

    return mask_mod


def block_diffusion(length, block):
    def mask_mod(b, h, q, k):
        noised, clean = (q < length), ~(k < length)
        a, c = q % length // block, k % length // block
        return ((a == c) & (noised ^ clean)) | ((a > c) & noised & clean) | ((a >= c) & ~noised & clean)

    return mask_mod


def global_window(size, tokens, length):
    is_global = torch.zeros(length, dtype=torch.bool)
    is_global[tokens] = True
    near = lambda b, h, q, k: (q - k).abs() <= size  # noqa: E731
    return or_masks(near, lambda b, h, q, k: is_global[q] | is_global[k])


def drafts(prefix, block):
    def mask_mod(b, h, q, k):
        own = (k >= prefix) & (q // block == (k - prefix) // block) & ((k - prefix) % block <= q % block)
        return (k < prefix) | own

    return mask_mod


def tree(prefix, parents):
    """Each node of a tree sees its ancestors."""
    above = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in list(enumerate(parents))[1:]:
        above[node] |= above[parent]

    def mask_mod(b, h, q, k):
        return (k < prefix) | ((k >= prefix) & above[q, (k - prefix).clamp(0, len(parents) - 1)])

    return mask_mod


def window_by_head(sizes):
    sizes = torch.tensor(sizes)
    return lambda b, h, q, k: (q >= k) & (q - k < sizes[h])


def documents_by_entry(owner):
    owner = torch.tensor(owner)
    return lambda b, h, q, k: (owner[b, q] == owner[b, k]) & (q >= k)


def padding(lengths):
    lengths = torch.tensor(lengths)
    return and_masks(causal, lambda b, h, q, k: k < lengths[b])


def cache(offsets, inner=causal):
    offsets = torch.tensor(offsets)
    return lambda b, h, q, k: inner(b, h, q + offsets[b], k)


def long_rows(rows, columns):
    table = torch.randint(900, (rows, columns))
    return lambda b, h, q, k: (table[q] == 8 * k).any()


def of_a_mask(shape):
    mask = torch.rand(shape) < 0.3
    return lambda b, h, q, k: mask[q, k]


def of_rows(shape):
    mask = torch.rand(shape) < 0.3
    return lambda b, h, q, k: mask[q][k]


def some_heads_local(size):
    return lambda b, h, q, k: torch.where(h < 2, (q >= k) & (q - k < size), q >= k)


LENGTHS = [5, 40, 1, 17, 60, 27]  # 150 in all
GALLERY = {
    "noop": (noop_mask, 1, 1, 70, 130),
    "causal": (causal, 1, 1, 150, 150),
    "causal, fewer queries": (causal, 1, 1, 70, 150),
    "causal, fewer keys": (causal, 1, 1, 150, 70),
    "sliding window": (sliding_window(20), 1, 1, 150, 150),
    "dilated window": (dilated_window(30, 3), 1, 1, 150, 150),
    "prefix LM": (prefix_lm(37), 1, 1, 150, 150),
    "sinks and window": (sinks_and_window(4, 20), 1, 1, 150, 150),
    "documents": (documents(LENGTHS), 1, 1, 150, 150),
    "causal documents": (documents(LENGTHS, causal), 1, 1, 150, 150),
    "prefixes in documents": (documents(LENGTHS, prefix_lm(9)), 1, 1, 150, 150),
    "documents by start": (documents_by_start(LENGTHS), 1, 1, 150, 150),
    "shared prefix": (shared_prefix(LENGTHS, [0, 0, 0, 3, 3, 3]), 1, 1, 150, 150),
    "in batches": (in_batches(32, causal), 1, 1, 150, 150),
    "natten": (neighbours(row_major(12), (12, 12), 5), 1, 1, 144, 144),
    "tiled natten": (neighbours(in_tiles(12, 4), (12, 12), 5), 1, 1, 144, 144),
    "morton natten": (neighbours(morton, (16, 16), 5), 1, 1, 256, 256),
    "stand-alone self-attention": (stand_alone(12, 5), 1, 1, 144, 144),
    "sliding tiles": (sliding_tiles((12, 8), 2, 3, 9), 1, 1, 105, 110),
    "video by frame": (video_by_frame(7, 30), 1, 1, 147, 147),
    "video by place": (video_by_place(7, 14, 3), 1, 1, 147, 147),
    "images in text": (images_in_text([(0, 70), (10, 70), (70, 120)], 30), 1, 1, 120, 90),
    "block diffusion": (block_diffusion(70, 7), 1, 1, 140, 140),
    "global window": (global_window(8, [0, 80], 150), 1, 1, 150, 150),
    "drafts": (drafts(20, 9), 1, 1, 90, 110),
    "window by head": (window_by_head([3, 9, 9, 200]), 1, 4, 150, 150),
    "documents by entry": (documents_by_entry([[0] * 70 + [1] * 50, [0] * 5 + [3] * 115]), 2, 1, 120, 120),
    "padding": (padding([150, 30]), 2, 1, 150, 150),
    "cache": (cache([100, 3]), 2, 1, 5, 150),
    "some heads local": (some_heads_local(10), 1, 4, 100, 100),
    "by entry and head": (and_masks(padding([90, 30]), window_by_head([3, 50])), 2, 2, 100, 100),
    "tree": (tree(10, [-1, 0, 1, 1, 3, 3, 0]), 1, 1, 7, 17),
    "products": (lambda b, h, q, k: q * k % 7 < 3, 1, 1, 90, 110),
    "floats": (lambda b, h, q, k: torch.tanh((q - k) / 9.0).abs() < 0.5, 1, 1, 90, 110),
    "a mask": (of_a_mask((90, 110)), 1, 1, 90, 110),
    "a mask, row by row": (of_rows((90, 110)), 1, 1, 90, 110),
}
CELL_BY_CELL = {  # operations of query and key without a rule
    "sine": (lambda b, h, q, k: torch.sin(q * 1.0 - k) > 0.5, 1, 1, 90, 110),
    "greatest common divisor": (lambda b, h, q, k: torch.gcd(q, k) == 1, 1, 1, 90, 110),
    "remainder by a key": (lambda b, h, q, k: q % (k + 1) == 0, 1, 1, 90, 110),
    "remainder of floats": (lambda b, h, q, k: torch.remainder(q - k, 2.5) < 1, 1, 1, 90, 110),
    "sorted": (lambda b, h, q, k: torch.stack([q, k, q - k]).sort().values[1] == k, 1, 1, 90, 110),
    "long rows": (long_rows(90, 300), 1, 1, 90, 110),
}
