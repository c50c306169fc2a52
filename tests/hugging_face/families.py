"""A tiny model of random weights of any family of Transformers, and what it is given."""

import copy
import inspect
import itertools
import pathlib
import re

import torch
import transformers as hf
from transformers.models.auto import modeling_auto

from spattn.transformers import use

ERRORS = (
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What models raise for what they cannot do with eager attention either."""

_PAGE = pathlib.Path(__file__).parents[2] / "docs" / "tutorials" / "transformers.rst"

VOCABULARY = 64
TOKENS = 24

# Values of a configuration that has such a field; the others stay as the family has them.
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "d_model": 32,
    "d_ff": 48,
    "d_kv": 8,
    "num_layers": 2,
    "num_heads": 4,
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 32,
    "n_layers": 2,
    "n_heads": 4,
    "dim": 32,
    "hidden_dim": 48,
    "n_inner": 48,
    "n_positions": 128,
    "n_ctx": 128,
    "rotary_dim": 8,
    "max_position_embeddings": 128,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "ffn_dim": 48,
    "ffn_hidden_size": 48,
    "embedding_size": 32,
    "emb_dim": 32,
    "word_embed_proj_dim": 32,
    "projection_dim": 32,
    "image_size": 32,
    "patch_size": 8,
    "num_local_experts": 2,
    "num_experts": 2,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "sliding_window": 8,
    "attention_chunk_size": 8,
    "local_attention": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "num_conv_pos_embeddings": 16,
    "num_mel_bins": 16,
    "max_source_positions": 128,
    "max_target_positions": 128,
}
_ALWAYS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}

# What a family asks of its configuration beside that.
_OWN = {
    "bamba": {"attn_layer_indices": [1]},
    "beit": {"use_relative_position_bias": True},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}},
    "deepseek_v2": {"num_experts_per_tok": 1, "n_group": 1, "topk_group": 1},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 1},
    "esmc": {"num_key_value_heads": 4},
    "esm": {"vocab_size": VOCABULARY, "mask_token_id": 3},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_ssm": 64, "mamba_d_head": 16},
    "gemma3n_text": {"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"]},
    "glm5_next_text": {"num_key_value_heads": 4, "qk_rope_head_dim": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4},
    "lilt": {"channel_shrink_ratio": 1, "hidden_size": 48},
    "luke": {"entity_vocab_size": VOCABULARY, "entity_emb_size": 32},
    "mistral4": {"num_key_value_heads": 4, "qk_head_dim": 16, "head_dim": 16},
    "ministral": {"head_dim": 8},
    "neomme": {"head_dim": 16},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "swin": {"patch_size": 2, "window_size": 4, "embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4]},
    "wav2vec2-bert": {"feature_projection_input_dim": 16},
    "xmod": {"default_language": "en_XX"},
}
_SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
_IN_SECTIONS = re.compile(
    "(Glm4v|Glm4vMoe|Glm46V|GlmImage|GlmOcr|Qwen2VL|Qwen2_5_VL|Qwen2_5Omni|PaddleOCR|Cosmos3Edge)Text"
)
# Where the first of the auto classes is not the one that says most.
_CLASSES = {
    "bart": "BartForConditionalGeneration",
    "mbart": "MBartForConditionalGeneration",
    "t5": "T5ForConditionalGeneration",
    "whisper": "WhisperForConditionalGeneration",
}


def names():
    """All families of Transformers that have a model."""
    return sorted(set(modeling_auto.MODEL_MAPPING_NAMES) | set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))


def model_class(name):
    """The family's decoder with a head, where it has one, and its bare model elsewhere."""
    composite = "text_config" in hf.CONFIG_MAPPING[name].sub_configs
    head = None if composite else modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(name)
    found = _CLASSES.get(name) or head or modeling_auto.MODEL_MAPPING_NAMES[name]
    return getattr(hf, found[0] if isinstance(found, (tuple, list)) else found)


def configuration(name, **own):
    return _tiny(hf.CONFIG_MAPPING[name], _OWN.get(name, {}) | own)


def _tiny(cls, own):
    default = cls()
    has = default._getattr_without_heterogeneous_validation
    given = dict(_ALWAYS)
    for field, value in _SIZES.items():
        known = has(field, None)
        settable = not isinstance(inspect.getattr_static(cls, field, None), property)
        if type(known) is int and settable and field not in given:
            given[field] = value
    for field in list(given):  # two names of one field
        other = cls.attribute_map.get(field, field)
        if other != field and other in given:
            del given[field]
    if has("kv_lora_rank", None) is not None:
        given["num_key_value_heads"] = 4
    for field in cls.sub_configs or ():
        inner = has(field, None)
        if inner is not None and hasattr(inner, "sub_configs"):
            given[field] = _tiny(type(inner), {})
    for field, value in vars(default).items():
        if isinstance(value, float) and "drop" in field:
            given[field] = 0.0
        if field == "layer_types" and value:
            given[field] = (list(dict.fromkeys(value)) * 2)[:2]
    if _IN_SECTIONS.match(cls.__name__):
        given |= _SECTIONS
    return cls(**copy.deepcopy(given | own))  # some configurations change what they are given


def parameters(name, **own):
    """How many parameters such a model has."""
    with torch.device("meta"):
        made = model_class(name)(configuration(name, **own))
    return sum(parameter.numel() for parameter in made.parameters())


def model(name, **own):
    """With random weights, always the same ones, and eager attention."""
    hf.set_seed(0)
    made = model_class(name)(configuration(name, **own)).eval()
    made.set_attn_implementation("eager")
    for parameter, values in made.named_parameters():
        if re.search("sinks|relative_position_bias", parameter) and not values.any():
            torch.nn.init.normal_(values, std=0.5)  # of zero, attention could ignore them
    return made


# What sharp() asks of a configuration beside _OWN, so that the feature of a family matters.
_SHARP = {
    "beit": {"use_shared_relative_position_bias": True},
    "bloom": {"n_head": 3, "hidden_size": 48},
    "gpt_oss": {"num_experts_per_tok": 2},  # of two: rounding selects no expert
    "granite": {"attention_multiplier": 0.1},
    "mpt": {"attn_config": {"clip_qkv": 1.0, "softmax_scale": 0.5}},
}


def sharp(name):
    """A model with eager attention whose scores are about 1, so that they decide on the weights."""
    made = model(name, **_SHARP.get(name, {}))
    with torch.no_grad():
        for module in made.modules():
            if isinstance(module, torch.nn.Linear) and module is not made.get_output_embeddings():
                module.weight /= module.weight.std() * module.in_features**0.5
    for module in made.modules():
        if getattr(module, "attn_logit_softcapping", None):
            module.attn_logit_softcapping = 0.2
    return made


def run(made, given):
    """The first result; some models draw masks or noise."""
    hf.set_seed(0)
    return made(**given)[0]


def padding(side):
    """A mask of tokens in which the first of two sequences is shorter."""
    valid = torch.ones(2, TOKENS, dtype=torch.int64)
    if side == "left":
        valid[0, :7] = 0
    if side == "right":
        valid[0, -7:] = 0
    return valid


def takes_padding(made, given):
    return "input_ids" in given and "attention_mask" in inspect.signature(made.forward).parameters


def inputs(made):
    """The first inputs of several that the model's forward() takes; its own error where it takes none."""
    errors = []
    for given in _candidates(made):
        try:
            with torch.no_grad():
                made(**given)
            return given
        except ERRORS as error:
            errors.append(error)
    raise ExceptionGroup(f"no inputs for {type(made).__name__}", errors)


def _candidates(made):
    def randn(*shape):
        return torch.randn(*shape, generator=torch.Generator().manual_seed(1))

    tokens = torch.randint(2, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    pixels, mels = randn(2, 3, 32, 32), getattr(made.config, "num_mel_bins", 16)
    fields = inspect.signature(made.forward).parameters
    also = {"use_cache": False} if "use_cache" in fields else {}
    if made.config.is_encoder_decoder and "decoder_input_ids" in fields:
        also["decoder_input_ids"] = tokens
    main = made.main_input_name
    if main == "input_features":
        for shape in ((2, mels, 256), (2, 256, mels), (2, 256, 80), (2, 256, 128), (2, 80, 256), (2, 128, 3000)):
            yield {main: randn(*shape)} | also
    elif main == "input_values":
        for shape in ((2, 2000), (2, 1, 2000), (2, 256, 16)):
            yield {main: randn(*shape)} | also
    elif main == "pixel_values":
        for shape in ((2, 3, 32, 32), (2, 2, 3, 32, 32), (2, 3, 64, 64)):
            yield {main: randn(*shape)} | also
        yield {"input_ids": tokens, "pixel_values": pixels} | also
    else:
        yield {"input_ids": tokens} | also
        yield {"input_ids": tokens, "pixel_values": pixels} | also
        yield {"input_ids": tokens, "pixel_values": pixels, "attention_mask": torch.ones_like(tokens)} | also
        yield {"input_ids": tokens, "bbox": torch.zeros(2, TOKENS, 4, dtype=torch.int64)} | also
    if "grid_thw" in fields:
        patch = made.config.patch_size
        patch, frames = patch if isinstance(patch, int) else patch[0], getattr(made.config, "temporal_patch_size", 1)
        name = "pixel_values" if "pixel_values" in fields else "hidden_states"
        for shape in ((16, 3 * frames * patch**2), (16, 3, patch, patch)):
            yield {name: randn(*shape), "grid_thw": torch.tensor([[1, 4, 4]])}


# -- what the documentation's table says of each family ----------------------------------------------------------------

EQUAL = "the same as with eager attention"
REASONS = {
    "refused: attention of its own, outside of Transformers' attention interface": "^model: .* does not use",
    "refused: a model that computes with its mask": (
        "^attention_mask: (this model computes with its mask|expected a mask for)"
    ),
    "refused: no layer that calls the attention interface": "^model: .* none of its layers uses",
}
"""The rows of the table, and the error of the families in each."""

MOST_PARAMETERS = 30_000_000
"""A model of more than that is not made for the nightly run."""

# With every run of the tests; the nightly run takes all families of the table.
EVERY_RUN = """
llama mistral mixtral qwen2 qwen2_moe qwen3 qwen3_moe gemma gemma2 gemma3_text phi phi3 gpt2 gpt_neox opt olmo2 cohere2
granite smollm3 starcoder2 stablelm glm4 exaone4 llama4_text modernbert-decoder deepseek_v3 ernie4_5 gpt_bigcode
bert roberta distilbert electra modernbert albert vit siglip_vision_model bart whisper gemma3 qwen3_vl llava
gpt_oss granite_swa t5 umt5 bloom mpt swin beit layoutlmv3 parakeet_encoder
longformer big_bird deberta-v2 doge deepseek_v4 xlnet gemma4_text mamba
""".split()


def table():
    """The rows of the documentation's table: families by what becomes of them."""
    text = _PAGE.read_text(encoding="utf-8").partition("   * - Result\n")[2]
    rows = re.findall(r"^   \* - (.*)\n     - ((?:.|\n       )*)$", text, re.MULTILINE)
    return {result: re.findall(r"``([^`]+)``", listed) for result, listed in rows}


def selected(nightly):
    """Families that compute the same as eager attention, and a dict of those that are refused by the row's name."""
    rows = table()
    chosen = set(EVERY_RUN) if not nightly else set(itertools.chain(*rows.values()))
    equal = [name for name in rows.pop(EQUAL) if name in chosen]
    return equal, {name: row for row, listed in rows.items() for name in listed if name in chosen}


def generates(name):
    return name in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or name in _CLASSES


def prepared(name):
    """A model with eager attention and what it is given; an error where it is too large, or none can be made."""
    if parameters(name) > MOST_PARAMETERS:
        raise ValueError(f"{name} has more than {MOST_PARAMETERS} parameters")
    made = model(name)
    given = [inputs(made)]
    if takes_padding(made, given[0]):
        given.append(given[0] | {"attention_mask": padding("right")})
        try:
            made(**given[1])
        except ERRORS:
            given.pop()
    return made, given


def outcome(made, given):
    """The row of the table in which a family belongs."""
    try:
        for one in given:
            use(made)(**one)
    except (TypeError, ValueError) as error:
        rows = [row for row, words in REASONS.items() if re.search(words, str(error))]
        if len(rows) != 1:
            raise
        return rows[0]
    return EQUAL
