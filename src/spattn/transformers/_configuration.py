"""The attribute ``config.spattn_pattern``: patterns stored as JSON in a configuration."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from ..patterns import Full, Pattern, from_json
from ..patterns.conversion import from_text

__all__ = ["checked", "install", "restriction"]

_NAME = "spattn_pattern"

Patterns = Pattern | dict[str, Pattern | None] | list[Pattern | None]


class SpattnPattern:
    """Descriptor ``spattn_pattern`` of all configurations, which stores JSON and returns patterns.

    It stores JSON because Transformers deep-copies a configuration's ``__dict__`` and writes it as JSON.
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
                f"spattn_pattern: set it on a sub-configuration of {type(config).__name__} "
                f"({', '.join(config.sub_configs)}), e.g. config.get_text_config().spattn_pattern"
            )
        vars(config)[_NAME] = _text(given)

    def __delete__(self, config: Any) -> None:
        vars(config).pop(_NAME, None)


def install() -> None:
    """Add the descriptor to PreTrainedConfig."""
    if not isinstance(vars(PreTrainedConfig).get(_NAME), SpattnPattern):
        PreTrainedConfig.spattn_pattern = SpattnPattern()


def restriction(config: Any) -> Pattern | tuple[Pattern, ...]:
    """Return the pattern of a configuration, or one per layer; Full if unset, ValueError if layers do not match."""
    given = getattr(config, _NAME, None)
    return Full() if given is None else _of_layers(config, given)


def checked(config: Any, given: Any) -> str:
    """Serialize patterns; raise ValueError if they do not match the configuration."""
    text = _text(given)
    _of_layers(config, _patterns(text))
    return text


def _of_layers(config: Any, given: Patterns) -> Pattern | tuple[Pattern, ...]:
    if any(getattr(config, name, False) for name in ("is_encoder_decoder", "add_cross_attention")):
        raise ValueError(f"spattn_pattern: must be None for a model with cross-attention, got {given!r}")
    if hasattr(config, "n_layers_per_attn_res_block"):
        raise ValueError(f"spattn_pattern: must be None for a model with attention over its layers, got {given!r}")
    if isinstance(given, Pattern):
        return given
    layers, types = config.num_hidden_layers, getattr(config, "layer_types", None)
    if isinstance(given, dict):
        if types is None:
            raise ValueError(
                f"spattn_pattern: expected a pattern or a list of {layers} patterns, because {type(config).__name__} "
                f"has no layer_types; got a dict with keys {', '.join(given)}"
            )
        unknown = given.keys() - set(types)
        if unknown:
            raise ValueError(
                f"spattn_pattern: the layer types of this configuration are {', '.join(sorted(set(types)))}, "
                f"got {', '.join(sorted(unknown))}"
            )
        given = [given.get(name) for name in types]
    elif len(given) != layers:
        raise ValueError(
            f"spattn_pattern: expected a list of {layers} patterns, one per layer (None = unrestricted), "
            f"got {len(given)}"
        )
    return tuple(Full() if one is None else one for one in given)


# -- JSON --------------------------------------------------------------------------------------------------------------


def _text(given: Any) -> str:
    """Serialize a pattern or its text, or a dict or list of these; validate JSON and return it unchanged."""
    if isinstance(given, str):
        if given.lstrip()[:1] not in ("{", "[") and given != "null":
            return _text_of_one(_from_text(given))
        _patterns(given)
        return given
    if isinstance(given, Mapping) and given and all(isinstance(name, str) for name in given):
        return "{" + ",".join(f"{json.dumps(name)}:{_text_of_one(one)}" for name, one in given.items()) + "}"
    if isinstance(given, (list, tuple)) and given:
        return "[" + ",".join(map(_text_of_one, given)) + "]"
    return _text_of_one(given)


def _from_text(text: str) -> Pattern:
    try:
        return from_text(text)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{_unexpected(text)}: {str(error).removeprefix('pattern: ')}") from error


def _text_of_one(pattern: Any) -> str:
    if pattern is None:
        return "null"
    if not isinstance(pattern, Pattern):
        raise _unexpected(pattern)
    text = pattern._serialized()
    if text is None:
        raise ValueError(
            "spattn_pattern: requires a serializable pattern, of a registered class with parameters that from_json() "
            f"restores; got {pattern!r}"
        )
    return text


def _patterns(given: Any) -> Patterns:
    """Decode the stored value, which is not yet validated if the configuration was created before :func:`register`."""
    found = _decoded(given if isinstance(given, str) else _text(given))
    return found.copy() if isinstance(found, (dict, list)) else found  # do not expose the cached object


@functools.lru_cache(maxsize=16)  # read in each forward pass
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
        "spattn_pattern: expected a pattern, its text or JSON, a dict by layer type or a list with one entry "
        f"per layer, got {given!r}"
    )
