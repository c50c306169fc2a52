"""Create patterns by their registered names."""

from __future__ import annotations

from typing import Any

from .base.pattern import Pattern
from .base.registry import names, pattern_class

__all__ = ["example", "get", "names"]


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
