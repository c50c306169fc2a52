"""Models give what their own eager attention gives: logits, gradients and generated tokens."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from sentence_encoder import layers, model, text  # noqa: E402
from sentence_encoder.model import DemoUnavailable  # noqa: E402

from . import models  # noqa: E402

CLOSE = {"rtol": 0, "atol": 1e-5}
NEW = 64


@pytest.fixture
def tokens():
    return torch.randint(2, models.VOCABULARY, (3, 21), generator=torch.Generator().manual_seed(1))


def padding(tokens, side):
    """Two of three sequences are shorter than the third."""
    valid = torch.ones_like(tokens)
    for entry, missing in ((0, 5), (1, 12)):
        if side == "left":
            valid[entry, :missing] = 0
        if side == "right":
            valid[entry, -missing:] = 0
    return valid


@pytest.mark.parametrize("side", ["left", "right", "neither"])
@pytest.mark.parametrize("name", [*models.DECODERS, *models.ENCODERS])
def test_logits(name, side, tokens):
    valid = padding(tokens, side)
    eager, ours = models.pair((models.DECODERS | models.ENCODERS)[name])
    with torch.no_grad():
        want, got = (m(tokens, attention_mask=valid)[0] for m in (eager, ours))
    torch.testing.assert_close(got[valid == 1], want[valid == 1], **CLOSE)


def test_images():
    eager, ours = models.pair(models.vit)
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ours(pixels)[0], eager(pixels)[0], **CLOSE)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", models.DECODERS)
def test_fault_43_generation_with_left_padding(name, cache, tokens):
    eager, ours = models.pair(models.DECODERS[name])
    options = {"max_new_tokens": NEW, "do_sample": False, "cache_implementation": cache}
    want, got = (m.generate(tokens, attention_mask=padding(tokens, "left"), **options) for m in (eager, ours))
    assert got.shape == (3, 21 + NEW) and torch.equal(got, want)


def test_prompt_in_pieces(tokens):
    """A cache that has some tokens, and several queries behind them."""
    eager, ours = models.pair(models.DECODERS["gemma3"])
    with torch.no_grad():
        want = eager(tokens).logits
        first = ours(tokens[:, :12], use_cache=True)
        rest = ours(tokens[:, 12:], past_key_values=first.past_key_values)
    torch.testing.assert_close(torch.cat([first.logits, rest.logits], 1), want, **CLOSE)


@pytest.mark.parametrize("name", models.DECODERS)
def test_packed_sequences(name, tokens):
    """Told by positions that start anew; each is as if it were alone."""
    _, ours = models.pair(models.DECODERS[name])
    lengths = (10, 4, 7)
    positions = torch.cat([torch.arange(n) for n in lengths])[None].expand(3, -1)
    with torch.no_grad():
        got = ours(tokens, position_ids=positions, use_cache=False).logits
        want = torch.cat([ours(part, use_cache=False).logits for part in tokens.split(lengths, 1)], 1)
    torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_step(checkpointing, tokens):
    eager, ours = models.pair(models.DECODERS["gemma3"])
    valid = padding(tokens, "right")
    if checkpointing:
        ours.activation_checkpointing_enable()
    for m in (eager, ours):
        m.train()
        m(tokens, attention_mask=valid, labels=tokens.masked_fill(valid == 0, -100), use_cache=False).loss.backward()
    for mine, theirs in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, **CLOSE)


@pytest.mark.slow
def test_compiled_model(tokens):
    """With a break of the graph at masks and at attention; other padding is not taken for the first one's."""
    _, ours = models.pair(models.DECODERS["mistral"])
    del ours.model.layers[1:]
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="eager")
    with torch.no_grad():
        for side in ("left", "right"):
            valid = padding(tokens, side)
            got, want = (m(tokens, attention_mask=valid, use_cache=False).logits for m in (compiled, ours))
            torch.testing.assert_close(got[valid == 1], want[valid == 1], **CLOSE)


def test_sentence_encoder_of_real_weights():
    """MiniLM on real text, against Transformers' own model of these weights."""
    try:
        encoder, tokenizer = model.load()
    except DemoUnavailable as error:
        pytest.skip(str(error))
    eager, ours = models.pair(lambda: layers.in_transformers(encoder))
    texts = text.tokenise(tokenizer, text.sample(2), encoder.max_len)
    padded = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.int64)
    valid = torch.zeros_like(padded)
    for row, one in enumerate(texts):
        padded[row, : len(one)], valid[row, : len(one)] = torch.from_numpy(one), 1
    with torch.no_grad():
        want, got = (m(padded, attention_mask=valid).last_hidden_state for m in (eager, ours))
    torch.testing.assert_close(got[valid == 1], want[valid == 1], **CLOSE)
