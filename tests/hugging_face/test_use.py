"""spattn.transformers.use(), patterns per layer, and configurations that keep them."""

import copy

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

from spattn.patterns import BlockLocal, Full, Sinks, SlidingWindow  # noqa: E402
from spattn.patterns.interop import from_mask_mod  # noqa: E402
from spattn.transformers import use  # noqa: E402
from spattn.transformers._configuration import checked  # noqa: E402
from spattn.transformers._functions import NoWindow  # noqa: E402
from spattn.transformers._mask import pattern_mask  # noqa: E402

from . import families, models  # noqa: E402

CLOSE = {"rtol": 0, "atol": 1e-5}
WINDOW, SINKS = SlidingWindow(3, 0), Sinks(2) | SlidingWindow(3, 0)


def make(name):
    hf.set_seed(0)
    return (models.DECODERS | models.ENCODERS)[name]().eval()


@pytest.fixture
def tokens():
    return torch.randint(2, models.VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(1))


def logits(model, tokens, **options):
    with torch.no_grad():
        return model(tokens, use_cache=False, **options)[0]


def test_use_sets_two_things_and_returns_the_model():
    model = make("llama")
    before = {id(module): type(module).forward for module in model.modules()}
    assert use(model, WINDOW) is model
    assert model.config._attn_implementation == "spattn" and model.config.spattn_pattern == WINDOW
    assert {id(module): module.forward.__func__ for module in model.modules()} == before
    assert use(model).config.spattn_pattern == WINDOW, "None leaves the pattern"
    assert use(model, SINKS).config.spattn_pattern == SINKS


@pytest.mark.parametrize(
    "model, words",
    [
        (
            lambda: hf.XLNetModel(hf.XLNetConfig(vocab_size=9, d_model=32, n_layer=1, n_head=4)),
            "XLNetModel",
        ),
        (
            lambda: hf.MambaModel(hf.MambaConfig(vocab_size=9, hidden_size=32, num_hidden_layers=1)),
            "MambaModel is not supported: none of its layers uses",
        ),
    ],
)
def test_a_refused_model_is_as_it_was(model, words):
    model = model()
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=f"^model: {words}"):
        use(model, WINDOW)
    assert model.config._attn_implementation == before and model.config.spattn_pattern is None


def test_what_is_no_model():
    with pytest.raises(TypeError, match="^model: expected a transformers.PreTrainedModel, got Linear"):
        use(torch.nn.Linear(2, 2))


def test_a_model_with_one_layer_of_its_own():
    """Others call the attention interface, so that Transformers' own check passes."""

    class OwnAttention(torch.nn.Module):
        def forward(self, hidden_states, **others):
            return torch.softmax(hidden_states, -1), None

    model = make("llama")
    model.model.layers[1].self_attn = OwnAttention()
    with pytest.raises(ValueError, match="^model: LlamaForCausalLM is not supported: its layer OwnAttention does not"):
        use(model)


def test_a_layer_with_a_configuration_of_its_own():
    """set_attn_implementation() would leave it dense."""
    model = make("llama")
    model.model.layers[1].self_attn.config = copy.copy(model.config)
    with pytest.raises(ValueError, match=r"its layer model\.layers\.1\.self_attn has a separate configuration"):
        use(model)


def test_composite_models():
    """The pattern is the text model's; the vision tower has none, and can also stay as it is."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    text = sizes | {"vocab_size": 99, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8}
    config = hf.Gemma3Config(text_config=text, vision_config=sizes | {"image_size": 32, "patch_size": 8})
    model = use(hf.Gemma3Model(config), WINDOW)
    assert model.config.text_config.spattn_pattern == WINDOW and model.config.vision_config.spattn_pattern is None
    assert model.config.vision_config._attn_implementation == "spattn"
    with pytest.raises(ValueError, match=r"^spattn_pattern: set it on .* Gemma3Config \(text_config, vision_config\)"):
        model.config.spattn_pattern = WINDOW
    model = hf.Gemma3Model(config)
    model.set_attn_implementation("eager")
    use(model.get_decoder())
    assert model.config.vision_config._attn_implementation == "eager"
    assert model.config.text_config._attn_implementation == "spattn"


# -- patterns per layer ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3", "llama4", "modernbert"])
def test_a_list_is_one_for_each_layer(name, tokens):
    """What the first layer returns tells its pattern, and the model's result that of the second one."""
    model, first = make(name), []
    layers = model.model.layers if hasattr(model, "model") else model.layers
    layers[1].register_forward_pre_hook(lambda layer, args: first.append(args[0]))
    results = [logits(use(model, given), tokens) for given in (SINKS, [None, SINKS], [SINKS, None], [None, None])]
    assert torch.equal(first[0], first[2]) and torch.equal(first[1], first[3])
    assert not torch.allclose(first[0], first[1], **CLOSE)
    for number, one in enumerate(results):
        assert not any(torch.allclose(one, other, **CLOSE) for other in results[:number])
    assert torch.equal(logits(use(model, [SINKS, SINKS]), tokens), results[0])
    assert torch.equal(logits(use(model, (SINKS, Full())), tokens), results[2])


