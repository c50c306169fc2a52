"""docs/patterns-definitions.rst, word for word, one pair at a time: plain Python, written apart from the package."""

from __future__ import annotations

import itertools

import numpy as np

from spattn import patterns as p
from spattn.patterns.base.class_registry import pattern_class


def allowed(pattern, i: int, j: int, q_len: int, kv_len: int) -> bool:
    """Whether query row `i` may attend to key `j`."""
    if isinstance(pattern, p.QueriesAt):
        return queries_at(pattern, i, j, q_len, kv_len)
    if isinstance(pattern, p.Prefix):
        return prefix(pattern, i, j, q_len, kv_len)
    if isinstance(pattern, p.RowIntervals):
        return 0 <= i < q_len and pattern.start[i] <= j < pattern.stop[i]
    if isinstance(pattern, p.PackedWindows):
        return packed_windows(pattern, i, j)
    if isinstance(pattern, p.Clusters):
        return clusters(pattern, i, j, q_len, kv_len)
    if isinstance(pattern, p.CSR):
        return 0 <= i < q_len and j in pattern.indices[pattern.indptr[i] : pattern.indptr[i + 1]]
    if isinstance(pattern, p.authoring.RowRuns):
        return 0 <= i < q_len and any(j in keys for keys in row_runs(pattern, i))
    return RULES[type(pattern)](pattern, i + kv_len - q_len, j, kv_len)


def has_rule(pattern) -> bool:
    """Whether this page knows a pattern, and what is in it."""
    inner = getattr(pattern, "patterns", None) or [getattr(pattern, "inner", None)]
    return type(pattern) in RULES and all(each is None or has_rule(each) for each in inner)


def mask(pattern, q_len: int, kv_len: int) -> np.ndarray:
    """The pattern as a boolean array (q_len, kv_len)."""
    cells = [[allowed(pattern, i, j, q_len, kv_len) for j in range(kv_len)] for i in range(q_len)]
    return np.array(cells, dtype=bool).reshape(q_len, kv_len)


def queries_at(x, i, j, q_len, kv_len):
    if isinstance(x.positions, int):
        position, last = x.positions + i, x.positions + q_len - 1
    else:
        position, last = x.positions[i] if 0 <= i < q_len else -1, max(x.positions, default=-1)
    tokens = max(kv_len, int(last) + 1)
    return allowed(x.inner, int(position), j, tokens, tokens)


def prefix(x, i, j, q_len, kv_len):
    position, keys = i + kv_len - q_len, kv_len - x.tokens
    if position < 0:
        return False
    rows = min(q_len, keys)
    row = position - x.tokens - (keys - rows)
    return position < x.tokens or j < x.tokens or allowed(x.inner, row, j - x.tokens, rows, keys)


def packed_windows(x, i, j):
    first = 0
    for queries, start, keys in zip(x.queries.tolist(), x.start.tolist(), x.keys.tolist(), strict=True):
        if first <= i < first + queries:
            position = start + i - first + (keys - queries if x.at_end else 0)
            near = (x.left == -1 or j >= position - x.left) and (x.right == -1 or j <= position + x.right)
            return start <= j < start + keys and near
        first += queries
    return False


def clusters(x, i, j, q_len, kv_len):
    position = i + kv_len - q_len
    if x.q_labels is not None:
        label = x.q_labels[i] if 0 <= i < q_len else -1
    else:
        label = x.labels[position] if 0 <= position < kv_len else -1
    return label >= 0 and x.labels[j] == label


def sliding_window(x, q, k, n):
    return (x.left == -1 or k >= q - x.left) and (x.right == -1 or k <= q + x.right)


def dilated_window(x, q, k, n):
    steps, rest = divmod(k - q, x.dilation)
    return rest == 0 and -x.left <= steps <= x.right


def periodic_window(x, q, k, n):
    own, other = (q - x.offset) % x.period, (k - x.offset) % x.period
    return -x.left <= other - own <= x.right


def is_token(tokens, position):
    return position in (range(tokens) if isinstance(tokens, int) else tokens)


def global_tokens(x, q, k, n):
    return (x.keys and is_token(x.tokens, k)) or (x.queries and is_token(x.tokens, q))


def documents(x, q, k, n):
    owner = [number for number, length in enumerate(x.lengths) for _ in range(length)]
    return 0 <= q < len(owner) and k < len(owner) and owner[q] == owner[k]


def column_intervals(x, q, k, n):
    intervals = [(x.start, x.stop)] + ([(x.start2, x.stop2)] if x.start2 is not None else [])
    return all(q not in range(a[k], b[k]) for a, b in intervals) and (not x.causal or k <= q)


def masked(x, q, k, n):
    row = q - (x.mask.shape[1] - x.mask.shape[0])
    return row >= 0 and bool(x.mask[row, k])


