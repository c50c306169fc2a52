"""``config.spattn_pattern``: pairs that the model's mask and the pattern allow, by positions in each sequence."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import BertConfig, BertModel, DynamicCache  # noqa: E402

from spattn.patterns import BlockLocal, Causal, PerHead, Sinks, SlidingWindow, strided  # noqa: E402

from . import models  # noqa: E402

CLOSE = {"rtol": 0, "atol": 1e-5}
SINKS = Sinks(2) | SlidingWindow(3, 0)


def restricted(name, pattern):
    _, ours = models.pair((models.DECODERS | models.ENCODERS)[name])
    ours.config.spattn_pattern = pattern
    return ours


@pytest.fixture
def tokens():
    return torch.randint(2, models.VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("pattern", [SlidingWindow(4, 2), strided(4), PerHead((Causal(), SINKS))])
def test_as_a_mask(pattern, tokens):
    """The same pairs as a mask of four axes, which eager attention adds."""
    eager, ours = models.pair(models.ENCODERS["bert"])
    heads = range(4 if isinstance(pattern, PerHead) else 1)
    mask = np.stack([pattern.index_set(20, 20, head=h * pattern.sizes()[1] // len(heads)).to_dense() for h in heads])
    mask = torch.from_numpy(mask).expand(2, -1, -1, -1)
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    with torch.no_grad():
        want = eager(tokens, attention_mask=additive)[0]
        for given in (mask, additive, additive.masked_fill(~mask, -torch.inf)):
            torch.testing.assert_close(ours(tokens, attention_mask=given)[0], want, **CLOSE)
        ours.config.spattn_pattern = pattern
        torch.testing.assert_close(ours(tokens)[0], want, **CLOSE)
        torch.testing.assert_close(
            ours(tokens, attention_mask=torch.ones(2, 1, 1, 20, dtype=torch.bool))[0], want, **CLOSE
        )
        assert not torch.allclose(eager(tokens)[0], want, **CLOSE)


def test_as_json(tokens, tmp_path):
    """Which a saved configuration keeps."""
    pattern = SlidingWindow(2).to_json()
    ours = restricted("bert", pattern)
    ours.save_pretrained(tmp_path)
    again = BertModel.from_pretrained(tmp_path, attn_implementation="spattn").eval()
    assert again.config.spattn_pattern == ours.config.spattn_pattern == SlidingWindow(2)
    with torch.no_grad():
        want = restricted("bert", SlidingWindow(2))(tokens)[0]
        assert torch.equal(ours(tokens)[0], want) and torch.equal(again(tokens)[0], want)


def test_the_model_stays_causal(tokens):
    """A pattern that looks ahead opens nothing that the model's mask closes."""
    with torch.no_grad():
        got = restricted("llama", SlidingWindow(4, 4))(tokens).logits
        want = restricted("llama", SlidingWindow(4, 0))(tokens).logits
    assert torch.equal(got, want)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "llama4"])
@pytest.mark.parametrize("pattern", [SINKS, BlockLocal(6)])
def test_positions_are_those_of_the_sequence(name, pattern, cache, tokens):
    """With padding before it, in a batch, it goes on as alone."""
    models.assert_entries_go_on_as_alone(restricted(name, pattern), tokens, cache, (7, 0))


@pytest.mark.parametrize("name", ["llama", "gemma3", "llama4"])
def test_positions_in_packed_sequences(name, tokens):
    ours = restricted(name, SINKS)
    positions = torch.cat([torch.arange(n) for n in (9, 11)])[None]
    with torch.no_grad():
        got = ours(tokens, position_ids=positions, use_cache=False).logits
        want = torch.cat([ours(part, use_cache=False).logits for part in tokens.split((9, 11), 1)], 1)
    torch.testing.assert_close(got, want, **CLOSE)


def test_positions_after_a_cache_forgot(tokens):
    """Chunks of the pattern go on where they were; the layer's window is narrower than what it has seen."""
    ours = restricted("mistral", BlockLocal(6))
    cache = DynamicCache(config=ours.config)
    with torch.no_grad():
        want = ours(tokens, use_cache=False).logits
        got = [ours(one, past_key_values=cache).logits for one in tokens.split(1, 1)]
    torch.testing.assert_close(torch.cat(got, 1), want, **CLOSE)


@pytest.mark.parametrize("given", ["window", '{"pattern": "window"}', "[]", 7, {"pattern": "causal"}])
def test_no_pattern(given, tokens):
    with pytest.raises(ValueError, match=r"^spattn_pattern: expected a pattern, its text or JSON, .*, got"):
        restricted("bert", given)(tokens)


def test_no_pattern_across_sequences(tokens):
    for option in ({"is_decoder": True, "add_cross_attention": True}, {"is_encoder_decoder": True}):
        ours = restricted("bert", SlidingWindow(2))
        for name, value in option.items():
            setattr(ours.config, name, value)
        with pytest.raises(ValueError, match="^spattn_pattern: must be None for a model with cross-attention"):
            ours(tokens)


def test_of_a_layer_alone():
    """As layers are called whose model makes no mask."""
    from spattn.transformers._attention import attend

    q, k, v = torch.randn(3, 1, 2, 9, 8, generator=torch.Generator().manual_seed(1))
    module = torch.nn.Module()
    module.config = BertConfig(spattn_pattern=SlidingWindow(2))
    for causal, window in ((True, (2, 0)), (False, (2, 2))):
        module.is_causal = causal
        want, _ = attend(torch.nn.Module(), q, k, v, torch.from_numpy(dense(SlidingWindow(*window))))
        assert torch.equal(attend(module, q, k, v, None)[0], want)


def dense(pattern):
    return pattern.index_set(9, 9).to_dense()[None, None]
