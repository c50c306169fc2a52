"""The registry of pattern classes by name, and of operators by symbol."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

from ..._util.imports import whole_imports

__all__ = ["DEEPEST", "OPERATORS", "Instance", "generation", "names", "pattern_class", "register"]

PatternClass = TypeVar("PatternClass", bound="type[Any]")

Instance = tuple[tuple[Any, ...], int]  # arguments of a pattern, and a length in tokens
DEEPEST = 64  # nesting limit: patterns are traversed recursively
OPERATORS: dict[str, type[Any]] = {}  # "&", "|" and "~"; filled by the composition module, which imports Pattern
_REGISTRY: dict[str, type[Any]] = {}
_PACKAGE = "spattn.patterns"
_GENERATION = [0]  # names that were registered anew, as by a notebook cell that runs twice
_LATER = {  # modules of spattn.patterns, imported on the first use of one of these names
    "grids.neighborhood": ("neighborhood",),
    "grids.per": ("per_axis", "per_batch", "per_head"),
    "grids.windowed": ("axial", "windowed"),
    "listed.clusters": ("clusters",),
    "papers.bigbird": ("bigbird",),
    "papers.recipes": ("fixed", "longformer", "prefix_lm", "strided"),
    "deepspeed": (
        "deepspeed_bigbird",
        "deepspeed_bslongformer",
        "deepspeed_dense",
        "deepspeed_fixed",
        "deepspeed_local_sliding_window",
        "deepspeed_variable",
    ),
    "sequence.queries_at": ("queries_at",),
    "sequence.vertical_slash": ("vertical_slash",),
}
_MODULE_OF = {name: module for module, names in _LATER.items() for name in names}


def register(
    name: str,
    example: Instance | Callable[[], Instance] | None = None,
    typical: Instance | Callable[[], Instance] | None = None,
) -> Callable[[PatternClass], PatternClass]:
    """Class decorator: register a pattern under `name` for :func:`get`, the tests, the benchmarks and the gallery.

    Parameters
    ----------
    name : str
        The registered name.
    example, typical : (tuple, int) or callable, optional
        Arguments and a length in tokens, or a function that returns them, for :meth:`Pattern.example` and
        :meth:`Pattern.typical`.

    Returns
    -------
    callable
        The decorator; it returns the class.

    Raises
    ------
    ValueError
        From the decorator, if another class has the name.
    """

    if not isinstance(name, str) or not name:
        raise TypeError(f"name: expected a non-empty string, got {name!r}")

    def add(cls: PatternClass) -> PatternClass:
        if name in _MODULE_OF and cls.__module__ != f"{_PACKAGE}.{_MODULE_OF[name]}":
            pattern_class(name)  # the name of a module that may not be imported yet
        old = _REGISTRY.get(name, cls)
        if (old.__module__, old.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"name: {name!r} is already registered for {_REGISTRY[name].__name__}")
        cls.name = name
        if example is not None or typical is not None:
            cls._instances = {"example": example, "typical": typical}
        _GENERATION[0] += old is not cls
        _REGISTRY[name] = cls
        return cls

    return add


def generation() -> int:
    """Return how many names have been registered anew: what was read by name before may be another class."""
    return _GENERATION[0]


def names() -> list[str]:
    """Return the registered names, sorted.

    Returns
    -------
    list of str
    """
    return sorted({*_REGISTRY, *_MODULE_OF})


def pattern_class(name: str) -> type[Any]:
    """Return the class registered under `name`."""
    if isinstance(name, str) and name not in _REGISTRY and name in _MODULE_OF:
        with whole_imports:
            importlib.import_module(f"{_PACKAGE}.{_MODULE_OF[name]}")
    if not isinstance(name, str) or name not in _REGISTRY:
        raise ValueError(f"pattern: expected one of {', '.join(names())}; got {name!r}{_meant(name)}")
    return _REGISTRY[name]


def _meant(name: object) -> str:
    """Suggest the closest registered name, as the end of a message."""
    with whole_imports:  # only for an unknown name
        import difflib

    close = difflib.get_close_matches(str(name), names(), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
