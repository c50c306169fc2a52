"""Attention modules that replace those of Transformers."""

from __future__ import annotations

import importlib

from torch import nn
from transformers import PreTrainedModel

__all__ = ["replace", "replaced", "set_implementation", "settable"]

_OWN_ATTENTION = {
    "transformers.models.bloom.modeling_bloom": "spattn.transformers._bloom",
    "transformers.models.mpt.modeling_mpt": "spattn.transformers._mpt",
}
"""Modules of models that do not call AttentionInterface, and modules of this package with classes of the same names."""
_REPLACEMENTS = _OWN_ATTENTION | {
    f"transformers.models.{name}.modeling_{name}": "spattn.transformers._t5"
    for name in ("t5", "mt5", "umt5", "switch_transformers")
}


def replaced(cls: type[nn.Module]) -> bool:
    """Return True for an attention class without AttentionInterface that :func:`replace` replaces or has made."""
    known = cls.__module__ in _OWN_ATTENTION or cls.__module__ in _OWN_ATTENTION.values()
    return known and "Attention" in cls.__name__


def settable(cls: type[PreTrainedModel]) -> bool:
    """Return True if :func:`set_implementation` changes what models of a class compute."""
    return bool(cls._can_set_attn_implementation()) or cls.__module__ in _OWN_ATTENTION


def replace(model: PreTrainedModel) -> None:
    """Change the class of the attention modules of a model in place; parameters, buffers and hooks stay."""
    for module in model.modules():
        own = _REPLACEMENTS.get(type(module).__module__)
        if own is not None:
            module.__class__ = getattr(importlib.import_module(own), type(module).__name__, type(module))


def set_implementation(model: PreTrainedModel, name: str) -> None:
    """Set the attention implementation of a model and its submodels.

    Transformers' method warns and does nothing in models without AttentionInterface and skips, in some versions,
    submodels whose configuration is a copy of the model's, such as T5's encoder.
    """
    if model._can_set_attn_implementation():
        model.set_attn_implementation(name)
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module.config._attn_implementation != name:
            module.config._attn_implementation = name
