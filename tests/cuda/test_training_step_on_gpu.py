"""A step of training on a GPU against the same step with attention as PyTorch writes it out."""

from __future__ import annotations

import pytest

from ..torch.test_training_step import PATTERNS, check_step

pytestmark = [pytest.mark.family("sm80"), pytest.mark.gpu]


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("sm80", "float32"), ("sm80", "bfloat16"), ("sm90", "bfloat16")],
    indirect=["family"],
)
@pytest.mark.parametrize("name", PATTERNS)
def test_equals_dense_attention(name, dtype):
    check_step(PATTERNS[name], dtype, "cuda", head_dim=64)
