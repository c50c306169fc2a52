"""Registries of pattern classes by name and of operators by symbol; example instances of patterns."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from ..._util.imports import whole_imports
from .check import default_value

__all__ = [
    "CONVERSIONS",
    "DEEPEST",
    "OPERATORS",
    "Instance",
    "Registered",
    "generation",
    "names",
    "pattern_class",
    "register",
    "registered",
]

PatternClass = TypeVar("PatternClass", bound="type[Any]")

Instance = tuple[tuple[Any, ...], int]  # arguments of a pattern, and a length in tokens
DEEPEST = 64  # nesting limit: patterns are traversed recursively
OPERATORS: dict[str, type[Any]] = {}  # "&", "|" and "~"; filled by the composition module, which imports Pattern
CONVERSIONS: dict[str, Callable[..., Any]] = {}  # by name; filled by the conversion module, which imports Pattern
_REGISTRY: dict[str, type[Any]] = {}
_PACKAGE = "spattn.patterns"
_GENERATION = [0]  # number of repeated registrations, e.g. by a notebook cell that runs twice
_LATER = {  # module → the names that it registers; the first use of a name imports the module
    "base.per_head": ("per_batch", "per_head"),
    "grids.neighborhood": ("neighborhood",),
    "grids.per_axis": ("axial", "per_axis", "windowed"),
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
    "sequence.packed": ("packed_windows",),
    "sequence.queries_at": ("queries_at",),
}
_MODULE_OF = {name: module for module, names in _LATER.items() for name in names}


def register(
    name: str,
    example: Instance | Callable[[], Instance] | None = None,
    typical: Instance | Callable[[], Instance] | None = None,
) -> Callable[[PatternClass], PatternClass]:
    """Decorate a pattern class to register it under `name` for :func:`get`, tests, benchmarks and the gallery.

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
    TypeError
        If `name` is not a non-empty string.
    ValueError
        From the decorator, if another class has the name.
    """

    if not isinstance(name, str) or not name:
        raise TypeError(f"name: expected a non-empty string, got {name!r}")

    def add(cls: PatternClass) -> PatternClass:
        if name in _MODULE_OF and cls.__module__ != f"{_PACKAGE}.{_MODULE_OF[name]}":
            pattern_class(name)  # imports the module that owns the name, so that the conflict is found
        old = _REGISTRY.get(name, cls)
        if (old.__module__, old.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"name: {name!r} is already registered for {_REGISTRY[name].__name__}")
        fields = getattr(cls, "__dataclass_fields__", None) and dataclasses.fields(cls)
        cls.name, cls._registered = name, cls
        cls._parameters = tuple(field.name for field in fields or () if field.init)
        if example is not None or typical is not None:
            cls._instances = {"example": example, "typical": typical}
        _GENERATION[0] += old is not cls
        _REGISTRY[name] = cls
        return cls

    return add


def generation() -> int:
    """Return the number of repeated registrations, a cache key for patterns that were decoded by name."""
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


def registered() -> list[type[Any]]:
    """Return the registered classes whose modules are imported."""
    return list(_REGISTRY.values())


def _meant(name: object) -> str:
    """Return the end of an error message, which suggests the closest registered name if there is one."""
    with whole_imports:  # late: only errors need it
        import difflib

    close = difflib.get_close_matches(str(name), names(), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


class Registered:
    """Mixin with the registered name of a pattern class and its instances for tests, benchmarks and the gallery."""

    name: ClassVar[str] = ""
    _registered: ClassVar[Any] = None  # the class of this name; another one in subclasses without a name of their own
    _parameters: ClassVar[tuple[str, ...]] = ()
    _instances: ClassVar[dict[str, Any]] = {}  # "example" and "typical" of register()
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @classmethod
    def _instance(cls, kind: str) -> tuple[Any, int] | None:
        given = cls._instances.get(kind)
        if given is None:
            return None
        values, length = given() if callable(given) else given
        return cls(*values), length

    @classmethod
    def example(cls) -> tuple[Any, int]:
        """Return a small instance for tests, benchmarks and pictures, and a length that suits it.

        The default implementation returns the instance passed to :func:`~spattn.patterns.authoring.register`, or else
        an instance with defaults, whose required parameters are in their annotated ranges.

        Returns
        -------
        pattern : Pattern
        length : int
            Number of queries and of keys.

        Raises
        ------
        TypeError
            If a parameter has neither a default nor an annotated range.
        """
        required = (f.name for f in dataclasses.fields(cls) if _is_required(f))
        return cls._instance("example") or (cls(**{name: default_value(cls, name) for name in required}), 32)

    @classmethod
    def typical(cls) -> tuple[Any, int]:
        """Return an instance of realistic size, and a length at which the cost of its plan is realistic.

        The default implementation returns the instance passed to :func:`~spattn.patterns.authoring.register`, or else
        the example, with 64 times its length if the pattern supports that.

        Returns
        -------
        pattern : Pattern
        length : int
            Number of queries and of keys.
        """
        if found := cls._instance("typical"):
            return found
        pattern, length = cls.example()
        try:
            pattern.at(0, 0).bind(64 * length, 64 * length)
        except ValueError:
            return pattern, length
        return pattern, 64 * length

    @classmethod
    def random(cls, draw: Any, sizes: Any) -> tuple[Any, Any]:
        """Draw a random instance for property tests, and sizes that suit it.

        The default implementation draws each parameter by its annotation. Override it if parameters depend on each
        other or on the lengths.

        Parameters
        ----------
        draw : spattn.testing.strategies.Draw
            Draws numbers and choices: ``draw.integer(1, 9)``.
        sizes : spattn.testing.strategies.Sizes
            Proposed batch, heads_q, heads_kv, q_len and kv_len.

        Returns
        -------
        pattern : Pattern
        sizes : Sizes
            Unchanged, or ``sizes._replace(q_len=..., kv_len=...)`` if :attr:`fixes_lengths` is True.
        """
        return draw.instance(cls, sizes)


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
