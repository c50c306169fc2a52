"""``config.spattn_pattern``: patterns as the JSON that a configuration can copy, write and read."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from ..patterns import Full, Pattern, from_json

__all__ = ["checked", "install", "restriction"]

_NAME = "spattn_pattern"

Patterns = Pattern | dict[str, Pattern | None] | list[Pattern | None]


class SpattnPattern:
    """The attribute ``spattn_pattern`` of all configurations: JSON in their ``__dict__``, patterns for the reader.

    Transformers deep-copies a configuration's ``__dict__`` and writes it as JSON, with whatever an attribute holds.
    """

    def __get__(self, config: Any, owner: type | None = None) -> Any:
        if config is None:
            return self
        given = vars(config).get(_NAME)
        return None if given is None else _patterns(given)

    def __set__(self, config: Any, given: Any) -> None:
        if given is None:
            vars(config).pop(_NAME, None)
            return
        if config.sub_configs and config.get_text_config() is not config:
            raise ValueError(
                f"spattn_pattern: set it in the configuration of one of the models inside a {type(config).__name__} "
                f"({', '.join(config.sub_configs)}), as config.get_text_config().spattn_pattern"
            )
        vars(config)[_NAME] = _text(given)

    def __delete__(self, config: Any) -> None:
        vars(config).pop(_NAME, None)


def install() -> None:
    """Gives every configuration of Transformers the attribute."""
    if not isinstance(vars(PreTrainedConfig).get(_NAME), SpattnPattern):
        PreTrainedConfig.spattn_pattern = SpattnPattern()


def restriction(config: Any) -> Pattern | tuple[Pattern, ...]:
    """The pattern of a configuration, or one for each of its layers; every pair where there is none.

    Raises
    ------
    ValueError
        If the configuration has no such layers or layer types, or its model attends from one sequence to another.
    """
    given = getattr(config, _NAME, None)
    return Full() if given is None else _of_layers(config, given)


def checked(config: Any, given: Any) -> str:
    """The JSON of patterns that suit a configuration; ValueError for others."""
    text = _text(given)
    _of_layers(config, _patterns(text))
    return text


def _of_layers(config: Any, given: Patterns) -> Pattern | tuple[Pattern, ...]:
    if any(getattr(config, name, False) for name in ("is_encoder_decoder", "add_cross_attention")):
        raise ValueError(
            f"spattn_pattern: expected None, as attention goes from one sequence to another, got {given!r}"
        )
    if isinstance(given, Pattern):
        return given
    layers, types = config.num_hidden_layers, getattr(config, "layer_types", None)
    if isinstance(given, dict):
        if types is None:
            raise ValueError(
                f"spattn_pattern: expected a pattern or a list of {layers}, as {type(config).__name__} has no "
                f"layer_types; got a dict of {', '.join(given)}"
            )
        unknown = given.keys() - set(types)
        if unknown:
            raise ValueError(
                f"spattn_pattern: expected the layer types {', '.join(sorted(set(types)))} of this configuration, "
                f"got {', '.join(sorted(unknown))}"
            )
        given = [given.get(name) for name in types]
    elif len(given) != layers:
        raise ValueError(
            f"spattn_pattern: expected a list of {layers}, one for each layer (None for no restriction), "
            f"got {len(given)}"
        )
    return tuple(Full() if one is None else one for one in given)


# -- JSON --------------------------------------------------------------------------------------------------------------


def _text(given: Any) -> str:
    """What is stored for a pattern, several ones, or the JSON of either."""
    if isinstance(given, str):
        _patterns(given)
        return given
    if isinstance(given, Mapping) and given and all(isinstance(name, str) for name in given):
        return "{" + ",".join(f"{json.dumps(name)}:{_text_of_one(one)}" for name, one in given.items()) + "}"
    if isinstance(given, (list, tuple)) and given:
        return "[" + ",".join(map(_text_of_one, given)) + "]"
    return _text_of_one(given)


def _text_of_one(pattern: Any) -> str:
    if pattern is None:
        return "null"
    if not isinstance(pattern, Pattern):
        raise _unexpected(pattern)
    text = pattern._serialized()
    if text is None:
        raise ValueError(
            "spattn_pattern: expected a pattern that a configuration can write as JSON: of a registered class, with "
            f"parameters that from_json() reads back; got {pattern!r}"
        )
    return text


def _patterns(given: Any) -> Patterns:
    """What a configuration holds; in one that was made before :func:`register`, this may be anything."""
    found = _decoded(given if isinstance(given, str) else _text(given))
    return found.copy() if isinstance(found, (dict, list)) else found  # the decoded one is kept


@functools.lru_cache(maxsize=16)  # each forward pass asks for it
def _decoded(text: str) -> Patterns:
    try:
        data = json.loads(text)
        if isinstance(data, list) and data:
            return [None if one is None else _read(one) for one in data]
        if isinstance(data, dict) and data and not isinstance(data.get("pattern"), str):
            return {name: None if one is None else _read(one) for name, one in data.items()}
        return _read(data)
    except (TypeError, ValueError) as error:
        raise _unexpected(text) from error


def _read(data: Any) -> Pattern:
    return from_json(json.dumps(data))


def _unexpected(given: Any) -> ValueError:
    return ValueError(
        "spattn_pattern: expected a pattern, or what its to_json() holds, got "
        f"{given!r}; several are a dict by layer type, or a list of one for each layer"
    )
