"""Soft-caps, sinks and position biases: results and all gradients beside eager attention, where they matter."""

import copy
import io

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

from spattn.patterns import Causal, SlidingWindow  # noqa: E402
from spattn.score import t5_bias  # noqa: E402
from spattn.testing import dropout_mask  # noqa: E402
from spattn.transformers import use  # noqa: E402
from spattn.transformers._attention import _biased, _given, attend  # noqa: E402
from spattn.transformers._mask import pattern_mask  # noqa: E402
from spattn.transformers._t5 import BucketBias  # noqa: E402

from . import families  # noqa: E402
from .families import run, sharp  # noqa: E402

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def uncapped(model):
    for module in model.modules():
        if hasattr(module, "attn_logit_softcapping"):
            module.attn_logit_softcapping = None


def filled(word, value):
    def change(model):
        found = [x for name, x in model.named_parameters() if word in name]
        assert found
        for x in found:
            x.data.fill_(value)

    return change


def without_alibi(model):
    def zeroed(layer, arguments, options):
        return arguments, {name: 0 * x if name in ("alibi", "position_bias") else x for name, x in options.items()}

    for layer in model.modules():
        if "Attention" in type(layer).__name__:
            layer.register_forward_pre_hook(zeroed, with_kwargs=True)


def unscaled(model):
    for module in model.modules():
        if hasattr(module, "scaling"):
            module.scaling = 1.0


# Changes to models with eager attention that remove their feature.
CASES = {
    "gemma2": uncapped,
    "t5gemma": uncapped,
    "gemma3_text": None,
    "gpt_oss": filled("sinks", -1e4),
    "granite_swa": filled("sinks", -1e4),
    "t5": filled("relative_attention_bias", 0.0),
    "umt5": filled("relative_attention_bias", 0.0),
    "mpt": without_alibi,
    "bloom": without_alibi,
    "swin": filled("relative_position_bias", 0.0),
    "beit": filled("relative_position_bias", 0.0),
    "granite": unscaled,
    "llama": None,
}


@pytest.mark.parametrize("name", CASES)
def test_logits_and_all_gradients(name):
    eager, ours = sharp(name), use(sharp(name))
    given = families.inputs(eager)
    results, gradients = [], []
    for model in (eager, ours):
        out = run(model, given)
        (out * torch.linspace(-1, 1, out.numel()).reshape(out.shape)).mean().backward()
        results.append(out.detach())
        gradients.append({name: x.grad for name, x in model.named_parameters() if x.grad is not None})
    torch.testing.assert_close(results[1], results[0], **CLOSE)
    assert gradients[0].keys() == gradients[1].keys()
    for parameter, want in gradients[0].items():
        torch.testing.assert_close(
            gradients[1][parameter], want, rtol=0, atol=1e-4 * want.abs().max().item() + 1e-9, msg=parameter
        )
    remove = CASES[name]
    if remove is not None:
        remove(eager)
        assert (run(eager, given) - results[0]).abs().max() > 1e-2, "the feature does not matter here"


@pytest.mark.parametrize("name", ["t5", "beit"])
def test_checkpointing(name):
    """Layers share a bias, which checkpoints pass on."""
    found = []
    for checkpointing in (False, True):
        model = use(sharp(name)).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        run(model, families.inputs(model)).mean().backward()
        found.append({parameter: x.grad for parameter, x in model.named_parameters() if x.grad is not None})
    assert found[0].keys() == found[1].keys()
    for parameter, gradient in found[0].items():
        assert torch.equal(found[1][parameter], gradient), parameter


