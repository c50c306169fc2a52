"""PyTorch as an oracle: its attention with a boolean mask, and FlexAttention's masks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import spattn
from spattn import patterns as p
from spattn import reference
from spattn.testing import assert_within_bound, dense_mask, error_bound, inputs, naive_orders
from spattn.testing.strategies import cases

torch = pytest.importorskip("torch")

some = settings(max_examples=max(10, settings.default.max_examples // 4))

# -- attention ---------------------------------------------------------------------------------------------------------


@some
@given(case=cases(max_len=100), dtype=st.sampled_from(["float32", "bfloat16"]))
def test_scaled_dot_product_attention_with_a_boolean_mask(case, dtype):
    q, k, v = inputs(*case.sizes, 16, dtype=dtype)
    s = case.sizes
    mask = dense_mask(case.pattern, s.batch, s.heads_q, s.q_len, s.kv_len)
    tensors = [torch.from_numpy(x.astype(np.float32)).to(getattr(torch, dtype)) for x in (q, k, v)]
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *tensors, attn_mask=torch.from_numpy(mask), enable_gqa=True
    ).float()
    ours = spattn.attention(*tensors, case.pattern)
    assert ours.dtype == tensors[0].dtype and isinstance(ours, torch.Tensor)
    rows = mask.any(axis=-1)  # a row without keys is NaN in some of torch's versions
    low, _ = naive_orders(q, k, v, mask)
    out64, _ = reference.attend(q, k, v, case.pattern)
    assert_within_bound(ours.float().numpy(), out64, low, q.dtype, "spattn")
    assert (ours.float() - theirs).abs().numpy()[rows].max(initial=0) <= 2 * error_bound(out64, low, q.dtype)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_on_cpu():
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    q, k, v = (torch.from_numpy(x) for x in inputs(1, 2, 2, 128, 128, 16))
    window = 17

    def sliding(b, h, i, j):
        return (j <= i) & (i - j <= window)

    block_mask = flex.create_block_mask(sliding, None, None, 128, 128, device="cpu")
    theirs = flex.flex_attention(q, k, v, block_mask=block_mask)
    torch.testing.assert_close(spattn.attention(q, k, v, p.SlidingWindow(window, 0)), theirs, rtol=1e-5, atol=1e-5)


def flex_masks():
    """FlexAttention's mask functions as people write them (attention-gym and its documentation), beside ours."""
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor([20, 7, 13, 24]))
    yield "causal", lambda b, h, i, j: i >= j, p.Causal()
    yield "sliding_window", lambda b, h, i, j: (i >= j) & (i - j <= 9), p.SlidingWindow(9, 0)
    yield "prefix_lm", lambda b, h, i, j: (j <= 11) | (i >= j), p.prefix_lm(12)
    yield "document", lambda b, h, i, j: documents[i] == documents[j], p.Documents((20, 7, 13, 24))
    yield (
        "document_causal",
        lambda b, h, i, j: (documents[i] == documents[j]) & (i >= j),
        (p.Documents((20, 7, 13, 24)) & p.Causal()),
    )
    yield "dilated", lambda b, h, i, j: ((i - j) % 3 == 0) & ((i - j).abs() <= 12), p.DilatedWindow(4, 4, 3)
    yield "global", lambda b, h, i, j: ((i - j).abs() <= 5) | (i < 3) | (j < 3), p.longformer(10, 1, 3)
    yield "strided", lambda b, h, i, j: (i >= j) & ((i - j < 8) | ((i - j) % 8 == 0)), p.strided(8)
    yield "fixed", lambda b, h, i, j: (i >= j) & ((i // 8 == j // 8) | (j % 8 >= 6)), p.fixed(8, 2)
    yield (
        "sinks",
        lambda b, h, i, j: (i >= j) & ((j < 4) | (i - j <= 10)),
        ((p.Sinks(4) | p.SlidingWindow(10, 0)) & p.Causal()),
    )
    yield (
        "per_head",
        lambda b, h, i, j: torch.where(h == 0, i >= j, i <= j),
        (p.PerHead((p.Causal(), p.SlidingWindow(0, -1)))),
    )


@pytest.mark.parametrize("name, mod, pattern", [pytest.param(*each, id=each[0]) for each in flex_masks()])
def test_flex_attention_masks(name, mod, pattern):
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    theirs = flex.create_mask(mod, 1, 2, 64, 64, device="cpu").numpy()
    assert np.array_equal(dense_mask(pattern, 1, 2, 64, 64), theirs)
    for head in range(2):
        ours = pattern.index_set(64, 64, head=head if pattern.sizes()[1] > 1 else 0).to_dense()
        assert np.array_equal(ours, theirs[0, head])