def block_layout(x, q, k, n):
    block_q, block_kv = x.block if isinstance(x.block, tuple) else (x.block, x.block)
    a, b = q // block_q, k // block_kv
    return a >= 0 and bool(x.layout[a, b])


def key_blocks(x, q, k, n):
    return q >= 0 and k // x.block_kv in x.blocks[q // x.block_q].tolist()


def longformer(x, q, k, n):
    side = x.window // 2
    near = abs(k - q) % x.dilation == 0 and abs(k - q) // x.dilation <= side
    return near or is_token(x.global_tokens, q) or is_token(x.global_tokens, k)


def floyd(generator, candidates: int, size: int) -> set[int]:
    """A sample of numbers below `candidates`, by Floyd's algorithm on the generator's raw words."""
    chosen: set[int] = set()
    size = min(size, candidates)
    words = generator.random_raw(size)
    for word, last in zip(words.tolist(), range(candidates - size, candidates), strict=True):
        number = word % (last + 1)
        chosen.add(last if number in chosen else number)
    return chosen


def philox(seed: int, head: int, row: int):
    return np.random.Philox(key=seed, counter=[0, 0, head, row])


def bigbird_blocks(x, a: int, blocks: int) -> set[int]:
    """All blocks of block row `a`."""
    own = {
        b
        for b in range(blocks)
        if abs(a - b) <= x.window_blocks // 2 or b < x.global_blocks or 0 <= a < x.global_blocks
    }
    left = [b for b in range(blocks) if b not in own and (not x.causal or b < a)]
    if a >= 0 and x.random_blocks:
        own |= {left[number] for number in floyd(philox(x.seed, x.head, a), len(left), x.random_blocks)}
    return own


