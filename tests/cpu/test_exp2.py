"""The kernels' own exponential (kernels/simd/exp2.h), to the unit in the last place."""

from __future__ import annotations

import math

import numpy as np
import pytest

import spattn
from spattn import cpu, patterns


@pytest.mark.parametrize("rows", [1, 16, 20000], ids=["one query", "few queries", "tiles"])
@pytest.mark.parametrize("dtype, lowest, highest", [("float32", -125, -26), ("float64", -1021, -55)])
@pytest.mark.parametrize("isa", cpu.instruction_sets())
def test_powers_of_two(isa, dtype, lowest, highest, rows):
    """Beside a key with logit 0 and value 0, a key with value 1 weighs 2^x / (1 + 2^x); where 1 + 2^x rounds to 1 the
    result is exp2(x) itself. The scale ln 2 cancels against log2(e), and x is not rounded on its way."""
    x = np.random.default_rng(0).uniform(lowest, highest, 20000).astype(dtype)
    q = x.reshape(-1, 1, rows, 1)
    k = np.broadcast_to(np.array([0, 1], dtype)[:, None], (len(q), 1, 2, 1))
    out, _ = cpu.forward(q, k, k, spattn.plan_for(patterns.Full(), q, k, k, backend="cpu"), math.log(2), isa=isa)
    exact = np.exp2(x.astype(np.longdouble))
    ulps = np.abs(out.ravel() - exact) / np.spacing(exact.astype(dtype))
    assert ulps.max() < 1.25  # below 1 with fused multiply-adds, which a build for the sanitizers does without
