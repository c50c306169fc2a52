"""Kernels read runs: plans whose runs are one tile each give the same bits."""

import dataclasses

import numpy as np
import pytest

from spattn import cpu, patterns
from spattn.planning.contract.types import tile_lists
from spattn.request.call import Call
from spattn.testing import inputs

CASES = {
    "causal": (patterns.Causal(), 700, 700),
    "few queries": (patterns.prefix_lm(900), 5, 1500),
    "many pieces": (patterns.Full(), 60, 9000),
    "two views": (patterns.longformer(40, global_tokens=(0, 150, 300)), 700, 700),
}


@pytest.mark.parametrize("isa", cpu.instruction_sets())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_runs_are_their_tiles(case, dtype, isa):
    pattern, q_len, kv_len = CASES[case]
    q, k, v = inputs(1, 4, 2, q_len, kv_len, 32, dtype=dtype)
    call = Call.of(q, k, v)
    made = cpu.plan_for(pattern, call)
    assert len(made.indices) < made.tiles
    apart = dataclasses.replace(made, **tile_lists(made)._asdict(), tile_indptr=np.arange(made.tiles + 1))
    results = []
    for plan in (made, apart):
        out, lse = cpu.forward(q, k, v, plan, 0.2, isa=isa)
        results.append((out, lse, *cpu.backward(q, q, k, v, out, lse, plan, 0.2, isa=isa)))
    for one, other in zip(*results, strict=True):
        assert one.tobytes() == other.tobytes()
