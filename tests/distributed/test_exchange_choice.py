"""What travels between GPUs: heads where rows would be more bytes, whatever the number of ranks."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("torch")

from spattn import patterns as p  # noqa: E402
from spattn.cuda import families  # noqa: E402
from spattn.distributed._attention import _heads_travel  # noqa: E402
from spattn.distributed._plans import Shape  # noqa: E402
from spattn.request.call import Call  # noqa: E402

GPU = SimpleNamespace(sm_count=132, name="emulated", capability=(9, 0))
HOPPER = families.FAMILIES[0]


def travels(pattern, heads_kv, ranks, exchange="auto", scored=False, length=4096):
    """Whether heads travel, for 16 query heads."""
    q, k = (np.broadcast_to(np.zeros(1, ml_dtypes.bfloat16), (1, n, length, 64)) for n in (16, heads_kv))
    call = Call.of(q, k, k)
    plan = HOPPER.plan_for(pattern, call, GPU, None, False)
    return _heads_travel(exchange, plan, Shape(1, 16, heads_kv, length, 64, 64), ranks, call, HOPPER, scored)


@pytest.mark.parametrize("heads_kv", [16, 2])
@pytest.mark.parametrize(
    ("pattern", "heads"),
    [
        (p.Causal(), True),
        (p.strided(32), True),
        (p.SlidingWindow(100), False),
        (p.Causal() & p.Documents((1000, 1096, 900, 1100)), False),
        (p.longformer(128, global_tokens=8), False),  # partial sums travel
        (p.PerHead([p.Causal(), *[p.Full()] * 15]), False),
    ],
    ids=str,
)
def test_choice_does_not_depend_on_the_number_of_ranks(pattern, heads, heads_kv):
    assert {travels(pattern, heads_kv, ranks) for ranks in (1, 2)} == {heads}
    assert not travels(pattern, heads_kv, 3)  # which does not divide the heads


def test_refused():
    assert travels(p.SlidingWindow(100), 4, 4, "heads")
    with pytest.raises(ValueError, match="key-value heads that 3 ranks divide, got 4; pass exchange='auto'"):
        travels(p.Causal(), 4, 3, "heads")
    with pytest.raises(ValueError, match="score, sinks and dropout_p"):
        travels(p.Causal(), 4, 2, "heads", scored=True)
    assert not travels(p.Causal(), 4, 2, scored=True) and not travels(p.Causal(), 4, 2, "point_to_point")
