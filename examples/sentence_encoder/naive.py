"""Dense attention in plain NumPy: the baseline."""

from __future__ import annotations

import numpy as np

STRIP_CELLS = 1 << 20
"""Scores per strip: 4 MiB of float32 stay in cache, which is faster than the whole matrix at once."""


def dense_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, strip_cells: int = STRIP_CELLS) -> np.ndarray:
    """``softmax(q kᵀ / √head_dim) v``, every pair computed, head by head in strips of rows.

    Strips bound the memory: the scores of 16384 tokens would take 1 GiB per head.

    Parameters
    ----------
    q, k, v : (batch, heads, tokens, head_dim) float arrays

    Returns
    -------
    (batch, heads, tokens, head_dim) array
    """
    batch, heads, q_len, head_dim = q.shape
    rows = max(1, strip_cells // max(k.shape[2], 1))
    scale = q.dtype.type(head_dim**-0.5)
    out = np.empty((*q.shape[:3], v.shape[3]), q.dtype)
    for b in range(batch):
        for h in range(heads):
            keys, values = k[b, h].T, v[b, h]
            for start in range(0, q_len, rows):
                strip = slice(start, start + rows)
                p = (q[b, h, strip] * scale) @ keys
                p -= p.max(axis=1, keepdims=True)
                np.exp(p, out=p)
                out[b, h, strip] = (p @ values) / p.sum(axis=1, keepdims=True)
    return out
