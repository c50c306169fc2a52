"""What patterns allow, and attention over it, from their definitions: NumPy alone, and nothing of spattn.

Masks are written from ``docs/patterns-definitions.rst``. A function here takes a pattern's parameters and returns a
function ``(q_len, kv_len) -> mask``: booleans (q_len, kv_len), or (batch or 1, heads or 1, q_len, kv_len) where batch
entries or heads differ. Query row i stands at position ``i + kv_len - q_len``. Attention is dense and in float64.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

Mask = Callable[[int, int], np.ndarray]

# -- masks -------------------------------------------------------------------------------------------------------------


def by_position(rule: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Mask:
    """The mask of a rule over positions of queries (q_len, 1) and keys (1, kv_len)."""

    def mask(q_len: int, kv_len: int) -> np.ndarray:
        p, j = np.arange(q_len)[:, None] + kv_len - q_len, np.arange(kv_len)[None]
        return np.broadcast_to(rule(p, j), (q_len, kv_len))

    return mask


def full() -> Mask:
    return by_position(lambda p, j: np.full((p.size, j.size), True))


def nothing() -> Mask:
    return by_position(lambda p, j: np.full((p.size, j.size), False))


def causal() -> Mask:
    return by_position(lambda p, j: j <= p)


def sliding_window(left: int, right: int) -> Mask:
    def rule(p: np.ndarray, j: np.ndarray) -> np.ndarray:
        return (True if left == -1 else p - left <= j) & (True if right == -1 else j <= p + right) & (p == p)

    return by_position(rule)


def dilated_window(left: int, right: int, dilation: int) -> Mask:
    return by_position(
        lambda p, j: np.logical_or.reduce([j == p + dilation * t for t in range(-left, right + 1)]) & (j == j)
    )


def periodic_window(period: int, left: int, right: int, offset: int) -> Mask:
    def rule(p: np.ndarray, j: np.ndarray) -> np.ndarray:
        apart = (j - offset) % period - (p - offset) % period
        return (-left <= apart) & (apart <= right)

    return by_position(rule)


def block_local(block: int, offset: int) -> Mask:
    return by_position(lambda p, j: (p - offset) // block == (j - offset) // block)


def strided(stride: int) -> Mask:
    return by_position(lambda p, j: (j <= p) & ((p - j < stride) | ((p - j) % stride == 0)))


def fixed(block: int, summary: int) -> Mask:
    return by_position(lambda p, j: (j <= p) & ((j // block == p // block) | (j % block >= block - summary)))


def stride(step: int, offset: int) -> Mask:
    return by_position(lambda p, j: (p - j) % step == offset)


def columns(period: int, start: int, stop: int) -> Mask:
    return by_position(lambda p, j: (start <= j % period) & (j % period < stop))


def sinks(count: int) -> Mask:
    return by_position(lambda p, j: j < count)


def _are(positions: np.ndarray, tokens: int | Sequence[int]) -> np.ndarray:
    return np.isin(positions, np.arange(tokens) if isinstance(tokens, int) else np.array(tokens, int))


def global_tokens(tokens: int | Sequence[int], queries: bool, keys: bool) -> Mask:
    return by_position(lambda p, j: (queries & _are(p, tokens)) | (keys & _are(j, tokens)))


def longformer(window: int, dilation: int, tokens: int | Sequence[int]) -> Mask:
    return either(dilated_window(window // 2, window // 2, dilation), global_tokens(tokens, True, True))


def prefix_lm(prefix: int) -> Mask:
    return by_position(lambda p, j: (j < prefix) | (j <= p))


def vertical_slash(chosen: Sequence[int], diagonals: Sequence[int]) -> Mask:
    return by_position(lambda p, j: (_are(j, chosen) | _are(p - j, diagonals)) & (j <= p))


def documents(lengths: Sequence[int]) -> Mask:
    def mask(q_len: int, kv_len: int) -> np.ndarray:
        owner = np.full(kv_len, -1)
        owner[: sum(lengths)] = np.repeat(np.arange(len(lengths)), lengths)
        return of_labels(owner, None)(q_len, kv_len)

    return mask


def of_labels(labels: np.ndarray, q_labels: np.ndarray | None) -> Mask:
    """A query attends to the keys of its own label, which those below 0 have not; ``q_labels`` are by row."""

    def mask(q_len: int, kv_len: int) -> np.ndarray:
        position = np.arange(q_len) + kv_len - q_len
        own = np.where(position < 0, -1, labels[np.maximum(position, 0)]) if q_labels is None else q_labels
        return (own[:, None] >= 0) & (own[:, None] == labels[None])

    return mask


def block_layout(layout: np.ndarray, block_q: int, block_kv: int) -> Mask:
    """Of a layout (rows, columns), or with axes of batch entries and heads before these."""

    def mask(q_len: int, kv_len: int) -> np.ndarray:
        p, j = np.arange(q_len) + kv_len - q_len, np.arange(kv_len)
        found = layout[..., np.maximum(p, 0)[:, None] // block_q, j // block_kv]
        return found & (p >= 0)[:, None]

    return mask


def key_blocks(blocks: np.ndarray, block_q: int, block_kv: int) -> Mask:
    """Lists (..., rows, n) of key blocks; -1 lists none."""

    def mask(q_len: int, kv_len: int) -> np.ndarray:
        listed = (blocks[..., None] == np.arange(-(-kv_len // block_kv))).any(axis=-2)
        return block_layout(listed, block_q, block_kv)(q_len, kv_len)

    return mask


def bigbird(
    block: int, window: int, at_ends: int, drawn: int, seed: int, is_causal: bool, heads: Sequence[int]
) -> Mask:
    """Of some heads, each of which draws blocks of its own; a block row before the first key draws none."""

    def of_head(head: int, kv_len: int) -> np.ndarray:
        blocks = -(-kv_len // block)
        found = np.zeros((blocks, blocks), bool)
        for row in range(blocks if drawn else 0):
            there = [abs(row - c) <= window // 2 or c < at_ends or row < at_ends for c in range(blocks)]
            others = [c for c in range(blocks) if not there[c] and (c < row or not is_causal)]
            least = max(0, len(others) - drawn)
            words = np.random.Philox(key=seed, counter=[0, 0, head, row]).random_raw(len(others) - least)
            chosen: set[int] = set()
            for last, word in zip(range(least, len(others)), words.tolist(), strict=True):
                chosen.add(last if word % (last + 1) in chosen else word % (last + 1))
            found[row, [others[number] for number in chosen]] = True
        return found

    def rule(p: np.ndarray, j: np.ndarray) -> np.ndarray:
        a, b = p // block, j // block
        near = (abs(a - b) <= window // 2) | (b < at_ends) | (a < at_ends)
        return near & ((j <= p) | (not is_causal))

    def mask(q_len: int, kv_len: int) -> np.ndarray:
        of_heads = np.stack([of_head(head, kv_len) for head in heads])
        of_heads = block_layout(of_heads, block, block)(q_len, kv_len)
        if is_causal:
            of_heads = of_heads & causal()(q_len, kv_len)
        return by_position(rule)(q_len, kv_len) | (of_heads if len(heads) > 1 else of_heads[0])

    return mask


def row_intervals(start: np.ndarray, stop: np.ndarray) -> Mask:
    return lambda q_len, kv_len: (start[..., None] <= np.arange(kv_len)) & (np.arange(kv_len) < stop[..., None])


def column_intervals(intervals: Sequence[tuple[np.ndarray, np.ndarray]], is_causal: bool) -> Mask:
    def rule(p: np.ndarray, j: np.ndarray) -> np.ndarray:
        masked = [(start <= p) & (p < stop) for start, stop in intervals]
        return ~np.logical_or.reduce(masked) & ((j <= p) | (not is_causal))

    return by_position(rule)


def given(mask: np.ndarray) -> Mask:
    """The array itself, which is of rows."""
    return lambda q_len, kv_len: mask


def pairs(row: np.ndarray, key: np.ndarray) -> Mask:
    def mask(q_len: int, kv_len: int) -> np.ndarray:
        found = np.zeros((q_len, kv_len), bool)
        found[row, key] = True
        return found

    return mask


def row_runs(start: np.ndarray, step: np.ndarray, count: np.ndarray) -> Mask:
    def mask(q_len: int, kv_len: int) -> np.ndarray:
        found = np.zeros((q_len, kv_len), bool)
        for row, run in np.ndindex(*start.shape):
            found[row, start[row, run] + step[row, run] * np.arange(count[row, run])] = True
        return found

    return mask


def key_padding(valid: np.ndarray) -> Mask:
    """Of keys (kv_len,), or (batch, kv_len)."""

    def mask(q_len: int, kv_len: int) -> np.ndarray:
        rows = np.full((q_len, 1), True)
        return valid[None] & rows if valid.ndim == 1 else valid[:, None, None, :] & rows

    return mask


# -- of grids ----------------------------------------------------------------------------------------------------------


def coordinates(positions: np.ndarray, grid: Sequence[int]) -> list[np.ndarray]:
    """By axis, row-major; the first one has no end, so that positions before the first token have negative ones."""
    found: list[np.ndarray] = []
    for length in reversed(grid[1:]):
        positions, own = np.divmod(positions, length)
        found.insert(0, own)
    return [positions, *found]


def on_axes(grid: Sequence[int], rules: Sequence[Callable[[np.ndarray, np.ndarray], np.ndarray]]) -> Mask:
    """Pairs whose coordinates along each axis the rule of the axis allows."""

    def rule(p: np.ndarray, j: np.ndarray) -> np.ndarray:
        axes = zip(rules, coordinates(p, grid), coordinates(j, grid), strict=True)
        return np.logical_and.reduce([np.broadcast_to(own(x, y), (p.size, j.size)) for own, x, y in axes])

    return by_position(rule)


def axial(grid: Sequence[int], axis: int) -> Mask:
    return on_axes(grid, [lambda x, y, own=own: (x == y) | (own == axis) for own in range(len(grid))])


def windowed(grid: Sequence[int], window: Sequence[int], shift: Sequence[int]) -> Mask:
    def along(length: int, w: int, s: int) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
        return lambda x, y: ((x - s) % length // w == (y - s) % length // w) & ((x < s) == (y < s))

    return on_axes(grid, list(map(along, grid, window, shift)))


def neighborhood(
    grid: Sequence[int], kernel: Sequence[int], dilation: Sequence[int], steps: Sequence[int], is_causal: Sequence[bool]
) -> Mask:
    def along(length: int, w: int, d: int, s: int, ahead: bool) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
        def rule(x: np.ndarray, y: np.ndarray) -> np.ndarray:
            u, z, n = x // d, y // d, length // d + (x % d < length % d)
            if ahead:
                leader = np.minimum(u // s * s + s - 1, n - 1)
                near = (z <= u) & (leader - z < w)
            else:
                leader, after = np.minimum(u // s * s + s // 2, n - 1), w // 2 + w % 2 - 1
                centre = np.clip(leader, w // 2, n - 1 - after)
                near = (-(w // 2) <= z - centre) & (z - centre <= after)
            return near & (x % d == y % d)

        return rule

    return on_axes(grid, list(map(along, grid, kernel, dilation, steps, is_causal)))


def per_axis(grid: Sequence[int], masks: Sequence[Mask]) -> Mask:
    """Of masks of as many queries and keys as the axes have tokens, and for the first axis of more queries before."""

    def mask(q_len: int, kv_len: int) -> np.ndarray:
        p, j = np.arange(q_len)[:, None] + kv_len - q_len, np.arange(kv_len)[None]
        found = np.full((q_len, kv_len), True)
        for own, length, x, y in zip(masks, grid, coordinates(p, grid), coordinates(j, grid), strict=True):
            before = max(0, -int(x.min(initial=0)))
            found &= own(length + before, length)[x + before, y]
        return found

    return mask


# -- what is made of others --------------------------------------------------------------------------------------------


def either(*masks: Mask) -> Mask:
    return lambda q_len, kv_len: functools.reduce(np.logical_or, (mask(q_len, kv_len) for mask in masks))


def both(*masks: Mask) -> Mask:
    return lambda q_len, kv_len: functools.reduce(np.logical_and, (mask(q_len, kv_len) for mask in masks))


def minus(one: Mask, other: Mask) -> Mask:
    return lambda q_len, kv_len: one(q_len, kv_len) & ~other(q_len, kv_len)


def complement(mask: Mask) -> Mask:
    return lambda q_len, kv_len: ~mask(q_len, kv_len)


def with_axes(mask: np.ndarray) -> np.ndarray:
    """(batch or 1, heads or 1, q_len, kv_len)."""
    return mask[(None,) * (4 - mask.ndim)]


def per_head(masks: Sequence[Mask], heads: int) -> Mask:
    """Each mask for as many neighbouring heads."""

    def mask(q_len: int, kv_len: int) -> np.ndarray:
        each = np.broadcast_arrays(*(with_axes(own(q_len, kv_len))[:, :1] for own in masks))
        return np.repeat(np.concatenate(each, axis=1), heads // len(masks), axis=1)

    return mask


def per_batch(masks: Sequence[Mask]) -> Mask:
    def mask(q_len: int, kv_len: int) -> np.ndarray:
        return np.concatenate(np.broadcast_arrays(*(with_axes(own(q_len, kv_len)) for own in masks)))

    return mask


def over_heads(mask: Mask, heads: int) -> Mask:
    """A mask that tells fewer heads apart, each of them for as many neighbouring ones."""

    def repeated(q_len: int, kv_len: int) -> np.ndarray:
        own = with_axes(mask(q_len, kv_len))
        return np.repeat(own, heads // own.shape[1], axis=1)

    return repeated


def prefix(inner: Mask, tokens: int) -> Mask:
    """Tokens in front of `inner`, all of which attend to all and are seen by all."""

    def mask(q_len: int, kv_len: int) -> np.ndarray:
        p, j, keys = np.arange(q_len) + kv_len - q_len, np.arange(kv_len), kv_len - tokens
        rows = min(q_len, keys)
        found = (p < tokens)[:, None] | (j < tokens)[None]
        if rows:
            found[q_len - rows :, tokens:] |= inner(rows, keys)
        return found & (p >= 0)[:, None]

    return mask


def queries_at(inner: Mask, where: int | Sequence[int]) -> Mask:
    """The rows of `inner`, made for all tokens that there are, at other positions: at each of several, or at those from
    one on."""

    def mask(q_len: int, kv_len: int) -> np.ndarray:
        position = where + np.arange(q_len) if isinstance(where, int) else np.array(where, int)
        tokens = max(kv_len, int(position.max(initial=-1)) + 1)
        return inner(tokens, tokens)[position, :kv_len]

    return mask


def whole(mask: Mask, batch: int, heads: int, q_len: int, kv_len: int) -> np.ndarray:
    """(batch, heads, q_len, kv_len): what each query head of each batch entry may see."""
    return np.broadcast_to(with_axes(mask(q_len, kv_len)), (batch, heads, q_len, kv_len))


# -- attention ---------------------------------------------------------------------------------------------------------


class Results(NamedTuple):
    """Of a forward and a backward, or how far those of a kernel may be from them."""

    out: np.ndarray
    lse: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray


class Attention:
    """Softmax attention over a mask and its gradients, dense and in float64.

    Parameters
    ----------
    q : (batch, heads_q, q_len, head_dim) array
    k, v : (batch, heads_kv, kv_len, head_dim or head_dim_v) arrays
        Each of their heads is that of as many neighbouring query heads.
    mask : (batch, heads_q, q_len, kv_len) bool array
    scale : float
    dout : (batch, heads_q, q_len, head_dim_v) array
    dlse : (batch, heads_q, q_len) array, optional
        None is zero.

    Attributes
    ----------
    results : Results
        A row that sees nothing has ``out = 0``, ``lse = -inf`` and no gradient.
    """

    def __init__(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        mask: np.ndarray,
        scale: float,
        dout: np.ndarray,
        dlse: np.ndarray | None = None,
    ):
        group = q.shape[1] // k.shape[1]
        self.q, self.dout = q.astype(np.float64), dout.astype(np.float64)
        self.k, self.v = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
        self.dlse = np.zeros(q.shape[:3]) if dlse is None else dlse.astype(np.float64)
        self.mask, self.scale, self.heads_kv = mask, float(scale), k.shape[1]
        self.seen = mask.any(axis=3)
        logits = np.where(mask, self.scale * (self.q @ _swap(self.k)), -np.inf)
        top = np.where(self.seen, logits.max(axis=3, initial=-np.inf), 0)
        weights = np.exp(logits - top[..., None])
        total = weights.sum(axis=3)
        lse = np.where(self.seen, top + np.log(np.where(self.seen, total, 1)), -np.inf)
        self.p = weights / np.where(self.seen, total, 1)[..., None]
        out = self.p @ self.v
        self.dp = self.dout @ _swap(self.v)
        self.delta = (self.p * self.dp).sum(axis=3) - self.dlse
        self.ds = self.p * (self.dp - self.delta[..., None])
        dq = self.scale * (self.ds @ self.k)
        dk, dv = self.scale * (_swap(self.ds) @ self.q), _swap(self.p) @ self.dout
        self.results = Results(out, lse, dq, self.over_group(dk), self.over_group(dv))

    def over_group(self, x: np.ndarray) -> np.ndarray:
        """The sums over the query heads that share keys."""
        return x.reshape(x.shape[0], self.heads_kv, -1, *x.shape[2:]).sum(axis=2)

    def bounds(self, eps: float, least: float = 0.0) -> Results:
        """How far results may be off, element by element, of a kernel that rounds operands, logits, weights and results
        to a type with this `eps`, and sums and exponentials to float32's, or to the type's where that is finer.

        An analysis to first order of errors of the worst sign, each rounding counted as a whole `eps`, twice what it
        can be; nothing in it is measured. `least` is the distance of neighbouring numbers at 0, where a type has so few
        exponents that weights get there.
        """
        fine = min(eps, 2.0**-23)
        seen, dim, dim_v = self.seen[..., None], self.q.shape[3], self.v.shape[3]
        # Logits: both operands and the result are rounded, and `dim` products summed.
        size = np.where(self.mask, abs(self.scale) * (abs(self.q) @ _swap(abs(self.k))), 0)
        most = size.max(axis=3, initial=0, keepdims=True)
        logit = np.where(self.mask, 3 * eps * size + fine * (dim + 8) * most, 0)
        keys = self.mask.sum(axis=3, keepdims=True)
        sums = fine * (keys + 8)
        lse = logit.max(axis=3, initial=0, keepdims=True) + sums + fine * (most + np.log1p(keys))
        # Weights: e to the logits, over their sum, and rounded. What is below `least` of the largest one is lost.
        share = np.expm1(logit + lse) + eps + sums
        weight = np.where(self.mask, share * self.p + 2 * least, 0)
        results = self.results
        out = weight @ abs(self.v) + (eps + sums) * (self.p @ abs(self.v)) + eps * abs(results.out) + least
        out = np.where(seen, out, 0)
        # Gradients: of weights that are computed again from a rounded lse.
        share = share + np.expm1(logit + 2 * lse)
        weight = np.where(self.mask, share * self.p + 2 * least, 0)
        terms = abs(self.dout) @ _swap(abs(self.v))
        pair = (2 * eps + fine * (dim_v + 8)) * terms
        of_out = (abs(self.dout) * (out + fine * (dim_v + 8) * abs(results.out))).sum(axis=3, keepdims=True)
        of_out += (self.p * pair).sum(axis=3, keepdims=True)
        inner = (self.p * terms).sum(axis=3, keepdims=True) + abs(self.dlse)[..., None]
        delta = of_out + (2 * eps + sums) * inner
        apart = abs(self.dp - self.delta[..., None])
        ds = weight * (apart + pair + delta) + self.p * (pair + delta) + 3 * eps * self.p * (terms + inner)
        ds = np.where(self.mask, ds + 2 * least * (1 + 1 / max(abs(self.scale), 1e-30)), 0)
        rows = fine * (self.mask.sum(axis=2)[..., None] + 8)
        step = abs(self.scale)
        dq = step * (ds @ abs(self.k) + sums * (abs(self.ds) @ abs(self.k))) + eps * abs(results.dq) + least
        dk = step * (_swap(ds) @ abs(self.q) + rows * (_swap(abs(self.ds)) @ abs(self.q)))
        dv = _swap(weight) @ abs(self.dout) + rows * (_swap(self.p) @ abs(self.dout))
        group = 1 + fine * self.mask.shape[1]  # sums over heads are as those over rows
        dk = group * self.over_group(dk) + eps * abs(results.dk) + least
        dv = group * self.over_group(dv) + eps * abs(results.dv) + least
        lse = np.where(self.seen, lse[..., 0] + fine * abs(np.where(self.seen, results.lse, 0)), 0)
        return Results(out, lse, np.where(seen, dq, 0), dk, dv)

    def exact_to(self, relative: float) -> Results:
        """The same of a kernel whose results are off by so much of the largest magnitude of each."""
        sizes = (abs(np.where(np.isfinite(x), x, 0)).max(initial=0) for x in self.results)
        return Results(
            *(np.full(x.shape, relative * max(1.0, size)) for x, size in zip(self.results, sizes, strict=True))
        )


def _swap(x: np.ndarray) -> np.ndarray:
    return np.swapaxes(x, -1, -2)


def wrong(
    got: Sequence[np.ndarray], want: Results, bounds: Results, names: Sequence[str] = Results._fields
) -> list[str]:
    """What of some results is further off than it may be, or not finite where the expected is; else nothing."""
    found = []
    for name, own in zip(names, got, strict=True):
        expected, bound = getattr(want, name), getattr(bounds, name)
        own = np.asarray(own).astype(np.float64)
        if own.shape != expected.shape:
            found.append(f"{name}: shape {own.shape}, not {expected.shape}")
            continue
        finite = np.isfinite(expected)
        off = np.where(finite, abs(own - np.where(finite, expected, 0)), 0)
        bad = np.where(finite, ~(off <= bound), own != expected)  # NaN is never within
        if bad.any():
            at = tuple(int(n) for n in np.argwhere(bad)[0])
            rows = len(np.unique(np.argwhere(bad)[:, :3], axis=0))
            found.append(
                f"{name}: {int(bad.sum())} of {bad.size} are wrong, in {rows} rows; at {at} {own[at]!r} instead of "
                f"{expected[at]!r} ± {bound[at] if finite[at] else 0:.3g}"
            )
    return found


def factorisations(number: int, most: int = 3) -> list[tuple[int, ...]]:
    """Every way to write a number as a product of up to so many factors, in order."""

    def of(rest: int, axes: int) -> list[tuple[int, ...]]:
        if axes == 1:
            return [(rest,)]
        return [(d, *tail) for d in range(1, rest + 1) if rest % d == 0 for tail in of(rest // d, axes - 1)]

    return list(itertools.chain.from_iterable(of(number, axes) for axes in range(1, most + 1)))


# -- predicates of no class of the package -----------------------------------------------------------------------------

PREDICATES: dict[str, Callable[[np.ndarray, np.ndarray, int, int], np.ndarray]] = {
    "sum": lambda p, j, a, b: (p + j) % a == b % a,
    "blocks": lambda p, j, a, b: p // a % 2 == j // b % 2,
    "apart": lambda p, j, a, b: abs(p - j) // a % 2 == 0,
    "smaller": lambda p, j, a, b: np.minimum(p, j) % a < b % a,
    "rows": lambda p, j, a, b: (p % (a + b) < a) & (j == j),
    "product": lambda p, j, a, b: p * j % (a + 1) == b % (a + 1),
    "divisors": lambda p, j, a, b: np.gcd(p, j + a) == 1,
}
"""Name to rule over positions and two numbers; the last two are of forms that no planner can follow."""


def predicate(form: str, a: int, b: int) -> Mask:
    return by_position(lambda p, j: PREDICATES[form](p, j, a, b))


def default_scale(head_dim: int) -> float:
    """The scale that attention has by default."""
    return 1 / math.sqrt(head_dim)
