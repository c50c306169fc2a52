"""Independent reference: dense attention, boolean masks and row counts, in NumPy alone."""

from __future__ import annotations

import numpy as np

__all__ = ["arrays", "dense", "draw", "lower_triangle", "strided", "times_written"]


def draw(seed, *shapes):
    """Standard normal float32 arrays of these shapes, one after the other from one generator."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def arrays(tokens=20, dtype="float32", heads=1, head_dim=8, count=3):
    """Standard normal arrays (1, heads, tokens, head_dim), each from a generator of its own."""
    shape = 1, heads, tokens, head_dim
    return [np.random.default_rng(seed).standard_normal(shape).astype(dtype) for seed in range(count)]


def dense(q, k, v, allowed, scale=None):
    """Softmax attention in long double, returned as float64; a row without an allowed key is 0.

    Arrays are (batch, heads, tokens, head_dim); `k` and `v` may have one head for all. `allowed` broadcasts to
    (batch, heads, queries, keys).
    """
    q, k, v = (np.asarray(x, np.longdouble) for x in (q, k, v))
    s = q @ k.swapaxes(-1, -2) * np.longdouble(q.shape[-1] ** -0.5 if scale is None else scale)
    s = np.where(allowed, s, -np.inf)
    top = s.max(-1, keepdims=True)
    p = np.exp(s - np.where(np.isfinite(top), top, 0))
    total = p.sum(-1, keepdims=True)
    return np.asarray(p / np.where(total > 0, total, 1) @ v, float)


def lower_triangle(tokens):
    """The causal mask."""
    return np.tri(tokens, dtype=bool)


def strided(q, k, stride):
    """The last `stride` keys of a query, itself included, and every key a multiple of `stride` before it."""
    return (k <= q) & ((q - k < stride) | ((q - k) % stride == 0))


def times_written(plan):
    """(variants, q_len) int array: how often a plan writes each row, by an item or by a merge.

    Read off the arrays of the plan, as docs/contract.rst defines them.
    """
    found = []
    for variant in range(plan.variants):
        times = np.zeros(plan.q_len, int)
        for item in plan.work[plan.work_indptr[variant] : plan.work_indptr[variant + 1]]:
            if item["slot"] == -1:
                view = plan.views[plan.components[item["component"]]["query_view"]]
                tile = np.unravel_index(int(item["query_tile"]), tuple(view["grid"]))
                axes = [
                    np.arange(i * box, min((i + 1) * box, extent)) * stride
                    for i, box, extent, stride in zip(tile, view["box"], view["extent"], view["stride"], strict=True)
                ]
                times[int(view["offset"]) + sum(np.meshgrid(*axes, indexing="ij")).ravel()] += 1
        times[plan.merge_rows[plan.merge_variants[variant] : plan.merge_variants[variant + 1]]] += 1
        found.append(times)
    return np.array(found)
