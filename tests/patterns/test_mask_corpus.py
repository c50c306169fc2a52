"""Plans of public models' mask functions against the masks, evaluated cell by cell by PyTorch."""

import numpy as np
import pytest

import spattn
from spattn import patterns as p
from spattn.testing import check_plan

torch = pytest.importorskip("torch")
flex = pytest.importorskip("torch.nn.attention.flex_attention")
from .mask_corpus import CORPUS, index_sets  # noqa: E402

TOKENS = 257


@pytest.mark.parametrize("name", CORPUS)
def test_plans_allow_the_pairs_of_the_mask(name):
    """The default tile, tiles of odd height, and the plan of a call, which may permute tokens."""
    mask_mod, *sizes = CORPUS[name](TOKENS)
    batch, heads, q_len, kv_len = sizes
    mask = flex.create_mask(mask_mod, *sizes, device="cpu").numpy()
    pattern = p.interop.from_mask_mod(mask_mod, batch=batch, heads=heads)
    arrays = [np.broadcast_to(np.float32(0), (batch, heads, length, 8)) for length in (q_len, kv_len, kv_len)]
    plans = [
        spattn.plan(pattern, q_len, kv_len, batch=batch, heads=heads),
        spattn.plan(pattern, q_len, kv_len, batch=batch, heads=heads, tiling=spattn.Tiling(tile=(24, 64))),
        spattn.plan_for(pattern, *arrays, backend="cpu"),
    ]
    for plan in plans:
        check_plan(plan, index_sets(plan, mask))
    rows = pattern.index_set(q_len, kv_len, batch=batch - 1, head=heads - 1)
    assert np.array_equal(rows.to_dense(), mask[-1, -1])
