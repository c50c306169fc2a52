"""spattn.transformers.Cache: tokens as without it and as eager attention with a dense mask, in bounded memory."""

import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

from transformers.masking_utils import (  # noqa: E402
    and_masks,
    causal_mask_function,
    chunked_overlay,
    sliding_window_overlay,
)

import spattn.transformers  # noqa: E402
from spattn.patterns import DilatedWindow, PerHead, Sinks, SlidingWindow, Stride  # noqa: E402
from spattn.transformers._mask import pattern_mask  # noqa: E402

from . import models  # noqa: E402

MODELS = models.DECODERS | {
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**models._DECODER)),
    "gpt_oss": lambda: hf.GptOssForCausalLM(
        hf.GptOssConfig(
            **models._WINDOWED, layer_types=models._LOCAL_AND_GLOBAL, num_local_experts=2, num_experts_per_tok=1
        )
    ),
}
STREAMING = Sinks(3) | SlidingWindow(6, 0)
PADDING = (0, 4, 9)
PROMPT, NEW = 14, 30
CLOSE = {"rtol": 0, "atol": 2e-5}


@pytest.fixture
def tokens():
    return torch.randint(2, models.VOCABULARY, (3, PROMPT), generator=torch.Generator().manual_seed(1))


def padded(tokens, padding=PADDING):
    valid = torch.ones_like(tokens)
    for entry, count in enumerate(padding):
        valid[entry, :count] = 0
    return valid


def pair(name, pattern=None, max_len=PROMPT + NEW, chunk=4):
    """An eager model, the same with spattn, and a cache that drops keys soon."""
    eager, ours = models.pair(MODELS[name])
    ours.config.spattn_pattern = pattern
    return eager, ours, spattn.transformers.Cache(ours.config, max_len, chunk=chunk)


def generated(model, tokens, cache=None, **options):
    hf.set_seed(3)
    options = {"max_new_tokens": NEW, "do_sample": False} | options
    options.setdefault("attention_mask", padded(tokens, PADDING[: len(tokens)]))
    return model.generate(tokens, past_key_values=cache, **options)


def positions(valid):
    return (valid.cumsum(1) - 1).clamp(min=0)


DECODING = {
    "sampling": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 2, "do_sample": True, "num_return_sequences": 2},
    "pieces": {"prefill_chunk_size": 5},
}


@pytest.mark.parametrize("name", MODELS)
def test_generation(name, tokens):
    eager, ours, cache = pair(name)
    assert torch.equal(generated(ours, tokens, cache), generated(eager, tokens))
    assert cache.get_seq_length() == PROMPT + NEW - 1


@pytest.mark.parametrize("decoding", DECODING)
def test_decoding(decoding, tokens):
    eager, ours, cache = pair("gpt_oss" if decoding == "beams" else "gemma3")
    options = {"max_new_tokens": 16} | DECODING[decoding]
    assert torch.equal(generated(ours, tokens, cache, **options), generated(eager, tokens, **options))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_prompt_lookup(name, tokens):
    """Steps of several tokens, some of which are removed again."""
    eager, ours, cache = pair(name, max_len=60, chunk=6)
    tokens = tokens[:1].repeat(1, 2)
    options = {"prompt_lookup_num_tokens": 5, "max_new_tokens": 20, "attention_mask": None}
    assert torch.equal(generated(ours, tokens, cache, **options), generated(eager, tokens, **options))
    if name == "gemma3":
        with pytest.raises(ValueError, match="make a cache with chunk > 6"):
            cache.crop(-6)


