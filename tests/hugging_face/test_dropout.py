"""Attention dropout in training: the weights that spattn's seeds drop, in eager attention too."""

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

from spattn.testing import dropout_mask  # noqa: E402
from spattn.transformers import _attention, use  # noqa: E402

from . import families  # noqa: E402

TOKENS, SHARE = torch.arange(2, 26).reshape(2, 12), 0.3


def results(model):
    """Logits and gradients of all parameters of a training step."""
    logits = model.train()(TOKENS, use_cache=False).logits
    logits.square().sum().backward()
    return logits, {name: x.grad for name, x in model.named_parameters()}


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "bloom", "mpt"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropout(name, checkpointing, monkeypatch):
    """Checkpointing computes each layer again, and drops the same weights."""
    options = {"attn_config": {"attn_pdrop": SHARE}} if name == "mpt" else {"attention_dropout": SHARE}
    own = families.configuration(name)
    for key, value in options.items():
        setattr(own, key, type(own.attn_config)(**{**own.attn_config.to_dict(), **value}) if name == "mpt" else value)
    models = []
    for _ in range(2):
        hf.set_seed(0)
        models.append(hf.AutoModelForCausalLM.from_config(own, attn_implementation="eager"))
    eager, ours = models[0], use(models[1])
    if checkpointing:
        ours.gradient_checkpointing_enable({"use_reentrant": False})
    seeds, drawn = [], _attention._dropout

    def remembered(share):
        found = drawn(share)
        seeds.append(found["seed"])
        return found

    monkeypatch.setattr(_attention, "_dropout", remembered)
    torch.manual_seed(5)
    got, gradients = results(ours)
    layers = own.num_hidden_layers
    assert len(seeds) == layers * (2 if checkpointing else 1) and len(set(seeds)) == layers
    rest = seeds[:layers]

    def dropout(weights, p=0.5, training=True, inplace=False):
        if not training or p == 0:
            return weights
        kept = torch.from_numpy(dropout_mask(rest.pop(0), p, *weights.shape))
        return weights * kept / (1 - p)

    monkeypatch.setattr(torch.nn.functional, "dropout", dropout)
    want, expected = results(eager)
    assert not rest
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    for parameter, x in expected.items():
        torch.testing.assert_close(gradients[parameter], x, rtol=1e-4, atol=1e-4 * float(x.abs().max()) + 1e-6)
