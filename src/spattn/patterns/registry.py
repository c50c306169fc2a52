"""Create patterns by their registered names, or from JSON."""

from __future__ import annotations

import functools
from typing import Any

from .._util.imports import whole_imports
from .base.codec import decode
from .base.pattern import Pattern
from .base.registry import DEEPEST, generation, names, pattern_class

__all__ = ["example", "from_json", "get", "names"]


def get(name: str, **params: Any) -> Pattern:
    """Create the pattern registered under `name`.

    Parameters
    ----------
    name : str
        One of :func:`names`.
    **params
        Parameters of the pattern's class.

    Returns
    -------
    Pattern

    Raises
    ------
    ValueError
        If the name is unknown or a parameter is out of range.
    TypeError
        If a parameter is missing or unknown.
    """
    found: Pattern = pattern_class(name)(**params)
    return found


def example(name: str) -> tuple[Pattern, int, int]:
    """Return a small instance of a registered pattern and lengths that suit it.

    Parameters
    ----------
    name : str
        One of :func:`names`.

    Returns
    -------
    pattern : Pattern
        The class's :meth:`Pattern.example`.
    q_len, kv_len : int
        Equal lengths in tokens.
    """
    pattern, length = pattern_class(name).example()
    return pattern, length, length


def from_json(text: str) -> Pattern:
    """Deserialize a pattern from :meth:`Pattern.to_json`; safe on untrusted data.

    Parameters
    ----------
    text : str
        JSON.

    Returns
    -------
    Pattern
        Equal to the serialized one.

    Raises
    ------
    TypeError
        If `text` is not a string.
    ValueError
        If it is not JSON, or does not describe a pattern.
    """
    if not isinstance(text, str):
        raise TypeError(f"text: expected a string of JSON, got {type(text).__name__}")
    return _read(text, generation())


@functools.lru_cache(maxsize=32)
def _read(text: str, generation: int) -> Pattern:
    """Read a pattern once, until a name is registered anew."""
    with whole_imports:  # late: keeps `import spattn` fast
        import json

    try:
        found: Pattern = decode(json.loads(text))
    except RecursionError as error:
        raise ValueError(f"data: expected lists and dicts nested at most {2 * DEEPEST} deep, got more") from error
    return found
