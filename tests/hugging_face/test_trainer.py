"""Trainer: bf16, gradient checkpointing and checkpoints, beside the same steps with eager attention."""

import warnings

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from spattn.patterns import Sinks, SlidingWindow  # noqa: E402
from spattn.transformers import use  # noqa: E402

from . import families  # noqa: E402

PATTERN = Sinks(2) | SlidingWindow(5, 0)
FAMILIES = ["llama", "mistral", "gemma2", "gemma3_text", "gpt_oss", "qwen3", "modernbert"]


def model_of(name):
    """With a head, eager attention, and no dropout."""
    hf.set_seed(0)
    auto = hf.AutoModelForMaskedLM if name == "modernbert" else hf.AutoModelForCausalLM
    return auto.from_config(families.configuration(name), attn_implementation="eager")


def train(model, folder):
    tokens = torch.randint(2, families.VOCABULARY, (8, families.TOKENS), generator=torch.Generator().manual_seed(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that Transformers renames
        options = hf.TrainingArguments(
            output_dir=folder,
            max_steps=2,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            bf16=True,
            use_cpu=True,
            gradient_checkpointing=True,
            save_steps=2,
            report_to=[],
            disable_tqdm=True,
        )
        trainer = hf.Trainer(model=model, args=options, train_dataset=[{"input_ids": x, "labels": x} for x in tokens])
        return trainer.train().training_loss


@pytest.mark.parametrize("name", FAMILIES)
def test_steps_are_those_of_eager_attention(name, tmp_path):
    eager, ours = model_of(name), use(model_of(name))
    want, got = train(eager, tmp_path / "eager"), train(ours, tmp_path / "ours")
    assert abs(got - want) < 5e-3
    start = dict(model_of(name).named_parameters())
    for parameter, one in eager.named_parameters():
        step, other = one - start[parameter], dict(ours.named_parameters())[parameter] - start[parameter]
        # Adam's first steps have the gradient's sign, which bfloat16 does not tell where the gradient is nearly 0.
        assert (step - other).abs().mean() < 0.15 * step.abs().mean() + 1e-6, parameter


@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint_keeps_the_pattern(name, tmp_path):
    ours = use(model_of(name), PATTERN)
    train(ours, tmp_path)
    again = use(type(ours).from_pretrained(tmp_path / "checkpoint-2"))
    assert again.config.spattn_pattern == PATTERN
    tokens = torch.arange(2, 22)[None]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):  # in which Trainer leaves the model's forward()
        assert torch.equal(again.eval()(tokens)[0].float(), ours.eval()(tokens)[0].float())