@pytest.mark.parametrize("name", ["gemma3", "modernbert"])
def test_a_dict_is_by_layer_type(name, tokens):
    """As a list of the same; a type that is left out is not restricted."""
    model = make(name)
    types = model.config.layer_types
    for first, second in ((SINKS, BlockLocal(6)), (SINKS, None), (None, SINKS)):
        want = logits(use(model, [first, second]), tokens)
        assert torch.equal(logits(use(model, {types[0]: first, types[1]: second}), tokens), want)
        left_out = {name: one for name, one in zip(types, (first, second), strict=True) if one is not None}
        assert torch.equal(logits(use(model, left_out), tokens), want)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_positions_of_each_layer_are_those_of_the_sequence(name, cache, tokens):
    """As of one pattern for all: left padding, generation and packed sequences."""
    model = use(make(name), [SINKS, BlockLocal(6)])
    models.assert_entries_go_on_as_alone(model, tokens, cache, (7, 0))
    positions = torch.cat([torch.arange(n) for n in (9, 11)])[None]
    parts = torch.cat([logits(model, part) for part in tokens.split((9, 11), 1)], 1)
    torch.testing.assert_close(logits(model, tokens, position_ids=positions), parts, **CLOSE)


def test_a_given_mask_is_restricted_by_layer_too(tokens):
    model = use(make("llama"), [SINKS, None])
    causal = torch.ones(2, 1, 20, 20, dtype=torch.bool).tril()
    torch.testing.assert_close(logits(model, tokens, attention_mask=causal), logits(model, tokens), **CLOSE)


@pytest.mark.parametrize(
    "pattern, words",
    [
        ([WINDOW], "expected a list of 2 patterns, one per layer .*, got 1"),
        ([WINDOW] * 3, "expected a list of 2 patterns, one per layer .*, got 3"),
        ({"chunked_attention": WINDOW}, "the layer types of .* are full_attention, sliding_attention, got chunked"),
        ([WINDOW, 7], r"expected a pattern, its text or JSON, .*, got 7"),
        ({"full_attention": "causal"}, r"expected a pattern, its text or JSON, .*, got 'causal'"),
        ([], "expected a pattern"),
        ({}, "expected a pattern"),
        ({1: WINDOW}, "expected a pattern"),
        ('{"full_attention": 3}', "expected a pattern"),
        (from_mask_mod(lambda b, h, q, k: (q - k) % 3 == 0), "requires a serializable pattern"),
    ],
)
def test_patterns_that_do_not_suit_the_configuration(pattern, words):
    model = make("gemma3")
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=f"^spattn_pattern: {words}"):
        use(model, pattern)
    assert model.config._attn_implementation == before and model.config.spattn_pattern is None


def test_no_layer_types():
    with pytest.raises(
        ValueError, match="^spattn_pattern: expected a pattern or a list of 2 patterns, because LlamaConfig has no"
    ):
        use(make("llama"), {"full_attention": WINDOW})


def test_attention_over_layers():
    """Inkling 2 attends to its layers by the same configuration, whose positions are not those of tokens."""
    config = families.configuration("inkling2_text")
    with pytest.raises(ValueError, match="^spattn_pattern: must be None for a model with attention over its layers"):
        checked(config, WINDOW)


def test_layers_that_do_not_know_their_number():
    config = hf.DistilBertConfig(vocab_size=99, dim=32, hidden_dim=48, n_layers=2, n_heads=4, attention_dropout=0.0)
    model = use(hf.DistilBertModel(config), [WINDOW, None])
    with pytest.raises(
        ValueError, match=r"one pattern for all layers, .* DistilBertSelfAttention does not identify its layer"
    ):
        model(torch.arange(9)[None])


# -- configurations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern",
    [SINKS, [WINDOW, None], {"sliding_attention": WINDOW}, {"sliding_attention": None, "full_attention": SINKS}],
)
def test_a_saved_model_keeps_its_patterns(pattern, tokens, tmp_path):
    model = use(make("gemma3"), pattern)
    model.save_pretrained(tmp_path)
    again = use(hf.Gemma3ForCausalLM.from_pretrained(tmp_path).eval())
    assert again.config.spattn_pattern == model.config.spattn_pattern == pattern
    assert torch.equal(logits(again, tokens), logits(model, tokens))
    copied = copy.deepcopy(model)
    copied.config.spattn_pattern = None
    assert "spattn_pattern" not in copied.config.to_dict() and model.config.spattn_pattern == pattern


def test_what_is_read_is_a_copy():
    config = hf.LlamaConfig(num_hidden_layers=2, spattn_pattern=[WINDOW, None])
    config.spattn_pattern[0] = None
    assert config.spattn_pattern == [WINDOW, None]
    del config.spattn_pattern
    assert config.spattn_pattern is None


def test_a_configuration_from_before():
    """Its attribute was set before spattn was there."""
    config = hf.LlamaConfig(num_hidden_layers=2)
    vars(config)["spattn_pattern"] = WINDOW
    assert config.spattn_pattern == WINDOW


# -- windows of no keys ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [0, -1])
def test_a_layer_that_attends_with_a_window_of_no_keys(window, tokens):
    model = use(make("mistral"))
    model.config.sliding_window = window
    with pytest.raises(NoWindow, match=f"^sliding_window: expected at least 1 in a layer .*, got {window}"):
        logits(model, tokens)


def test_a_mask_with_a_window_of_no_keys_is_handed_on():
    from transformers.masking_utils import sliding_window_causal_mask_function

    mask = pattern_mask(2, 3, 3, mask_function=sliding_window_causal_mask_function(0))
    assert mask.shape == (2, 1, 3, 3) and isinstance(mask.to("meta").pattern, NoWindow)


# -- models that compute with their masks ------------------------------------------------------------------------------


def test_operators_of_masks():
    mask, other = pattern_mask(1, 3, 3), torch.zeros(3, 3)
    for use_of in (
        lambda: mask + 1,
        lambda: mask + mask,
        lambda: mask + other.bool(),
        lambda: (other + mask).softmax(-1),
        lambda: 1 - mask,
        lambda: mask * 2,
        lambda: mask & other.bool(),
        lambda: other.bool() | mask,
    ):
        with pytest.raises(TypeError, match="^attention_mask: this model computes with its mask"):
            use_of()
