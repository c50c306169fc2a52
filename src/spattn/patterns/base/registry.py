"""Patterns by name, operators by symbol."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ..._util.imports import whole_imports

if TYPE_CHECKING:
    from .composition import Composite
    from .pattern import Pattern

__all__ = ["DEEPEST", "OPERATORS", "example", "get", "names", "pattern_class", "register"]

PatternClass = TypeVar("PatternClass", bound="type[Pattern]")

DEEPEST = 64  # how deep patterns nest: they are walked by recursion
# "&", "|" and "~": how a pattern finds what it is joined by, which are patterns too.
OPERATORS: dict[str, type[Composite]] = {}
_REGISTRY: dict[str, type[Pattern]] = {}


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


def pattern_class(name: str) -> type[Pattern]:
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
    return pattern_class(name)(**params)


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
