"""Field annotations of patterns: parameter checks and example values."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from .check import assign, choice, flag, integer, integers

__all__ = [
    "Count",
    "Positive",
    "Range",
    "Word",
    "alternatives",
    "check_parameters",
    "default_value",
    "limits",
    "parameters",
]

Check = Callable[[str, Any], Any]
_USUAL = 4  # example value of an integer, if in range


class Range(NamedTuple):
    """The valid range of an integer parameter: ``left: Annotated[int, Range(0)]``.

    Parameters
    ----------
    least, most : int or None, optional
        Inclusive bounds; None = unbounded.
    """

    least: int | None = None
    most: int | None = None

    def __repr__(self) -> str:
        return f"Range({self.least})" if self.most is None else f"Range({self.least}, {self.most})"


Count = Annotated[int, Range(0)]
Positive = Annotated[int, Range(1)]
Word = Annotated[int, Range(0, 2**64 - 1)]


@functools.cache
def parameters(cls: type) -> dict[str, Any]:
    """Map each init field of a dataclass to its annotation, or to None if that cannot be evaluated."""
    return {field.name: _annotation(cls, field) for field in dataclasses.fields(cls) if field.init}


def _annotation(cls: type, field: dataclasses.Field[Any]) -> Any:
    if not isinstance(field.type, str):
        return field.type
    owner = next(c for c in cls.__mro__ if field.name in inspect.get_annotations(c))
    holder = types.FunctionType((lambda: None).__code__, vars(sys.modules[owner.__module__]))
    holder.__annotations__ = {field.name: field.type}  # alone: other annotations may not be evaluable
    try:
        return inspect.get_annotations(holder, eval_str=True)[field.name]
    except NameError:  # of a local class, or imported under TYPE_CHECKING
        return None


def alternatives(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the annotation itself."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def check_parameters(pattern: object) -> None:
    """Check and convert each field by its annotation; unannotated fields must be hashable, as plans are cached by
    pattern."""
    cls: type = type(pattern)
    for name, check in _checks(cls):
        value = getattr(pattern, name)
        if check is None:
            _check_hash(pattern, name, value)
        elif (checked := check(name, value)) is not value:
            assign(pattern, **{name: checked})


@functools.cache
def _checks(cls: type) -> tuple[tuple[str, Check | None], ...]:
    return tuple((name, _check(kind)) for name, kind in parameters(cls).items())


def _check_hash(pattern: Any, name: str, value: Any) -> None:
    if type(value).__hash__ is not None:
        return
    try:
        hash(pattern)
    except TypeError as error:
        raise TypeError(
            f"{name}: expected a hashable value, such as a tuple, got {type(value).__name__}; for array fields derive "
            "from ByContent and Pattern, with @dataclass(frozen=True, eq=False, repr=False)"
        ) from error


def _check(kind: Any) -> Check | None:
    """Return the check that an annotation declares, or None."""
    kinds = alternatives(kind)
    if len(kinds) > 1:
        return _check_union(kinds)
    origin, args = get_origin(kind), get_args(kind)
    if kind is bool:
        return flag
    if origin is Literal:
        return lambda name, value: choice(name, value, args)
    within = limits(kind)
    if within is not None:
        least, most = within
        return lambda name, value: integer(name, value, least, most)
    of_each = limits(args[0]) if origin is tuple and args[1:] == (...,) else None
    if of_each is None:
        return None
    lowest, highest = of_each
    return lambda name, value: integers(name, value, lowest, highest)


def _check_union(kinds: tuple[Any, ...]) -> Check | None:
    """Check None, literals and sequences by type; check anything else as the first remaining member."""
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    several: list[Any] = [_check(kind) for kind in kinds if get_origin(kind) is tuple]
    others = [kind for kind in kinds if get_origin(kind) not in (Literal, tuple) and kind is not types.NoneType]
    single: list[Any] = [_check(kind) for kind in others]
    if None in (*several, *single):
        return None

    def check(name: str, value: Any) -> Any:
        if (value is None and types.NoneType in kinds) or (isinstance(value, str) and value in words):
            return value
        sequence = several and hasattr(value, "__iter__") and not isinstance(value, str)
        return (several if sequence or not single else single)[0](name, value)

    return check


def limits(kind: Any) -> Range | None:
    """Return the Range in an annotation, or None."""
    return next((each for each in getattr(kind, "__metadata__", ()) if isinstance(each, Range)), None)


def default_value(cls: type, name: str) -> Any:
    """Return an example value for a parameter without a default."""
    kind = alternatives(parameters(cls)[name])[0]
    if kind is bool:
        return False
    if get_origin(kind) is Literal:
        return get_args(kind)[0]
    one = kind if get_origin(kind) is not tuple else get_args(kind)[0]
    within = Range() if one is int else limits(one)
    if within is None:
        raise TypeError(
            f"{name}: expected a default or an annotated range, got {kind}; or define {cls.__name__}.example()"
        )
    value = _USUAL if within.least is None else max(_USUAL, within.least)
    value = value if within.most is None else min(value, within.most)
    return value if one is kind else (value,)
