"""Detect models that spattn does not support."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ._replacements import replaced, settable

__all__ = ["refusal"]

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"


def refusal(model: PreTrainedModel) -> str | None:
    """Return the reason why a model is not supported, from its classes and configuration, or None."""
    layers = {type(module): module for module in model.modules()}
    for cls in layers:
        if issubclass(cls, PreTrainedModel) and not settable(cls):
            return f"{cls.__name__} does not use Transformers' AttentionInterface"
    asking = [cls for cls in layers if _names(cls, _INTERFACE) or replaced(cls)]
    for cls in layers:
        if cls not in asking and "Attention" in cls.__name__ and _names(cls, "softmax"):
            return f"its layer {cls.__name__} does not use Transformers' AttentionInterface"
    if not asking:
        return "none of its layers uses Transformers' AttentionInterface"
    reached = {id(config) for config in _configurations(model)}
    for name, module in model.named_modules():
        if type(module) in asking and id(getattr(module, "config", model.config)) not in reached:
            return f"its layer {name} has a separate configuration, which set_attn_implementation() does not change"
    return None


def _configurations(model: PreTrainedModel) -> Iterator[Any]:
    """Yield all configurations that ``set_attn_implementation()`` changes."""
    found = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    while found:
        config = found.pop()
        yield config
        found += [sub for name in config.sub_configs if (sub := getattr(config, name)) is not None]


def _names(cls: type[nn.Module], word: str) -> bool:
    """Return True if a method of a layer's class refers to the name `word`."""
    return any(word in code.co_names for code in _codes(cls))


def _codes(cls: type[nn.Module]) -> Iterator[CodeType]:
    for base in cls.__mro__:
        if base in (PreTrainedModel, nn.Module):
            return
        for method in vars(base).values():
            code: Any = getattr(inspect.unwrap(method) if callable(method) else None, "__code__", None)
            if code is not None:
                yield code
