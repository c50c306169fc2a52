"""Patterns by name, operators by symbol."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ..._util.imports import whole_imports

__all__ = ["DEEPEST", "OPERATORS", "names", "pattern_class", "register"]

PatternClass = TypeVar("PatternClass", bound="type[Any]")

DEEPEST = 64  # how deep patterns nest: they are walked by recursion
# "&", "|" and "~": how a pattern finds what it is joined by, which are patterns too.
OPERATORS: dict[str, type[Any]] = {}
_REGISTRY: dict[str, type[Any]] = {}


def register(name: str) -> Callable[[PatternClass], PatternClass]:
    """Class decorator: makes a pattern known by `name` to :func:`get`, the tests, the benchmarks and the gallery.

    Parameters
    ----------
    name : str
        What :func:`get` finds it under.

    Returns
    -------
    callable
        The decorator; it returns the class.

    Raises
    ------
    ValueError
        From the decorator, if another class has the name.
    """

    def add(cls: PatternClass) -> PatternClass:
        if _REGISTRY.get(name, cls).__qualname__ != cls.__qualname__:
            raise ValueError(f"name: {name!r} is already registered for {_REGISTRY[name].__name__}")
        cls.name = name
        _REGISTRY[name] = cls
        return cls

    return add


def names() -> list[str]:
    """Registered names, sorted.

    Returns
    -------
    list of str
    """
    return sorted(_REGISTRY)


def pattern_class(name: str) -> type[Any]:
    """The class registered under `name`."""
    if not isinstance(name, str) or name not in _REGISTRY:
        raise ValueError(f"pattern: expected one of {', '.join(names())}; got {name!r}{_meant(name)}")
    return _REGISTRY[name]


def _meant(name: object) -> str:
    """The registered name that is most like an unknown one, as the end of a message."""
    with whole_imports:  # only where a name is wrong
        import difflib

    close = difflib.get_close_matches(str(name), names(), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