# A pattern, whether it allows the distance between a query and a key, and its number of sinks.
PATTERNS = {
    "sinks and window": (STREAMING, lambda d: (d >= 0) & (d <= 6), 3),
    "window": (SlidingWindow(6, 0), lambda d: (d >= 0) & (d <= 6), 0),
    "dilated window": (DilatedWindow(3, 0, 2), lambda d: (d >= 0) & (d <= 6) & (d % 2 == 0), 0),
    "stride": (Stride(3), lambda d: (d >= 0) & (d % 3 == 0), 0),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_in_eager_attention_with_a_dense_mask(name, tokens):
    """Each greedy token is the likeliest one after the tokens before it, by a mask that NumPy makes."""
    pattern, near, sinks = PATTERNS[name]
    eager, ours, cache = pair("llama", pattern)
    found = generated(ours, tokens, cache)
    n = found.shape[1]
    valid = torch.cat([padded(tokens), torch.ones(3, NEW, dtype=torch.int64)], 1)
    at = positions(valid).numpy()
    distance = at[:, :, None] - at[:, None]
    mask = near(distance) | (distance >= 0) & (at[:, None] < sinks)
    mask &= (np.arange(n)[:, None] >= np.arange(n)) & (valid.numpy()[:, None] == 1)
    mask |= np.eye(n, dtype=bool)  # rows of padding must have a key
    dense = torch.where(torch.from_numpy(mask)[:, None], 0.0, torch.finfo(torch.float32).min)
    with torch.no_grad():
        want = eager(found, attention_mask=dense, position_ids=positions(valid)).logits
    assert torch.equal(found[:, PROMPT:], want[:, PROMPT - 1 : -1].argmax(-1))


@pytest.mark.parametrize("chunk", [1, 32])
@pytest.mark.parametrize("padding", [(0, 0, 0), PADDING])
@pytest.mark.parametrize(
    "pattern",
    [
        STREAMING,
        [STREAMING, None],
        [SlidingWindow(3, 0), SlidingWindow(5, 0)],
        PerHead((Stride(3), SlidingWindow(5, 0), STREAMING, SlidingWindow(3, 0))),
        STREAMING | PerHead((Stride(4), Stride(5))),
    ],
)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_logits_of_cached_steps(name, pattern, padding, chunk):
    """Pieces of several sizes, reordering, another batch and cropped tokens, against the whole sequence."""
    n = 70
    _, ours, cache = pair(name, pattern, max_len=n, chunk=chunk)
    rng = np.random.default_rng(0)
    tokens = torch.from_numpy(rng.integers(2, models.VOCABULARY, (3, n)))
    valid, at = padded(tokens, padding), 0

    def reorder(order):
        nonlocal tokens, valid
        tokens, valid = tokens[order], valid[order]

    with torch.no_grad():
        for size in (11, 1, 1, 7, 1, 20, 1, 1, 2, 1, 1):
            new = slice(at, at + size)
            given = {"attention_mask": valid[:, : new.stop]}
            place = positions(given["attention_mask"])
            want = ours(tokens[:, : new.stop], position_ids=place, use_cache=False, **given).logits[:, new]
            got = ours(tokens[:, new], position_ids=place[:, new], past_key_values=cache, **given).logits
            seen = valid[:, new] == 1
            torch.testing.assert_close(got[seen], want[seen], **CLOSE)
            at = new.stop
            if at == 12:
                cache.reorder_cache(torch.tensor([2, 1, 1]))
                reorder([2, 1, 1])
            if at == 20:
                cache.batch_select_indices(torch.tensor([2, 0]))
                reorder([2, 0])
            if at == 41:
                cache.batch_repeat_interleave(2)
                reorder([0, 0, 1, 1])
            if at == 43 and chunk > 2:
                cache.crop(-2)
                at = 41
                tokens[:, at:] = torch.from_numpy(rng.integers(2, models.VOCABULARY, tokens[:, at:].shape))


def test_memory_is_that_of_windows(tokens):
    """By bytes: window, two chunks and, in a layer without a window, all tokens; the same after beam search."""
    _, ours, cache = pair("gemma3", max_len=10_000)
    generated(ours, tokens, cache, max_new_tokens=20)
    token = 2 * 2 * 8 * 4  # keys and values of 2 heads
    window = models.WINDOW - 1
    assert [layer.nbytes for layer in cache.layers] == [3 * token * (2 * (window + 4) + 1), 3 * token * 10_000]
    storage = [layer._cache._k.data_ptr() for layer in cache.layers]
    cache.reorder_cache(torch.tensor([1, 1, 0]))
    cache.reset()
    assert cache.get_seq_length() == 0
    generated(ours, tokens, cache, max_new_tokens=20)
    assert [layer._cache._k.data_ptr() for layer in cache.layers] == storage

    _, ours, cache = pair("llama", STREAMING, max_len=10_000)
    generated(ours, tokens, cache, num_beams=2, max_new_tokens=20)
    assert cache.nbytes == 2 * 6 * token * (3 + 2 * (6 + 4) + 1)


def test_a_conversation(tokens):
    """A second prompt behind the first answer, by the same cache."""
    eager, ours, cache = pair("gemma3", max_len=200)
    options = {"max_new_tokens": 12, "attention_mask": None}
    answer = generated(ours, tokens, cache, **options)
    more = torch.cat([answer, tokens], 1)
    assert torch.equal(generated(ours, more, cache, **options), generated(eager, more, **options))


def test_cached_steps_under_autocast(tokens):
    _, ours, cache = pair("gemma3", STREAMING)
    with torch.autocast("cpu", torch.bfloat16):
        want = generated(ours, tokens, max_new_tokens=8)
        assert torch.equal(generated(ours, tokens, cache, max_new_tokens=8), want)
    assert cache.layers[0]._cache._k.dtype == torch.bfloat16


def test_too_many_tokens(tokens):
    _, ours, cache = pair("gemma3", max_len=20)
    with pytest.raises(ValueError, match=r"a sequence of 20 tokens cannot take 1 more, with max_len=20; make a cache"):
        generated(ours, tokens, cache)
    cache.reset()
    generated(ours, tokens[:2], cache, max_new_tokens=7)
    assert cache.batch_size == 2 and cache.get_seq_length() == 20


def test_another_implementation(tokens):
    """Eager attention would take the kept keys for the first ones."""
    eager, _, cache = pair("gemma3")
    with pytest.raises(TypeError, match=r"computes with the keys .* call spattn.transformers.use\(model\)"):
        generated(eager, tokens, cache)


def test_another_pattern(tokens):
    """The present pattern needs keys that were dropped, or other sinks."""
    for first, later in ((SlidingWindow(3, 0), None), (STREAMING, SlidingWindow(3, 0)), (STREAMING, Sinks(3))):
        _, ours, cache = pair("llama", first, chunk=1)
        generated(ours, tokens, cache, max_new_tokens=20)
        ours.config.spattn_pattern = later
        more = torch.cat([tokens] * 3, 1)
        with pytest.raises(ValueError, match="^attention_mask: .* use a (dynamic cache|cache of Transformers)"):
            generated(ours, more, cache, max_new_tokens=8)


def test_masks_of_the_last_keys(tokens):
    """The error is that of the first key that a mask needs."""
    module = hf.LlamaForCausalLM(hf.LlamaConfig(**models._DECODER)).model.layers[0].self_attn
    for function, reach in ((sliding_window_overlay(8), 10), (chunked_overlay(8, torch.zeros(3, dtype=int)), 10)):
        mask = pattern_mask(3, 3, 40, 37, mask_function=and_masks(function, causal_mask_function), config=module.config)
        assert mask.behind(40 - reach, module).shape == (3, 1, 3, reach)
        with pytest.raises(ValueError, match=f"keeps {reach - 1} of 40 keys in layer 0, and this mask may need others"):
            mask.behind(40 - reach + 1, module)


def test_biases_behind_dropped_keys(tokens):
    """BLOOM's ALiBi is an array with a column for each key."""
    sizes = {"vocab_size": models.VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4, "eos_token_id": None}
    bloom = spattn.transformers.use(hf.BloomForCausalLM(hf.BloomConfig(**sizes)).eval(), SlidingWindow(5, 0))
    cache = spattn.transformers.Cache(bloom.config, 60, chunk=2)
    assert torch.equal(generated(bloom, tokens, cache), generated(bloom, tokens))
    bloom.config.spattn_pattern = STREAMING
    with pytest.raises(ValueError, match="position_bias: not supported in a layer of spattn.transformers.Cache"):
        generated(bloom, tokens, spattn.transformers.Cache(bloom.config, 60, chunk=2))


def test_right_padding_of_a_layer_with_sinks(tokens):
    _, ours, cache = pair("llama", STREAMING)
    with torch.no_grad(), pytest.raises(ValueError, match="supports left padding only"):
        ours(tokens, attention_mask=padded(tokens).flip(1), past_key_values=cache)
    _, ours, cache = pair("llama", STREAMING)
    with torch.no_grad():
        ours(tokens, past_key_values=cache)
        valid = torch.ones(3, PROMPT + 2, dtype=torch.int64)
        valid[0, 3] = 0
        with pytest.raises(ValueError, match="supports left padding only"):
            ours(tokens[:, :2], attention_mask=valid, past_key_values=cache)
        cache.reset()
        ours(tokens, past_key_values=cache)
        valid[0, :4] = 0
        with pytest.raises(ValueError, match=r"expected a mask of \[16, 16, 16\] tokens, .*, got \[12, 16, 16\]"):
            ours(tokens[:, :2], attention_mask=valid, past_key_values=cache)


def test_gradients_are_refused(tokens):
    _, ours, cache = pair("llama")
    with pytest.raises(RuntimeError, match="KVCache.append"):
        ours(tokens, past_key_values=cache)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: "llama", TypeError, "config: expected model.config, got str"),
        (lambda: hf.T5Config(), ValueError, "config: T5Config has cross-attention"),
        (lambda: hf.FalconH1Config(num_hidden_layers=2), ValueError, "config: layer 0 of FalconH1Config needs a"),
    ],
)
def test_refused_configurations(make, error, message):
    config = make()
    with pytest.raises(error, match=re.escape(message)):
        spattn.transformers.Cache(config, 100)
