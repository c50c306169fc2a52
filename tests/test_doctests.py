"""The examples in the docstrings of the public API run as they stand."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import numpy as np
import pytest

import spattn

README = Path(__file__).parents[1] / "README.md"
NEEDS = {
    "torch": "torch",
    "jax": "jax",
    "cuda": "pycuda",
    "flex_attention": "torch",
    "_torch_recorder": "torch",
    "_torch_rules": "torch",
    "_torch_trace": "torch",
    "sparse": "torch",
    "transformers": "transformers",
    "distributed": "torch",
    "demo": "tokenizers",
}


def modules():
    for found in pkgutil.walk_packages(spattn.__path__, "spattn."):
        if not found.name.rpartition(".")[2].startswith("__"):
            yield found.name


@pytest.mark.parametrize("name", ["spattn", *modules()])
def test_examples(name):
    for part in name.split("."):
        if part in NEEDS:
            pytest.importorskip(NEEDS[part])
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert result.failed == 0


@pytest.mark.parametrize("name", ["attention", "plan", "available_backends"])
def test_public_functions_have_examples(name):
    assert ">>>" in getattr(spattn, name).__doc__


def test_readme():
    """Its example runs, and gives what it says it does."""
    examples = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert examples
    for example in examples:
        space = {}
        exec(example, space)
        assert space["out"].shape == space["q"].shape and np.isfinite(space["out"]).all()
