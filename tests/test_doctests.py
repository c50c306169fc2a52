"""The examples in the docstrings of the public API run as they stand."""

import doctest
import importlib
import pkgutil

import pytest

import spattn

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
