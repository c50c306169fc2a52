"""What only the AMX kernels do: packed key tiles that a thread keeps, and float16 as two bfloat16 parts.

Runs where AMX is, and in builds with ``-Damx_emulated=true``.
"""

from __future__ import annotations

import numpy as np
import pytest

from spattn import Tiling, cpu, patterns, plan
from spattn.testing import inputs

from .test_forward import check

pytestmark = pytest.mark.skipif("amx" not in cpu.instruction_sets(), reason="neither AMX nor an emulating build")
NARROW = ["float16", "bfloat16"]


def forward(q, k, v, made):
    return cpu.forward(q, k, v, made, q.shape[3] ** -0.5, isa="amx")


def same(a, b):
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(np.ascontiguousarray(x).view(np.uint8), np.ascontiguousarray(y).view(np.uint8))


@pytest.mark.parametrize("head_dim", [64, 200, 512])
@pytest.mark.parametrize("dtype", NARROW)
def test_what_is_in_the_cache_changes_nothing(dtype, head_dim):
    """Heads of a group, which share their tiles, against each head on its own, and both against item after item."""
    pattern = patterns.SlidingWindow(90, 70) | patterns.Columns(600, 0, 2)
    q, k, v = inputs(2, 4, 2, q_len=1300, kv_len=1300, head_dim=head_dim, head_dim_v=48, dtype=dtype)
    made = plan(pattern, 1300, 1300, tiling=Tiling(tile=cpu.TILE))
    together = forward(q, k, v, made)
    for b, h in np.ndindex(2, 4):
        one = np.s_[b : b + 1, h : h + 1]
        kv = np.s_[b : b + 1, h // 2 : h // 2 + 1]
        same((x[one] for x in together), forward(q[one], k[kv], v[kv], made))


@pytest.mark.parametrize("layout", ["bshd", "contiguous"])
@pytest.mark.parametrize("dtype", NARROW)
def test_rows_in_place_and_gathered(dtype, layout):
    """Rows that are packed from where they are against the same rows with gaps between their features."""
    q, k, v = inputs(1, 2, 2, q_len=200, kv_len=260, head_dim=64, dtype=dtype, layout=layout)
    made = plan(patterns.SlidingWindow(60, 60), 200, 260, tiling=Tiling(tile=cpu.TILE))
    apart = [np.repeat(x, 2, axis=3)[..., ::2] for x in (q, k, v)]
    same(forward(q, k, v, made), forward(*apart, made))


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", NARROW)
def test_numbers_that_are_not_finite_at_keys_that_nobody_sees(dtype, poison):
    """To the bit: every third key, in the middle of tiles, is unseen."""
    q, k, v = inputs(1, 2, q_len=150, kv_len=150, head_dim=40, head_dim_v=24, dtype=dtype)
    made = plan(patterns.Columns(3, 1, 3), 150, 150, tiling=Tiling(tile=cpu.TILE))
    clean = forward(q, k, v, made)
    k[:, :, ::3], v[:, :, ::3] = poison, poison
    same(clean, forward(q, k, v, made))


@pytest.mark.parametrize("size", [6e4, 6e-8])
def test_largest_and_smallest_float16(size):
    q, k, v = inputs(1, 2, q_len=150, kv_len=150, head_dim=40, head_dim_v=24, dtype="float16")
    v[:, :, 70:90] = size
    check(q, k, v, patterns.SlidingWindow(40, 30), "amx")
    k[:, :, 70:90, 3], q[..., 3] = size, min(1 / size, 1)
    check(q, k, v, patterns.SlidingWindow(40, 30), "amx")


def test_scratch_of_tiles_that_are_larger_than_the_cache():
    q, k, v = inputs(1, 1, q_len=600, kv_len=2048, head_dim=256, dtype="float16")
    check(q, k, v, patterns.Full(), "amx", made=plan(patterns.Full(), 600, 2048, tiling=Tiling(tile=(48, 512))))
