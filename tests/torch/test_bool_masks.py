"""Bool masks given as bare arrays broadcast as those of PyTorch's attention do, wherever a caller may give one."""

import re

import numpy as np
import pytest
import torch

import spattn
from spattn import patterns
from spattn.torch import SparseAttention

BATCH, HEADS, Q_LEN, KV_LEN = 2, 4, 6, 9
FITTING = [(1,), (4,), (1, 1), (2, 1), (1, 4), (2, 4)]
MISFITS = {  # leading axes, and the hint
    (2,): "insert an axis for one mask per batch entry: mask[:, None]",
    (3,): "expected 4 heads or 1",
    (8,): "expected 4 heads or 1",
    (0,): "expected 4 heads or 1",
    (2, 2): "use spattn.patterns.Mask(mask)",
    (4, 2): "use spattn.patterns.Mask(mask)",
    (4, 4): "expected 2 batch or 1",
    (3, 1): "expected 2 batch or 1",
}


def masked_calls():
    """Every way to give a bool mask: a name, the conversion of arrays, and a function of q, k, v and the mask."""
    yield "numpy", np.asarray, spattn.attention
    yield "reference", np.asarray, lambda *given: spattn.attention(*given, backend="reference")
    yield "grouped", np.asarray, lambda q, k, v, m: spattn.grouped_attention([(q, k, v, m), (q, k, v, "full")])[0]
    yield "plan", np.asarray, lambda q, k, v, m: spattn.attention(q, k, v, spattn.plan_for(m, q, k, v))
    yield "torch", torch.from_numpy, spattn.attention
    yield "compiled", torch.from_numpy, torch.compile(spattn.attention, backend="aot_eager", dynamic=False)
    yield "recorded", lambda x: torch.from_numpy(x).requires_grad_(x.dtype == np.float32), spattn.attention


def operands():
    rng = np.random.default_rng(5)
    return [rng.standard_normal((BATCH, HEADS, n, 8), dtype=np.float32) for n in (Q_LEN, KV_LEN, KV_LEN)]


SLOW = {"compiled": pytest.mark.slow}
CALLS = [pytest.param(*call, id=call[0], marks=SLOW.get(call[0], ())) for call in masked_calls()]


@pytest.mark.parametrize("name, convert, attend", CALLS)
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


@pytest.mark.parametrize("shape", [(2, 1, 1, 9), (1, 1, 1, 9), (1, 9), (6, 1), (1, 1), (2, 4, 6, 1)], ids=str)
def test_hints_for_masks_that_broadcast_along_queries_or_keys(shape):
    """PyTorch's attention broadcasts them too; here a pattern says the same without the cells."""
    hint = "key_padding=mask" if shape[-2:] == (1, 9) else "np.broadcast_to"
    with pytest.raises(ValueError, match=rf"^pattern: .*got {re.escape(str(shape))}; .*use .*{re.escape(hint)}"):
        spattn.attention(*operands(), np.ones(shape, bool))


def test_hints_name_the_shape_that_was_given():
    """Also in a graph, and in a layer, which does not know the batch."""
    mask = torch.ones(2, Q_LEN, KV_LEN, dtype=torch.bool)
    whole = torch.compile(lambda *given: spattn.attention(*given), backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=re.escape("got (2, 6, 9)")) as raised:
        whole(*map(torch.from_numpy, operands()), mask)
    assert "insert an axis for one mask per batch entry: mask[:, None]" in str(raised.value)
    with pytest.raises(ValueError, match=re.escape("mask[:, None]; use spattn.patterns.Mask(mask)")):
        SparseAttention(32, 4, mask)


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
