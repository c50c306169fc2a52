"""Equal scores get equal weights, however large: up to the error of combining partials (docs/numerics.rst)."""

from __future__ import annotations

import numpy as np
import pytest

import spattn
from spattn import patterns

CASES = {
    "strided": (patterns.strided(7), 120, 120),
    "union": (patterns.longformer(6, 3, (11, 18)) | patterns.strided(9), 120, 120),
    "three parts": (patterns.SlidingWindow(4, 0) | patterns.Sinks(3) | patterns.PeriodicWindow(16, 2), 150, 150),
    "decoding": (patterns.Full(), 1, 3000),
}


@pytest.mark.parametrize("power", [0, 10, 20, 30, 40])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("case", CASES)
def test_equal_scores(case, dtype, power):
    pattern, q_len, kv_len = CASES[case]
    q, k = np.full((1, 1, q_len, 1), 2.0**power, dtype), np.ones((1, 1, kv_len, 1), dtype)
    allowed = pattern.index_set(q_len, kv_len).to_dense()
    v = np.random.default_rng(0).integers(0, 2, (1, 1, kv_len, 16)).astype(dtype)
    expected = allowed @ v[0, 0].astype(np.float64) / allowed.sum(axis=1, keepdims=True)
    out = spattn.attention(q, k, v, pattern, scale=1.0, backend="cpu")[0, 0]
    assert np.abs(out - expected).max() <= 2.0 ** (power - 51) + 4 * np.finfo(dtype).eps