def test_checkpoints_that_detach_a_bias():
    model = use(sharp("t5")).train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(TypeError, match="^position_bias: this model computes with its position bias"):
        run(model, families.inputs(model))
    table = torch.zeros(3, 5, requires_grad=True)
    with pytest.raises(TypeError, match=r"^attention_mask: .* \(operation aten.detach.default\)"):
        (pattern_mask(2, 3, 5) + table).detach()
    assert (pattern_mask(2, 3, 5) + table.detach()).detach().bias is not None


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "t5", "bloom", "mpt"])
def test_dropout_in_training(name, monkeypatch):
    """Eager attention with the pairs that spattn drops: logits and all gradients, also in checkpoints."""
    models = [sharp(name), use(sharp(name)), use(sharp(name))]
    given = families.inputs(models[0])
    for model in models:
        for module in model.train().modules():
            if "Attention" in type(module).__name__:
                for field in ("attention_dropout", "dropout", "attn_dropout_p"):
                    if isinstance(getattr(module, field, None), (int, float)):
                        setattr(module, field, 0.25)
                    elif field == "attention_dropout" and hasattr(module, field):
                        module.attention_dropout.p = 0.25

    def dropped(x, p=0.5, training=True, inplace=False):
        if x.ndim != 4 or not p or not training:
            return x
        seed = int(torch.randint(1 << 62, ()))
        return x * torch.from_numpy(dropout_mask(seed, p, *x.shape)) / (1 - p)

    results = []
    models[2].gradient_checkpointing_enable({"use_reentrant": False})
    for model in models:
        with monkeypatch.context() as patch:
            if model is models[0]:
                patch.setattr(torch.nn.functional, "dropout", dropped)
            out = run(model, given)
            (out * torch.linspace(-1, 1, out.numel()).reshape(out.shape)).mean().backward()
        results.append((out.detach(), {name: x.grad for name, x in model.named_parameters() if x.grad is not None}))
    with torch.no_grad():
        assert (run(models[1].eval(), given) - results[0][0]).abs().max() > 1e-3
    for out, gradients in results[1:]:
        torch.testing.assert_close(out, results[0][0], **CLOSE)
        assert gradients.keys() == results[0][1].keys()
        for parameter, want in results[0][1].items():
            error = (gradients[parameter] - want).abs().max()
            assert error <= 1e-4 * want.abs().max() + 1e-9, parameter


# -- the attention function --------------------------------------------------------------------------------------------


def tensors(*shapes):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]


