"""Heads and batch entries whose patterns differ share the launches that one of them would take."""

from __future__ import annotations

import pytest

import spattn
from spattn import cuda, patterns
from spattn.cuda.driver import launch
from spattn.cuda.sm90.forward import launches as forward_launches
from spattn.testing import inputs

pytestmark = [pytest.mark.family("sm80"), pytest.mark.gpu]

# name: (pattern, batch, heads, tokens, launches by the portable kernels, by the Hopper kernels)
GROUPED = {
    "heads": (patterns.PerHead((patterns.Causal(), patterns.SlidingWindow(30))), 5, 2, 260, 1, 1),
    "batch entries": (patterns.Documents(((100, 150), (30, 40, 180))), 2, 8, 250, 1, 1),
    # Shared rows: a merge kernel; on Hopper also the items that join two sources themselves.
    "heads, shared rows": (
        patterns.PerHead((patterns.strided(12), patterns.longformer(64, global_tokens=(0, 5)), patterns.Causal())),
        5,
        3,
        300,
        2,
        3,
    ),
}


@pytest.fixture
def launches(monkeypatch):
    """The kernels launched since the test began, one entry a launch."""
    made, original = [], launch.start

    def noted(written, *arguments):
        made.extend(written)
        return original(written, *arguments)

    for module in (launch, forward_launches):
        monkeypatch.setattr(module, "start", noted)
    return made


@pytest.mark.parametrize("family", ["sm80", "sm90"], indirect=True)
@pytest.mark.parametrize("case", GROUPED)
def test_grouped_batch_is_one_launch(family, launches, case):
    pattern, batch, heads, tokens, portable, hopper = GROUPED[case]
    q, k, v = inputs(batch, heads, heads, tokens, tokens, 64, dtype="bfloat16")
    cuda.forward(q, k, v, spattn.plan_for(pattern, q, k, v, backend="cuda"), 0.125)
    assert len(launches) == {"sm80": portable, "sm90": hopper}[family]