def bigbird(x, q, k, n):
    blocks = -(-n // x.block)
    return k // x.block in bigbird_blocks(x, q // x.block, blocks) and (not x.causal or k <= q)


def coordinates(position, grid):
    """Row-major coordinates; positions before the first token get a negative outermost one."""
    result = []
    for length in reversed(grid[1:]):
        position, c = divmod(position, length)
        result.append(c)
    return [position, *reversed(result)]


def axial(x, q, k, n):
    a, b = coordinates(q, x.grid), coordinates(k, x.grid)
    return all(a[axis] == b[axis] for axis in range(len(x.grid)) if axis != x.axis % len(x.grid))


def windowed(x, q, k, n):
    def side(c, length, w, s):
        # Swin's label of a token: its window after the roll, and on which side of the roll's seam it came from.
        rolled = (c - s) % length
        return rolled // w, c - s < 0

    a, b = coordinates(q, x.grid), coordinates(k, x.grid)
    window, shift = (v if isinstance(v, tuple) else (v,) * len(x.grid) for v in (x.window, x.shift))
    axes = zip(a, b, x.grid, window, shift, strict=True)
    return all(side(c, length, w, s) == side(d, length, w, s) for c, d, length, w, s in axes)


def neighbourhood_axis(x, y, length, w, d, s, causal):
    if x % d != y % d:
        return False
    g, u, z = x % d, x // d, y // d
    n = len(range(g, length, d))
    if causal:
        leader = min((u // s) * s + s - 1, n - 1)
        return z <= u and leader - z < w
    leader = min((u // s) * s + s // 2, n - 1)
    low, high = w // 2, n - 1 - (w // 2 + w % 2 - 1)
    centre = low if leader < low else high if leader > high else leader
    return -(w // 2) <= z - centre <= w // 2 + w % 2 - 1


def neighborhood(x, q, k, n):
    a, b = coordinates(q, x.grid), coordinates(k, x.grid)
    axes = zip(a, b, x.grid, x.kernel, x.dilation, x.stride, x.causal, strict=True)
    return all(neighbourhood_axis(*axis) for axis in axes)


def row_runs(x, i):
    runs = zip(x.start[i], x.step[i], x.count[i], strict=True)
    return [{int(start) + int(step) * t for t in range(count)} for start, step, count in runs]


def per_axis(x, q, k, n):
    """By the coordinates as by positions; the queries of an axis are all of its positions."""
    a, b = coordinates(q, x.grid), coordinates(k, x.grid)
    axes = zip(x.patterns, a, b, x.grid, strict=True)
    return all(allowed(pattern, c, d, length, length) for pattern, c, d, length in axes)


def deepspeed(x, q, k, n):
    assert n % x.block == 0
    r, c, blocks = q // x.block, k // x.block, n // x.block
    return r >= 0 and LAYOUTS[type(x)](x, r, c, blocks)


def earlier(x, r, c):
    return x.attention == "bidirectional" or c <= r


def deepspeed_fixed(x, r, c, n):
    size, width = x.num_local_blocks, x.num_global_blocks
    if r // size == c // size and earlier(x, r, c):
        return True
    f = size - (1 + (x.head or 0) % x.num_different_global_patterns) * width
    groups = list(itertools.takewhile(lambda i: i < n - n % size, itertools.count(f, size)))
    if n % size:
        groups.append(min(n - n % size + f, n - width))
    for i in groups:
        if i <= c < i + width and (x.attention == "bidirectional" or r >= i):
            return True
        if x.horizontal_global_attention and i <= r < i + width:
            return True
    return False


def deepspeed_variable(x, r, c, n):
    owner, window = [], 0
    while len(owner) < n:
        size = x.local_window_blocks[min(window, len(x.local_window_blocks) - 1)]
        owner += [window] * min(size, n)
        window += 1
    if owner[r] == owner[c] and earlier(x, r, c):
        return True
    ends = x.global_block_end_indices or [g + 1 for g in x.global_block_indices]
    for start, end in zip(x.global_block_indices, ends, strict=True):
        if c in range(start, end) and (x.attention == "bidirectional" or r >= start):
            return True
        if x.horizontal_global_attention and r in range(start, end):
            return True
    return bool(x.num_random_blocks) and c in floyd(philox(x.seed, x.head, r), n, x.num_random_blocks)


def deepspeed_bigbird(x, r, c, n):
    if not earlier(x, r, c):
        return False
    if abs(r - c) <= x.num_sliding_window_blocks // 2 or min(r, c) < x.num_global_blocks:
        return True
    candidates = n if x.attention == "bidirectional" else r + 1
    return bool(x.num_random_blocks) and c in floyd(philox(x.seed, x.head, r), candidates, x.num_random_blocks)


def deepspeed_bslongformer(x, r, c, n):
    ends = x.global_block_end_indices or [g + 1 for g in x.global_block_indices]
    tokens = [range(start, end) for start, end in zip(x.global_block_indices, ends, strict=True)]
    near = abs(r - c) <= x.num_sliding_window_blocks // 2
    return earlier(x, r, c) and (near or any(r in block or c in block for block in tokens))


def deepspeed_local(x, r, c, n):
    w = x.num_sliding_window_blocks // 2
    return r - w <= c <= (r if x.attention == "unidirectional" else r + w)


LAYOUTS = {
    pattern_class("deepspeed_dense"): lambda x, r, c, n: True,
    pattern_class("deepspeed_fixed"): deepspeed_fixed,
    pattern_class("deepspeed_variable"): deepspeed_variable,
    pattern_class("deepspeed_bigbird"): deepspeed_bigbird,
    pattern_class("deepspeed_bslongformer"): deepspeed_bslongformer,
    pattern_class("deepspeed_local_sliding_window"): deepspeed_local,
}
RULES = {
    p.Full: lambda x, q, k, n: True,
    p.Causal: lambda x, q, k, n: k <= q,
    p.SlidingWindow: sliding_window,
    p.DilatedWindow: dilated_window,
    p.BlockLocal: lambda x, q, k, n: (q - x.offset) // x.block == (k - x.offset) // x.block,
    p.GlobalTokens: global_tokens,
    p.Sinks: lambda x, q, k, n: k < x.count,
    p.Stride: lambda x, q, k, n: (q - k) % x.stride == x.offset,
    p.Columns: lambda x, q, k, n: k % x.period in range(x.start, x.stop),
    p.Documents: documents,
    p.PeriodicWindow: periodic_window,
    pattern_class("prefix_lm"): lambda x, q, k, n: (
        k <= q or k < (x.prefix[0] if isinstance(x.prefix, tuple) else x.prefix)
    ),
    p.VerticalSlash: lambda x, q, k, n: (k in x.columns or q - k in x.diagonals) and k <= q,
    p.ColumnIntervals: column_intervals,
    p.Mask: masked,
    p.BlockLayout: block_layout,
    p.KeyBlocks: key_blocks,
    p.KeyPadding: lambda x, q, k, n: bool(x.valid.reshape(-1)[k]),
    pattern_class("strided"): lambda x, q, k, n: k <= q and (q - k < x.stride or (q - k) % x.stride == 0),
    pattern_class("fixed"): lambda x, q, k, n: (
        k <= q and (k // x.block == q // x.block or k % x.block >= x.block - x.summary)
    ),
    pattern_class("longformer"): longformer,
    p.BigBird: bigbird,
    pattern_class("axial"): axial,
    pattern_class("windowed"): windowed,
    p.Neighborhood: neighborhood,
    p.QueriesAt: queries_at,
    p.Prefix: prefix,
    p.PerAxis: per_axis,
    p.Clusters: None,
    p.RowIntervals: None,  # by the row, as allowed() says
    p.PackedWindows: None,  # by the row
    p.CSR: None,  # likewise
    p.authoring.RowRuns: None,  # likewise
    **dict.fromkeys(LAYOUTS, deepspeed),
}
