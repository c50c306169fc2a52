"""Plans whose places are looked up, which the portable kernels do not execute."""

from __future__ import annotations

import numpy as np
import pytest

import spattn
from spattn import cuda, patterns
from spattn.request.call import Call
from spattn.schedule import compiler
from spattn.testing import Expectation, inputs

pytestmark = pytest.mark.family("sm80")

CLUSTERS = patterns.Clusters(np.arange(300) ** 2 % 17)


@pytest.mark.gpu
@pytest.mark.parametrize("prepare", [cuda.prepare, cuda.prepare_backward])
def test_portable_kernels_refuse_them(prepare):
    made = compiler.plan(CLUSTERS, 300, heads=2, ordered=True)
    assert made.ordered
    with pytest.raises(
        ValueError, match="^plan: ordered and gathered plans require the forward kernels of compute capability"
    ):
        prepare(Call.of(*inputs(1, 2, q_len=300, head_dim=64)), made)


@pytest.mark.gpu
def test_calls_plan_their_pattern_anew():
    arrays = inputs(1, 2, q_len=300, head_dim=64)
    made = spattn.plan_for(CLUSTERS, *arrays, backend="cpu")
    assert made.ordered
    out, lse = spattn.attention(*arrays, made, backend="cuda", return_lse=True)
    Expectation(CLUSTERS, *arrays).check(out, lse)
