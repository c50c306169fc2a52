"""Other libraries as oracles: torch's SDPA with a boolean mask, FlexAttention masks, windows in their words."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import spattn
from spattn import patterns as p
from spattn import reference
from spattn.testing import assert_within_budget, dense_mask, error_budget, inputs, naive_orders
from spattn.testing.strategies import cases

torch = pytest.importorskip("torch")

some = settings(max_examples=max(10, settings.default.max_examples // 4))
LENGTHS = st.integers(1, 60)


def mask_of(pattern, q_len, kv_len):
    return pattern.index_set(q_len, kv_len).to_dense()


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
    assert_within_budget(ours.float().numpy(), out64, low, q.dtype, "spattn")
    assert (ours.float() - theirs).abs().numpy()[rows].max(initial=0) <= 2 * error_budget(out64, low, q.dtype)


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
    yield "prefix_lm", lambda b, h, i, j: (j <= 11) | (i >= j), p.PrefixLM(12)
    yield "document", lambda b, h, i, j: documents[i] == documents[j], p.Documents((20, 7, 13, 24))
    yield "document_causal", lambda b, h, i, j: (documents[i] == documents[j]) & (i >= j), (
        p.Documents((20, 7, 13, 24)) & p.Causal()
    )
    yield "dilated", lambda b, h, i, j: ((i - j) % 3 == 0) & ((i - j).abs() <= 12), p.DilatedWindow(4, 4, 3)
    yield "global", lambda b, h, i, j: ((i - j).abs() <= 5) | (i < 3) | (j < 3), p.Longformer(10, 1, 3)
    yield "strided", lambda b, h, i, j: (i >= j) & ((i - j < 8) | ((i - j) % 8 == 0)), p.Strided(8)
    yield "fixed", lambda b, h, i, j: (i >= j) & ((i // 8 == j // 8) | (j % 8 >= 6)), p.Fixed(8, 2)
    yield "sinks", lambda b, h, i, j: (i >= j) & ((j < 4) | (i - j <= 10)), (
        (p.Sinks(4) | p.SlidingWindow(10, 0)) & p.Causal()
    )
    yield "per_head", lambda b, h, i, j: torch.where(h == 0, i >= j, i <= j), (
        p.PerHead((p.Causal(), p.SlidingWindow(0, None)))
    )


@pytest.mark.parametrize("name, mod, pattern", [pytest.param(*each, id=each[0]) for each in flex_masks()])
def test_flex_attention_masks(name, mod, pattern):
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    theirs = flex.create_mask(mod, 1, 2, 64, 64, device="cpu").numpy()
    assert np.array_equal(dense_mask(pattern, 1, 2, 64, 64), theirs)
    for head in range(2):
        ours = pattern.index_set(64, 64, head=head if pattern.sizes()[1] > 1 else 0).to_dense()
        assert np.array_equal(ours, theirs[0, head])


# -- PATTERNS.md, "the same window in other libraries' words" ----------------------------------------------------------


@some
@given(st.integers(0, 70), st.integers(0, 70), LENGTHS, LENGTHS)
def test_words_flash_attention_window_size_and_splash_local_mask(left, right, q_len, kv_len):
    """flash-attn: row i sees keys within [i + kv_len - q_len - left, i + kv_len - q_len + right]."""
    i, j = np.ogrid[:q_len, :kv_len]
    theirs = (j >= i + kv_len - q_len - left) & (j <= i + kv_len - q_len + right)
    assert np.array_equal(mask_of(p.SlidingWindow(left, right), q_len, kv_len), theirs)
    complete = [n for n in range(q_len) if left <= n + kv_len - q_len < kv_len - right]
    assert (theirs[complete].sum(axis=1) == left + right + 1).all()


@some
@given(st.integers(0, 70), LENGTHS)
def test_words_attention_gym_sliding_window(width, length):
    """attention-gym: causal and q - kv <= W; W + 1 keys a full row."""
    i, j = np.ogrid[:length, :length]
    assert np.array_equal(mask_of(p.SlidingWindow(width, 0), length, length), (i >= j) & (i - j <= width))
    if length > width:
        assert mask_of(p.SlidingWindow(width, 0), length, length)[-1].sum() == width + 1


@some
@given(st.integers(0, 70), st.integers(1, 9), LENGTHS)
def test_words_attention_gym_dilated_window_is_a_span(span, dilation, length):
    """attention-gym: |q - kv| <= W and (q - kv) % dilation == 0: W tokens of span hold W // dilation keys a side."""
    i, j = np.ogrid[:length, :length]
    theirs = (np.abs(i - j) <= span) & ((i - j) % dilation == 0)
    side = span // dilation
    assert np.array_equal(mask_of(p.DilatedWindow(side, side, dilation), length, length), theirs)


@some
@given(st.integers(1, 70), LENGTHS)
def test_words_hugging_face_mistral_and_minference(window, length):
    """transformers: kv > q - sliding_window and causal; MInference's n_local likewise: W keys, the query's included."""
    i, j = np.ogrid[:length, :length]
    assert np.array_equal(mask_of(p.SlidingWindow(window - 1, 0), length, length), (j > i - window) & (j <= i))
    if length >= window:
        assert mask_of(p.SlidingWindow(window - 1, 0), length, length)[-1].sum() == window


@some
@given(st.integers(1, 60), st.data())
def test_words_natten_shifts_where_a_sliding_window_truncates(length, data):
    """NATTEN: every row has exactly `kernel` keys; where the window fits, an odd kernel is a symmetric window."""
    kernel = data.draw(st.integers(1, length))
    ours = mask_of(p.Neighborhood(length, kernel), length, length)
    start = np.clip(np.arange(length) - kernel // 2, 0, length - kernel)
    theirs = (np.arange(length) >= start[:, None]) & (np.arange(length) < start[:, None] + kernel)
    assert np.array_equal(ours, theirs) and (ours.sum(axis=1) == kernel).all()
    if kernel % 2:
        inside = slice(kernel // 2, length - kernel // 2)
        truncated = mask_of(p.SlidingWindow(kernel // 2), length, length)
        assert np.array_equal(ours[inside], truncated[inside])
        assert (truncated.sum(axis=1) <= kernel).all()


@some
@given(st.integers(1, 29), st.integers(30, 60))
def test_words_attention_gym_natten_with_an_even_kernel_is_not_natten(half, length):
    """attention-gym: |kv - clamp(q, k // 2, L - 1 - k // 2)| <= k // 2, which is k + 1 keys for an even k."""
    kernel = 2 * (half // 2 + 1)
    centre = np.clip(np.arange(length), kernel // 2, length - 1 - kernel // 2)
    theirs = np.abs(np.arange(length) - centre[:, None]) <= kernel // 2
    assert (theirs.sum(axis=1) == kernel + 1).all()
    assert not np.array_equal(mask_of(p.Neighborhood(length, kernel), length, length), theirs)
    assert np.array_equal(mask_of(p.Neighborhood(length, kernel + 1), length, length), theirs)


@some
@given(st.integers(1, 20), st.integers(0, 3), LENGTHS)
def test_words_longformer_attention_window(half, tokens, length):
    """transformers: attention_window counts both sides; global tokens attend and are attended to everywhere."""
    i, j = np.ogrid[:length, :length]
    theirs = (np.abs(i - j) <= half) | (i < tokens) | (j < tokens)
    assert np.array_equal(mask_of(p.Longformer(2 * half, global_tokens=tokens), length, length), theirs)
