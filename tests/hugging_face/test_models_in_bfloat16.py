"""Models in bfloat16 on a GPU are as near to float32 as with eager attention: logits, all gradients, generation."""

import copy

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

from spattn.transformers import use  # noqa: E402

from . import families  # noqa: E402

FAMILIES = """
llama mistral qwen3 gemma2 gemma3_text gpt_oss granite_swa bloom mpt bert modernbert vit bart t5 swin beit
""".split()
CACHES = [(name, "dynamic") for name in FAMILIES if families.generates(name)]
CACHES += [("llama", "static"), ("gemma3_text", "static")]
NEW = 6


def on_devices(cases):
    """All cases on a GPU, and the first one on the CPU, which shows that the test itself works."""
    cases = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [(*cases[0], "cpu"), *(pytest.param(*case, "cuda", marks=pytest.mark.gpu) for case in cases)]


def models(name, device):
    """The same weights with eager attention in float32 and in bfloat16, and with spattn in bfloat16; their inputs."""
    rounded = families.sharp(name).bfloat16()
    rounded.set_experts_implementation("eager")  # kernels of experts do not take all dtypes and sizes
    given = families.inputs(copy.deepcopy(rounded).float())
    made = [copy.deepcopy(rounded).float(), rounded, use(copy.deepcopy(rounded))]
    return [(model.to(device), moved(given, device, model.dtype)) for model in made]


def moved(given, device, dtype):
    """Values of bfloat16 in a dtype, and integers, on a device."""
    tensors = {name: x.to(device) for name, x in given.items() if isinstance(x, torch.Tensor)}
    return given | {name: x.bfloat16().to(dtype) if x.is_floating_point() else x for name, x in tensors.items()}


def error(got, exact):
    """Norm of the difference of two lists of tensors, and of the second."""
    squares = [
        sum(x.double().square().sum().item() for x in tensors)
        for tensors in ([x.double() - y.double() for x, y in zip(got, exact, strict=True)], exact)
    ]
    return [square**0.5 for square in squares]


def by_module(model):
    """Gradients of the parameters of each module: those of biases may be 0, of which rounding errors remain."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found.setdefault(name.rpartition(".")[0], []).append(parameter.grad)
    return found


@pytest.mark.parametrize(("name", "device"), on_devices(FAMILIES))
def test_logits_and_gradients_in_bfloat16(name, device):
    """Within twice the error of eager attention; for gradients, plus twice its relative error over all of them."""
    results = []
    for model, given in models(name, device):
        valid = None
        if families.takes_padding(model, given):
            given["attention_mask"] = families.padding("right").to(device)
            valid = given["attention_mask"] == 1
        out = families.run(model, given)
        if valid is not None and not model.config.is_encoder_decoder:
            out = out[valid]
        weights = torch.linspace(-1, 1, out.numel()).bfloat16().reshape(out.shape)
        torch.autograd.backward(out, weights.to(out))
        results.append(([out.detach()], by_module(model)))
    (exact, of_exact), (naive, of_naive), (found, of_found) = results
    assert found[0].dtype == torch.bfloat16
    assert error(found, exact)[0] <= 2 * error(naive, exact)[0]
    assert of_exact.keys() == of_naive.keys() == of_found.keys() and len(of_exact) > 5
    whole, size = error(*(sum(x.values(), []) for x in (of_naive, of_exact)))
    for module, gradients in of_exact.items():
        own, norm = error(of_naive[module], gradients)
        assert error(of_found[module], gradients)[0] <= 2 * (own + whole / size * norm), module


class Forced(hf.LogitsProcessor):
    """Generates given tokens: after another token, logits could not be compared."""

    def __init__(self, tokens):
        self.tokens = tokens

    def __call__(self, input_ids, scores):
        token = self.tokens[:, input_ids.shape[1], None]
        return torch.full_like(scores, -torch.inf).scatter(1, token, 0.0)


@pytest.mark.parametrize(("name", "cache", "device"), on_devices(CACHES))
def test_generation_in_bfloat16(name, cache, device):
    """With a cache and left padding: the logits of each step, for the tokens that eager attention takes in float32."""
    steps, forced = [], []
    for model, given in models(name, device):
        options = {"attention_mask": families.padding("left").to(device), "max_new_tokens": NEW, "do_sample": False}
        options |= {"cache_implementation": cache, "disable_compile": True, "output_logits": True}
        options |= {"logits_processor": forced, "return_dict_in_generate": True}
        found = model.generate(given["input_ids"], use_cache=True, **options)
        forced = forced or [Forced(found.sequences)]
        assert torch.equal(found.sequences, forced[0].tokens)
        steps.append(found.logits)
    exact, naive, found = steps
    assert error(found, exact)[0] <= 2 * error(naive, exact)[0]
