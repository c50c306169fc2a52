"""Kernel families: which one computes a problem on which GPU."""

from __future__ import annotations

import numpy as np
import pytest

from spattn import patterns
from spattn.cuda import families
from spattn.cuda.families import FAMILIES
from spattn.schedule import compiler

pytestmark = pytest.mark.family("sm90")

HOPPER, FLOAT32, PORTABLE = FAMILIES
FULL = patterns.Full()


class Gpu:
    """A device, as far as families read it."""

    def __init__(self, *capability):
        self.capability = capability


@pytest.mark.parametrize(
    ("capability", "dtype", "dims", "expected"),
    [
        ((9, 0), "bfloat16", (64, 64), HOPPER),
        ((9, 0), "float16", (256, 8), HOPPER),
        ((9, 0), "float16", (64, 60), PORTABLE),
        ((9, 0), "float32", (64, 64), FLOAT32),
        ((9, 0), "float32", (64, 136), PORTABLE),
        ((9, 0), "float64", (64, 64), PORTABLE),
        ((8, 0), "float32", (64, 64), PORTABLE),
        ((8, 0), "bfloat16", (64, 64), PORTABLE),
        ((10, 0), "bfloat16", (64, 64), PORTABLE),
    ],
)
def test_families_of_problems(monkeypatch, capability, dtype, dims, expected):
    device = Gpu(*capability)
    assert families.of(device, dtype, *dims) is expected
    monkeypatch.setenv("SPATTN_CUDA_KERNEL", "portable")
    assert families.of(device, dtype, *dims) is PORTABLE
    with pytest.raises(ValueError, match=r"head_dim_v 257 is not supported on CUDA \(max 256\)"):
        families.of(device, dtype, dims[0], 257)
    monkeypatch.setenv("SPATTN_CUDA_KERNEL", "fastest")
    with pytest.raises(ValueError, match="expected 'auto' or 'portable', got 'fastest'"):
        families.of(device, dtype, *dims)


def test_families_of_plans():
    """The family of the problem, else the portable one."""
    common, small, high = (compiler.plan(FULL, 300, tile=tile) for tile in ((128, 64), (40, 64), (256, 64)))
    gathered = compiler.plan(patterns.Clusters(np.arange(300) % 5), 300, tile=(64, 64), ordered=True)
    assert gathered.ordered
    for plan, forward, backward in ((common, HOPPER, HOPPER), (high, PORTABLE, PORTABLE), (small, HOPPER, None)):
        assert families.executing(HOPPER, plan) is forward
        if backward is not None:
            assert families.executing(HOPPER, plan, backward=True) is backward
    for family, backward in ((PORTABLE, False), (HOPPER, True)):
        with pytest.raises(ValueError, match="no CUDA kernel has tiles of 40 × 64"):
            families.executing(family, small, backward)
        with pytest.raises(ValueError, match=r"ordered and gathered plans require .* compute capability 9\.0"):
            families.executing(family, gathered, backward)
    assert families.executing(HOPPER, gathered) is HOPPER


def test_blackwell_is_told_what_runs():
    said = "no kernels for compute capability 10.x yet: the portable kernels run"
    assert [families.note(Gpu(*own)) for own in ((8, 0), (9, 0), (10, 0), (10, 3))] == [None, None, said, said]
    assert families.note(Gpu(12, 0)) == said.replace("10", "12")
    assert FAMILIES[-1].launcher is None
