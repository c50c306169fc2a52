"""Patterns by their registered names."""

from __future__ import annotations

from typing import Any

from .pattern import Pattern
from .registry import pattern_class

__all__ = ["example", "get"]


def get(name: str, **params: Any) -> Pattern:
    """The pattern registered under `name`, made with `params`.

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
    """A small instance of a registered pattern and lengths that suit it.

    Parameters
    ----------
    name : str
        One of :func:`names`.

    Returns
    -------
    pattern : Pattern
        From the class's :meth:`Pattern.example`.
    q_len, kv_len : int
        Lengths in tokens, which are equal.
    """
    pattern, length = pattern_class(name).example()
    return pattern, length, length
