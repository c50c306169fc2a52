"""Guesses why an attention function differs; each is evaluated, and only those that agree are returned."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ..patterns import Pattern, QueriesAt
from ..patterns.base.walk import altered
from .bounds import dense_mask

__all__ = ["deviation_of_scores", "guess_heads", "guess_pairs", "guess_scale"]

_MOST_GUESSES = 3
_DIGITS = (2, 3, 4, 5)  # significant digits of an estimated scale


def guess_pairs(seen: np.ndarray, pattern: Pattern) -> list[str]:
    """Return what may be wrong with a mask (batch, heads, q_len, kv_len) that should be the pattern's."""
    found: dict[str, None] = {}
    for guess, mask in _candidates(seen, pattern):
        if mask.shape == seen.shape and np.array_equal(mask, seen):
            found[guess] = None
        if len(found) == _MOST_GUESSES:
            break
    return list(found)


def _candidates(seen: np.ndarray, pattern: Pattern) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (guess, its mask)."""
    batch, heads, q_len, kv_len = sizes = seen.shape
    expected = dense_mask(pattern, batch, heads, q_len, kv_len)
    row, key = np.ogrid[:q_len, :kv_len]
    position = row + kv_len - q_len
    yield "the mask has no effect: every key is used", np.ones(sizes, bool)
    yield "no key is used", np.zeros(sizes, bool)
    yield "the mask is inverted: True means masked", ~expected
    yield "transposed: rows and keys are exchanged", expected.swapaxes(2, 3)
    earlier = key <= position
    if not (expected & ~earlier).any() and np.array_equal(seen & earlier, expected):
        yield "the causal mask is missing: later keys are used", seen
    yield "a causal mask is added: later keys are not used", expected & earlier
    yield "off by one: the query's own key is excluded", expected & (key != position)
    yield "off by one: the query's own key is included", expected | (key == position)
    for guess, positions in (
        ("aligned top-left instead of bottom-right: row i is at position i", 0),
        ("off by one: query positions are one too large", kv_len - q_len + 1),
        ("off by one: query positions are one too small", kv_len - q_len - 1),
    ):
        yield from _evaluated(guess, QueriesAt(pattern, positions), sizes)
    for axis, entries in enumerate(("batch entries", "heads")):
        first = np.take(expected, [0], axis=axis)
        yield f"all {entries} use the pairs of the first", np.broadcast_to(first, sizes)
        yield f"the {entries} are reversed", np.flip(expected, axis=axis)
    for change, other in altered(pattern):
        what = f"padding keys are used: {change}" if change.startswith("KeyPadding(") else change
        yield from _evaluated(f"{what}: the pairs are those of {other!r}", other, sizes)


def _evaluated(guess: str, pattern: Pattern, sizes: tuple[int, ...]) -> Iterator[tuple[str, np.ndarray]]:
    try:
        batch, heads, q_len, kv_len = sizes
        mask = dense_mask(pattern, batch, heads, q_len, kv_len)
    except ValueError:
        return  # a pattern that does not support these lengths
    yield guess, mask


def guess_heads(
    k: np.ndarray, v: np.ndarray, heads_q: int, agrees: Callable[[np.ndarray, np.ndarray], bool]
) -> list[str]:
    """Return another assignment of key-value heads to query heads, if the results agree with it."""
    heads_kv = k.shape[1]
    if heads_kv in (1, heads_q):
        return []
    index = np.arange(heads_q) % heads_kv
    if not agrees(k[:, index], v[:, index]):
        return []
    group = heads_q // heads_kv
    return [f"key-value heads are interleaved: query head h uses head h % {heads_kv} instead of h // {group}"]


def guess_scale(
    q: np.ndarray,
    k: np.ndarray,
    weights: np.ndarray,
    mask: np.ndarray,
    scale: float,
    agrees: Callable[[float], bool],
) -> list[str]:
    """Return another scale, estimated from the weights, if the results agree with it."""
    products, logarithms = _centered(q, k, weights, mask)
    square = float((products**2).sum())
    slope = float((products * logarithms).sum()) / square if square else scale
    known = {1.0: " (scale missing)", q.shape[3] ** -0.5: " (1 / sqrt(head_dim))", 1 / q.shape[3]: " (1 / head_dim)"}
    for other in (*known, *(float(f"{slope:.{digits}g}") for digits in _DIGITS)):
        if abs(other - slope) < 0.05 * abs(slope) and agrees(other):
            return [f"scale: the function uses {other:.6g}{known.get(other, '')} instead of {scale:.6g}"]
    return []


def deviation_of_scores(q: np.ndarray, k: np.ndarray, weights: np.ndarray, mask: np.ndarray, scale: float) -> float:
    """Return the largest deviation of the logarithms of weights from ``scale · q·k``, relative to the row's mean."""
    products, logarithms = _centered(q, k, weights, mask)
    return float(np.abs(logarithms - scale * products).max(initial=0))


def _centered(q: np.ndarray, k: np.ndarray, weights: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return q·k and the logarithms of weights of the allowed pairs, 0 elsewhere, minus the means of the rows."""
    keys = np.repeat(k.astype(np.float64), q.shape[1] // k.shape[1], axis=1)
    products = q.astype(np.float64) @ keys.swapaxes(2, 3)
    live = mask & (weights > 0)
    count = np.maximum(live.sum(axis=3, keepdims=True), 1)

    def centered(x: np.ndarray) -> np.ndarray:
        x = np.where(live, x, 0)
        return np.where(live, x - x.sum(axis=3, keepdims=True) / count, 0)

    return centered(products), centered(np.log(np.where(live, weights, 1)))
