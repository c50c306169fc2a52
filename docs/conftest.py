"""Pages whose examples need a package that the documentation does without."""

import pytest

NEEDS = {
    "torch_tensors.rst": "torch",
    "torch_training.rst": "torch",
    "character_model.rst": "torch",
    "from_flex_attention.rst": "torch",
    "jax.rst": "jax",
    "transformers.rst": "transformers",
    "threads.rst": "threadpoolctl",
}


@pytest.fixture(autouse=True)
def needed(request):
    if request.path.name in NEEDS:
        pytest.importorskip(NEEDS[request.path.name])
