"""Doctests of the pages: the packages they need, slow pages, and a check of each pattern that an example builds."""

import doctest

import pytest

from .recipes import check_example

NEEDS = {
    "drop_in.rst": "torch",
    "dropout.rst": "torch",
    "torch_tensors.rst": "torch",
    "torch_training.rst": "torch",
    "bias_and_sinks.rst": "torch",
    "character_model.rst": "torch",
    "from_flex_attention.rst": "torch",
    "generation.rst": "transformers",
    "jax.rst": "jax",
    "long_text.rst": "torch",
    "many_gpus.rst": "torch",
    "selected_blocks.rst": "torch",
    "transformers.rst": "transformers",
    "threads.rst": "threadpoolctl",
    "trainer.rst": "transformers",
    "verify.rst": "torch",
}
SLOW = {"character_model.rst", "from_flex_attention.rst", "jax.rst", "torch_training.rst", "trainer.rst"}


@pytest.fixture(autouse=True)
def needed(request):
    if request.path.name in NEEDS:
        pytest.importorskip(NEEDS[request.path.name])


def pytest_collection_modifyitems(items):
    for item in items:
        if isinstance(item, pytest.DoctestItem) and item.path.suffix == ".rst":
            item.dtest.globs["_check_example"] = check_example
            item.dtest.examples = list(checked(item.path.name, item.dtest.examples))
            if item.path.name in SLOW:
                item.add_marker("slow")


def checked(page, examples):
    """Yield the examples of a page, each followed by an example that checks its patterns unless it raises."""
    for example in examples:
        yield example
        if example.exc_msg is None:
            call = f"_check_example({page!r}, {example.source!r}, globals())\n"
            yield doctest.Example(call, "", lineno=example.lineno)
