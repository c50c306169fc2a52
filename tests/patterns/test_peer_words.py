"""docs/windows.rst, "Windows in other libraries": each line as a property, for all parameters."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spattn import patterns as p

some = settings(max_examples=max(10, settings.default.max_examples // 4))
LENGTHS = st.integers(1, 60)


def mask_of(pattern, q_len, kv_len):
    return pattern.index_set(q_len, kv_len).to_dense()


@some
@given(st.integers(0, 70), st.integers(0, 70), LENGTHS, LENGTHS)
def test_words_flash_attention_window_size_and_splash_local_mask(left, right, q_len, kv_len):
    """flash-attn: row i sees keys within [i + kv_len - q_len - left, i + kv_len - q_len + right]; so does splash with
    that offset."""
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
@given(st.integers(1, 27), st.integers(30, 60))  # k + 1 keys fit
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
    assert np.array_equal(mask_of(p.longformer(2 * half, global_tokens=tokens), length, length), theirs)


@some
@given(st.integers(0, 70), st.integers(0, 70), st.integers(-70, 70), LENGTHS, LENGTHS)
def test_words_splash_local_mask_has_an_offset(left, right, offset, q_len, kv_len):
    """JAX splash: row i sees keys within [i + offset - left, i + offset + right]; an offset of 0 is the top left."""
    i, j = np.ogrid[:q_len, :kv_len]
    theirs = (j >= i + offset - left) & (j <= i + offset + right)
    assert np.array_equal(mask_of(p.QueriesAt(p.SlidingWindow(left, right), offset), q_len, kv_len), theirs)


@some
@given(st.integers(0, 20), st.integers(0, 20), st.integers(-20, 20), st.integers(1, 30), st.integers(1, 30))
def test_words_splash_local_mask_itself(left, right, offset, q_len, kv_len):
    splash = pytest.importorskip("jax.experimental.pallas.ops.tpu.splash_attention", reason="JAX is not installed")
    theirs = splash.LocalMask((q_len, kv_len), (left, right), offset)[:, :]
    assert np.array_equal(mask_of(p.QueriesAt(p.SlidingWindow(left, right), offset), q_len, kv_len), theirs)


@some
@given(st.integers(1, 40), LENGTHS)
def test_words_hugging_face_encoders(half, length):
    """transformers: |q - kv| <= sliding_window, which ModernBERT halves from local_attention; EmbeddingGemma makes
    sliding_window // 2 + 1 of its configuration's and asks for less than that."""
    i, j = np.ogrid[:length, :length]
    modernbert = np.abs(i - j) <= half
    assert np.array_equal(mask_of(p.SlidingWindow(half), length, length), modernbert)
    for configured in (2 * half, 2 * half + 1):
        gemma = np.abs(i - j) < configured // 2 + 1
        assert np.array_equal(mask_of(p.SlidingWindow(configured // 2), length, length), gemma)


@some
@given(st.integers(1, 20), st.integers(0, 30), LENGTHS)
def test_words_hugging_face_chunks_are_counted_behind_the_padding(chunk, padding, length):
    """transformers: (q - left_padding) // chunk == (kv - left_padding) // chunk, and causal."""
    i, j = np.ogrid[:length, :length]
    theirs = ((i - padding) // chunk == (j - padding) // chunk) & (j <= i)
    assert np.array_equal(mask_of(p.chunked_causal(chunk, padding), length, length), theirs)


@some
@given(st.integers(1, 5), st.integers(4, 9), st.integers(0, 3), st.integers(0, 2**32 - 1))
def test_words_bigbird_of_google(block, blocks, count, seed):
    """The first and the last block are global, a row has the blocks beside its own, and random ones that are listed."""
    listed = np.random.default_rng(seed).integers(-1, blocks, (blocks, count))
    listed[[0, -1]] = -1
    a, b = np.ogrid[:blocks, :blocks]
    layout = (np.abs(a - b) <= 1) | np.isin(a, (0, blocks - 1)) | np.isin(b, (0, blocks - 1))
    layout |= (listed[:, None, :] == b[..., None]).any(axis=2)
    n = block * blocks
    ours = (
        p.BigBird(block, random_blocks=0)
        | p.GlobalTokens(tuple(range(n - block, n)))
        | p.KeyBlocks(listed, block, block)
    )
    assert np.array_equal(mask_of(ours, n, n), np.kron(layout, np.ones((block, block), bool)))
