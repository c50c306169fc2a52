"""Counter-based random blocks: any row can be drawn alone, reproducibly on every machine."""

from __future__ import annotations

import numpy as np

__all__ = ["draw_ranks", "random_words"]

# Constants of Philox4x64-10: Salmon, Moraes, Dror, Shaw. Parallel random numbers: as easy as 1, 2, 3. SC11.
_MULTIPLIER = (np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157))
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_LOW, _HALF, _WORD = np.uint64(0xFFFFFFFF), np.uint64(32), (1 << 64) - 1


def random_words(seed: int, head: int, rows: np.ndarray, count: int) -> np.ndarray:
    """Return the first `count` words of ``np.random.Philox(key=seed, counter=[0, 0, head, row])``, vectorized over
    rows: (rows, count) uint64."""
    blocks = -(-count // 4)
    shape = (len(rows), blocks)
    counter = [
        np.broadcast_to(np.arange(1, blocks + 1, dtype=np.uint64), shape),
        np.zeros(shape, np.uint64),
        np.full(shape, head, np.uint64),
        np.broadcast_to(rows.astype(np.uint64)[:, None], shape),
    ]
    key = [seed & _WORD, seed >> 64]
    for _ in range(10):
        (high0, low0), (high1, low1) = (_product(m, c) for m, c in zip(_MULTIPLIER, counter[::2], strict=True))
        counter = [high1 ^ counter[1] ^ np.uint64(key[0]), low1, high0 ^ counter[3] ^ np.uint64(key[1]), low0]
        key = [(k + w) & _WORD for k, w in zip(key, _WEYL, strict=True)]
    return np.stack(counter, axis=-1).reshape(len(rows), 4 * blocks)[:, :count]


def _product(a: np.uint64, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the high and low words of the 128-bit product."""
    a0, a1, b0, b1 = a & _LOW, a >> _HALF, b & _LOW, b >> _HALF
    middle = a1 * b0 + (a0 * b0 >> _HALF)
    other = a0 * b1 + (middle & _LOW)
    return a1 * b1 + (middle >> _HALF) + (other >> _HALF), a * b


def draw_ranks(seed: int, head: int, rows: np.ndarray, candidates: np.ndarray, size: int) -> np.ndarray:
    """Draw `size` distinct numbers below ``candidates[i]`` for each row, or all of them if there are no more.

    Returns (rows, size) int64, -1 where a row has fewer candidates. Seed, head and row number alone determine a row.
    Floyd's sampling (Bentley, Programming Pearls, CACM 30(9), 1987) with one word per draw, word t modulo the draw's
    range: a bias of 2^-44 at a million blocks.
    """
    everyone = np.arange(size)
    ranks = np.where(everyone < candidates[:, None], everyone, -1)
    choosy = candidates > size  # the others take all candidates without drawing
    ranks[choosy] = _sample(random_words(seed, head, rows[choosy], size), candidates[choosy])
    return ranks


def _sample(words: np.ndarray, candidates: np.ndarray) -> np.ndarray:
    """Draw one distinct number per word, below each row's candidates; needs fewer words than candidates."""
    size = words.shape[1]
    ranks = np.empty(words.shape, dtype=np.int64)
    for t in range(size):
        last = candidates - size + t
        rank = (words[:, t] % (last + 1).astype(np.uint64)).astype(np.int64)
        taken = (ranks[:, :t] == rank[:, None]).any(axis=1)
        ranks[:, t] = np.where(taken, last, rank)
    return ranks
