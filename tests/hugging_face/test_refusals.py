"""What changes a result and cannot be computed is refused by name, and nothing is left out in silence."""

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

import spattn.transformers  # noqa: E402
from spattn.transformers._attention import attend  # noqa: E402
from spattn.transformers._mask import pattern_mask  # noqa: E402

from . import families, models  # noqa: E402

TOKENS = torch.arange(2, 12)[None]


def call(q_len=4, kv_len=4, mask=None, module=None, **options):
    q, kv = torch.zeros(1, 2, q_len, 8), torch.zeros(1, 2, kv_len, 8)
    return attend(module or torch.nn.Module(), q, kv, kv, mask, **options)[0]


def test_fault_43_registered_with_its_mask_function():
    """And again, which changes nothing."""
    spattn.transformers.register()
    assert ALL_ATTENTION_FUNCTIONS["spattn"] is attend
    assert ALL_MASK_ATTENTION_FUNCTIONS["spattn"] is pattern_mask


@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_weights_of_replaced_modules(name):
    """MPT's layers do not tell their attention that its weights are wanted."""
    ours = spattn.transformers.use(families.model(name))
    ours(TOKENS)
    with pytest.raises(ValueError, match=r"^output_attentions: attention weights are never materialized"):
        ours(TOKENS, output_attentions=True)


@pytest.mark.parametrize("name", [*models.DECODERS, *models.ENCODERS])
def test_weights(name):
    _, ours = models.pair((models.DECODERS | models.ENCODERS)[name])
    with pytest.raises(ValueError, match=r"^output_attentions: attention weights are never materialized"):
        ours(TOKENS, output_attentions=True)


def test_weights_of_images():
    _, ours = models.pair(models.vit)
    with pytest.raises(ValueError, match=r"^output_attentions: attention weights are never materialized"):
        ours(torch.zeros(1, 3, 32, 32), output_attentions=True)


@pytest.mark.parametrize("name", ["head_mask", "indices", "block_indices", "cache", "cu_seq_lens_q"])
def test_other_arguments(name):
    call(**{name: None})
    with pytest.raises(ValueError, match=rf'^{name}: .* with attn_implementation="spattn", got Tensor$'):
        call(**{name: torch.zeros(2)})


@pytest.mark.parametrize(
    "mask, words",
    [
        (
            torch.ones(4, 4, dtype=torch.bool),
            r"expected a tensor of shape \(batch, heads, q_len, kv_len\), got \(4, 4\)",
        ),
        ("causal", r"expected a tensor of shape \(batch, heads, q_len, kv_len\), got str"),
        (pattern_mask(1, 4, 5), r"expected a mask for q_len=4 and kv_len=4, got \(4, 5\)"),
    ],
)
def test_masks(mask, words):
    with pytest.raises(ValueError, match=f"^attention_mask: {words}"):
        call(mask=mask)


def test_masks_of_integers():
    with pytest.raises(TypeError, match="expected an array of dtype bool"):
        call(mask=torch.ones(1, 1, 4, 4, dtype=torch.int64))


def test_no_mask_where_queries_may_stand_anywhere():
    """As Transformers' default: a layer is causal unless it says otherwise, or the call does."""
    assert call(1, 7).shape == call(4, 7, is_causal=False).shape[:1] + (1, 2, 8)
    with pytest.raises(ValueError, match=r"^attention_mask is required when q_len \(4\) differs from kv_len \(7\)"):
        call(4, 7)