def dense(q, k, v, mask, cap=None, biases=(), sinks=None):
    """The formula: scale, cap, biases, mask; `sinks` broadcasts to (batch, heads, q_len, 1)."""
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * 0.3
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    scores = sum(biases, scores).masked_fill(~mask, -torch.inf)
    logits = scores if sinks is None else torch.cat([scores, sinks.expand(*scores.shape[:3], 1)], -1)
    weights = logits.softmax(-1)[..., : k.shape[2]]
    return (weights @ v.repeat_interleave(q.shape[1] // k.shape[1], 1)).transpose(1, 2)


def assert_same(got, want, inputs):
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    weights = torch.linspace(-1, 1, want.numel(), dtype=want.dtype).reshape(want.shape)
    gradients = [torch.autograd.grad((out * weights).sum(), inputs) for out in (got, want)]
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-8)


CAUSAL = torch.ones(9, 9, dtype=torch.bool).tril()


def test_all_of_them_in_one_call():
    """The cap applies before both biases; a mask of the model has keys that its cache does not use."""
    inputs = q, k, v, bias, added, sinks = tensors(
        (2, 4, 9, 8), (2, 2, 12, 8), (2, 2, 12, 8), (1, 4, 9, 12), (2, 1, 9, 12), (4,)
    )
    mask = added + pattern_mask(2, 9, 12)
    assert mask.kv_len == 9 and mask.shape == (2, 1, 9, 12)
    out, _ = attend(
        torch.nn.Module(), q, k, v, mask, scaling=0.3, softcap=0.5, position_bias=bias, s_aux=sinks, sliding_window=None
    )
    used = dense(q, k[:, :, :9], v[:, :, :9], CAUSAL, 0.5, (bias[..., :9], added[..., :9]), sinks[None, :, None, None])
    assert_same(out, used, inputs)


def test_sinks_of_queries():
    """As of Inkling 2: a logit for each query and head."""
    inputs = q, k, v, sinks = tensors((2, 4, 9, 8), (2, 2, 9, 8), (2, 2, 9, 8), (2, 4, 9, 1))
    out, _ = attend(torch.nn.Module(), q, k, v, None, scaling=0.3, sinks=sinks, is_causal=True)
    assert_same(out, dense(q, k, v, CAUSAL, sinks=sinks), inputs)
    with pytest.raises(ValueError, match="^sinks: expected None, because s_aux has sinks, too"):
        attend(torch.nn.Module(), q, k, v, None, sinks=sinks, s_aux=torch.zeros(4))


@pytest.mark.parametrize("masked", [None, -torch.inf, "minimum"])
@pytest.mark.parametrize("heads", [1, 4])
def test_biases_in_a_mask(heads, masked):
    """Values of −inf and the dtype's minimum forbid a pair, all others are added, -100 and NaN as well."""
    inputs = q, k, v, bias = tensors((2, 4, 9, 8), (2, 4, 9, 8), (2, 4, 9, 8), (1, heads, 9, 9))
    shifted = bias - 100.0 * (torch.arange(9) % 4 == 3)
    if masked is None:
        mask, allowed = shifted, torch.ones_like(CAUSAL)
    else:
        value = masked if masked == -torch.inf else torch.finfo(bias.dtype).min
        mask, allowed = shifted.masked_fill(~CAUSAL, value), CAUSAL
    out, _ = attend(torch.nn.Module(), q, k, v, mask, scaling=0.3)
    assert_same(out, dense(q, k, v, allowed, biases=[shifted]), inputs)
    out, _ = attend(torch.nn.Module(), q, k, v, torch.where(allowed, torch.nan, mask), scaling=0.3)
    assert out.isnan().all()


@pytest.mark.parametrize("value", [-torch.inf, torch.finfo(torch.float32).min])
def test_additive_masks_without_a_bias_are_patterns(value):
    """Of which the kernels skip tiles."""
    mask = torch.zeros(2, 1, 9, 9).masked_fill(~CAUSAL, value)
    pattern, added = _given(mask)
    assert added is None and (pattern.index_set(9, 9, batch=1).to_dense() == CAUSAL.numpy()).all()
    pattern, added = _given(mask - CAUSAL.float())
    assert added is not None and (pattern.index_set(9, 9, batch=1).to_dense() == CAUSAL.numpy()).all()


def test_a_learned_bias_of_zero_has_a_gradient():
    q, k, v = tensors((1, 2, 5, 8), (1, 2, 5, 8), (1, 2, 5, 8))
    bias = torch.zeros(1, 2, 5, 5, dtype=torch.float64, requires_grad=True)
    out, _ = attend(torch.nn.Module(), q, k, v, bias)
    assert torch.autograd.grad(out.square().sum(), bias)[0].abs().min() > 0


def test_biases_that_do_not_fit_a_mask():
    mask = pattern_mask(2, 3, 5)
    with pytest.raises(ValueError, match=r"^attention_mask: a bias of shape \(2, 1, 4, 3, 5\) does not fit"):
        mask + torch.zeros(2, 1, 4, 3, 5)
    summed = torch.ones(4, 1, 5) + (mask + torch.ones(2, 1, 1, 1, dtype=torch.float64))
    assert summed.shape == (2, 4, 3, 5) and summed.dtype == torch.float64 and (summed.bias == 2).all()
    assert summed.to("meta").bias.device.type == "meta"


# -- T5's buckets ------------------------------------------------------------------------------------------------------


def test_buckets_stay_a_table():
    """The first layer makes the bias; the others and a decoding step use it as it is."""
    model = use(families.model("t5"))
    layer = model.decoder.block[0].layer[0].SelfAttention
    bias = layer.compute_bias(1, 32, past_seen_tokens=torch.tensor(6))
    assert isinstance(bias, BucketBias) and bias.shape == (1, 4, 1, 32)
    function = _biased(bias, 7)
    assert isinstance(function, t5_bias) and function.table is layer.relative_attention_bias.weight
    assert not function.bidirectional and model.encoder.block[0].layer[0].SelfAttention.compute_bias(3, 3).function
    for use_of in (lambda: bias + 1, lambda: torch.zeros(1) + bias, lambda: bias.sum()):
        with pytest.raises(TypeError, match="^position_bias: this model computes with its position bias"):
            use_of()
    assert _biased(layer.compute_bias(1, 32, past_seen_tokens=3), 7).array.shape == (1, 4, 1, 7)
    layer.relative_attention_bias.__class__ = type("Adapter", (torch.nn.Embedding,), {})
    assert type(layer.compute_bias(1, 32, past_seen_tokens=6)) is torch.Tensor
    layer.relative_attention_bias.__class__ = torch.nn.Embedding
    model.set_attn_implementation("eager")
    assert type(layer.compute_bias(1, 32, past_seen_tokens=6)) is torch.Tensor


def test_buckets_behind_which_a_cache_has_free_entries():
    """With a mask of the caller's own, the last query is not at the last key."""
    model = use(families.model("t5"))
    layer = model.decoder.block[0].layer[0].SelfAttention
    (q, k, v) = (x.detach().float() for x in tensors((1, 4, 2, 8), (1, 4, 9, 8), (1, 4, 9, 8)))
    mask = torch.arange(9) <= 4 + torch.arange(2)[:, None]
    bias = layer.compute_bias(2, 9, past_seen_tokens=4)
    out, _ = attend(torch.nn.Module(), q, k, v, mask[None, None], scaling=0.3, position_bias=bias)
    torch.testing.assert_close(out, dense(q, k, v, mask, biases=[bias.compute()]))


# -- modules that are replaced -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bloom", "mpt", "t5", "mt5", "umt5", "switch_transformers"])
def test_replaced_modules(name):
    """They keep their parameters and hooks, can be copied and stored, and are instances of Transformers' classes."""
    model, calls = families.model(name), []
    classes = {path: type(module) for path, module in model.named_modules()}
    path = next(path for path in classes if path.rpartition(".")[2] in ("self_attention", "attn", "SelfAttention"))
    model.get_submodule(path).register_forward_hook(lambda *given: calls.append(path))
    parameters = dict(model.named_parameters())
    assert use(use(model)) is model and dict(model.named_parameters()) == parameters
    replaced = [path for path, module in model.named_modules() if type(module) is not classes[path]]
    assert path in replaced and all(
        type(model.get_submodule(path)).__module__.startswith("spattn.") for path in replaced
    )
    assert all(isinstance(module, classes[path]) for path, module in model.named_modules())
    given = families.inputs(model)
    want = run(model, given)
    assert calls
    stored = io.BytesIO()
    model.get_submodule(path)._forward_hooks.clear()
    torch.save(model, stored)
    stored.seek(0)
    for other in (copy.deepcopy(model), torch.load(stored, weights_only=False)):
        assert torch.equal(run(other, given), want)


def test_a_pattern_in_replaced_modules():
    given = {"input_ids": torch.arange(2, 22)[None]}
    for name in ("bloom", "mpt"):
        window, causal = (run(use(families.model(name), one), given) for one in (SlidingWindow(3, 0), Causal()))
        torch.testing.assert_close(window[:, :4], causal[:, :4], rtol=0, atol=1e-6)
        assert not torch.allclose(window[:, 5:], causal[:, 5:], rtol=0, atol=1e-5)


def test_the_cache_of_mpt_before_its_renaming():
    """Older versions of Transformers call it past_key_values."""
    attention = use(families.model("mpt")).transformer.blocks[0].attn
    (x,) = (x.detach().float() for x in tensors((1, 5, 32)))
    results = []
    for name in ("cache", "past_key_values"):
        cache = hf.DynamicCache()
        for part in (x[:, :4], x[:, 4:]):
            out, _ = attention(part, None, **{name: cache})
        results.append(out)
    assert torch.equal(*results) and not torch.allclose(results[0], attention(x[:, 4:], None)[0])


def test_replaced_modules_refuse_by_name():
    model = use(families.model("bloom"))
    for layer in model.transformer.h:
        layer.self_attention.pretraining_tp, layer.self_attention.slow_but_exact = 2, True
    with pytest.raises(ValueError, match="^slow_but_exact: expected False"):
        model(torch.arange(2, 9)[None])
    model = use(families.model("mpt", max_seq_len=16))
    with pytest.raises(ValueError, match="^max_seq_len: expected at least 17 .*, got 16"):
        model(torch.arange(2, 19)[None])


def test_a_subclass_of_a_replaced_module():
    """It may compute something else."""
    model = families.model("bloom")
    attention = model.transformer.h[0].self_attention
    attention.__class__ = type("OwnAttention", (type(attention),), {})
    with pytest.raises(ValueError, match="^model: BloomForCausalLM is not supported: its layer OwnAttention does not"):
        use(model)
    for block in model.transformer.h:
        block.self_attention = torch.nn.Identity()
    with pytest.raises(ValueError, match="^model: BloomForCausalLM is not supported: none of its layers uses"):
        use(model)
    assert model.config._attn_implementation == "eager"


def test_a_model_that_is_not_replaced():
    """Registration alone selects the masks, with which the model's own attention cannot compute."""
    config = families.configuration("bloom")
    model = families.model_class("bloom")._from_config(config, attn_implementation="spattn")
    with pytest.raises(TypeError, match=r"computes with its mask, .*softmax.*spattn\.transformers\.use"):
        model(torch.arange(2, 9)[None])
