"""Plans of tokens in another order, which kernels for GPUs do not read."""

import numpy as np
import pytest

import spattn
from spattn import compiler, cuda, patterns
from spattn.call import Call
from spattn.testing import Expectation, inputs

PATTERN = patterns.Clusters(np.arange(300) ** 2 % 17)


@pytest.mark.parametrize("prepare", [cuda.prepare, cuda.prepare_backward])
def test_they_are_refused(prepare):
    """Before anything is asked of a device."""
    made = compiler.plan(PATTERN, 300, heads=2, ordered=True)
    assert made.ordered
    with pytest.raises(ValueError, match="^plan: expected one of tokens in their order, got an ordered one"):
        prepare(Call.of(*inputs(1, 2, q_len=300, head_dim=64)), made)


@pytest.mark.gpu
def test_calls_plan_their_pattern_anew():
    arrays = inputs(1, 2, q_len=300, head_dim=64)
    made = spattn.plan(PATTERN, backend="cpu", like=arrays)
    assert made.ordered
    out, lse = spattn.attention(*arrays, made, backend="cuda", return_lse=True)
    Expectation(PATTERN, *arrays).check(out, lse)
