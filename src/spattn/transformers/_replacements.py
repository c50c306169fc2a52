"""Attention modules for models that do not call Transformers' AttentionInterface."""

from __future__ import annotations

import importlib

from torch import nn
from transformers import PreTrainedModel

__all__ = ["replace", "replaced", "set_implementation", "settable"]

_REPLACEMENTS = {
    "transformers.models.bloom.modeling_bloom": "spattn.transformers._bloom",
    "transformers.models.mpt.modeling_mpt": "spattn.transformers._mpt",
}
"""Modules of Transformers, and of this package with subclasses of the same names."""


def replaced(cls: type[nn.Module]) -> bool:
    """Return True for an attention class that :func:`replace` replaces, or has replaced."""
    known = cls.__module__ in _REPLACEMENTS or cls.__module__ in _REPLACEMENTS.values()
    return known and "Attention" in cls.__name__


def settable(cls: type[PreTrainedModel]) -> bool:
    """Return True if :func:`set_implementation` changes what models of a class compute."""
    return bool(cls._can_set_attn_implementation()) or cls.__module__ in _REPLACEMENTS


def replace(model: PreTrainedModel) -> None:
    """Change the class of the attention modules of a model in place; parameters, buffers and hooks stay."""
    for module in model.modules():
        own = _REPLACEMENTS.get(type(module).__module__)
        if own is not None:
            module.__class__ = getattr(importlib.import_module(own), type(module).__name__, type(module))


def set_implementation(model: PreTrainedModel, name: str) -> None:
    """Set the attention implementation of a model, also where Transformers' method does nothing."""
    model.set_attn_implementation(name)
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and type(module).__module__ in _REPLACEMENTS:
            module.config._attn_implementation = name
