"""Small models of random weights, and one of real weights, which the tests compare with their own eager attention."""

import copy

import torch
import transformers as hf

VOCABULARY = 99
WINDOW = 8

_ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_DECODER = _ENCODER | {"num_key_value_heads": 2, "head_dim": 8}
_WINDOWED = _DECODER | {"sliding_window": WINDOW}
_LOCAL_AND_GLOBAL = ["sliding_attention", "full_attention"]
_MIXTURE = {"intermediate_size_mlp": 48, "num_local_experts": 2, "num_experts_per_tok": 1}

DECODERS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_DECODER)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**_WINDOWED)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(**_WINDOWED, layer_types=_LOCAL_AND_GLOBAL, attn_logit_softcapping=None)
    ),
    "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**_WINDOWED, layer_types=_LOCAL_AND_GLOBAL)),
    "llama4": lambda: hf.Llama4ForCausalLM(hf.Llama4TextConfig(**_DECODER, **_MIXTURE, attention_chunk_size=WINDOW)),
}
ENCODERS = {
    "bert": lambda: hf.BertModel(hf.BertConfig(**_ENCODER)),
    "modernbert": lambda: hf.ModernBertModel(
        hf.ModernBertConfig(**_ENCODER, local_attention=WINDOW, layer_types=_LOCAL_AND_GLOBAL)
    ),
    "embedding gemma": lambda: hf.Gemma3TextModel(
        hf.Gemma3TextConfig(**_WINDOWED, layer_types=_LOCAL_AND_GLOBAL, use_bidirectional_attention=True)
    ),
}


def vit():
    return hf.ViTModel(
        hf.ViTConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=32,
            patch_size=8,
        )
    )


def pair(make):
    """A model with its eager attention, and the same with spattn's."""
    hf.set_seed(0)
    eager = make().eval()
    eager.set_attn_implementation("eager")
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation("spattn")
    return eager, ours


def assert_entries_go_on_as_alone(model, tokens, cache, missing):
    """In a batch with so many tokens of padding on the left of each entry, generation gives what it gives without."""
    valid = torch.ones_like(tokens)
    for entry, count in enumerate(missing):
        valid[entry, :count] = 0
    options = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": cache}
    got = model.generate(tokens, attention_mask=valid, **options)
    for entry, count in enumerate(missing):
        alone = tokens[entry : entry + 1, count:]
        want = model.generate(alone, attention_mask=torch.ones_like(alone), **options)
        assert torch.equal(got[entry, count:], want[0])
