"""Bool masks given as bare arrays broadcast as those of PyTorch's attention do, wherever a caller may give one."""

import re

import numpy as np
import pytest
import torch

import spattn
from spattn import patterns

BATCH, HEADS, Q_LEN, KV_LEN = 2, 4, 6, 9
FITTING = [(1,), (4,), (1, 1), (2, 1), (1, 4), (2, 4)]
MISFITS = {  # leading axes, and the hint
    (2,): "insert an axis: mask[:, None]",
    (3,): "expected 1 or 4 for heads",
    (8,): "expected 1 or 4 for heads",
    (0,): "expected 1 or 4 for heads",
    (2, 2): "use spattn.patterns.Mask(mask)",
    (4, 2): "use spattn.patterns.Mask(mask)",
    (4, 4): "expected 1 or 2 for batch",
    (3, 1): "expected 1 or 2 for batch",
}


def masked_calls():
    """Every way to give a bool mask: a name, the conversion of arrays, and a function of q, k, v and the mask."""
    yield "numpy", np.asarray, spattn.attention
    yield "reference", np.asarray, lambda *given: spattn.attention(*given, backend="reference")
    yield "grouped", np.asarray, lambda q, k, v, m: spattn.grouped_attention([(q, k, v, m), (q, k, v, "full")])[0]
    yield "plan", np.asarray, lambda q, k, v, m: spattn.attention(q, k, v, spattn.plan(m, like=(q, k, v)))
    yield "torch", torch.from_numpy, spattn.attention
    yield "compiled", torch.from_numpy, torch.compile(spattn.attention, backend="aot_eager", dynamic=False)
    yield "recorded", lambda x: torch.from_numpy(x).requires_grad_(x.dtype == np.float32), spattn.attention


def operands():
    rng = np.random.default_rng(5)
    return [rng.standard_normal((BATCH, HEADS, n, 8), dtype=np.float32) for n in (Q_LEN, KV_LEN, KV_LEN)]


@pytest.mark.parametrize("name, convert, attend", [pytest.param(*c, id=c[0]) for c in masked_calls()])
def test_bool_masks_broadcast_as_in_torch(name, convert, attend):
    """A bare mask has one entry, or as many as q, along each leading axis; anything else is refused."""
    arrays, rng = operands(), np.random.default_rng(6)
    for leading in FITTING:
        mask = rng.random((*leading, Q_LEN, KV_LEN)) < 0.7
        tensors = [torch.from_numpy(x) for x in arrays]
        expected = torch.nn.functional.scaled_dot_product_attention(*tensors, attn_mask=torch.from_numpy(mask))
        found = attend(*map(convert, (*arrays, mask)))
        found = found.detach().numpy() if isinstance(found, torch.Tensor) else found
        np.testing.assert_allclose(found, expected, atol=1e-5)
    for leading, hint in MISFITS.items():
        with pytest.raises(ValueError, match=re.escape(hint)):
            attend(*map(convert, (*arrays, np.ones((*leading, Q_LEN, KV_LEN), bool))))


def test_bool_masks_of_gradients_broadcast_as_in_torch():
    q, k, v = operands()
    out, lse = spattn.attention(q, k, v, return_lse=True)
    for leading, hint in MISFITS.items():
        with pytest.raises(ValueError, match=re.escape(hint)):
            spattn.attention_backward(out, q, k, v, out, lse, np.ones((*leading, Q_LEN, KV_LEN), bool))


def test_mask_keeps_groups_of_heads():
    """patterns.Mask has groups of heads, which a bare mask has not."""
    arrays = operands()
    groups = np.random.default_rng(7).random((2, Q_LEN, KV_LEN)) < 0.7
    found = spattn.attention(*arrays, patterns.Mask(groups))
    np.testing.assert_array_equal(found, spattn.attention(*arrays, groups.repeat(2, axis=0)))
